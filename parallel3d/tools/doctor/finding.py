"""Checks, which are pure functions of facts, and the findings that they return."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partialmethod
from operator import itemgetter
from typing import Any, TypeVar

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.facts import Facts

Ranks = tuple[int, ...]
Value = TypeVar("Value")


class Severity(StrEnum):
    """How serious a finding is: an error keeps a job from running right; a warning may cost speed; a note is
    advice."""

    ok = "ok"
    note = "note"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """What is wrong: what a check has found, why it matters and what to do.

    Attributes:
        name: name of the check, such as ``nccl-debug``.
        area: title of the section of the report that it is in.
        seen: what was observed.
        why: why it matters.
        do: a command to run or a setting to change.
    """

    name: str
    area: str
    severity: Severity
    seen: str
    why: str
    do: str
    ranks: Ranks = ()


@dataclass(frozen=True)
class Seen:
    """What a check's function returns if something is wrong.

    Attributes:
        text: what was observed, as a sentence or a list.
        do: advice to replace the check's own; "": the check's own.
        ranks: the ranks concerned, in any order; empty: those whose facts were checked.
    """

    text: str
    do: str = ""
    ranks: Ranks = ()


Result = Seen | str | None
"""What a check returns; None or ``""`` if nothing is wrong."""

Look = Callable[..., Result]


@dataclass(frozen=True)
class Check:
    """A check: its function ``look``, and ``about``, its finding without the observation."""

    look: Look
    about: Finding

    def finding(self, seen: Seen | str, ranks: Ranks = ()) -> Finding:
        """Returns the finding for the observation ``seen``, for ``ranks`` unless ``seen`` names others."""
        if isinstance(seen, str):
            seen = Seen(seen)
        do, ranks = seen.do or self.about.do, tuple(sorted({*seen.ranks})) or ranks
        return replace(self.about, seen=seen.text, do=do, ranks=ranks)


CHECKS: dict[str, Check] = {}
"""Name -> check of the Facts of one process."""
ACROSS: dict[str, Check] = {}
"""Name -> check that compares processes: its argument maps rank to Facts."""
ON_AXES: dict[str, Check] = {}
"""Name -> check of the Measurement of collectives."""


@dataclass(frozen=True)
class Area:
    """A section of the report.

    Its methods ``error``, ``warning`` and ``note`` take the advice and return a decorator that makes a
    function a check of that severity: ``few_open_files`` becomes the check ``few-open-files``. The function's
    docstring says why it matters.

    Attributes:
        name: title of the section.
        checks: the dict that its checks are added to: ``CHECKS`` (of one process), ``ACROSS`` or ``ON_AXES``.
    """

    name: str
    checks: dict[str, Check]

    def _check(self, severity: Severity, do: str) -> Callable[[Look], Look]:
        def register(look: Look) -> Look:
            name = look.__name__.replace("_", "-")
            why = " ".join((look.__doc__ or "").split())
            self.checks[name] = Check(look, Finding(name, self.name, severity, "", why, do))
            return look

        return register

    error = partialmethod(_check, Severity.error)
    warning = partialmethod(_check, Severity.warning)
    note = partialmethod(_check, Severity.note)


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Returns value -> the ranks that have it, from rank -> value."""
    found: dict[Value, list[int]] = {}
    for rank, value in sorted(values.items(), key=itemgetter(0)):
        found.setdefault(value, []).append(rank)
    return found


def examine_all(checks: Mapping[str, Check], argument: Any) -> list[Finding]:
    """Runs each of ``checks`` on ``argument``; returns the findings."""
    results = ((check, check.look(argument)) for check in checks.values())
    return [check.finding(seen) for check, seen in results if seen]


def examine(facts: Mapping[int, Facts]) -> list[Finding]:
    """Runs all ``CHECKS`` on the facts of all ranks. A finding that several ranks have is returned once."""
    findings: list[Finding] = []
    for check in CHECKS.values():
        results = ranks_by_value({rank: check.look(own) for rank, own in facts.items()})
        findings += [check.finding(seen, tuple(ranks)) for seen, ranks in results.items() if seen]
    if len(facts) > 1:
        findings += examine_all(ACROSS, facts)
    return sort(findings)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings sorted by severity, errors first, otherwise in the given order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def all_checks() -> list[Finding]:
    """Returns all findings that there may be, without an observation."""
    return [check.about for check in (*CHECKS.values(), *ACROSS.values(), *ON_AXES.values())]


def name_hosts(hosts: Collection[str], ranks: Iterable[int]) -> str:
    """Returns the first hosts and all ranks as text: "node-1, node-2 (ranks 4-11)"."""
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return f"{', '.join([*hosts][:4])}{more} ({name_ranks(ranks)})"
