"""ClipPlan: how the gradients of the same tensors, call after call, are taken in few kernels.

What is the same at each call (which tensors make up whole buckets, where these have padding, which ranks have
other parts of what) is found once. It holds no tensor, bucket or process group, so that it keeps none alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import is_
from typing import Any

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

_MOST = 4  # plans kept: a model's, and those of a few parts of it


@dataclass
class Found:
    """This rank's gradients.

    Attributes:
        groups: process groups by name, innermost axis first, in the same order on every rank.
        flats: (cut, a part of a bucket's flat gradient, contiguous).
        others: (cut, a local gradient).
        wholes: the flat gradients that ``flats`` are parts of.
    """

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    flats: list[tuple[Cut, torch.Tensor]] = field(default_factory=list)
    others: list[tuple[Cut, torch.Tensor]] = field(default_factory=list)
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
        return len(mine) == len(tensors) and all(map(is_, tensors, (ref() for ref in mine)))

    def find(self, tensors: Sequence[torch.Tensor]) -> Found:
        """The gradients that are there.

        Raises:
            StateError: one waits for its reduction.
        """
        grads = [tensor.grad for tensor in tensors]
        found, cut_of = Found(), _Cuts()
        for entry in self._entries:
            if isinstance(entry, int):
                members = [grads[entry]]
            else:
                members = [grads[i] for i in entry.indices]
                if entry.find(members, tensors, found, cut_of):
                    continue
            for grad in members:
                if grad is not None:
                    found.others.append((cut_of(grad, found.groups), local_of(grad)))
        return found


class _Whole:
    """A bucket whose parameters are all among the tensors.

    Attributes:
        indices: of its parameters.
        runs: (cut, which parameter it begins with, its size): neighbours that the same groups have parts of.
    """

    def __init__(self, bucket: Bucket, index: dict[int, int]) -> None:
        self.indices = [index[id(param.sharded)] for param in bucket.params]
        self._numel = bucket.numel
        self._padding = padding_of(bucket)
        cut_of = _Cuts()
        groups: dict[Any, Any] = {}
        cuts = [cut_of(param.sharded, groups) for param in bucket.params]
        self.runs = [
            (cut, members[0], sum(bucket.slot_sizes[i] for i in members))
            for cut, run in groupby(range(len(cuts)), key=cuts.__getitem__)
            for members in [list(run)]
        ]

    def find(
        self,
        grads: list[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        found: Found,
        cut_of: _Cuts,
    ) -> bool:
        """Adds the flat gradient that ``grads``, of some of ``tensors``, are views of; False if none is."""
        flat = flat_gradient(grads)
        if flat is None or flat.numel() != self._numel:
            return False
        if not self._numel:  # on every rank
            return True
        for cut, first, _ in self.runs:
            if cut not in cut_of.seen:  # else its groups are there
                # Not of the gradient: its mesh may be an equal one, with other groups of the same ranks.
                cut_of(tensors[self.indices[first]], found.groups)
        for start, length in self._padding:
            flat.narrow(0, start, length).zero_()  # may hold anything
        found.wholes.append(flat)
        cuts = [cut for cut, _, _ in self.runs]
        parts = [flat] if len(cuts) == 1 else flat.split([size for _, _, size in self.runs])
        found.flats += zip(cuts, parts, strict=True)
        return True


class _Cuts:
    """Which groups have parts of a gradient; what is alike is looked up once."""

    def __init__(self) -> None:
        self._known: dict[Any, Cut] = {}
        self.seen: set[Cut] = set()

    def __call__(self, grad: torch.Tensor | None, groups: dict[str, ProcessGroup]) -> Cut:
        """Of ``grad``; adds the groups to ``groups``."""
        if not isinstance(grad, DTensor):
            return frozenset()
        spec = spec_of(grad)
        key = id(spec.mesh), spec.placements
        if key not in self._known:
            self._known[key] = _cut_by(spec, groups)
            self.seen.add(self._known[key])
        return self._known[key]


def _cut_by(spec: DTensorSpec, groups: dict[str, ProcessGroup]) -> Cut:
    names = set()
    for axis in reversed(range(spec.mesh.ndim)):
        placement = spec.placements[axis]
        if placement.is_partial():
            raise StateError(
                f"a gradient of shape {tuple(spec.shape)} is {placement} on axis {axis} of {spec.mesh}: it "
                "waits for its reduction. Clip after the backward of the last micro-batch"
            )
        if isinstance(placement, Replicate) or spec.mesh.size(axis) == 1:
            continue
        group = spec.mesh.get_group(axis)
        groups[group.group_name] = group
        names.add(group.group_name)
    return frozenset(names)


_plans: list[ClipPlan] = []


def plan_for(tensors: Sequence[torch.Tensor]) -> ClipPlan:
    """The plan for these tensors, an earlier one if there is one."""
    plan = next((plan for plan in _plans if plan.is_of(tensors)), None)
    if plan is None:
        plan = ClipPlan(tensors)
        _plans.insert(0, plan)
        del _plans[_MOST:]
    return plan
