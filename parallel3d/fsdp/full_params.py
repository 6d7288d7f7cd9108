"""full_params: modules show whole, plain Parameters for a while, and what is done to them is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._arguments import as_bool
from parallel3d._compat import get_local_tensor, make_dtensor, set_grad
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.buckets.held_sum import waits_for_reduction
from parallel3d.fsdp.checks import check_module
from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.whole.first_rank import is_first, meshes_of
from parallel3d.fsdp.whole.gathering import make_replicas_agree, whole_tensors
from parallel3d.fsdp.whole.other_form import (
    Chosen,
    check_at_rest,
    chosen_of,
    shown_instead,
    to_rest,
    whole_params,
)

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.state import Unit

__all__ = ["full_params"]

_WHAT = "full_params"


@contextmanager
def full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within it the modules have plain Parameters of the plain model's shapes, to read or to edit.

    They are gathered over shard and tp in the parameters' own dtypes, one all-gather per bucket and axis.
    On leaving, each rank keeps its shard of what its Parameters then hold (also of one that was put in
    place of another); ranks that hold the same shard take that of the first of them. The sharded Parameter
    objects, which the optimizer has, stay the same. If the body raises, its edits are dropped: a rank
    that raises alone could not communicate. Ignored parameters are as ever.

    Every rank of the mesh must enter it. No forward, backward, optimizer step or conversion goes inside.
    Replaces ``FullyShardedDataParallel.summon_full_params``.

    Args:
        module: a unit, or a module with units inside.
        recurse: False shows the parameters of ``module``'s own unit only.
        writeback: whether edits are kept; False drops them.
        rank0_only: whole Parameters on the first rank of the mesh only; others show their shards.
        offload_to_cpu: whole Parameters on the CPU; one bucket at a time is whole on the device.
        with_grads: ``.grad`` too is whole where there is one, and its edits are kept: setting it to
            None, or to a tensor, does so to the sharded Parameter's.

    Raises:
        Parallel3dError: ``rank0_only`` with ``writeback``, or an option that is no bool; on leaving, a
            Parameter was replaced by one of another shape. Nothing is written then.
        StateError: in a forward or backward, in another ``full_params`` of the same unit, parameters on
            the meta device; with ``with_grads``, gradients that wait for their reduction.
    """
    check_module(module)
    _check_options(
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    units = list(units_of(module, recurse))
    for unit in units:
        check_at_rest(unit, _WHAT)
        if with_grads:
            _check_reduced(unit)
    keep = not rank0_only or is_first(meshes_of(units))
    kept = [unit for unit in units if unit.group.kept and unit.group.shown]
    views: list[_View] = []
    with ExitStack() as stack:
        for unit in units:
            view = _View(unit, keep=keep, to_cpu=offload_to_cpu, grads=with_grads)
            stack.enter_context(shown_instead(unit, view.chosen, view.wholes.get))
            views.append(view)
        yield
        if writeback:
            edits = [view.edits() for view in views]
            for view, edited in zip(views, edits, strict=True):
                view.write(edited)
        views.clear()
    for unit in kept:  # by the user's ``unshard()``
        context = unit.ready_context()
        unit.issue_unshard(context)
        unit.group.keep()
        unit.group.unshard(context.comm)
        unit.group.show()


def _check_options(**options: bool) -> None:
    for name, value in options.items():
        as_bool(name, value)
    if options["writeback"] and options["rank0_only"]:
        raise Parallel3dError(
            "full_params: writeback=True with rank0_only=True would write what the other ranks don't "
            "have; give writeback=False to read on the first rank, or rank0_only=False to edit"
        )


def _check_reduced(unit: Unit) -> None:
    for bucket in unit.group.buckets:
        for param in bucket.params:
            grad = param.sharded.grad
            if waits_for_reduction(grad):
                raise StateError(
                    f"full_params(with_grads=True): the gradient of {param.name} in unit {unit.label} "
                    "waits for its reduction; call it after the backward of the last micro-batch"
                )


class _View:
    """One unit's parameters as whole ones.

    Attributes:
        wholes: by parameter what to show; empty on ranks that show nothing.
    """

    def __init__(self, unit: Unit, *, keep: bool, to_cpu: bool, grads: bool) -> None:
        to_rest(unit)
        self.unit = unit
        self.grads = grads
        self.chosen: Chosen = chosen_of(unit)
        self.wholes = whole_params(self.chosen, keep=keep, to_cpu=to_cpu)
        if grads:
            for bucket, indices in self.chosen:
                self._gather_grads(bucket, indices, keep=keep)

    def _gather_grads(self, bucket: Bucket, indices: list[int], *, keep: bool) -> None:
        """Also where this rank has no gradient: another may."""
        if not _may_have_grads(bucket):
            return
        locals_ = [_local_grad(bucket.params[i]) for i in indices]
        wide = [
            torch.zeros((), dtype=bucket.sum_dtype, device=bucket.home).expand(p.local.shape)
            if local is None
            else local.to(bucket.sum_dtype)
            for p, local in zip([bucket.params[i] for i in indices], locals_, strict=True)
        ]
        wholes = whole_tensors(bucket, indices, wide)
        for index, local, grad in zip(indices, locals_, wholes, strict=True):
            shown = self.wholes.get(bucket.params[index])
            if keep and shown is not None and local is not None:
                set_grad(shown, grad.to(shown.device, local.dtype))

    def edits(self) -> dict[ShardedParam, nn.Parameter]:
        """What the modules have now; checked."""
        found: dict[ShardedParam, nn.Parameter] = {}
        for param, shown in self.wholes.items():
            now = [holder.get(name) for holder, name in param.slots]
            others = [each for each in now if each is not None and each is not shown]
            for other in others:  # maybe several, of a tied parameter
                if other.shape != param.global_shape:
                    raise Parallel3dError(
                        f"full_params: parameter {param.name} of unit {self.unit.label} was replaced by one "
                        f"of shape {tuple(other.shape)}; its shape must stay {tuple(param.global_shape)}"
                    )
            found[param] = others[0] if others else shown
        return found

    def write(self, edited: dict[ShardedParam, nn.Parameter]) -> None:
        """Keeps this rank's shards of ``edited``."""
        with torch.inference_mode(False), torch.no_grad():
            for bucket, indices in self.chosen:
                params = [bucket.params[i] for i in indices]
                for param in params:
                    param.local.copy_(param.local_part(edited[param].detach()))
                    param.sharded.requires_grad_(edited[param].requires_grad)
                make_replicas_agree(bucket, indices, [p.local for p in params])
                if self.grads and _may_have_grads(bucket):
                    _write_grads(bucket, indices, [edited[p].grad for p in params])


def _may_have_grads(bucket: Bucket) -> bool:
    """The same answer on every rank, whatever gradients it has."""
    return bucket.dtype.is_floating_point or bucket.dtype.is_complex


def _local_grad(param: ShardedParam) -> torch.Tensor | None:
    grad = param.sharded.grad
    return get_local_tensor(grad) if isinstance(grad, DTensor) else grad


def _write_grads(bucket: Bucket, indices: list[int], grads: list[torch.Tensor | None]) -> None:
    params = [bucket.params[i] for i in indices]
    locals_ = []
    for param, whole in zip(params, grads, strict=True):
        dtype = bucket.sum_dtype if whole is None else whole.dtype
        local = torch.zeros_like(param.local, dtype=dtype)
        if whole is not None:
            local.copy_(param.local_part(whole.detach()))
        locals_.append(local)
    wide = [local.to(bucket.sum_dtype) for local in locals_]
    make_replicas_agree(bucket, indices, wide)
    for param, whole, local, agreed in zip(params, grads, locals_, wide, strict=True):
        before = param.sharded.grad
        if whole is None:
            param.sharded.grad = None
        elif isinstance(before, DTensor) and before.dtype == whole.dtype:
            get_local_tensor(before).copy_(agreed)
        else:
            grad = make_dtensor(local.copy_(agreed), param.reduced_spec(whole.dtype))
            set_grad(param.sharded, grad)
