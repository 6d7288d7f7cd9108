"""ClipPlan: how the gradients of the same tensors, call after call, are taken in few kernels.

What is the same at each call (which tensors make up whole buckets, where these have padding, which ranks have
other parts of what) is found once. It holds no tensor, bucket or process group, so that it keeps none alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, call, is_, itemgetter
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from parallel3d._compat import DTensorSpec, spec_of
from parallel3d.errors import StateError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.grads import flat_gradient
from parallel3d.optim.flat import by_bucket, padding_of
from parallel3d.optim.pieces import local_of

__all__ = ["ClipPlan", "Cut", "Found", "plan_for"]

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
