"""A window of steps becomes a trace for Perfetto, on the ranks that were asked for."""

import json
from pathlib import Path

import pytest
import torch

from parallel3d.errors import Parallel3dError
from parallel3d.observability import ProfilerWindow, parse_steps


def run(window: ProfilerWindow, steps: range, rank: int = 3) -> None:
    for step in steps:
        window.begin(step, rank)
        torch.ones(4, 4) @ torch.ones(4, 4)
        window.end(step)
    window.close()


def names(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if "name" in event]


@pytest.mark.parametrize(
    ("first", "last", "steps", "seen"),
    [
        (2, 3, range(6), (2, 3)),
        (0, 0, range(3), (0,)),
        (2, 9, range(4), (2, 3)),  # the run ends before
        (2, 4, range(3, 6), (3, 4)),  # it goes on within the window
    ],
)
def test_a_trace(
    tmp_path: Path, first: int, last: int, steps: range, seen: tuple[int, ...]
) -> None:
    window = ProfilerWindow(tmp_path / "traces", first, last, ranks=None)
    run(window, steps)
    (path,) = (tmp_path / "traces").iterdir()
    assert path == window.path and path.name == f"steps-{first}-{last}-rank-00003.json"
    found = names(path)
    assert {n for n in found if n.startswith("step ")} == {f"step {n}" for n in seen}
    assert found.count("aten::mm") == len(seen)


def test_other_ranks_and_other_steps(tmp_path: Path) -> None:
    run(ProfilerWindow(tmp_path / "a", 2, 3), range(5))  # rank 0 only
    with pytest.warns(UserWarning, match="ended after step 0, before the steps 2 to 3"):
        run(ProfilerWindow(tmp_path / "b", 2, 3, ranks=[3]), range(1))
    run(ProfilerWindow(tmp_path / "c", 2, 3, ranks=[3]), range(4, 9))
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be written"):
        run(ProfilerWindow(tmp_path / "file", 1, 1, ranks=None), range(3))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what could be written."""

    def export(self: object, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")  # as torch does

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.warns(UserWarning, match="could not be written"):
        run(ProfilerWindow(tmp_path, 1, 1, ranks=None), range(3))
    assert not list(tmp_path.iterdir())


def test_a_profiler_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is on, say: the training goes on, and it isn't tried again."""

    def start(self: object) -> None:
        raise RuntimeError("already enabled")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    with pytest.warns(UserWarning, match="already enabled") as seen:
        run(ProfilerWindow(tmp_path, 1, 3, ranks=None), range(5))
    assert len(seen) == 1


def test_arguments() -> None:
    assert parse_steps("10:12") == (10, 12) and parse_steps("7") == (7, 7)
    for text in ("", "a:b", "3:2", "-1:2", "1:", "1:2:3"):
        with pytest.raises(Parallel3dError, match="FIRST:LAST"):
            parse_steps(text)
    with pytest.raises(Parallel3dError, match="the steps 3 to 2"):
        ProfilerWindow("x", 3, 2)
    with pytest.raises(Parallel3dError, match="a step is '1'"):
        ProfilerWindow("x", "1", 2)  # type: ignore[arg-type]
