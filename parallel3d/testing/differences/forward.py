"""The first module whose output or gradient differs, and the module that caused the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from parallel3d.testing.differences.fit import ALL, Comparison, Fit, FitGap, FitGroup
from parallel3d.testing.differences.record import FUNCTION, ForwardTrace, Key, Place

DifferenceKind = Literal[
    "structure",
    "weight at the start",
    "error",
    "input",
    "output",
    "loss",
    "gradient",
    "weight after a step",
    "buffer",
    "dropout",
]


@dataclass(frozen=True)
class Difference:
    """The first place where the parallel model differs from the plain one.

    Attributes:
        module: its name in the plain model; ``""`` is the model itself, ``"(loss)"`` the loss function.
        kind: what differs.
        what: a description of the tensor, such as ``"gradient of weight"``.
        step: counted from 0.
        rank: a rank that has the difference.
        difference: the largest difference, divided by the largest value of the plain model's tensor (for
            gradients: of all gradients); infinite if there are no two tensors to subtract.
        bound: the largest difference that is accepted.
        hint: how the two tensors are related, if that is simple.
        module_type: the module's class.
    """

    module: str
    kind: DifferenceKind
    what: str
    step: int = 0
    rank: int = 0
    difference: float = math.inf
    bound: float = 0.0
    hint: str = ""
    module_type: str = ""

    @classmethod
    def of_gap(
        cls, module: str, kind: DifferenceKind, what: str, step: int, gap: FitGap, bound: float
    ) -> Difference:
        """Makes a Difference with the size, rank and hint of ``gap``."""
        return cls(module, kind, what, step, gap.rank, gap.difference, bound, gap.hint)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON, where an infinite difference is None."""
        data = asdict(self)
        data["difference"] = self.difference if math.isfinite(self.difference) else None
        return data

    def __str__(self) -> str:
        name = self.module or "the model itself"
        kind = f" ({self.module_type})" if self.module_type else ""
        by = ""
        if math.isfinite(self.difference):
            by = f" differs by {self.difference:.3g} (relative; {self.bound:g} is allowed)"
        hint = f": {self.hint}" if self.hint else ""
        return f"{name}{kind}, step {self.step}, rank {self.rank}: {self.what}{by}{hint}"


def owner_of(parameter: str) -> tuple[str, str]:
    """Splits a parameter's or buffer's name: "a.b.weight" -> ("a.b", "weight")."""
    module, _, own = parameter.rpartition(".")
    return module, own


Event = tuple[str, Key]


class Forward:
    """The forwards of one step, compared: how the parallel model's ranks hold each of the plain model's
    tensors.

    ``fits`` has the Fit of each input and output of a module, ``bad`` the events (a call's begin or end) with
    a tensor for which there is none.
    """

    def __init__(
        self, plain: ForwardTrace, parallel: ForwardTrace, groups: Sequence[FitGroup], bound: float
    ) -> None:
        self.plain, self.parallel, self.groups, self.bound = plain, parallel, groups, bound
        self.fits: dict[Place, Fit] = {}
        self.bad: dict[Event, FitGap] = {}
        for what, key in plain.events:
            call = parallel.calls.get(key)
            if call is None or (what == "exit" and not call.done):
                continue
            wanted, held = plain.calls[key].tensors[what], call.tensors[what]
            if len(wanted) != len(held):
                continue
            for at, want in wanted.items():
                if not want or not held.get(at):
                    continue
                kinds = call.kinds.get(at, ALL) if what == "exit" else ALL
                fit = Comparison(want, held[at], groups, bound).fit(kinds)
                if isinstance(fit, FitGap):
                    self.bad.setdefault((what, key), fit)
                else:  # a sum is not odd if its placements announce it
                    self.fits[what, key, at] = Fit("partial") if kinds == {"partial"} else fit

    def first(self, step: int) -> Difference | None:
        """Returns the cause of the first tensor that differs, unless a call that contains it has right
        outputs.

        The inputs of a module are attributed to the code around it. A tensor that ranks hold in an unusual
        way, such as a sum that was not reduced, is the cause if a tensor computed from it differs.
        """
        event = next((event for event in self.plain.events if self._is_wrong(event)), None)
        if event is None:
            return None
        gap, suspect = self.bad[event], self._suspect(event)
        if suspect is not None:
            event, gap = suspect, replace(gap, hint=self._odd(suspect))
        what, key = event
        if what == "exit":
            return Difference.of_gap(key[0], "output", "output", step, gap, self.bound)
        parent = self.plain.calls[key].parent
        name = parent[0] if parent is not None else "(loss)"
        text = f"what it gives to {key[0].partition(FUNCTION)[2] or key[0] or 'the model'}"
        return Difference.of_gap(name, "input", text, step, gap, self.bound)

    def output_of(self, other: Difference) -> Difference | None:
        """Returns the difference in the output of the module that ``other`` names; None if that is right."""
        for (what, key), gap in self.bad.items():
            if what == "exit" and key[0] == other.module:
                return Difference.of_gap(key[0], "output", "output", other.step, gap, self.bound)
        return None

    def _odd(self, event: Event) -> str:
        """Returns why ranks hold a tensor of ``event`` in a way that is seldom intended, or ``""``."""
        odd = (fit.odd for place, fit in self.fits.items() if place[:2] == event and fit.odd)
        return next(odd, "")

    def _ancestors(self, key: Key) -> list[Key]:
        """Returns the calls that contain the call ``key``, innermost first."""
        parent = self.plain.calls[key].parent
        return [] if parent is None else [parent, *self._ancestors(parent)]

    def _is_wrong(self, event: Event) -> bool:
        """Returns whether a tensor of ``event`` differs, and no call that contains it has right outputs."""
        what, key = event
        around = [*self._ancestors(key), *([key] if what == "enter" else [])]
        return event in self.bad and not any(self._is_right(k) for k in around)

    def _is_right(self, key: Key) -> bool:
        """Returns whether a call's outputs are right, other than single numbers, which may be by chance."""
        event, outputs = ("exit", key), self.plain.calls[key].tensors["exit"]
        telling = any(value.numel() > 1 for values in outputs.values() for value in values.values())
        fits = all(("exit", key, at) in self.fits for at in outputs)
        return telling and fits and event not in self.bad and not self._odd(event)

    def _suspect(self, event: Event) -> Event | None:
        """Returns the first event before ``event`` with a tensor held in an odd way that may be the cause."""
        before = self.plain.events[: self.plain.events.index(event)]
        scope = {*self._ancestors(event[1]), event[1]}
        finished = {key for what, key in before if what == "exit"}
        for what, key in before:
            if not self._odd((what, key)):
                continue
            ancestors = self._ancestors(key)
            around = [a for a in ancestors if a in finished] + ([key] if what == "enter" else [])
            near = any(a in scope for a in ancestors)
            if near and not any(self._is_right(a) for a in around):
                return what, key
        return None


class Backward:
    """The backwards of one step, compared; the plain gradients are of the mean over ``data_size`` ranks."""

    def __init__(self, forward: Forward, data_size: int) -> None:
        self.forward, self.plain, self.scale = forward, forward.plain, data_size
        # A gradient may be zero but for rounding: compare it with the largest of all.
        largest = [
            float(value.abs().max())
            for call in self.plain.calls.values()
            for tensors in call.grads.values()
            for values in tensors.values()
            for value in values.values()
            if value.numel()
        ]
        self.floor = max(largest, default=0.0) * 1e-3

    def first(self, gaps: Mapping[str, FitGap], step: int) -> Difference | None:
        """Returns the cause of ``gaps``, those of parameters whose gradients differ; None if there are none.

        The gradient of a module's output is attributed to the calls that read the output; the gradients of
        its input and its parameters to the module itself.
        """
        if not gaps:
            return None
        by_module = {owner_of(name)[0]: name for name in gaps}  # the last parameter of each
        for what, key in reversed(self.plain.events):
            if what == "enter" and key[1] == 0 and key[0] in by_module:
                return self._of_parameter(by_module[key[0]], gaps, key, step)
            for place in self._places(what, key):
                gap = self._fit(place)
                if isinstance(gap, FitGap):
                    return self._of_value(place, gap, step)
        # The parameter of a module that is not called.
        return self._of_parameter(list(gaps)[-1], gaps, None, step)

    def _fit(self, place: Place) -> str | FitGap:
        """Returns how ranks hold the gradient at ``place``: ``"whole"``, ``"partial"``, ``""`` if that is
        unknown, or a FitGap if the gradient differs."""
        what, key, at = place
        form, call = self.forward.fits.get(place), self.forward.parallel.calls.get(key)
        want = self.plain.calls[key].grads[what].get(at)
        if form is None or call is None or want is None:
            return ""
        got, groups = call.grads[what].get(at), self.forward.groups
        if got is None:
            return FitGap(math.inf, groups[0].ranks[0], "no gradient arrives")
        scaled = {rank: value * self.scale for rank, value in want.items()}
        return Comparison(scaled, got, groups, self.forward.bound, self.floor).fit_gradient(form)

    def _places(self, what: str, key: Key) -> list[Place]:
        """Returns the tensors (places) of one event that have a gradient, last first."""
        grads = self.plain.calls[key].grads[what]
        return [(what, key, at) for at in sorted(grads, reverse=True)]

    def _readers(self, place: Place) -> list[Place]:
        """Returns the innermost calls' inputs that are the same tensor as the one at ``place``."""
        calls = self.plain.calls.values()
        readers = [("enter", c.key, at) for c in calls for at, source in c.reads if source == place]
        around = {self.plain.calls[key].parent for _, key, _ in readers}
        return [p for p in readers if p[1] not in around]

    def _cause(self, places: list[Place]) -> Key | None:
        """Returns the call that returned only a part of the gradient at ``places``; None if there is none."""
        cause = None
        seen: set[Key] = set()
        while True:
            readers = [r for p in places for r in self._readers(p) if r[1] not in seen]
            partial = [r for r in readers if self._fit(r) == "partial"]
            if not partial:
                return cause
            cause = partial[0][1]
            seen.add(cause)
            places = [p for p in self._places("exit", cause) if self._fit(p) == "partial"]

    def _of_parameter(
        self, name: str, gaps: Mapping[str, FitGap], key: Key | None, step: int
    ) -> Difference:
        (module, own), gap, what = owner_of(name), gaps[name], "gradient of its input"
        outputs = self._places("exit", key) if key is not None else []
        cause = self._cause([p for p in outputs if self._fit(p) == "partial"])
        if cause is None:
            what = f"gradient of {own}"
        else:
            module = cause[0]
            hint = (
                f"each tp rank's is a part of a sum that is not reduced, so that of {name} is wrong"
            )
            gap = replace(gap, hint=hint)
        return Difference.of_gap(module, "gradient", what, step, gap, self.forward.bound)

    def _of_value(self, place: Place, gap: FitGap, step: int) -> Difference:
        what, key, _ = place
        cause = self._cause([place]) or (key if what == "enter" else None)
        if cause is None:
            parent = self.plain.calls[key].parent
            name = "(loss)" if parent is None else parent[0]
            text = f"gradient of what {key[0] or 'the model'} put out"
        else:
            name, text = cause[0], "gradient of its input"
            if not gap.hint and cause != key:
                gap = replace(gap, hint="each tp rank's is a part of a sum that is not reduced")
        return Difference.of_gap(name, "gradient", text, step, gap, self.forward.bound)
