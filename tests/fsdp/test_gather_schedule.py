"""The schedule of gathers: events in, units to gather out; a table, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from parallel3d.fsdp.schedule import GatherSchedule, Prefetch, PrefetchSettings


@dataclass
class Units:
    """Units by name, as a schedule asks for them. ``gathering``: whose all-gathers are under way."""

    begun: set[str] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    gathering: set[str] = field(default_factory=set)
    forward: dict[str, list[str]] = field(default_factory=dict)
    backward: dict[str, list[str]] = field(default_factory=dict)

    def is_gathering(self, unit: str) -> bool:
        return unit in self.gathering

    def may_be_next(self, unit: str) -> bool:
        return unit not in self.begun and unit not in self.empty

    def is_read_in_backward(self, unit: str) -> bool:
        return unit not in self.unread

    def named_in_forward(self, unit: str) -> list[str] | None:
        return self.forward.get(unit)

    def named_in_backward(self, unit: str) -> list[str] | None:
        return self.backward.get(unit)


def play(
    events: str, settings: PrefetchSettings | None = None, units: Units | None = None
) -> list[str]:
    """What is gathered after each of ``events``.

    Events: ``|`` a forward of the root begins, ``a`` a unit's forward, ``-`` the backward begins, ``A`` the
    backward of unit a's last forward, ``~A`` the same with its gathers put off, ``/`` what was put off is
    wanted, ``a.`` the backward of a unit is over, ``!`` an exception. What is gathered is used by its unit's
    next forward or backward.
    """
    units = units or Units()
    schedule = GatherSchedule(units, settings or PrefetchSettings())
    found, positions = [], {}
    events = events.replace(" ", "")
    place = 0
    while place < len(events):
        event = events[place]
        after = events[place + 1 : place + 2]
        place += 1
        if event == "|":
            schedule.begin_iteration()
            units.begun.clear()
        elif event == "-":
            schedule.begin_backwards()
        elif event == "!":
            schedule.abandon()
            units.gathering.clear()
        elif event == "/":
            schedule.issue_deferred()
        elif after == ".":
            place += 1
            schedule.end_backward(event)
        elif event == "~" or event.isupper():
            unit = (after if event == "~" else event).lower()
            place += event == "~"
            units.gathering.discard(unit)
            units.begun.add(unit)
            schedule.begin_backward(unit, positions[unit], defer=event == "~")
        else:
            units.gathering.discard(event)
            positions[event] = schedule.begin_forward(event)
        gathered = ""
        while (unit := schedule.next()) is not None:
            gathered += str(unit)
            units.gathering.add(str(unit))
        found.append(gathered)
    return found


BEFORE, AFTER, NEVER = (PrefetchSettings(backward=each) for each in Prefetch)
TABLE = {
    "the first iteration knows no order": (
        "|abc-CBA",
        None,
        None,
        ["", "", "", "", "", "b", "a", ""],
    ),
    "the second gathers the next": ("|abc|abc", None, None, ["", "", "", "", "", "b", "c", ""]),
    "another order gathers nothing": ("|abc|acb", None, None, ["", "", "", "", "", "b", "", ""]),
    "an iteration that broke off": (
        "|abc|ab!|abc",
        None,
        None,
        [*[""] * 5, "b", "c", "", "", "b", "c", ""],
    ),
    "no forward prefetch": ("|ab|ab", PrefetchSettings(forward=False), None, [""] * 6),
    "named in forward": (
        "|abc|abc",
        PrefetchSettings(forward=False),
        Units(forward={"a": ["b", "c"], "b": []}),
        ["", "bc", "", "", "", "bc", "", ""],
    ),
    "after the backward": (
        "|abc-Cc.Bb.Aa.",
        AFTER,
        None,
        ["", "", "", "", "", "", "b", "", "a", "", ""],
    ),
    "never": ("|abc-CBA", NEVER, None, [""] * 8),
    "never, but what is named": (
        "|abc-CBA",
        NEVER,
        Units(backward={"c": ["b", "a"]}),
        ["", "", "", "", "", "ba", "", ""],
    ),
    "not what backward does not read": (
        "|abc-CBA",
        None,
        Units(unread={"a"}),
        ["", "", "", "", "", "b", "", ""],
    ),
    "an empty one is passed over": (
        "|abc-CA",
        None,
        Units(empty={"b"}),
        ["", "", "", "", "", "a", ""],
    ),
    "a unit that ran twice": ("|aba-AB", None, None, ["", "", "", "", "", "b", ""]),
    "units within others, whose backwards begin after these": (
        "|axby-BYAX",
        None,
        None,
        ["", "", "", "", "", "", "x", "a", "", ""],
    ),
    "put off around a unit, and in it": (
        "|axby-~B~Y/AX",
        None,
        None,
        ["", "", "", "", "", "", "", "", "xa", "", ""],
    ),
    "put off around a unit": (
        "|axby-~BYAX",
        None,
        None,
        ["", "", "", "", "", "", "", "xa", "", ""],
    ),
    "put off until it is wanted": (
        "|abc-~C/BA",
        None,
        None,
        ["", "", "", "", "", "", "b", "a", ""],
    ),
    "put off, and overtaken": ("|abc-~CB/A", None, None, ["", "", "", "", "", "", "a", "", ""]),
    "at most one ahead": (
        "|abcd-DCBA",
        PrefetchSettings(limit=1),
        Units(backward={"d": ["c", "b", "a"]}),
        ["", "", "", "", "", "", "c", "b", "a", ""],
    ),
    "what a pass has not issued is dropped": (
        "|abc|abc-CBA",
        PrefetchSettings(limit=1),
        Units(forward={"a": ["b", "c"], "b": [], "c": []}, backward={"c": [], "b": [], "a": []}),
        ["", "b", "c", "", "", "b", "c", *[""] * 5],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_gathered_when(case: str) -> None:
    events, settings, units, expected = TABLE[case]
    assert play(events, settings, units) == expected


def test_it_needs_no_torch() -> None:
    code = (
        "import importlib.util as u, sys; from pathlib import Path;"
        "s = u.spec_from_file_location('s', sys.argv[1]); m = u.module_from_spec(s);"
        "sys.modules['s'] = m; s.loader.exec_module(m); assert 'torch' not in sys.modules"
    )
    from parallel3d.fsdp import layout, schedule

    for module in (layout, schedule):
        subprocess.run([sys.executable, "-c", code, module.__file__], check=True)
