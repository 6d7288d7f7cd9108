"""full_params: registers the full parameters in a sharded model's modules for a while.

Also what full state dicts share with it: gathering full tensors, registering other Parameters than the
sharded ones, and sending values from the first rank to all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.accumulated import waits_for_reduction
from parallel3d.fsdp.group import Registered, Retain
from parallel3d.fsdp.members import check_module, params_of, refuse_torch_units, units_of
from parallel3d.fsdp.options.gather_extension import as_plain
from parallel3d.fsdp.param import parameters_dict
from parallel3d.fsdp.state_dict.transforms import all_gathered

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.unit import Unit


# The first rank of a model's meshes, which ``rank0_only`` and ``broadcast_from_rank0`` are about.


def meshes_of(units: Iterable[Unit]) -> list[DeviceMesh]:
    """Returns the distinct meshes of the units' sharded Parameters, in the same order on all ranks."""
    return list(dict.fromkeys(param.on.mesh for param in params_of(units)))


def is_first(meshes: Iterable[DeviceMesh]) -> bool:
    """Returns whether this rank is the first of each of ``meshes``: rank 0, if they have all ranks.

    Simulated ranks are one process, which counts as the first.
    """
    if ranks_are_simulated():
        return True
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def _groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def tensor_from_first(value: torch.Tensor, meshes: Sequence[DeviceMesh]) -> torch.Tensor:
    """Returns the first rank's ``value`` on all ranks of ``meshes``, on the mesh's device.

    Other ranks give any tensor of the same shape and dtype. It is broadcast over one mesh after the other, as
    the first rank of a later mesh may get it from an earlier one only.
    """
    full = torch.empty(value.shape, dtype=value.dtype, device=meshes[0].device_type)
    if is_first(meshes):
        full.copy_(value)
    # After axis i all ranks with coordinate 0 on the later axes of the mesh have the value; other ranks'
    # values are overwritten later.
    for group in [group for mesh in meshes for group in _groups(mesh)] if full.numel() else ():
        dist.broadcast(full.view(-1).view(torch.uint8), group=group, group_src=0)
    return full


def state_dict_from_first(
    meshes: Sequence[DeviceMesh],
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, Any],
    strip: Callable[[], Any],
) -> Mapping[str, Any]:
    """Returns ``state_dict`` on the first rank of ``meshes``, and on the others what ``strip()`` returns on
    the first rank, sent by pickle.

    Args:
        tensors: the tensors in ``state_dict``, by name; they are only checked.
        strip: returns ``state_dict`` without the values of these tensors.

    Raises:
        Parallel3dError: on every rank: one of ``tensors`` is a DTensor or on the meta device.
    """
    first = is_first(meshes)
    sent: Any = (_refusal(tensors) or strip()) if first else None
    for mesh in meshes:
        box = [sent]
        for group in () if ranks_are_simulated() else _groups(mesh):
            dist.broadcast_object_list(box, group=group, group_src=0)
        sent = box[0]
    if isinstance(sent, str):
        raise Parallel3dError(sent)
    return state_dict if first else sent


def _refusal(tensors: Mapping[str, Any]) -> str | None:
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta):
            what = "on the meta device" if value.is_meta else "a DTensor"
            return (
                f"broadcast_from_rank0=True: {name} is {what} on the first rank, which has to give full "
                "tensors with values, as model_state_dict and optim_state_dict return them for "
                "StateDictType.FULL_STATE_DICT"
            )
    return None


def to_send(value: Any, later: bool) -> Any:
    """Returns ``value`` on the CPU; a tensor sent ``later`` as a placeholder with its shape and dtype."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if later else value.detach().cpu()


# Full tensors: from this rank's shards of a bucket's parameters to tensors of their global shapes. There is
# one all-gather over the shard axis per bucket, and one over each own axis (tp) that shards a parameter.
# Unlike in an unshard, values keep their dtype.


def full_tensors(
    bucket: Bucket, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gathers tensors that are sharded as ``params`` are: their values, gradients or optimizer states.

    Args:
        bucket: the bucket of ``params``.
        locals_: this rank's shards, one for each of ``params``, plain tensors of one dtype.

    Returns:
        Tensors of the parameters' global shapes, each in its own memory, on the bucket's computing device.
    """
    with torch.inference_mode(False), torch.no_grad():
        rows = _packed(bucket, params, locals_).to(bucket.device)
        numel = rows.numel()
        for group in bucket.gather_groups:
            rows = all_gathered(rows, group, bucket.unit)
        rows = rows.view(bucket.num_shards, numel)
        columns = rows.split([p.geometry.padded_numel for p in params], dim=1)
        parts = [_compute_part(p, c) for p, c in zip(params, columns, strict=True)]
        del rows, columns
        _gather_own_axes(bucket.unit, params, parts)
        return parts


def _packed(
    bucket: Bucket, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns ``locals_``, padded with zeros to the parameters' segments, concatenated."""
    views = bucket.local_views
    one_buffer = bucket.gathers_shards  # False where each parameter has its own memory
    if one_buffer and len(locals_) == len(views) and all(map(operator.is_, locals_, views)):
        return bucket.flat
    sizes = [p.geometry.padded_numel for p in params]
    flat = torch.zeros(sum(sizes), dtype=locals_[0].dtype, device=bucket.storage_device)
    for param, segment, local in zip(params, flat.split(sizes), locals_, strict=True):
        param.geometry.local_view(segment).copy_(local)
    return flat


def _compute_part(param: ShardedParam, column: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of compute shape whose shards are the rows of ``column`` (with padding)."""
    region = column.new_empty(param.num_shards * param.geometry.padded_numel)
    for target, source in param.geometry.copy_pairs(region, column):
        target.copy_(source)
    view = param.geometry.contiguous_view(region)
    return view if param.geometry.even else view.clone(memory_format=torch.contiguous_format)


def _gather_own_axes(unit: str, params: Sequence[ShardedParam], parts: list[torch.Tensor]) -> None:
    """Gathers ``parts``, of compute shapes, over the parameters' own axes (tp), the last axis first, and puts
    the tensors of global shapes in their place."""
    for level in reversed(range(max(len(p.on.cuts) for p in params))):
        by_group: dict[str, tuple[ProcessGroup, list[int]]] = {}
        for index, param in enumerate(params):
            mesh = param.on.compute_mesh
            if level < len(param.on.cuts) and mesh is not None:
                axis, _ = param.on.cuts[level]
                if mesh.size(axis) > 1:
                    group = mesh.get_group(axis)
                    by_group.setdefault(group.group_name, (group, []))[1].append(index)
        for group, indices in by_group.values():
            cuts = [_OwnCut(params[i], level) for i in indices]
            packed = torch.cat([c.padded(parts[i]) for c, i in zip(cuts, indices, strict=True)])
            rows = all_gathered(packed, group, unit).view(group.size(), packed.numel())
            columns = rows.split([prod(cut.largest) for cut in cuts], dim=1)
            for cut, index, column in zip(cuts, indices, columns, strict=True):
                parts[index] = cut.joined(column)


class _OwnCut:
    """How one own axis (tp) shards one parameter; ``level``: its index among the own axes that do.

    Attributes:
        axis, dim: the axis of the compute mesh, and the dim that it shards.
        largest: shape of the largest part that the own axes up to this one leave on a rank.
        before: shape of this rank's part before this axis shards it; SymInts under simulated ranks.
    """

    def __init__(self, param: ShardedParam, level: int) -> None:
        on, shape = param.on, param.global_shape
        self.on = on
        self.axis, self.dim = on.cuts[level]
        self.largest, self.before = list(shape), list(shape)
        for i, (axis, dim) in enumerate(on.cuts[: level + 1]):
            self.largest[dim] = on.largest_length(axis, self.largest[dim])
            if i < level:
                assert on.compute_mesh is not None
                rank = on.compute_mesh.get_local_rank(axis)
                self.before[dim] = on.length(axis, self.before[dim], rank)
        self.even = on.are_even(shape)

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """Returns ``part`` padded with zeros to the shape ``largest``, flat."""
        if self.even:
            return part.reshape(-1)
        padded = torch.zeros(self.largest, dtype=part.dtype, device=part.device)
        target = padded
        for dim, size in enumerate(part.shape):
            target = target.narrow(dim, 0, size)
        target.copy_(part)
        return padded.view(-1)

    def joined(self, column: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of shape ``before`` from all ranks' parts, (ranks of the axis, elements)."""
        pieces = []
        for rank, row in enumerate(column):
            piece = row.view(self.largest)
            if not self.even:
                for dim, size in enumerate(self.before):
                    length = self.on.length(self.axis, size, rank) if dim == self.dim else size
                    piece = piece.narrow(dim, 0, length)
            pieces.append(piece)
        return self.on.joined(self.axis, self.dim, pieces)


def make_replicas_agree(
    bucket: Bucket, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor]
) -> None:
    """Broadcasts the shards ``locals_`` in place, each from the first of the ranks that hold it.

    What users write to full tensors may differ by rank, as random numbers do, and replicas that differ would
    stay different without an error. There is one broadcast per axis that replicates.
    """
    with torch.inference_mode(False), torch.no_grad():
        for group in bucket.replicate_groups:
            _take_first(group, bucket.device, locals_)
        by_group: dict[str, tuple[ProcessGroup, list[torch.Tensor]]] = {}
        for param, local in zip(params, locals_, strict=True):
            for group in param.on.replicating_groups():
                by_group.setdefault(group.group_name, (group, []))[1].append(local)
        for group, members in by_group.values():
            _take_first(group, bucket.device, members)


def _take_first(group: ProcessGroup, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrites ``tensors``, of one dtype and the same shapes on all ranks, with the first rank's."""
    plain = [as_plain(tensor.detach()) for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1) for tensor in plain]).to(device)
    dist.broadcast(packed.view(torch.uint8), group=group, group_src=0)  # as bytes, for any dtype
    values = packed.split([tensor.numel() for tensor in plain])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))


# Swapped parameters: other Parameters registered instead of a unit's sharded ones, between steps.
# ``full_params`` registers full ones, ``state_dict`` full or local ones while it runs. The optimizer and the
# unit keep the sharded Parameter objects, which are registered again in any case.

ByBucket = list[tuple["Bucket", list["ShardedParam"]]]
"""Parameters of a unit by bucket, in the same order on all ranks."""


def check_not_swapped(unit: Unit, what: str) -> None:
    """Raises StateError if other Parameters are registered in place of the unit's; ``what`` was called."""
    if unit.group.is_in_other_form:
        raise StateError(
            f"{what}: the parameters of unit {unit.label} are in another form already; leave that "
            "full_params (or state_dict) first"
        )


def check_at_rest(unit: Unit, what: str) -> None:
    """Raises StateError, naming ``what``, if the unit is in a forward or backward, or in ``full_params``."""
    check_not_swapped(unit, what)
    unit.come_to_rest()
    context = unit.context
    running = context is not None and (context.running or context.backward is not None)
    if unit.depth or unit.backward_begun or running:
        raise StateError(
            f"{what}: unit {unit.label} is in a forward or backward; call it between steps, or after "
            "reset_iter_state() if an exception has ended one"
        )


def to_rest(unit: Unit, meta_ok: bool = False) -> None:
    """Reshards ``unit``, and copies Parameters that were replaced or moved into its buckets. Raises
    StateError if its parameters are on the meta device, unless ``meta_ok``."""
    group = unit.group
    if unit.context is not None:
        group.register_sharded()
        group.reshard(unit.context.comm)
    group.adopt()
    for bucket in group.buckets:
        if bucket.flat.is_meta and not meta_ok:
            raise StateError(
                f"parameters of unit {bucket.unit} ({bucket.params[0].name} is the first) are on the meta "
                "device and have no values yet; call parallel3d.materialize or to_empty first"
            )


def gather_full_params(
    chosen: ByBucket, *, keep: bool = True, to_cpu: bool = False
) -> dict[ShardedParam, nn.Parameter]:
    """Gathers the full values of the parameters ``chosen``, one bucket after another.

    Args:
        keep: False: this rank only takes part in the all-gathers, and drops the results.
        to_cpu: copies each bucket's result to the CPU before the next bucket is gathered.

    Returns:
        For each parameter a full Parameter of its own dtype, in its own memory.
    """
    result: dict[ShardedParam, nn.Parameter] = {}
    for bucket, params in chosen:
        with torch.inference_mode(False):
            tensors = full_tensors(bucket, params, [param.local for param in params])
            if keep:
                result |= {
                    param: nn.Parameter(full.cpu() if to_cpu else full, param.sharded.requires_grad)
                    for param, full in zip(params, tensors, strict=True)
                }
        del tensors
    return result


@contextmanager
def swapped_params(
    unit: Unit, chosen: ByBucket, others: Mapping[ShardedParam, nn.Parameter]
) -> Iterator[None]:
    """Context manager that registers ``others[param]`` in place of the sharded Parameter of each ``param`` of
    ``chosen`` that is in ``others``."""
    swapped: list[tuple[Any, str, nn.Parameter]] = []
    unit.group.enter(Registered.OTHER)
    try:
        for _, params in chosen:
            for param in params:
                for holder, name in param.module_infos if param in others else ():
                    if holder.get(name) is not None:  # the user may have removed it
                        swapped.append((holder, name, param.sharded))
                        holder[name] = others[param]
        yield
    finally:
        unit.group.enter(Registered.SHARDED)
        for holder, name, sharded in swapped:
            holder[name] = sharded


def params_by_bucket(unit: Unit, module: nn.Module | None = None) -> ByBucket:
    """Returns the unit's parameters by bucket; given a ``module`` of the unit's, only those inside it."""
    if module is None or len(unit.modules) == 1:
        return [(bucket, list(bucket.params)) for bucket in unit.group.buckets]
    inside = {id(m._parameters) for m in module.modules()}
    chosen = [(b, [p for p in b.params if inside & places_of(p)]) for b in unit.group.buckets]
    return [(bucket, params) for bucket, params in chosen if params]


def places_of(param: ShardedParam) -> set[int]:
    return {id(parameters_dict(holder)) for holder, _ in param.module_infos}


@contextmanager
def full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context manager in which modules have plain Parameters of the plain model's shapes, to read or edit.

    They are gathered over shard and tp in the parameters' own dtypes, with one all-gather per bucket and
    axis. On exit each rank keeps its shard of its edited Parameters, also of those that were replaced; ranks
    that hold the same shard take the value of the first of them. The sharded Parameter objects, which the
    optimizer has, stay the same. If the body raises, its edits are dropped: a rank that raises alone could
    not communicate. Ignored parameters are left as they are.

    Every rank of the mesh must enter it. No forward, backward, optimizer step or conversion may run inside.
    It replaces ``FullyShardedDataParallel.summon_full_params``.

    Args:
        module: a unit, or a module with units inside.
        recurse: whether to include units inside ``module``'s own unit.
        writeback: whether to keep edits.
        rank0_only: register full Parameters on the first rank of the mesh only; others see their shards.
        offload_to_cpu: put full Parameters on the CPU; on the device one bucket is gathered at a time.
        with_grads: gather ``.grad`` too, where there is one, and keep its edits: setting it to None, or to a
            tensor, does so to the sharded Parameter's.

    Raises:
        Parallel3dError: ``rank0_only`` with ``writeback``, or an option that is no bool; on exit, a
            Parameter was replaced by one of another shape. Nothing is written then.
        StateError: a forward, backward or other ``full_params`` of the unit is running, parameters are on
            the meta device, or, with ``with_grads``, gradients wait for their reduction.
    """
    check_module(module)
    options = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only}
    options |= {"offload_to_cpu": offload_to_cpu, "with_grads": with_grads}
    for name, value in options.items():
        as_bool(name, value)
    if writeback and rank0_only:
        raise Parallel3dError(
            "full_params: writeback=True with rank0_only=True would write what the other ranks don't "
            "have; give writeback=False to read on the first rank, or rank0_only=False to edit"
        )
    refuse_torch_units(module, "full_params")
    units = list(units_of(module, recurse))
    for unit in units:
        check_at_rest(unit, "full_params")
        for param in params_of([unit]) if with_grads else ():
            if waits_for_reduction(param.sharded.grad):
                raise StateError(
                    f"full_params(with_grads=True): the gradient of {param.name} in unit {unit.label} "
                    "is not reduced yet; call it after the backward of the last micro-batch"
                )
    keep = not rank0_only or is_first(meshes_of(units))
    unsharded_by_user = [
        unit for unit in units if unit.group.is_registered and unit.group.retain is Retain.USER
    ]
    views: list[_FullView] = []
    with ExitStack() as stack:
        for unit in units:
            view = _FullView(unit, keep=keep, to_cpu=offload_to_cpu, grads=with_grads)
            stack.enter_context(swapped_params(unit, view.chosen, view.full))
            views.append(view)
        yield
        if writeback:
            edits = [view.edits() for view in views]
            for view, edited in zip(views, edits, strict=True):
                view.write(edited)
        views.clear()
    for unit in unsharded_by_user:
        context = unit.ready_context()
        unit.issue_unshard(context)
        unit.group.retain = Retain.USER
        unit.group.unshard(context.comm)
        unit.group.register_unsharded()


class _FullView:
    """The full parameters of one unit, gathered when it is made, for ``full_params``.

    Attributes:
        chosen: the unit's parameters by bucket.
        full: the full Parameter of each; empty on ranks that keep none.
    """

    def __init__(self, unit: Unit, *, keep: bool, to_cpu: bool, grads: bool) -> None:
        to_rest(unit)
        self.unit = unit
        self.grads = grads
        self.chosen = params_by_bucket(unit)
        self.full = gather_full_params(self.chosen, keep=keep, to_cpu=to_cpu)
        if grads:
            for bucket, params in self.chosen:
                self._gather_grads(bucket, params)

    def _gather_grads(self, bucket: Bucket, params: list[ShardedParam]) -> None:
        """Gathers ``.grad`` of ``params``; a rank without one sends zeros, as others may have one."""
        if not _may_have_grads(bucket):
            return
        zero = torch.zeros((), dtype=bucket.precision.sum_dtype, device=bucket.storage_device)
        locals_ = []
        for param in params:
            grad = param.sharded.grad
            local = get_local_tensor(grad) if isinstance(grad, DTensor) else grad
            held = zero.expand(param.local.shape) if local is None else local.to(zero.dtype)
            locals_.append(held)
        for param, full in zip(params, full_tensors(bucket, params, locals_), strict=True):
            grad = param.sharded.grad
            if grad is not None and param in self.full:
                target = self.full[param]
                set_grad(target, full.to(target.device, grad.dtype))

    def edits(self) -> dict[ShardedParam, nn.Parameter]:
        """Returns the Parameters that are registered now, by ShardedParam; raises if a shape has changed."""
        result: dict[ShardedParam, nn.Parameter] = {}
        for param, full in self.full.items():
            registered = [holder.get(name) for holder, name in param.module_infos]
            replaced = [p for p in registered if p is not None and p is not full]
            for other in replaced:  # several, if the parameter is tied
                if other.shape != param.global_shape:
                    raise Parallel3dError(
                        f"full_params: parameter {param.name} of unit {self.unit.label} was replaced by one "
                        f"of shape {tuple(other.shape)}; its shape must stay {tuple(param.global_shape)}"
                    )
            result[param] = replaced[0] if replaced else full
        return result

    def write(self, edited: dict[ShardedParam, nn.Parameter]) -> None:
        """Copies this rank's shards of ``edited``, and ``requires_grad``, to the sharded Parameters."""
        with torch.inference_mode(False), torch.no_grad():
            for bucket, params in self.chosen:
                for param in params:
                    param.local.copy_(param.local_part(edited[param].detach()))
                    param.sharded.requires_grad_(edited[param].requires_grad)
                make_replicas_agree(bucket, params, [p.local for p in params])
                if self.grads and _may_have_grads(bucket):
                    _write_grads(bucket, params, [edited[p].grad for p in params])


def _may_have_grads(bucket: Bucket) -> bool:
    """Returns whether a bucket's dtype can have gradients, which is the same on every rank."""
    return bucket.dtype.is_floating_point or bucket.dtype.is_complex


def _write_grads(
    bucket: Bucket, params: list[ShardedParam], grads: list[torch.Tensor | None]
) -> None:
    """Sets ``.grad`` of the sharded Parameters to this rank's shards of the full gradients ``grads``."""
    locals_ = []
    for param, full in zip(params, grads, strict=True):
        local = torch.zeros_like(param.local, dtype=bucket.precision.sum_dtype)
        if full is not None:
            local.copy_(param.local_part(full.detach()))
        locals_.append(local)
    make_replicas_agree(bucket, params, locals_)
    for param, full, local in zip(params, grads, locals_, strict=True):
        before = param.sharded.grad
        if full is None:
            param.sharded.grad = None
        elif isinstance(before, DTensor) and before.dtype == full.dtype:
            get_local_tensor(before).copy_(local)
        else:
            grad = make_dtensor(local.to(full.dtype), param.reduced_spec(full.dtype))
            set_grad(param.sharded, grad)
