"""Parameters and buffers: the same ones, and the same values, as in the plain model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d._torch.simulated import tensors_by_rank
from parallel3d.testing.differences.fit import (
    Fit,
    Gap,
    Group,
    distance,
    fit_value,
    hint_of,
    take,
)
from parallel3d.testing.differences.forward import Difference, owner_of
from parallel3d.testing.differences.record import Values, plain_name
from parallel3d.testing.parity import shards_of


def gathered(value: Any) -> list[Any]:
    """``value`` of every real rank; with simulated ones, or one process, this one's."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class State:
    """The parameters and buffers of both models, side by side.

    Attributes:
        forms: how ranks hold the parameters that are no DTensors, by name.
    """

    def __init__(
        self, plain: nn.Module, parallel: nn.Module, groups: Sequence[Group], own: tuple[int, ...]
    ) -> None:
        self.plain, self.parallel, self.groups, self.own = plain, parallel, groups, own
        self.forms: dict[str, Fit] = {}
        self.buffers: dict[str, Fit] = {}

    def names(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters by the plain model's names, tied ones by each of theirs."""
        found = model.named_parameters(remove_duplicate=False)
        return {plain_name(name): param for name, param in found}

    # ---- before anything runs ----

    def structure(self) -> Difference | None:
        """A parameter that one model lacks, freezes, ties or has in another dtype."""
        theirs, ours = self.names(self.plain), self.names(self.parallel)
        for name in [*theirs, *ours]:
            module, own = owner_of(name)
            if name not in ours or name not in theirs:
                which = "parallel" if name in theirs else "plain"
                return Difference(
                    module, "structure", f"{own}: the {which} model has no such parameter"
                )
            p, q = theirs[name], ours[name]
            if p.requires_grad != q.requires_grad:
                frozen = "parallel" if p.requires_grad else "plain"
                return Difference(
                    module, "structure", f"{own} is frozen in the {frozen} model only"
                )
            if p.dtype != q.dtype:
                which_dtype = f"{own} is {_dtype(q)}, in the plain model {_dtype(p)}"
                return Difference(module, "structure", which_dtype)
        return self._ties(theirs, ours)

    def _ties(
        self, theirs: dict[str, nn.Parameter], ours: dict[str, nn.Parameter]
    ) -> Difference | None:
        first: dict[int, str] = {}
        first_of_ours: dict[int, str] = {}
        for name, param in theirs.items():
            one = first.setdefault(id(param), name)
            other = first_of_ours.setdefault(id(ours[name]), name)
            if one != other:
                module, own = owner_of(name)
                what = f"{own} is no longer the same parameter as {one}"
                if one == name:
                    what = f"{own} has become the same parameter as {other}"
                return Difference(module, "structure", what)
        return None

    def modes(self) -> Difference | None:
        """The first module that is in evaluation in one model and in training in the other."""
        ours = {plain_name(name): module.training for name, module in self.parallel.named_modules()}
        for name, module in self.plain.named_modules():
            if ours.get(plain_name(name), module.training) != module.training:
                which = "parallel" if module.training else "plain"
                what = f"it is in evaluation mode in the {which} model only"
                return Difference(plain_name(name), "structure", what)
        return None

    def without_gradient(self) -> tuple[str, ...]:
        """The plain model's trained parameters that have no gradient now."""
        return tuple(
            name
            for name, param in self.plain.named_parameters()
            if param.requires_grad and param.grad is None
        )

    def weights_at_start(self, bound: float) -> Difference | None:
        """A weight or buffer that begins with another value. Notes in which form ranks hold them."""
        ours, gaps = self.names(self.parallel), {}
        for name, p in self.names(self.plain).items():
            q = ours[name]
            if not isinstance(q, DTensor):
                fit = self._fit(p.detach(), q.detach(), bound)
                if isinstance(fit, Fit):
                    self.forms[name] = fit
                else:
                    gaps[name] = fit
        gaps |= self.gaps("weight", bound, only_dtensors=True)
        for name, gap in gaps.items():
            module, own = owner_of(name)
            return Difference(
                module, "weight at the start", f"{own} at the start", 0, gap.rank,
                gap.difference, bound, gap.hint,
            )  # fmt: skip
        return self._buffers_at_start(bound)

    def _fit(self, whole: Tensor, part: Tensor, bound: float) -> Fit | Gap:
        kinds = frozenset({"whole", "shard", "slices"})
        plain = {group.data_rank: whole for group in self.groups}
        return fit_value(plain, self.everywhere(part), self.groups, bound, kinds=kinds)

    def everywhere(self, tensor: Tensor) -> Values:
        """What every rank has of it."""
        by_rank = tensors_by_rank(tensor)
        mine = dict(by_rank) if by_rank is not None else dict.fromkeys(self.own, tensor.detach())
        found: Values = {}
        for each in gathered(mine):
            found |= each
        return found

    # ---- buffers ----

    def _pairs_of_buffers(self) -> list[tuple[str, Tensor, Tensor]]:
        ours = {plain_name(name): b for name, b in self.parallel.named_buffers()}
        theirs = {plain_name(name): b for name, b in self.plain.named_buffers()}
        return [
            (name, b, ours[name])
            for name, b in theirs.items()
            if name in ours and not isinstance(ours[name], DTensor)
        ]

    def _buffers_at_start(self, bound: float) -> Difference | None:
        for name, b, c in self._pairs_of_buffers():
            fit = self._fit(b, c, max(bound, 1e-6))  # a cast of the whole model rounds a table anew
            if isinstance(fit, Gap):
                return self._of_buffer(name, "at the start", 0, fit, bound)
            if fit.kind == "slices" and fit.odd:
                return self._of_buffer(name, "at the start", 0, Gap(math.inf, 0, fit.odd), bound)
            self.buffers[name] = fit
        return None

    def keep_buffers(self) -> dict[str, Tensor]:
        """The plain model's buffers now."""
        return {name: b.clone() for name, b, _ in self._pairs_of_buffers()}

    def buffers_after(
        self, before: dict[str, Tensor], step: int, bound: float
    ) -> Difference | None:
        """A buffer that should have stayed, or that ranks have different values of.

        Of what the plain model changes its own values say nothing: it has seen the data ranks' samples
        one after another.
        """
        for name, b, c in self._pairs_of_buffers():
            fit, values = self.buffers.get(name), self.everywhere(c)
            if fit is None:
                continue
            if torch.equal(b, before[name]):
                gap = self._fit(b, c, max(bound, 1e-6))
                if isinstance(gap, Gap):
                    return self._of_buffer(name, f"after step {step}", step, gap, bound)
                continue
            gap2 = self._apart(values, fit)
            if gap2.difference > bound:
                return self._of_buffer(name, f"after step {step}", step, gap2, bound)
        return None

    def _apart(self, values: Values, fit: Fit) -> Gap:
        """How far ranks that should have the same buffer are apart."""
        worst = Gap(0.0, 0)
        first = self.groups[0]
        for group in self.groups:
            for i, rank in enumerate(group.ranks):
                like = values[first.ranks[i if fit.kind != "whole" else 0]]
                scale = max(float(like.abs().max()) if like.numel() else 0.0, 1e-30)
                apart = distance(values[rank].double(), like.double()) / scale
                if apart > worst.difference:
                    worst = Gap(
                        apart, rank, "the ranks have different values: it isn't synchronised"
                    )
        return worst

    def _of_buffer(self, name: str, when: str, step: int, gap: Gap, bound: float) -> Difference:
        module, own = owner_of(name)
        what = f"buffer {own} {when}"
        return Difference(module, "buffer", what, step, gap.rank, gap.difference, bound, gap.hint)

    # ---- gradients and weights ----

    def gaps(self, what: str, bound: float, *, only_dtensors: bool = False) -> dict[str, Gap]:
        """The parameters whose ``"gradient"`` or ``"weight"`` differs, in the model's order."""
        theirs, ours = self.names(self.plain), self.names(self.parallel)
        scale = self._largest_gradient() if what == "gradient" else 0.0
        read: Callable[[Any], Any] = _grad if what == "gradient" else _data
        found: dict[str, Gap] = {}
        for name, p in theirs.items():
            q = ours[name]
            if only_dtensors and not isinstance(q, DTensor):
                continue
            a, b = read(p), read(q)
            if a is None or b is None:
                if (a is None) != (b is None):
                    which = "plain" if a is None else "parallel"
                    found[name] = Gap(math.inf, self.own[0], f"none in the {which} model")
                continue
            gap = self._gap(a, b, scale, self.forms.get(name, Fit("whole")), bound)
            if not gap.difference <= bound:
                found[name] = gap
        return _agreed(found)

    def _largest_gradient(self) -> float:
        grads = [p.grad for p in self.plain.parameters() if p.grad is not None]
        return max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)

    def _gap(self, whole: Tensor, part: Tensor, scale: float, form: Fit, bound: float) -> Gap:
        scale = max(scale or (float(whole.double().abs().max()) if whole.numel() else 1.0), 1e-30)
        pairs = self._parts(whole, part, form)
        worst = Gap(0.0, self.own[0])
        for rank, _, got, want in pairs:
            apart = distance(got, want) / scale
            if not apart <= worst.difference:
                worst = Gap(apart, rank)
        if worst.difference <= bound:
            return worst
        return Gap(worst.difference, worst.rank, self._hint(pairs, worst.rank, bound, scale))

    def _parts(
        self, whole: Tensor, part: Tensor, form: Fit
    ) -> list[tuple[int, str, Tensor, Tensor]]:
        """(rank, which part, what it has, what it should have)."""
        if isinstance(part, DTensor):
            if part.shape != whole.shape:
                return [(self.own[0], "", torch.zeros(0), whole)]
            return [(rank, str(box), got, whole[box]) for rank, box, got in shards_of(part)]
        places = {rank: i for group in self.groups for i, rank in enumerate(group.ranks)}
        by_rank = tensors_by_rank(part)
        values = by_rank if by_rank is not None else dict.fromkeys(self.own, part.detach())
        return [
            (rank, str(places[rank] if form.index else ""), got, take(whole, form, places[rank]))
            for rank, got in values.items()
        ]

    def _hint(
        self,
        pairs: list[tuple[int, str, Tensor, Tensor]],
        rank: int,
        bound: float,
        scale: float,
    ) -> str:
        """What relates the worst rank's part to the plain one, or those of the ranks that share it."""
        mine = next((p for p in pairs if p[0] == rank), None)
        if mine is None or mine[2].shape != mine[3].shape or not mine[2].numel():
            return ""
        # As if every rank had what this one has: only a factor, or rounding, can then be seen.
        wants = {group.data_rank: mine[3] for group in self.groups}
        gots = {rank: mine[2] for group in self.groups for rank in group.ranks}
        hint = hint_of(wants, gots, self.groups, bound, scale)
        if hint:
            return hint
        same = {r: got for r, part, got, _ in pairs if part == mine[1]}
        for group in self.groups:
            if rank in group.ranks and set(group.ranks) <= set(same) and len(group.ranks) > 1:
                total = torch.stack([same[r] for r in group.ranks]).sum(0)
                if distance(total, mine[3]) <= bound * scale * 10:
                    return "the sum over the tp ranks is the plain model's: a reduction is missing"
        data = [
            same[group.ranks[i]]
            for group in self.groups
            for i in range(len(group.ranks))
            if rank in (group.ranks[i], self.groups[0].ranks[i]) or _place(self.groups, rank) == i
            if group.ranks[i] in same
        ]
        if len(data) > 1 and distance(torch.stack(data).mean(0), mine[3]) <= bound * scale * 10:
            return "the mean over the data ranks is the plain model's: it isn't reduced over them"
        return ""


def _place(groups: Sequence[Group], rank: int) -> int:
    """The tp coordinate of a rank."""
    return next(group.ranks.index(rank) for group in groups if rank in group.ranks)


def _grad(param: nn.Parameter) -> Tensor | None:
    return param.grad


def _data(param: nn.Parameter) -> Tensor:
    return param.detach()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _agreed(mine: dict[str, Gap]) -> dict[str, Gap]:
    """What any real rank has found, in the order of the model."""
    everyone = gathered(mine)
    if len(everyone) == 1:
        return mine
    worst: dict[str, Gap] = {}
    for each in everyone:
        for name, gap in each.items():
            if name not in worst or gap.difference > worst[name].difference:
                worst[name] = gap
    return worst
