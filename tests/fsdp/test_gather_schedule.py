"""The schedule of gathers: events in, units to gather out; a table, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from parallel3d.fsdp.schedule import GatherSchedule, Prefetch, PrefetchSettings


@dataclass
class Units:
    """Units by name, as a schedule asks for them. ``gathering``: whose all-gathers are under way.
    ``without_room``: whose memory another one has."""

    begun: set[str] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    gathering: set[str] = field(default_factory=set)
    forward: dict[str, list[str]] = field(default_factory=dict)
    backward: dict[str, list[str]] = field(default_factory=dict)
    without_room: set[str] = field(default_factory=set)

    def is_gathering(self, unit: str) -> bool:
        return unit in self.gathering

    def may_be_next(self, unit: str) -> bool:
        return unit not in self.begun and unit not in self.empty

    def has_room(self, unit: str) -> bool:
        return unit not in self.without_room

    def is_read_in_backward(self, unit: str) -> bool:
        return unit not in self.unread

    def named_in_forward(self, unit: str) -> list[str] | None:
        return self.forward.get(unit)

    def named_in_backward(self, unit: str) -> list[str] | None:
        return self.backward.get(unit)


def play(events: str, settings: PrefetchSettings, units: Units) -> str:
    """``events``, each with what is gathered after it in brackets.

    Events: ``|`` a forward of the root begins, ``a`` a unit's forward, ``-`` the backward begins, ``A`` the
    backward of unit a's last forward, ``~A`` the same with its gathers put off, ``/`` what was put off is
    wanted, ``a.`` the backward of a unit is over, ``!`` an exception. What is gathered is used by its unit's
    next forward or backward.
    """
    schedule = GatherSchedule(units, settings)
    found, positions = "", {}
    for event in re.findall(r"~?\w\.?|[|/!-]", events):
        unit = event.strip("~.").lower()
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
        elif event.endswith("."):
            schedule.end_backward(unit)
        elif event.islower():
            units.gathering.discard(unit)
            positions[unit] = schedule.begin_forward(unit)
        else:
            units.gathering.discard(unit)
            units.begun.add(unit)
            schedule.begin_backward(unit, positions[unit], defer=event.startswith("~"))
        gathered = ""
        while (following := schedule.next()) is not None:
            gathered += str(following)
            units.gathering.add(str(following))
        found += f"{event}({gathered})" if gathered else event
    return found


TABLE = {
    "the first iteration knows no order": "|abc-C(b)B(a)A",
    "the second gathers the next": "|abc|a(b)b(c)c",
    "another order gathers nothing": "|abc|a(b)cb",
    "an iteration that broke off": "|abc|a(b)b(c)!|a(b)b(c)c",
    "a unit that ran twice": "|aba-A(b)B",
    "units within others, whose backwards begin after these": "|axby-B(x)Y(a)AX",
    "put off around a unit, and in it": "|axby-~B~Y/(xa)AX",
    "put off around a unit": "|axby-~BY(xa)AX",
    "put off until it is wanted": "|abc-~C/(b)B(a)A",
    "put off, and overtaken": "|abc-~CB(a)/A",
}
NO_FORWARD = PrefetchSettings(forward=False)
AFTER, NEVER = (PrefetchSettings(backward=each) for each in (Prefetch.AFTER, Prefetch.NEVER))
OTHERS = {
    "no forward prefetch": ("|ab|ab", NO_FORWARD, Units()),
    "named in forward": (
        "|a(bc)bc|a(bc)bc",
        NO_FORWARD,
        Units(forward={"a": ["b", "c"], "b": []}),
    ),
    "after the backward": ("|abc-Cc.(b)Bb.(a)Aa.", AFTER, Units()),
    "never": ("|abc-CBA", NEVER, Units()),
    "never, but what is named": ("|abc-C(ba)BA", NEVER, Units(backward={"c": ["b", "a"]})),
    "not what backward does not read": (
        "|abc-C(b)BA",
        PrefetchSettings(),
        Units(unread={"a"}),
    ),
    "an empty one is passed over": ("|abc-C(a)A", PrefetchSettings(), Units(empty={"b"})),
    "at most one ahead": (
        "|abcd-D(c)C(b)B(a)A",
        PrefetchSettings(limit=1),
        Units(backward={"d": ["c", "b", "a"]}),
    ),
    "what a pass has not issued is dropped": (
        "|a(b)b(c)c|a(b)b(c)c-CBA",
        PrefetchSettings(limit=1),
        Units(forward={"a": ["b", "c"], "b": [], "c": []}, backward={"c": [], "b": [], "a": []}),
    ),
}


@pytest.mark.parametrize("case", [*TABLE, *OTHERS])
def test_what_is_gathered_when(case: str) -> None:
    played, settings, units = OTHERS.get(case) or (TABLE[case], PrefetchSettings(), Units())
    assert play(re.sub(r"\(\w*\)", "", played), settings, units) == played


def test_it_needs_no_torch() -> None:
    code = (
        "import importlib.util as u, sys; from pathlib import Path;"
        "s = u.spec_from_file_location('s', sys.argv[1]); m = u.module_from_spec(s);"
        "sys.modules['s'] = m; s.loader.exec_module(m); assert 'torch' not in sys.modules"
    )
    from parallel3d.fsdp import layout, schedule

    for module in (layout, schedule):
        subprocess.run([sys.executable, "-c", code, module.__file__], check=True)


def test_what_has_no_room_is_gathered_when_it_has() -> None:
    """It stays wanted, and so do those behind it; its own forward takes it off the list."""
    units = Units(without_room={"b"}, forward={"a": ["b", "c"]})
    schedule = GatherSchedule(units, PrefetchSettings())
    schedule.begin_forward("a")
    assert schedule.next() is None
    units.without_room.clear()
    assert [schedule.next(), schedule.next(), schedule.next()] == ["b", "c", None]
    units.without_room = {"b"}
    schedule.begin_forward("a")
    assert schedule.next() is None
    schedule.begin_forward("b")
    assert [schedule.next(), schedule.next()] == ["c", None]
