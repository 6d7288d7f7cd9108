"""What shows that a command is busy."""

import io
import sys

import pytest

pytest.importorskip("rich")

from parallel3d.tools.terminal import Busy


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_it_is_shown_on_a_terminal_by_the_first_rank(
    rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Busy("importing torch") as busy:
        busy.say("running train.py")
    shown = screen.getvalue()
    assert ("running train.py" in shown and "0:00:00" in shown) == (rank != "1")
    assert rank != "1" or not shown


def test_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with Busy("importing torch") as busy:
        print("own", file=sys.stderr)
        busy.say("more")
    assert file.getvalue() == "own\n"
