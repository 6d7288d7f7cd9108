"""The checks of doctor and the findings they report. A check is a pure function of facts."""

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
    """An error prevents a job from running or from running correctly; a warning may cost speed."""

    ok = "ok"
    note = "note"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: name of the check, such as ``nccl-debug``.
        area: section of the report.
        seen: the observation.
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
    """What a check reports.

    Attributes:
        text: the observation, as a sentence or a list.
        do: advice that is more specific than the check's own; ``""`` for the check's own.
        ranks: the ranks concerned, in any order, where they are not the ranks whose facts were checked.
    """

    text: str
    do: str = ""
    ranks: Ranks = ()


Result = Seen | str | None
"""What a check returns; None or ``""`` if nothing is wrong."""

Look = Callable[..., Result]


@dataclass(frozen=True)
class Check:
    """The function that checks one thing, and its finding without what depends on the facts."""

    look: Look
    about: Finding

    def finding(self, seen: Seen | str, ranks: Ranks = ()) -> Finding:
        """Returns the finding for ``seen``, which concerns ``ranks`` unless it names others."""
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
    function a check of that severity: ``few_open_files`` becomes the check ``few-open-files``. The
    function's docstring says why it matters.

    Attributes:
        name: title of the section.
        checks: ``CHECKS``, ``ACROSS`` or ``ON_AXES``, which determines the argument of its checks.
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
    """Returns value -> the ranks that have it, for rank -> value."""
    found: dict[Value, list[int]] = {}
    for rank, value in sorted(values.items(), key=itemgetter(0)):
        found.setdefault(value, []).append(rank)
    return found


def examine_all(checks: Mapping[str, Check], argument: Any) -> list[Finding]:
    """Runs ``checks``, each once, on ``argument``."""
    results = ((check, check.look(argument)) for check in checks.values())
    return [check.finding(seen) for check, seen in results if seen]


def examine(facts: Mapping[int, Facts]) -> list[Finding]:
    """Runs all checks on all ranks' facts. A finding that several ranks share is reported once."""
    findings: list[Finding] = []
    for check in CHECKS.values():
        results = ranks_by_value({rank: check.look(own) for rank, own in facts.items()})
        findings += [check.finding(seen, tuple(ranks)) for seen, ranks in results.items() if seen]
    if len(facts) > 1:
        findings += examine_all(ACROSS, facts)
    return sort(findings)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts by severity, errors first; the order is otherwise kept."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def all_checks() -> list[Finding]:
    """Returns what there may be to find: in one process, between processes and in collectives."""
    return [check.about for check in (*CHECKS.values(), *ACROSS.values(), *ON_AXES.values())]


def name_hosts(hosts: Collection[str], ranks: Iterable[int]) -> str:
    """Returns the first hosts and all ranks: ``node-1, node-2 (ranks 4-11)``."""
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return f"{', '.join([*hosts][:4])}{more} ({name_ranks(ranks)})"
