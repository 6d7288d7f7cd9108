"""The first module whose output differs, and who is to blame for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from parallel3d.testing.differences.fit import ALL, Fit, Gap, Group, fit_gradient, fit_value
from parallel3d.testing.differences.record import FUNCTION, Call, Key, Place, Trace, Values

# Difference: what is reported.

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
    """The first place where the parallel model departs from the plain one.

    Attributes:
        module: its name in the plain model; ``""`` is the model itself, ``"(loss)"`` the loss function.
        kind: of what it is a difference.
        what: that in words, such as ``"gradient of weight"``.
        step: counted from 0.
        rank: one that has it.
        difference: relative to the largest value of the plain model's tensor (of gradients: of all).
            Infinite where there is nothing to subtract.
        bound: what would have been accepted.
        hint: how the two are related, where that is simple.
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None."""
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
    """A parameter's or buffer's module and its own name in it."""
    module, _, own = parameter.rpartition(".")
    return module, own


Event = tuple[str, Key]


@dataclass
class Forward:
    """How each recorded tensor fits, and which don't."""

    fits: dict[Place, Fit] = field(default_factory=dict)
    bad: dict[Event, Gap] = field(default_factory=dict)

    def odd(self, event: Event) -> str:
        """Why what entered or left is in a form that is seldom meant."""
        what, key = event
        for place, fit in self.fits.items():
            if place[:2] == (what, key) and fit.odd:
                return fit.odd
        return ""


def compare_forward(
    plain: Trace, parallel: Trace, groups: Sequence[Group], bound: float
) -> Forward:
    """Fits each tensor that entered or left a module of the parallel model."""
    found = Forward()
    for what, key in plain.events:
        ours, theirs = parallel.calls.get(key), plain.calls[key]
        if ours is None or (what == "exit" and not ours.done):
            continue
        for at, want, got in _pairs(what, theirs, ours):
            kinds = ours.kinds.get(at, ALL) if what == "exit" else ALL
            fit = fit_value(want, got, groups, bound, kinds=kinds)
            if isinstance(fit, Fit):
                if kinds == {"partial"}:
                    fit = Fit("partial")  # as its placements say
                found.fits[what, key, at] = fit
            else:
                found.bad.setdefault((what, key), fit)
    return found


def _pairs(what: str, theirs: Call, ours: Call) -> Iterator[tuple[int, Values, Values]]:
    a, b = (getattr(call, "inputs" if what == "enter" else "outputs") for call in (theirs, ours))
    if len(a) == len(b):
        for at, want in a.items():
            if at in b and set(want) and set(b[at]):
                yield at, want, b[at]


def first_in_forward(plain: Trace, found: Forward, step: int, bound: float) -> Difference | None:
    """The module to blame for the first tensor that doesn't fit, unless what is around it does.

    What a module is given is the work of the code around it. A form that is seldom meant, such as a sum
    not reduced, is to blame if what is made of it is wrong.
    """
    for event in plain.events:
        if event in found.bad and not _healed(plain, found, event):
            break
    else:
        return None
    what, key = event
    suspect = _suspect(plain, found, event)
    if suspect is not None:
        (what, key), gap = suspect, found.bad[event]
        return _blamed(plain, (what, key), step, bound, gap, found.odd(suspect))
    return _blamed(plain, event, step, bound, found.bad[event], found.bad[event].hint)


def output_of(found: Forward, other: Difference) -> Difference | None:
    """The output that differs of the module that ``other`` is a difference of, if one does."""
    for (what, key), gap in found.bad.items():
        if what == "exit" and key[0] == other.module:
            by = gap.rank, gap.difference, other.bound, gap.hint
            return Difference(key[0], "output", "output", other.step, *by)
    return None


def _blamed(plain: Trace, event: Event, step: int, bound: float, gap: Gap, hint: str) -> Difference:
    what, key = event
    if what == "exit":
        return Difference(key[0], "output", "output", step, gap.rank, gap.difference, bound, hint)
    parent = plain.calls[key].parent
    name = parent[0] if parent is not None else "(loss)"
    given = f"what it gives to {key[0].partition(FUNCTION)[2] or key[0] or 'the model'}"
    return Difference(name, "input", given, step, gap.rank, gap.difference, bound, hint)


def _ancestors(plain: Trace, key: Key) -> Iterator[Key]:
    parent = plain.calls[key].parent
    while parent is not None:
        yield parent
        parent = plain.calls[parent].parent


def _healed(plain: Trace, found: Forward, event: Event) -> bool:
    """Whether a module around it, or the one that got it, put out the right thing nevertheless."""
    what, key = event
    around = list(_ancestors(plain, key))
    if what == "enter":
        around.append(key)
    return any(_is_right(plain, found, each) for each in around)


def _is_right(plain: Trace, found: Forward, key: Key) -> bool:
    """Whether a call put out what it should. One number, such as a loss, may be right by chance."""
    event, outputs = ("exit", key), plain.calls[key].outputs
    telling = any(value.numel() > 1 for values in outputs.values() for value in values.values())
    fits = all(("exit", key, at) in found.fits for at in outputs)
    return telling and fits and event not in found.bad and not found.odd(event)


def _suspect(plain: Trace, found: Forward, event: Event) -> Event | None:
    """The first odd tensor before ``event`` that may be the reason."""
    key = event[1]
    before = plain.events[: plain.events.index(event)]
    scope = set(_ancestors(plain, key)) | {key}
    finished = {k for w, k in before if w == "exit"}
    for each in before:
        if not found.odd(each):
            continue
        around = list(_ancestors(plain, each[1]))
        near = plain.calls[each[1]].parent in scope or any(a in scope for a in around)
        cleared = any(a in finished and _is_right(plain, found, a) for a in around)
        if each[0] == "enter":
            cleared = cleared or _is_right(plain, found, each[1])
        if near and not cleared:
            return each
    return None


# The first module whose gradient differs, in the order of the backward.


@dataclass
class _Backward:
    """One search."""

    plain: Trace
    parallel: Trace
    forward: Forward
    groups: Sequence[Group]
    bound: float
    floor: float
    scale: float  # plain gradients are of the mean over data ranks

    def fit(self, place: Place) -> str | Gap:
        """``"whole"``, ``"partial"``, ``""`` where nothing can be said, or how far it is off."""
        what, key, at = place
        form, ours = self.forward.fits.get(place), self.parallel.calls.get(key)
        name = "input_grads" if what == "enter" else "output_grads"
        want = getattr(self.plain.calls[key], name).get(at)
        if form is None or ours is None or want is None:
            return ""
        got = getattr(ours, name).get(at)
        if got is None:
            return Gap(float("inf"), self.groups[0].ranks[0], "no gradient arrives")
        scaled: Values = {rank: value * self.scale for rank, value in want.items()}
        return fit_gradient(form, scaled, got, self.groups, self.bound, self.floor)

    def places(self, what: str, key: Key) -> list[Place]:
        """The tensors of one event, last first."""
        grads = "input_grads" if what == "enter" else "output_grads"
        return [
            (what, key, at) for at in sorted(getattr(self.plain.calls[key], grads), reverse=True)
        ]

    def readers(self, place: Place) -> list[Place]:
        """Who reads just this tensor; of a module and those inside it only the latter."""
        calls = self.plain.calls.values()
        found = [("enter", c.key, at) for c in calls for at, source in c.reads if source == place]
        around = {self.plain.calls[key].parent for _, key, _ in found}
        return [p for p in found if p[1] not in around]

    def cause(self, places: list[Place]) -> Key | None:
        """The call that gave back but a part of the gradient of what is at ``places``, if one did."""
        found = None
        seen: set[Key] = set()
        while True:
            readers = [r for p in places for r in self.readers(p) if r[1] not in seen]
            partial = [r for r in readers if self.fit(r) == "partial"]
            if not partial:
                return found
            found = partial[0][1]
            seen.add(found)
            places = [p for p in self.places("exit", found) if self.fit(p) == "partial"]


def first_in_backward(
    plain: Trace,
    parallel: Trace,
    forward: Forward,
    groups: Sequence[Group],
    parameters: Mapping[str, Gap],
    *,
    data_size: int,
    step: int,
    bound: float,
) -> Difference | None:
    """The module to blame, given the parameters whose gradients differ; None if there are none.

    What arrives at a module is the work of who reads what it put out; what it passes on, or leaves in
    its parameters, is its own.
    """
    if not parameters:
        return None
    search = _Backward(plain, parallel, forward, groups, bound, _floor(plain), data_size)
    by_module: dict[str, list[str]] = {}
    for name in parameters:
        by_module.setdefault(owner_of(name)[0], []).append(name)
    for what, key in reversed(plain.events):
        if what == "enter" and key[1] == 0 and key[0] in by_module:
            return _of_parameter(search, by_module[key[0]][-1], parameters, key, step)
        for place in search.places(what, key):
            gap = search.fit(place)
            if isinstance(gap, Gap):
                return _of_value(search, place, gap, step)
    name = list(parameters)[-1]  # of a module that isn't called
    return _of_parameter(search, name, parameters, None, step)


def _floor(plain: Trace) -> float:
    """A gradient that is zero but for rounding is no smaller than this for a comparison."""
    largest = 0.0
    for call in plain.calls.values():
        for values in (*call.output_grads.values(), *call.input_grads.values()):
            for value in values.values():
                if value.numel():
                    largest = max(largest, float(value.abs().max()))
    return largest * 1e-3


def _of_parameter(
    search: _Backward, name: str, gaps: Mapping[str, Gap], key: Key | None, step: int
) -> Difference:
    gap, (module, own) = gaps[name], owner_of(name)
    found = Difference(
        module,
        "gradient",
        f"gradient of {own}",
        step,
        gap.rank,
        gap.difference,
        search.bound,
        gap.hint,
    )
    outputs = search.places("exit", key) if key is not None else []
    cause = search.cause([p for p in outputs if search.fit(p) == "partial"])
    if cause is None:
        return found
    hint = f"each tp rank's is a part of a sum that is not reduced, so that of {name} is wrong"
    return replace(found, module=cause[0], what="gradient of its input", hint=hint)


def _of_value(search: _Backward, place: Place, gap: Gap, step: int) -> Difference:
    what, key, _ = place
    kind: DifferenceKind = "gradient"
    cause = search.cause([place])
    if cause is None and what == "enter":
        cause = key
    if cause is not None:
        hint = gap.hint
        if not hint and cause != key:
            hint = "each tp rank's is a part of a sum that is not reduced"
        return Difference(
            cause[0], kind, "gradient of its input", step, gap.rank, gap.difference, search.bound, hint
        )  # fmt: skip
    parent = search.plain.calls[key].parent
    name = "(loss)" if parent is None else parent[0]
    given = f"gradient of what {key[0] or 'the model'} put out"
    return Difference(name, kind, given, step, gap.rank, gap.difference, search.bound, gap.hint)
