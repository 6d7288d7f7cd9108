"""The first module whose output differs, and who is to blame for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from parallel3d.testing.differences.fit import ALL, Fit, Gap, Group, fit_value
from parallel3d.testing.differences.found import Difference
from parallel3d.testing.differences.record import FUNCTION, Call, Key, Place, Trace, Values

__all__ = ["Forward", "compare_forward", "first_in_forward", "output_of"]

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
