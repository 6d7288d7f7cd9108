"""clip_grad_norm_: the global norm over any mix of sharded, replicated and plain gradients."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, groupby
from operator import attrgetter, call, is_, itemgetter
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from parallel3d._torch.dtensor import DTensorSpec, spec_of
from parallel3d._torch.kernels import foreach_mul_, foreach_norm
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import Bucket, flat_gradient, parameters_at_rest, refuse_unfinalized
from parallel3d.mesh.agreement import name_ranks
from parallel3d.mesh.store import next_table, others, wait_for
from parallel3d.optim.pieces import by_bucket, local_of, padding_of
from parallel3d.optim.step_in_backward import refuse_stepped

# ClipPlan: how the gradients of the same tensors, call after call, are taken in few kernels.
#
# What is the same at each call (which tensors make up whole buckets, where these have padding,
# which ranks have other parts of what) is found once. It holds no tensor, bucket or process group,
# so that it keeps none alive.

Cut = frozenset[str]
"""Names of the process groups over which a gradient's parts differ."""

_grad_of = attrgetter("grad")
_MOST = 4  # plans kept: a model's, and those of a few parts of it


@dataclass
class Found:
    """This rank's gradients.

    Attributes:
        groups: process groups by name, innermost axis first, in the same order on every rank.
        flats: by cut, parts of buckets' flat gradients, contiguous.
        others: by cut, local gradients.
        wholes: the flat gradients that ``flats`` are parts of.
    """

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    flats: dict[Cut, list[torch.Tensor]] = field(default_factory=dict)
    others: dict[Cut, list[torch.Tensor]] = field(default_factory=dict)
    wholes: list[torch.Tensor] = field(default_factory=list)


class ClipPlan:
    """See the module's docstring."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._entries: list[_Whole | int] = [
            _Whole(each, index) if isinstance(each, Bucket) else index[id(each)]
            for each in by_bucket(tensors)
        ]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these."""
        mine = self._tensors
        return len(mine) == len(tensors) and all(map(is_, tensors, map(call, mine)))

    def find(self, tensors: Sequence[torch.Tensor]) -> Found:
        """The gradients that are there.

        Raises:
            StateError: one waits for its reduction.
        """
        grads = list(map(_grad_of, tensors))
        found, cut_of = Found(), _Cuts()
        for entry in self._entries:
            if isinstance(entry, int):
                members: Sequence[torch.Tensor | None] = [grads[entry]]
            else:
                members = entry.members(grads)
                if entry.find(members, tensors, found):
                    continue
            for grad in members:
                if grad is not None:
                    cut = cut_of(grad, found.groups)
                    found.others.setdefault(cut, []).append(local_of(grad))
        return found


class _Whole:
    """A bucket whose parameters are all among the tensors.

    Attributes:
        members: takes what belongs to its parameters out of a list with an entry for each tensor.
    """

    def __init__(self, bucket: Bucket, index: dict[int, int]) -> None:
        indices = [index[id(param.sharded)] for param in bucket.params]
        first, *rest = indices
        self.members = itemgetter(*indices) if rest else itemgetter(slice(first, first + 1))
        self._slot_sizes = bucket.slot_sizes
        self._padding = padding_of(bucket)
        # By name of a group: one of the tensors that it has parts of, and on which axis.
        self._sources: dict[str, tuple[int, int]] = {}
        cuts = []
        for i, param in zip(indices, bucket.params, strict=True):
            cutting = _cutting(spec_of(cast(DTensor, param.sharded)))
            for axis, group in cutting:
                self._sources.setdefault(group.group_name, (i, axis))
            cuts.append(frozenset(group.group_name for _, group in cutting))
        # Neighbours that the same groups have parts of, and their sizes.
        runs = [
            (cut, size)
            for cut, run in groupby(range(len(cuts)), key=cuts.__getitem__)
            if (size := sum(bucket.slot_sizes[i] for i in run))
        ]
        self._cuts, self._sizes = [cut for cut, _ in runs], [size for _, size in runs]

    def find(
        self,
        grads: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        found: Found,
    ) -> bool:
        """Adds the flat gradient that ``grads``, of some of ``tensors``, are views of; False if none is."""
        flat = flat_gradient(grads, self._slot_sizes)
        if flat is None:
            return False
        if not self._cuts:  # no elements, on every rank
            return True
        for name, (i, axis) in self._sources.items():
            if name not in found.groups:
                # Not of the gradient: its mesh may be an equal one, with other groups of the same ranks.
                found.groups[name] = spec_of(cast(DTensor, tensors[i])).mesh.get_group(axis)
        for start, length in self._padding:
            flat.narrow(0, start, length).zero_()  # may hold anything
        found.wholes.append(flat)
        parts = [flat] if len(self._cuts) == 1 else flat.split_with_sizes(self._sizes)
        for cut, part in zip(self._cuts, parts, strict=True):
            found.flats.setdefault(cut, []).append(part)
        return True


class _Cuts:
    """Which groups have parts of a gradient; what is alike is looked up once."""

    def __init__(self) -> None:
        self._known: dict[Any, Cut] = {}

    def __call__(self, grad: torch.Tensor, groups: dict[str, ProcessGroup]) -> Cut:
        """Of ``grad``; adds the groups to ``groups``."""
        if not isinstance(grad, DTensor):
            return frozenset()
        spec = spec_of(grad)
        key = id(spec.mesh), spec.placements
        if key not in self._known:
            cutting: dict[str, ProcessGroup] = {
                group.group_name: group for _, group in _cutting(spec)
            }
            groups.update(cutting)
            self._known[key] = frozenset(cutting)
        return self._known[key]


def _cutting(spec: DTensorSpec) -> list[tuple[int, ProcessGroup]]:
    """(axis, its group) where ranks have different parts of a tensor, innermost axis first.

    Raises:
        StateError: it waits for its reduction.
    """
    cutting = []
    for axis in reversed(range(spec.mesh.ndim)):
        placement = spec.placements[axis]
        if placement.is_partial():
            raise StateError(
                f"a gradient of shape {tuple(spec.shape)} is {placement} on axis {axis} of {spec.mesh}: it "
                "waits for its reduction. Clip after the backward of the last micro-batch"
            )
        if not isinstance(placement, Replicate) and spec.mesh.size(axis) > 1:
            cutting.append((axis, spec.mesh.get_group(axis)))
    return cutting


_plans: list[ClipPlan] = []


def plan_for(tensors: Sequence[torch.Tensor]) -> ClipPlan:
    """The plan for these tensors, an earlier one if there is one."""
    plan = next((plan for plan in _plans if plan.is_of(tensors)), None)
    if plan is None:
        plan = ClipPlan(tensors)
        _plans.insert(0, plan)
        del _plans[_MOST:]
    return plan


# Which ranks' losses are nan or infinite, asked when a norm that all ranks know has turned out to
# be.

_LIMIT = timedelta(seconds=10)
"""For ranks that have no such error: their gradients are not among those of the norm."""


def name_losses(loss: torch.Tensor | float | None) -> str:
    """What each rank's loss is, for an error's text; through the store, once the step has failed."""
    if loss is None:
        return ". Give clip_grad_norm_ loss=, this rank's, to read here on which ranks it was not"
    own = _in_words(loss)
    found = others()
    if found is None:
        return f". This rank's loss is {own}"
    store, rank, world_size = found
    keys = [str(each) for each in range(world_size)]
    ranks_of: dict[str, list[int]] = {}
    with suppress(RuntimeError):  # the store has gone, with a rank that has raised already
        table = next_table(store, "optim/nonfinite", rank)
        table.set(str(rank), json.dumps(own))
        with suppress(RuntimeError):  # not all come
            wait_for(table, keys, _LIMIT)
        for each, key in enumerate(keys):
            if table.check([key]):
                ranks_of.setdefault(json.loads(table.get(key)), []).append(each)
    if not ranks_of:
        return f". This rank's loss is {own}"
    if set(ranks_of) == {"finite"}:
        return ". The loss is finite on every rank that has said so: its backward has made it"
    texts = [
        f"{what} on {name_ranks(ranks)}" for what, ranks in sorted(ranks_of.items(), reverse=True)
    ]
    return f". The loss is {', '.join(texts)}"


def _in_words(loss: torch.Tensor | float) -> str:
    values = loss.detach().double().flatten().tolist() if isinstance(loss, torch.Tensor) else [loss]
    bad = [value for value in values if not math.isfinite(value)]
    return str(bad[0]) if bad else "finite"


# Elements whose squares are summed one after another: of millions float32 would lose some digits, on the CPU.
_ROW = 4096


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

    Each element of the plain model's gradient counts once, wherever it is: a sharded gradient's parts are
    summed over the axes that cut it, a replicated or plain one counts on its own. At most one small
    all-reduce per mesh axis.

    Args:
        parameters: a module, or tensors whose ``.grad`` to clip.
        max_norm: the largest norm to leave.
        norm_type: the p of the norm, above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is nan or infinite (waits for the device).
        loss: this rank's, or the sum of its micro-batches': that error then says on which ranks it was nan or
            infinite. Nothing is communicated for it but where there is that error, which all ranks have.

    Returns:
        The norm before clipping, a scalar tensor; the same on every rank if plain gradients (of ignored
        parameters, say) are.

    Raises:
        Parallel3dError: bad ``max_norm`` or ``norm_type``, or a non-finite norm if asked for.
        StateError: a gradient waits for its reduction, as between micro-batches, or for
            ``finalize_backward()``; or parameters are updated in backward (``step_in_backward``).
    """
    _check_numbers(max_norm, norm_type)
    tensors = _tensors(parameters)
    refuse_stepped(tensors, "clip_grad_norm_")
    refuse_unfinalized(tensors, "clip_grad_norm_")
    found = plan_for(tensors).find(tensors)
    if not found.flats and not found.others:
        return torch.zeros(())
    norm = _total_norm(found, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise Parallel3dError(
            f"the {norm_type}-norm of the gradients is {norm.item()}; it must be finite to clip by"
            f"{name_losses(loss)}"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [*found.wholes, *chain.from_iterable(found.others.values())]
    for (device, dtype), alike in _by_kind(grads).items():
        foreach_mul_(alike, factor.to(device, dtype))
    return norm


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise Parallel3dError(f"max_norm is {max_norm!r}; it must be a number >= 0")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise Parallel3dError(
            f"norm_type is {norm_type!r}; it must be a number > 0, such as 2.0 or float('inf')"
        )


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


def _total_norm(found: Found, p: float) -> torch.Tensor:
    parts = _power_sums(found, p)
    for name, group in found.groups.items():
        _reduce_over(name, group, parts, p)
    (total,) = parts.values()
    return total if math.isinf(p) else total ** (1.0 / p)


def _power_sums(found: Found, p: float) -> dict[Cut, torch.Tensor]:
    """By cut, the sum of |x|^p over all tensors (largest |x| for p = inf), at least in float32."""
    rows, rest = _rows_and_rest(found, p)
    norms = {cut: [_row_norms(x, p) for x in rows.get(cut, ())] for cut in rest}
    # All of a kind in one call, whichever groups have parts of them.
    kinds: dict[tuple[torch.device, torch.dtype], dict[Cut, list[torch.Tensor]]] = {}
    for cut, tensors in rest.items():
        for kind, alike in _by_kind(tensors).items():
            kinds.setdefault(kind, {})[cut] = alike
    for (_, dtype), by_cut in kinds.items():
        tensors = list(chain.from_iterable(by_cut.values()))
        of_all = torch.stack(list(foreach_norm(tensors, p, _norm_dtype(dtype))))
        for cut, mine in zip(by_cut, of_all.split([len(x) for x in by_cut.values()]), strict=True):
            norms[cut].append(mine)
    return {cut: _power_sum(each, p) for cut, each in norms.items()}


def _rows_and_rest(
    found: Found, p: float
) -> tuple[dict[Cut, list[torch.Tensor]], dict[Cut, list[torch.Tensor]]]:
    """By cut: long flat gradients as rows of ``_ROW`` elements, and what is left beside them."""
    rows: dict[Cut, list[torch.Tensor]] = {}
    rest: dict[Cut, list[torch.Tensor]] = {}
    for cut, flats in found.flats.items():
        left = rest[cut] = []
        for x in flats:
            number = x.numel() // _ROW
            if number > 1:
                whole = number * _ROW
                rows.setdefault(cut, []).append(x[:whole].view(number, _ROW))
                x = x[whole:]
            if x.numel():
                left.append(x)
    for cut, tensors in found.others.items():
        if math.isinf(p):
            # A rank may hold no row of a tensor, and the maximum of nothing is an error: add a zero.
            tensors = [torch.cat([x.flatten().abs(), x.new_zeros(1)]) for x in tensors]
        rest.setdefault(cut, []).extend(tensors)
    return rows, rest


def _row_norms(rows: torch.Tensor, p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, p, 1, dtype=_norm_dtype(rows.dtype))


def _power_sum(norms: list[torch.Tensor], p: float) -> torch.Tensor:
    """Of the tensors that ``norms``, vectors, are the norms of."""
    all_norms = norms[0]
    if len(norms) > 1:
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
        all_norms = torch.cat([norm.to(all_norms.device, dtype) for norm in norms])
    return all_norms.max() if math.isinf(p) else all_norms.pow(p).sum()


def _by_kind(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _reduce_over(name: str, group: ProcessGroup, parts: dict[Cut, torch.Tensor], p: float) -> None:
    """Sums the parts that ``group`` cuts over it, and merges them with those it doesn't cut."""
    keys = [key for key in parts if name in key]
    summed = torch.stack([parts[key] for key in keys])
    op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    dist.all_reduce(summed, op, group=group)
    for key, value in zip(keys, summed.unbind(), strict=True):
        del parts[key]
        rest = key - {name}
        if rest not in parts:
            parts[rest] = value
        elif math.isinf(p):
            parts[rest] = torch.maximum(parts[rest], value)
        else:
            parts[rest] = parts[rest] + value
