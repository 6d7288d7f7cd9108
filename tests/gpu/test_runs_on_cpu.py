"""``check.py`` on a CPU: all parts run, a wrong engine is seen, and a hang ends with its stack."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _support.gpu_run import ROOT, killed_and_resumed

HERE = Path(__file__).resolve().parent
sys.path.append(str(ROOT / "benchmarks" / "gpu"))  # for the processes, too: they get this path

pytestmark = pytest.mark.slow


@pytest.mark.full  # minutes
def test_every_part_in_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    script = HERE / "check.py"
    names = re.findall(r'^    Task\("(\w+)"', script.read_text(), re.MULTILINE)
    page = killed_and_resumed(script, tmp_path / "run", names)
    rows = {each["part"]["name"]: each["part"]["rows"] for each in page}
    assert [each["part"]["failed"] for each in page] == [[]] * len(page)
    truth = [row for name in rows if name.startswith(("truth", "libraries")) for row in rows[name]]
    assert {row[-1] for row in truth} == {"ok"}
    assert {row[0] for row in truth} == {
        *("(1, 1, 1)", "(1, 2, 1)", "(2, 1, 1)", "(2, 2, 1)", "(1, 1, 2)", "(1, 2, 2)"),
        *("(1, 1, 1), cp 2", "(1, 2, 1), cp 2"),
    }
    assert {row[1] for row in rows["truth2"]} > {
        "cp ulysses",
        "cp ring",
        "cp gather",
        "sequence fp64",
    }
    assert {row[1] for row in rows["libraries"]} == {"LoRA", "float8"}
    assert {row[-1] for row in rows["races"]} == {"ok", "control", "control seen"}
    assert {row[-1] for name in ("races_ranks", "races_offload") for row in rows[name]} == {"ok"}


def test_readme_lists_the_parts() -> None:
    text, script = ((HERE / name).read_text() for name in ("README.md", "check.py"))
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert listed == re.findall(r'^    Task\("(\w+)"', script, re.MULTILINE)


def test_a_wrong_engine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import truth
    from ranks import FAULT

    monkeypatch.setenv(FAULT, "scaled_gradient")
    monkeypatch.chdir(tmp_path)
    wanted = {"fp64", "offload", "checkpoint"}
    some = [case for case in truth.cases(1, small=True) if case.name in wanted]
    part = truth.run("truth1", 1, some, "cpu")
    # Loss and gradients of the checkpoint's mesh, too: each case sees it.
    assert {row[1] for row in part.rows if row[-1] == "FAILED"} == wanted
    assert any("grads differ from the plain model's by 0.01" in each for each in part.failed)


def hang(here: Any, argument: str) -> str:
    """A case: of two ranks one does not come."""
    from torch import distributed as dist

    if argument == "hangs" and here.rank == 1:
        time.sleep(600)
    if argument == "raises" and here.rank == 0:
        raise ValueError("on purpose")
    dist.barrier()
    return argument


def test_a_hang_ends_with_its_stack(tmp_path: Path) -> None:
    from ranks import run_cases

    names = ["first", "hangs", "second", "raises", "third"]
    outcome = run_cases(
        hang,
        [(name, name) for name in names],
        world=2,
        device_type="cpu",
        backend="gloo",
        folder=tmp_path,
        limit=4.0,
        deadline=time.monotonic() + 120,
    )
    assert outcome.results == {name: [name, name] for name in ("first", "second", "third")}
    assert set(outcome.failed) == {"hangs", "raises"}
    assert "rank 1 hangs in hangs" in outcome.failed["hangs"]
    assert "test_runs_on_cpu.py" in outcome.failed["hangs"]
    assert "ValueError: on purpose" in outcome.failed["raises"]


def test_where_ranks_are_when_no_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runner
    from ranks import run_cases

    until = time.monotonic() + 20
    monkeypatch.setattr(runner, "_running", runner.Share(20.0, until=until))
    outcome = run_cases(
        hang,
        [(name, name) for name in ("first", "hangs", "second")],
        world=2,
        device_type="cpu",
        backend="gloo",
        folder=tmp_path,
        limit=60.0,
        deadline=until,
    )
    assert time.monotonic() < until
    assert outcome.results == {"first": ["first", "first"]}
    assert outcome.failed == {}
    assert [each.partition(":")[0] for each in outcome.left_out] == ["hangs", "second"]
    assert "rank 1 hangs in hangs" in outcome.left_out[0]
    assert "test_runs_on_cpu.py" in outcome.left_out[0]


def test_one_process_goes_on_after_an_error(tmp_path: Path) -> None:
    from ranks import run_cases

    outcome = run_cases(
        alone,
        [("raises", "raises"), ("after", "after")],
        world=1,
        device_type="cpu",
        backend="",
        folder=tmp_path,
        limit=20.0,
        deadline=time.monotonic() + 60,
    )
    assert "ValueError: on purpose" in outcome.failed["raises"]
    (after,) = outcome.results["after"]
    assert after == ["raises", "after"]  # in the same process


_run: list[str] = []


def alone(here: Any, argument: str) -> list[str]:
    """A case of one process: the cases that have run in it."""
    _run.append(argument)
    if argument == "raises":
        raise ValueError("on purpose")
    return _run
