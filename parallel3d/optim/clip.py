"""clip_grad_norm_: the global norm over any mix of sharded, replicated and plain gradients."""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, groupby
from operator import attrgetter, call, is_
from typing import cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import DTensorSpec, spec_of
from parallel3d._torch.kernels import foreach_mul_, foreach_norm
from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import Bucket, flat_gradient, parameters_at_rest, refuse_unfinalized
from parallel3d.mesh.agreement import name_ranks, ranks_by_value
from parallel3d.mesh.exchange import StoreExchange
from parallel3d.mesh.store import next_table, others
from parallel3d.optim.pieces import by_bucket, check_reduced, local_of, padding_of
from parallel3d.optim.step_in_backward import refuse_stepped

Axes = frozenset[str]
"""Names of the process groups over which a gradient is sharded."""

Tensors = list[torch.Tensor]

_grad_of = attrgetter("grad")
_ROW = 4096  # elements whose squares are summed in one go: float32 loses digits over millions, on the CPU
_STORE_TIMEOUT = timedelta(seconds=10)  # for ranks that don't have these gradients, and so no error


@dataclass
class LocalGrads:
    """This rank's gradients, by the process groups that shard them.

    Attributes:
        groups: name -> process group, innermost axis first, in the same order on every rank.
        flats: names of groups -> contiguous parts of buckets' flat gradients that these groups shard.
        others: the same of local gradients that are in no flat one.
        wholes: the flat gradients that ``flats`` are parts of.
    """

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    flats: dict[Axes, Tensors] = field(default_factory=dict)
    others: dict[Axes, Tensors] = field(default_factory=dict)
    wholes: Tensors = field(default_factory=list)


class ClipPlan:
    """How to find and norm the gradients of some tensors in few kernels, for calls that repeat.

    What is the same in each call is computed once: which tensors make up whole buckets, where these have
    padding, and over which groups they are sharded. It keeps no tensor, bucket or process group alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._entries: list[_WholeBucket | int] = [
            _WholeBucket(item, index) if isinstance(item, Bucket) else index[id(item)]
            for item in by_bucket(tensors)
        ]

    def is_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the plan was made for ``tensors``."""
        same = map(is_, tensors, map(call, self._tensors))
        return len(self._tensors) == len(tensors) and all(same)

    def find(self, tensors: Sequence[torch.Tensor]) -> LocalGrads:
        """Returns the tensors' gradients; StateError if one is not reduced yet."""
        grads = list(map(_grad_of, tensors))
        found = LocalGrads()
        known: dict[object, Axes] = {}  # (mesh, placements) -> groups: looked up once
        for entry in self._entries:
            if isinstance(entry, int):
                members: Sequence[torch.Tensor | None] = [grads[entry]]
            else:
                members = [grads[i] for i in entry.indices]
                if entry.add_to(found, members, tensors):
                    continue
            for grad in members:
                if grad is None:
                    continue
                axes: Axes = frozenset()
                if isinstance(grad, DTensor):
                    spec = spec_of(grad)
                    key = id(spec.mesh), spec.placements
                    if key not in known:
                        check_reduced(grad, "Clip")
                        groups = {str(group.group_name): group for _, group in _sharding(spec)}
                        found.groups.update(groups)
                        known[key] = frozenset(groups)
                    axes = known[key]
                found.others.setdefault(axes, []).append(local_of(grad))
        return found


class _WholeBucket:
    """A bucket all of whose parameters are among a plan's tensors: its flat gradient holds all of theirs."""

    def __init__(self, bucket: Bucket, index: dict[int, int]) -> None:
        self.indices = [index[id(param.sharded)] for param in bucket.params]
        self._segment_sizes = bucket.layout.segment_sizes
        self._padding = padding_of(bucket)
        # Name of a group -> (index of a tensor that it shards, the axis of that tensor's mesh).
        self._sources: dict[str, tuple[int, int]] = {}
        by_param = []
        for i, param in zip(self.indices, bucket.params, strict=True):
            sharding = _sharding(spec_of(cast(DTensor, param.sharded)))
            for axis, group in sharding:
                self._sources.setdefault(group.group_name, (i, axis))
            by_param.append(frozenset(group.group_name for _, group in sharding))
        # Runs of neighbours that the same groups shard, with their sizes.
        self._runs = [
            (axes, size)
            for axes, run in groupby(range(len(by_param)), key=by_param.__getitem__)
            if (size := sum(bucket.layout.segment_sizes[i] for i in run))
        ]

    def add_to(
        self,
        found: LocalGrads,
        grads: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
    ) -> bool:
        """Adds the bucket's flat gradient to ``found``; False if ``grads`` are not views of one tensor."""
        flat = flat_gradient(grads, self._segment_sizes)
        if flat is None:
            return False
        if not self._runs:  # no elements, on every rank
            return True
        for name, (i, axis) in self._sources.items():
            if name not in found.groups:
                # Not of the gradient: its mesh may be an equal one with other groups of the same ranks.
                found.groups[name] = spec_of(cast(DTensor, tensors[i])).mesh.get_group(axis)
        for start, length in self._padding:
            flat.narrow(0, start, length).zero_()
        found.wholes.append(flat)
        parts = flat.split_with_sizes([size for _, size in self._runs])
        for (axes, _), part in zip(self._runs, parts, strict=True):
            found.flats.setdefault(axes, []).append(part)
        return True


def _sharding(spec: DTensorSpec) -> list[tuple[int, ProcessGroup]]:
    """Returns (mesh axis, its process group) of the axes that shard a tensor, innermost axis first."""
    mesh = spec.mesh
    axes = [a for a, n in enumerate(mesh.shape) if n > 1 and not spec.placements[a].is_replicate()]
    return [(axis, mesh.get_group(axis)) for axis in reversed(axes)]


_plans: deque[ClipPlan] = deque(maxlen=4)  # for a model, and a few parts of it


def plan_for(tensors: Sequence[torch.Tensor]) -> ClipPlan:
    """Returns the :class:`ClipPlan` for ``tensors``, an earlier one if they are the same."""
    plan = next((plan for plan in _plans if plan.is_for(tensors)), None)
    if plan is None:
        plan = ClipPlan(tensors)
        _plans.appendleft(plan)
    return plan


def name_losses(loss: torch.Tensor | float | None) -> str:
    """Returns the end of the error for a nonfinite norm: each rank's ``loss``, exchanged through the store.
    All ranks call it, since they have the same norm."""
    if loss is None:
        return (
            ". Give clip_grad_norm_ loss=, this rank's loss, to read here on which ranks it is not"
        )
    values = loss.detach().double().flatten().tolist() if isinstance(loss, torch.Tensor) else [loss]
    own = next((str(value) for value in values if not math.isfinite(value)), "finite")
    ranks_of: dict[str, list[int]] = {}
    peers = others()
    if peers is not None:
        store, own_rank, world_size = peers
        with suppress(RuntimeError):  # the store has ended with a rank that has raised already
            table = next_table(store, "optim/nonfinite", own_rank)
            losses = StoreExchange(table, own_rank, range(world_size), _STORE_TIMEOUT)
            losses.put(own)
            ranks_of = ranks_by_value(losses.collect())
    if not ranks_of:
        return f". This rank's loss is {own}"
    if set(ranks_of) == {"finite"}:
        return ". The loss is finite on every rank that has reported it: its backward has made it"
    texts = [
        f"{value} on {name_ranks(ranks)}" for value, ranks in sorted(ranks_of.items(), reverse=True)
    ]
    return f". The loss is {', '.join(texts)}"


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    loss: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Scales the gradients in place so that their norm is at most ``max_norm``.

    Each element of the plain model's gradient counts once, wherever it is: the norm of a sharded gradient is
    summed over the axes that shard it, a replicated or plain one counts on its own. At most one small
    all-reduce per mesh axis.

    Args:
        parameters: a module, or tensors whose ``.grad`` to clip.
        max_norm: the largest norm to leave.
        norm_type: the p of the norm, above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is nan or infinite (waits for the device).
        loss: this rank's loss, or the sum over its micro-batches: that error then says on which ranks it is
            nan or infinite. Nothing is communicated for it otherwise.

    Returns:
        The norm before clipping, a scalar tensor; the same on every rank if plain gradients (of ignored
        parameters, say) are.

    Raises:
        Parallel3dError: bad ``max_norm`` or ``norm_type``.
        StateError: a non-finite norm if asked for (a RuntimeError too, as torch's); a gradient is not reduced
            yet, as between micro-batches or before ``finalize_backward()``; or parameters are updated in
            backward (``step_in_backward``).
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise Parallel3dError(f"max_norm is {max_norm!r}; it must be a number >= 0")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise Parallel3dError(
            f"norm_type is {norm_type!r}; it must be a number > 0, such as 2.0 or float('inf')"
        )
    tensors = _tensors(parameters)
    refuse_stepped(tensors, "clip_grad_norm_")
    refuse_unfinalized(tensors, "clip_grad_norm_")
    found = plan_for(tensors).find(tensors)
    if not found.flats and not found.others:
        return torch.zeros(())
    norm = _total_norm(found, norm_type)
    if error_if_nonfinite:
        dry_run.reads("error_if_nonfinite")
    if error_if_nonfinite and not dry_run.active() and not bool(torch.isfinite(norm)):
        raise StateError(
            f"the {norm_type}-norm of the gradients is {norm.item()}; it must be finite to clip by"
            f"{name_losses(loss)}"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: defaultdict[tuple[torch.device, torch.dtype], Tensors] = defaultdict(list)
    for grad in chain(found.wholes, *found.others.values()):
        by_kind[grad.device, grad.dtype].append(grad)
    for (device, dtype), alike in by_kind.items():
        foreach_mul_(alike, factor.to(device, dtype))
    return norm


def _tensors(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> Sequence[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return parameters_at_rest(parameters)
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str):
        raise Parallel3dError(
            f"parameters is {parameters!r}; it must be a module, a tensor or an iterable of tensors"
        )
    return list(parameters)


def _total_norm(found: LocalGrads, p: float) -> torch.Tensor:
    sums = _power_sums(found, p)
    is_max = math.isinf(p)
    for name, group in found.groups.items():
        # Reduces the sums of what this group shards, and adds them to those of the remaining groups.
        keys = [axes for axes in sums if name in axes]
        reduced = torch.stack([sums.pop(axes) for axes in keys])
        dist.all_reduce(reduced, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        for axes, value in zip(keys, reduced.unbind(), strict=True):
            rest = axes - {name}
            if rest in sums:
                value = torch.maximum(sums[rest], value) if is_max else sums[rest] + value
            sums[rest] = value
    (total,) = sums.values()
    return total if is_max else total ** (1.0 / p)


def _power_sums(found: LocalGrads, p: float) -> dict[Axes, torch.Tensor]:
    """Returns groups -> local sum of |x|^p over the gradients that they shard (max |x| for p = inf), at least
    in float32."""
    norms: dict[Axes, Tensors] = {axes: [] for axes in [*found.flats, *found.others]}
    # By kind, then groups: what is not summed in rows, so that one call takes all of a kind.
    kinds: dict[tuple[torch.device, torch.dtype], dict[Axes, Tensors]] = {}
    for axes, flats in found.flats.items():
        for flat in flats:
            rows = flat.numel() // _ROW
            if rows > 1:
                dtype = _norm_dtype(flat.dtype)
                table = flat[: rows * _ROW].view(rows, _ROW)
                norms[axes].append(torch.linalg.vector_norm(table, p, 1, dtype=dtype))
                flat = flat[rows * _ROW :]
            if flat.numel():
                kinds.setdefault((flat.device, flat.dtype), {}).setdefault(axes, []).append(flat)
    for axes, grads in found.others.items():
        for grad in grads:
            if math.isinf(p):
                # A rank may hold no element, and the maximum of nothing is an error: add a zero.
                grad = torch.cat([grad.flatten().abs(), grad.new_zeros(1)])
            kinds.setdefault((grad.device, grad.dtype), {}).setdefault(axes, []).append(grad)
    for (_, dtype), by_axes in kinds.items():
        tensors = list(chain.from_iterable(by_axes.values()))
        stacked = torch.stack(list(foreach_norm(tensors, p, _norm_dtype(dtype))))
        parts = stacked.split([len(group) for group in by_axes.values()])
        for axes, part in zip(by_axes, parts, strict=True):
            norms[axes].append(part)
    return {axes: _power_sum(vectors, p) for axes, vectors in norms.items()}


def _power_sum(norms: Tensors, p: float) -> torch.Tensor:
    """Returns the sum of |x|^p over some tensors, from vectors of their p-norms."""
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    all_norms = torch.cat([norm.to(norms[0].device, dtype) for norm in norms])
    return all_norms.max() if math.isinf(p) else all_norms.pow(p).sum()


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
