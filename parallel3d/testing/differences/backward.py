"""The first module whose gradient differs, in the order of the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel3d.testing.differences.fit import Gap, Group, fit_gradient
from parallel3d.testing.differences.forward import Forward
from parallel3d.testing.differences.found import Difference, DifferenceKind, owner_of
from parallel3d.testing.differences.record import Key, Place, Trace, Values

__all__ = ["first_in_backward"]


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
