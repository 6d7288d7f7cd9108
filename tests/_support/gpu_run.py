"""Runs of ``tests/gpu/check.py`` and ``benchmarks/gpu/bench.py``, and parts that stand in for theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def statuses(folder: Path) -> dict[str, str]:
    """The status of each part that has a file in a run's folder."""
    found = {}
    for path in folder.glob("*.json"):
        if path.stem not in ("run", "page"):
            found[path.stem] = json.loads(path.read_text())["status"]
    return found


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float) -> None:
    """Waits until ``condition`` holds, at most while ``process`` runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def killed_and_resumed(script: Path, folder: Path, parts: list[str]) -> list[dict[str, Any]]:
    """Runs a script for two minutes, kills it behind its first part, and resumes it until all are done.

    Returns:
        The parts of page.json, all of them complete.
    """
    command = [sys.executable, str(script), "--device", "cpu", "--small", "--minutes", "2"]
    first = subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until((folder / "page.json").exists, first, 120)
    time.sleep(2.0)  # into the second
    first.send_signal(signal.SIGKILL)
    print(first.communicate()[0])
    before = {name for name, status in statuses(folder).items() if status == "done"}
    written = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in before}
    for _ in range(3):  # a busy machine may not do all at once
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(script), "--resume", str(folder), "--minutes", "4"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert time.monotonic() - begun < 260
        if done.returncode != 3:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    page = json.loads((folder / "page.json").read_text())
    assert [result["part"]["name"] for result in page] == parts
    assert {result["status"] for result in page} == {"done"}
    text = (folder / "page.md").read_text()
    assert text.startswith("# On a CPU")
    assert all(f"## {name}: ok\n" in text for name in parts)
    # What was complete was not run again.
    assert written == {name: (folder / f"{name}.json").stat().st_mtime_ns for name in before}
    return page


# -- parts ----------------------------------------------------------------------------------------------


def _part(rows: int, after: float = 0.0) -> Any:
    from page import Part

    part = Part("a part", "what it shows", ["number", "process"])
    for number in range(rows):
        part.rows.append([number, os.getpid()])
        time.sleep(after)
    return part


def quick(device: str, small: bool) -> Any:
    """Has one row."""
    return _part(1)


def wrong(device: str, small: bool) -> Any:
    """Finds something that is wrong."""
    part = _part(1)
    part.failed.append("0 is not 1")
    return part


def leaves_out(device: str, small: bool) -> Any:
    """Has no time for its last case."""
    part = _part(1)
    part.left_out.append("the last case")
    return part


def slow(device: str, small: bool) -> Any:
    """Takes half a second a row."""
    return _part(20, 0.5)


def goes_on(device: str, small: bool) -> Any:
    """Has one row more than before, and no time for all."""
    from page import Part
    from runner import running

    part = Part("a part", "what it shows", ["number"])
    part.rows = list(running().before.get("rows", []))
    part.rows.append([len(part.rows)])
    part.left_out.append("the others")
    return part


def hangs(device: str, small: bool) -> Any:
    """Never ends, nor does the process that it has started."""
    part = _part(2)
    child = subprocess.Popen(["sleep", "600"])
    part.rows.append(["child", child.pid])
    return waits_for_ever()


def waits_for_ever() -> None:
    time.sleep(600)


def raises(device: str, small: bool) -> Any:
    """Raises after a row."""
    _part(1)
    raise ValueError("on purpose")


def vanishes(device: str, small: bool) -> Any:
    """Ends its process after a row."""
    _part(1)
    time.sleep(0.5)
    os._exit(7)
