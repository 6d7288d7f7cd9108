"""Compares parameters and buffers, and their gradients, with those of the plain model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d._torch.fully_shard import plain_name
from parallel3d._torch.simulated import tensors_by_rank
from parallel3d.testing.differences.fit import Comparison, Fit, FitGap, FitGroup, apart, take
from parallel3d.testing.differences.forward import Difference, owner_of
from parallel3d.testing.differences.record import Values
from parallel3d.testing.parity import shards_of

_CUT = frozenset({"whole", "shard", "slices"})
Part = tuple[int, str, Tensor, Tensor]  # (rank, which part, what the rank has, what it should have)


def gathered(value: Any) -> list[Any]:
    """Returns each process's ``value``; only this one's with simulated ranks or without a group."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def joined(values: Values) -> Values:
    """Returns tensors by rank: those of all processes together."""
    return {rank: tensor for part in gathered(values) for rank, tensor in part.items()}


class State:
    """The parameters and buffers of both models. ``forms``: the Fit of parameters that are no DTensors."""

    def __init__(
        self,
        plain: nn.Module,
        parallel: nn.Module,
        groups: Sequence[FitGroup],
        own: tuple[int, ...],
    ) -> None:
        self.plain, self.parallel, self.groups, self.own = plain, parallel, groups, own
        self.forms: dict[str, Fit] = {}
        self.buffers: dict[str, Fit] = {}

    def parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Returns both models' parameters by the plain model's names; a tied one under each of its names."""
        plain, parallel = (
            {plain_name(name): p for name, p in m.named_parameters(remove_duplicate=False)}
            for m in (self.plain, self.parallel)
        )
        return plain, parallel

    # ---- before the first step ----

    def structure(self) -> Difference | None:
        """Returns the first parameter that is absent, frozen, tied or of another dtype in one model only."""
        for name, what in self._structures():
            return Difference(owner_of(name)[0], "structure", what)
        return None

    def _structures(self) -> Iterator[tuple[str, str]]:
        plain, parallel = self.parameters()
        for name in [*plain, *parallel]:
            p, q, own = plain.get(name), parallel.get(name), owner_of(name)[1]
            if p is None or q is None:
                which = "plain" if p is None else "parallel"
                yield name, f"{own}: the {which} model has no such parameter"
            elif p.requires_grad != q.requires_grad:
                which = "parallel" if p.requires_grad else "plain"
                yield name, f"{own} is frozen in the {which} model only"
            elif p.dtype != q.dtype:
                yield name, f"{own} is {_dtype(q)}, in the plain model {_dtype(p)}"
        first_names: tuple[dict[int, str], dict[int, str]] = {}, {}
        for name, p in plain.items():
            own, tied = owner_of(name)[1], first_names[0].setdefault(id(p), name)
            tied_in_parallel = first_names[1].setdefault(id(parallel[name]), name)
            if tied != tied_in_parallel and tied == name:
                yield name, f"{own} has become the same parameter as {tied_in_parallel}"
            elif tied != tied_in_parallel:
                yield name, f"{own} is no longer the same parameter as {tied}"

    def modes(self) -> Difference | None:
        """Returns the first module that is in training mode in one model only."""
        training = {plain_name(name): m.training for name, m in self.parallel.named_modules()}
        for name, module in self.plain.named_modules():
            if training.get(plain_name(name), module.training) != module.training:
                which = "parallel" if module.training else "plain"
                what = f"it is in evaluation mode in the {which} model only"
                return Difference(plain_name(name), "structure", what)
        return None

    def without_gradient(self) -> tuple[str, ...]:
        """Returns the names of the plain model's parameters that require a gradient and have none now."""
        named = self.plain.named_parameters()
        return tuple(name for name, p in named if p.requires_grad and p.grad is None)

    def weights_at_start(self, bound: float) -> Difference | None:
        """Returns the first parameter or buffer with another initial value; notes how ranks hold them."""
        plain, parallel = self.parameters()
        gaps = {}
        for name, p in plain.items():
            if not isinstance(parallel[name], DTensor):
                fit = self._fit(p.detach(), parallel[name].detach(), bound)
                if isinstance(fit, Fit):
                    self.forms[name] = fit
                else:
                    gaps[name] = fit
        gaps |= self.gaps("weight", bound, only_dtensors=True)
        for name, gap in gaps.items():
            module, own = owner_of(name)
            what = f"{own} at the start"
            return Difference.of_gap(module, "weight at the start", what, 0, gap, bound)
        for name, b, c in self._buffer_pairs():
            fit = self._fit(b, c, max(bound, 1e-6))  # casting the model rounds a table again
            if isinstance(fit, Fit) and fit.kind == "slices" and fit.odd:
                fit = FitGap(math.inf, 0, fit.odd)
            if isinstance(fit, FitGap):
                return _of_buffer(name, "at the start", 0, fit, bound)
            self.buffers[name] = fit
        return None

    def _fit(self, whole: Tensor, part: Tensor, bound: float) -> Fit | FitGap:
        plain = {group.data_rank: whole for group in self.groups}
        held = joined(self._on_own_ranks(part))
        return Comparison(plain, held, self.groups, bound).fit(_CUT)

    def _on_own_ranks(self, tensor: Tensor) -> Values:
        """Returns ``tensor`` by rank: for all simulated ranks, or for this process's."""
        by_rank = tensors_by_rank(tensor)
        return dict.fromkeys(self.own, tensor.detach()) if by_rank is None else dict(by_rank)

    # ---- buffers ----

    def _buffer_pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        parallel = {plain_name(name): b for name, b in self.parallel.named_buffers()}
        for name, b in self.plain.named_buffers():
            c = parallel.get(plain_name(name))
            if c is not None and not isinstance(c, DTensor):
                yield plain_name(name), b, c

    def keep_buffers(self) -> dict[str, Tensor]:
        return {name: b.clone() for name, b, _ in self._buffer_pairs()}

    def buffers_after(
        self, before: dict[str, Tensor], step: int, bound: float
    ) -> Difference | None:
        """Returns the first buffer that changed though the plain one (``before``) didn't, or that differs
        between ranks.

        Where the plain model changes a buffer, its value is not compared: the plain model has seen the data
        ranks' samples one after another.
        """
        for name, b, c in self._buffer_pairs():
            fit = self.buffers.get(name)
            if fit is None:
                continue
            gap: Fit | FitGap
            if torch.equal(b, before[name]):
                gap = self._fit(b, c, max(bound, 1e-6))
            else:
                gap = self._gap_between_ranks(joined(self._on_own_ranks(c)), fit)
            if isinstance(gap, FitGap) and gap.difference > bound:
                return _of_buffer(name, f"after step {step}", step, gap, bound)
        return None

    def _gap_between_ranks(self, values: Values, fit: Fit) -> FitGap:
        """Returns the largest difference between the values of ranks that should have the same."""
        worst = FitGap(0.0, 0)
        first = self.groups[0]
        for group in self.groups:
            for i, rank in enumerate(group.ranks):
                like = values[first.ranks[i if fit.kind != "whole" else 0]]
                difference = apart(like, values[rank], 1e-30)
                if difference > worst.difference:
                    hint = "the ranks have different values: it isn't synchronised"
                    worst = FitGap(difference, rank, hint)
        return worst

    # ---- gradients and weights ----

    def gaps(self, what: str, bound: float, *, only_dtensors: bool = False) -> dict[str, FitGap]:
        """Returns name -> gap of the parameters whose ``"gradient"`` or ``"weight"`` (``what``) differs."""
        plain, parallel = self.parameters()
        grads = [p.grad for p in plain.values() if p.grad is not None and p.grad.numel()]
        largest = max((float(g.abs().max()) for g in grads), default=0.0)
        gaps: dict[str, FitGap] = {}
        for name, p in plain.items():
            q = parallel[name]
            if only_dtensors and not isinstance(q, DTensor):
                continue
            a, b = (t.grad if what == "gradient" else t.detach() for t in (p, q))
            if a is None or b is None:
                if a is not b:
                    which = "plain" if a is None else "parallel"
                    gaps[name] = FitGap(math.inf, self.own[0], f"none in the {which} model")
                continue
            scale = largest if what == "gradient" else 0.0
            gap = self._gap(a, b, scale, self.forms.get(name, Fit("whole")), bound)
            if not gap.difference <= bound:
                gaps[name] = gap
        return _merged(gaps)

    def _gap(self, whole: Tensor, part: Tensor, scale: float, form: Fit, bound: float) -> FitGap:
        scale = max(scale or (float(whole.double().abs().max()) if whole.numel() else 1.0), 1e-30)
        parts = self._parts(whole, part, form)
        worst = FitGap(0.0, self.own[0])
        for rank, _, got, want in parts:
            difference = apart(want, got, scale)
            if difference > worst.difference:
                worst = FitGap(difference, rank)
        if worst.difference <= bound:
            return worst
        return FitGap(worst.difference, worst.rank, self._hint(parts, worst.rank, bound, scale))

    def _parts(self, whole: Tensor, part: Tensor, form: Fit) -> list[Part]:
        if isinstance(part, DTensor):
            if part.shape != whole.shape:
                return [(self.own[0], "", torch.zeros(0), whole)]
            return [(rank, str(box), got, whole[box]) for rank, box, got in shards_of(part)]
        places = {rank: i for group in self.groups for i, rank in enumerate(group.ranks)}
        return [
            (rank, str(places[rank] if form.index else ""), got, take(whole, form, places[rank]))
            for rank, got in self._on_own_ranks(part).items()
        ]

    def _hint(self, parts: list[Part], rank: int, bound: float, scale: float) -> str:
        """Returns a text if the plain tensor and what ranks hold of it are simply related, or ""."""
        worst = next((p for p in parts if p[0] == rank), None)
        if worst is None or worst[2].shape != worst[3].shape or not worst[2].numel():
            return ""
        _, box, got, want = worst
        # As if every rank had this part, which shows a factor or rounding only.
        plain = {group.data_rank: want for group in self.groups}
        held = {rank: got for group in self.groups for rank in group.ranks}
        hint = Comparison(plain, held, self.groups, bound, scale).hint()
        if hint:
            return hint
        near = 10 * bound
        same = {r: got for r, part, got, _ in parts if part == box}
        group = next(group for group in self.groups if rank in group.ranks)
        tp = [same[r] for r in group.ranks if r in same]
        if len(tp) == len(group.ranks) > 1 and apart(want, torch.stack(tp).sum(0), scale) <= near:
            return "the sum over the tp ranks is the plain model's: a reduction is missing"
        place = group.ranks.index(rank)
        data = [same[g.ranks[place]] for g in self.groups if g.ranks[place] in same]
        if len(data) > 1 and apart(want, torch.stack(data).mean(0), scale) <= near:
            return "the mean over the data ranks is the plain model's: it isn't reduced over them"
        return ""


def _of_buffer(name: str, when: str, step: int, gap: FitGap, bound: float) -> Difference:
    module, own = owner_of(name)
    return Difference.of_gap(module, "buffer", f"buffer {own} {when}", step, gap, bound)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _merged(own_gaps: dict[str, FitGap]) -> dict[str, FitGap]:
    """Returns the largest difference of each parameter that any process has found."""
    worst: dict[str, FitGap] = {}
    for gaps in gathered(own_gaps):
        for name, gap in gaps.items():
            if name not in worst or gap.difference > worst[name].difference:
                worst[name] = gap
    return worst
