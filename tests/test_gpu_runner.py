"""benchmarks/gpu/runner.py: parts with limits in processes of their own, and runs that are resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _support.gpu_run import ROOT, statuses, until

MACHINE = {"device": "cpu", "torch": "none"}
PATH = os.pathsep.join([str(ROOT / "benchmarks" / "gpu"), str(ROOT / "tests")])
Run = Callable[..., tuple[int, float]]

# A program of its own, without torch: its processes are there at once.
PROGRAM = """
import json, sys, time
from pathlib import Path
from runner import Task, run_parts
if __name__ == "__main__":
    folder, parts, seconds, machine, preload = json.loads(sys.argv[1])
    tasks = [Task(name, "_support.gpu_run", function, weight) for name, function, weight in parts]
    begun = time.monotonic()
    code = run_parts(tasks, Path(folder), device="cpu", small=True, seconds=seconds, machine=machine,
                     preload=preload)
    print(json.dumps([code, time.monotonic() - begun]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs parts of ``_support.gpu_run`` in a folder; returns the exit code and the seconds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "run").mkdir()

    def run(
        *parts: tuple[str, str, float], seconds: float = 20.0, forked: bool = True
    ) -> tuple[int, float]:
        preload = ["runner", "_support.gpu_run"] if forked else None
        given = json.dumps([str(tmp_path / "run"), parts, seconds, MACHINE, preload])
        command = [sys.executable, "-S", str(program), given]
        env = {**os.environ, "PYTHONPATH": PATH}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        code, took = json.loads(done.stdout.splitlines()[-1])
        return code, took

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of the run."""
    return tmp_path / "run"


def read(folder: Path, name: str) -> dict[str, Any]:
    """The file of a part."""
    return json.loads((folder / f"{name}.json").read_text())


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_all_hold(run: Run, folder: Path) -> None:
    assert run(("a", "quick", 1), ("b", "quick", 1))[0] == 0
    page = json.loads((folder / "page.json").read_text())
    assert [(each["part"]["name"], each["status"], each["machine"]) for each in page] == [
        ("a", "done", MACHINE),
        ("b", "done", MACHINE),
    ]
    text = (folder / "page.md").read_text()
    assert text.index("## a: ok") < text.index("## b: ok")
    assert page[0]["part"]["rows"][0][1] != page[1]["part"]["rows"][0][1]  # processes of their own
    assert sorted(path.name for path in folder.iterdir()) == [
        *("a.json", "a.log", "b.json", "b.log", "page.json", "page.md")
    ]


def test_processes_that_are_not_forked(run: Run, folder: Path) -> None:
    code, _ = run(
        ("a", "quick", 1), ("b", "hangs", 1), ("c", "raises", 1), seconds=8.0, forked=False
    )
    assert code == 1
    assert statuses(folder) == {"a": "done", "b": "out of time", "c": "raised an error"}
    assert all(is_gone(row[1]) for row in read(folder, "b")["part"]["rows"])


def test_one_that_hangs_is_ended_with_its_processes_and_named(run: Run, folder: Path) -> None:
    code, seconds = run(("first", "hangs", 1), ("second", "quick", 1), seconds=4.0)
    assert code == 3 and seconds < 4.5
    assert statuses(folder) == {"first": "out of time", "second": "done"}
    first = read(folder, "first")["part"]
    assert [row[0] for row in first["rows"]] == [0, 1, "child"]  # they stay
    assert all(is_gone(row[1]) for row in first["rows"])
    assert "ended at its limit of 3 s" in first["notes"][-1]
    assert "in waits_for_ever < " in first["notes"][-1]
    assert "## first: out of time; so far ok" in (folder / "page.md").read_text()


def test_one_that_raises_and_one_whose_process_ends(run: Run, folder: Path) -> None:
    assert run(("a", "raises", 1), ("b", "vanishes", 1), ("c", "quick", 1))[0] == 1
    assert statuses(folder) == {"a": "raised an error", "b": "raised an error", "c": "done"}
    first, second = (read(folder, name)["part"] for name in "ab")
    assert first["failed"] == ["ValueError: on purpose"] and len(first["rows"]) == 1
    assert any("in raises" in line for line in first["notes"])
    assert "its process ended with code 7" in second["failed"][0] and len(second["rows"]) == 1


def test_the_time_is_kept_and_the_first_come_first(run: Run, folder: Path) -> None:
    parts = [(name, "hangs", 1.0) for name in "abcdefgh"]
    code, seconds = run(*parts, seconds=4.0)
    assert code == 3 and seconds < 4.5
    ended = list(statuses(folder))
    assert sorted(ended) == list("abcdefgh")[: len(ended)] and len(ended) < 8
    assert "## h: not run" in (folder / "page.md").read_text()


def test_a_share_grows_by_what_others_leave(run: Run, folder: Path) -> None:
    code, _ = run(("a", "quick", 20), ("b", "hangs", 1), ("c", "quick", 1), seconds=5.0)
    assert code == 3
    # Of half of what is left, more than a 22nd of all.
    assert 2.0 < read(folder, "b")["seconds"] < 4.5


@pytest.mark.parametrize("function", ["leaves_out", "hangs", "raises", "vanishes"])
def test_resumed_is_only_what_is_not_complete(run: Run, folder: Path, function: str) -> None:
    assert run(("a", "quick", 1), ("b", function, 1), ("c", "wrong", 1), seconds=5.0)[0] == 1
    before = {name: read(folder, name) for name in "abc"}
    assert before["b"]["status"] != "done"
    # A part that has found something wrong is complete.
    assert run(("a", "quick", 1), ("b", "quick", 1), ("c", "wrong", 1))[0] == 1
    assert [read(folder, name) == before[name] for name in "abc"] == [True, False, True]
    assert set(statuses(folder).values()) == {"done"}


def test_a_resumed_part_keeps_its_rows_until_it_has_more(run: Run, folder: Path) -> None:
    run(("a", "slow", 1), seconds=3.5)
    first = read(folder, "a")
    rows = len(first["part"]["rows"])
    assert first["status"] == "out of time" and rows >= 2
    run(("a", "slow", 1), seconds=2.0)  # not even as many
    assert len(read(folder, "a")["part"]["rows"]) == rows
    assert run(("a", "quick", 1))[0] == 0  # one that is complete replaces them
    assert len(read(folder, "a")["part"]["rows"]) == 1


def test_a_part_goes_on_behind_its_rows_on_the_same_machine_only(run: Run, folder: Path) -> None:
    run(("a", "goes_on", 1), seconds=3.0)
    first = read(folder, "a")
    assert first["status"] == "out of time" and len(first["part"]["rows"]) == 1
    run(("a", "goes_on", 1), seconds=3.0)
    assert [row[0] for row in read(folder, "a")["part"]["rows"]] == [0, 1]
    (folder / "a.json").write_text(json.dumps({**first, "machine": {**MACHINE, "torch": "other"}}))
    run(("a", "goes_on", 1), seconds=3.0)
    assert [row[0] for row in read(folder, "a")["part"]["rows"]] == [0]


SCRIPT = """
import sys
sys.path[:0] = [{gpu!r}, {tests!r}]
from runner import Task, command_line
if __name__ == "__main__":
    tasks = [Task(name, "_support.gpu_run", name, 1) for name in ("quick", "slow", "wrong")]
    sys.exit(command_line("A script.", tasks, minutes=0.5, preload={preload!r}))
"""


def script(folder: Path, *options: str, preload: Sequence[str] = ()) -> list[str]:
    path = folder / "script.py"
    gpu, tests = (str(ROOT / name) for name in ("benchmarks/gpu", "tests"))
    path.write_text(SCRIPT.format(gpu=gpu, tests=tests, preload=list(preload)))
    return [sys.executable, str(path), *options]


def refused(folder: Path, *options: str) -> str:
    done = subprocess.run(script(folder, *options), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr


def test_bad_options_are_refused(tmp_path: Path) -> None:
    assert "there is no part 'quack': quick, slow, wrong" in refused(
        tmp_path, "--out", "x", "--only", "quick,quack"
    )
    assert "no run has begun there" in refused(tmp_path, "--resume", str(tmp_path / "none"))
    (tmp_path / "run.json").write_text('{"device": "cpu", "small": false}')
    assert "a run has begun there" in refused(tmp_path, "--out", str(tmp_path))
    text = refused(tmp_path, "--resume", str(tmp_path), "--small")
    assert "which can't be changed" in text
    assert "--minutes 0" in refused(tmp_path, "--out", "x", "--minutes", "0")
    assert "required" in refused(tmp_path)


@pytest.mark.slow
def test_where_the_server_has_used_the_device_processes_are_started_anew(tmp_path: Path) -> None:
    """As CUDA does not survive a fork: what the server imports makes ``card`` fail there."""
    (tmp_path / "uses_cuda.py").write_text("import page\npage.card = None\n")
    options = ["--out", str(tmp_path / "run"), "--device", "cpu", "--minutes", "2"]
    command = script(tmp_path, *options, "--only", "quick", preload=["uses_cuda"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "processes are not forked" in done.stdout
    assert statuses(tmp_path / "run") == {"quick": "done"}


@pytest.mark.full  # beside other work its part may run out of time
def test_a_killed_run_leaves_nothing_and_is_resumed(tmp_path: Path) -> None:
    """The torch that ``card`` imports makes it slow."""
    folder = tmp_path / "run"
    first: Any = subprocess.Popen(
        script(tmp_path, "--out", str(folder), "--device", "cpu", "--minutes", "0.6"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(lambda: "slow" in statuses(folder), first, 60)
    until(lambda: len(read(folder, "slow")["part"]["rows"]) > 2, first, 60)
    pid = read(folder, "slow")["part"]["rows"][0][1]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert is_gone(pid)
    assert statuses(folder) == {"quick": "done", "slow": "running"}
    quick = (folder / "quick.json").read_text()
    done = subprocess.run(script(tmp_path, "--resume", str(folder)), check=False)
    assert done.returncode == 1  # as one part has found something wrong
    assert statuses(folder) == {"quick": "done", "slow": "done", "wrong": "done"}
    assert (folder / "quick.json").read_text() == quick
