"""Findings, and the checks that make them: pure functions of facts, each with why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from parallel3d.tools.doctor.facts import Facts
from parallel3d.tools.doctor.measuring import Measurement

Ranks = tuple[int, ...]


class Severity(StrEnum):
    """An error keeps a job from running, or from running right; a warning costs speed, or may do so."""

    ok = "ok"
    note = "note"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Seen:
    """What one check has seen.

    Attributes:
        text: in words.
        do: what to do, where it is more special than what the check says.
        ranks: whom it is about, where that is not whose facts they are.
    """

    text: str
    do: str = ""
    ranks: Ranks = ()


Result = Seen | str | None


@dataclass(frozen=True)
class Check:
    """One thing that may be wrong.

    Attributes:
        name: of the finding.
        area: of the report.
        why: it matters.
        do: a command or a setting.
        look: facts -> what was seen; None if all is well. Of ``ACROSS``: the facts of all ranks.
    """

    name: str
    area: str
    severity: Severity
    why: str
    do: str
    look: Callable[..., Result]

    def finding(self, seen: Seen | str, ranks: Ranks) -> Finding:
        found = Seen(seen) if isinstance(seen, str) else seen
        do = found.do or self.do
        return Finding(
            self.name, self.area, self.severity, found.text, self.why, do, found.ranks or ranks
        )


@dataclass(frozen=True)
class Finding:
    """What a check has found, on which ranks."""

    name: str
    area: str
    severity: Severity
    seen: str
    why: str
    do: str
    ranks: Ranks = ()


CHECKS: dict[str, Check] = {}
"""By name: those of one process."""
ACROSS: dict[str, Check] = {}
"""By name: those that compare processes."""

ON_AXES: dict[str, Check] = {}
"""By name: those of what collectives took."""

_Look = Callable[[Facts], Result]
_LookAcross = Callable[[Mapping[int, Facts]], Result]
_LookAxes = Callable[[Measurement], Result]


def check(
    name: str, area: str, severity: Severity, *, why: str, do: str
) -> Callable[[_Look], _Look]:
    """Makes a function of one process's facts a check."""

    def add(look: _Look) -> _Look:
        CHECKS[name] = Check(name, area, severity, why, do, look)
        return look

    return add


def across(
    name: str, area: str, severity: Severity, *, why: str, do: str
) -> Callable[[_LookAcross], _LookAcross]:
    """Makes a function of rank -> facts a check."""

    def add(look: _LookAcross) -> _LookAcross:
        ACROSS[name] = Check(name, area, severity, why, do, look)
        return look

    return add


def on_axes(
    name: str, area: str, severity: Severity, *, why: str, do: str
) -> Callable[[_LookAxes], _LookAxes]:
    """Makes a function of a Measurement a check."""

    def add(look: _LookAxes) -> _LookAxes:
        ON_AXES[name] = Check(name, area, severity, why, do, look)
        return look

    return add


def examine_axes(measurement: Measurement) -> list[Finding]:
    """All checks of what was measured."""
    seen = ((each, each.look(measurement)) for each in ON_AXES.values())
    return [each.finding(found, ()) for each, found in seen if found is not None]


def examine(facts: Mapping[int, Facts]) -> list[Finding]:
    """All checks on all ranks' facts: the worst first, ranks that have the same joined."""
    found: list[Finding] = []
    for each in CHECKS.values():
        by_text: dict[Seen | str, list[int]] = {}
        for rank, own in sorted(facts.items()):
            seen = each.look(own)
            if seen is not None:
                by_text.setdefault(seen, []).append(rank)
        found += [each.finding(seen, tuple(ranks)) for seen, ranks in by_text.items()]
    for each in ACROSS.values():
        if len(facts) > 1 and (seen := each.look(facts)) is not None:
            found.append(each.finding(seen, ()))
    return sort(found)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; else as they came."""
    order = list(Severity)
    return sorted(findings, key=lambda f: -order.index(f.severity))


def all_checks() -> Iterator[Check]:
    """Those of one process, those that compare, those of collectives."""
    yield from CHECKS.values()
    yield from ACROSS.values()
    yield from ON_AXES.values()
