"""A run's folder: how many checkpoints stay, in which order they count, what a killed save leaves."""

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from _support.checkpoint.small_models import One, names

from parallel3d.checkpoint import latest, load, save
from parallel3d.errors import CheckpointError, CorruptCheckpointError, Parallel3dError


def loaded(path: Path) -> tuple[int, float]:
    """(step, the number) of the checkpoint that load finds."""
    model = One(-1.0)
    info = load(path, model)
    return info.step, model.value[0].item()


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (None, [0, 1, 2, 3, 4])]
)
def test_keeps_the_last(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in range(5):
        path = save(tmp_path, One(step), step=step, keep=keep)
        assert path == tmp_path / f"step-{step:08d}" and latest(tmp_path) == path
    assert names(tmp_path) == {f"step-{step:08d}" for step in left}
    for step in left:
        assert loaded(tmp_path / f"step-{step:08d}") == (step, step)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_wrong_keep(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(Parallel3dError, match="keep is"):
        save(tmp_path / "run", One(), step=1, keep=keep)
    assert not (tmp_path / "run").exists()


WRONG_STEPS = [-1, 1.0, True, "3", 10**18, numpy.int64(-1), numpy.bool_(True), torch.ones(2)]


@pytest.mark.parametrize("step", [*WRONG_STEPS, torch.tensor(True)])
def test_wrong_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(Parallel3dError, match="step is"):
        save(tmp_path / "run", One(), step=step)


def test_a_step_again(tmp_path: Path) -> None:
    save(tmp_path, One(1), step=7)
    save(tmp_path, One(2), step=7)
    assert loaded(tmp_path) == (7, 2.0)
    assert names(tmp_path) == {"step-00000007"}


def test_back_to_an_earlier_step(tmp_path: Path) -> None:
    """The order is that of the saves: who goes back and saves goes on from there."""
    for step in (1, 2, 3):
        save(tmp_path, One(step), step=step, keep=3)
    save(tmp_path, One(20), step=2, keep=3)
    assert loaded(tmp_path) == (2, 20.0)
    assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000003"}
    save(tmp_path, One(21), step=1, keep=2)
    assert loaded(tmp_path) == (1, 21.0)
    assert names(tmp_path) == {"step-00000001", "step-00000002"}


def test_large_steps(tmp_path: Path) -> None:
    save(tmp_path, One(1), step=99_999_999)
    save(tmp_path, One(2), step=10**12)
    assert loaded(tmp_path) == (10**12, 2.0)


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    """With keep=1 a damaged folder, which is looked at first, must not push out the good one."""
    save(tmp_path, One(1), step=1)
    damaged = save(tmp_path, One(2), step=2)
    (damaged / "COMPLETE").write_text("?")
    with pytest.warns(UserWarning, match="not the newest"):
        assert loaded(tmp_path) == (1, 1.0)
    save(tmp_path, One(3), step=3, keep=1)
    assert names(tmp_path) == {"step-00000002", "step-00000003"}
    with pytest.warns(UserWarning, match="not the newest"):
        assert loaded(tmp_path) == (3, 3.0)
    save(tmp_path, One(4), step=2, keep=1)  # replaces it
    assert names(tmp_path) == {"step-00000002"}


def test_leftovers_are_removed(tmp_path: Path) -> None:
    first = save(tmp_path, One(1), step=1)
    shutil.copytree(first, tmp_path / "step-00000002.tmp-0123abcd")
    shutil.copytree(first, tmp_path / "step-00000002.old.tmp-0123abcd")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000004.tmp-0123abcd.txt").write_text("somebody's")
    assert loaded(tmp_path) == (1, 1.0)
    save(tmp_path, One(5), step=5)
    left = {"step-00000001", "step-00000005", "notes", "step-00000004.tmp-0123abcd.txt"}
    assert names(tmp_path) == left


def test_without_its_marker(tmp_path: Path) -> None:
    """Somebody has copied half of it: it is looked at, no more; and can be replaced."""
    save(tmp_path, One(1), step=1)
    half = tmp_path / "step-00000002"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"")
    assert latest(tmp_path) == tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="has no COMPLETE"):
        assert loaded(tmp_path) == (1, 1.0)
    save(tmp_path, One(2), step=2)
    assert loaded(tmp_path) == (2, 2.0) and len(names(tmp_path)) == 2


def test_killed_between_two_names(tmp_path: Path) -> None:
    """The old one of a step, put aside for the new one, counts; and comes back."""
    save(tmp_path, One(1), step=1)
    path = save(tmp_path, One(2), step=2)
    path.rename(tmp_path / "step-00000002.old")
    assert loaded(tmp_path) == (2, 2.0)
    save(tmp_path, One(3), step=3)
    assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000003"}
    assert loaded(tmp_path / "step-00000002") == (2, 2.0)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000002.old")
    save(tmp_path, One(4), step=4, keep=3)  # was killed before it removed the old one
    assert names(tmp_path) == {"step-00000002", "step-00000003", "step-00000004"}


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000001"
    foreign.mkdir()
    (foreign / ".metadata").write_text("DCP's")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of parallel3d"):
        save(tmp_path, One(1), step=1)
    assert names(tmp_path) == {"step-00000001"} and names(foreign) == {".metadata"}
    save(tmp_path, One(2), step=2, keep=1)
    assert (foreign / ".metadata").exists()


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    other = save(tmp_path / "other", One(1), step=1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-00000001").symlink_to(other)
    with pytest.raises(CorruptCheckpointError, match="has no checkpoint"):
        load(run, One())
    save(run, One(2), step=1)
    assert loaded(run) == (1, 2.0) and not (run / "step-00000001").is_symlink()
    assert loaded(other) == (1, 1.0)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing at"):
        load(tmp_path / "missing", One())
    with pytest.raises(CorruptCheckpointError, match="has no checkpoint of parallel3d"):
        load(tmp_path, One())
    (tmp_path / "file").write_text("")
    with pytest.raises(CorruptCheckpointError, match="is a file"):
        load(tmp_path / "file", One())
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", One(), step=1)
    assert latest(tmp_path) is None and latest(tmp_path / "missing") is None


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    future = save("run", One(1), step=1, async_=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    future.result()
    assert loaded(tmp_path / "run") == (1, 1.0)


def test_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    """A checkpoint within a checkpoint would not be found, and go with it."""
    path = save(tmp_path, One(1), step=1)
    link = tmp_path / "link"
    link.symlink_to(path)
    for given in (path, link):
        with pytest.raises(CheckpointError, match="is one checkpoint; give the run's folder"):
            save(given, One(2), step=2)
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="is one checkpoint; give the run's folder"):
        save(path, One(2), step=2)
    assert names(path) == {"checkpoint.json", "index.json", "rank-00000.safetensors"}


@pytest.mark.parametrize("name", ["index.json", "checkpoint.json"])
def test_files_of_these_names_in_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody's")
    for step in (1, 2):
        save(tmp_path, One(step), step=step, keep=1)
        assert loaded(tmp_path) == (step, step) and latest(tmp_path) is not None
    assert names(tmp_path) == {name, "step-00000002"}
    # A folder with these and no checkpoint in it was to be one.
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.raises(CorruptCheckpointError, match="was not completed"):
        load(tmp_path, One())


def test_a_link_is_newest(tmp_path: Path) -> None:
    """It isn't followed, and load says so."""
    run, other = tmp_path / "run", tmp_path / "moved"
    save(run, One(1), step=1)
    save(run, One(2), step=2).rename(other)
    link = run / "step-00000002"
    link.symlink_to(other)
    with pytest.warns(UserWarning, match="step-00000002 is a link"):
        info = load(run, One())
    assert info.step == 1 and [path for path, _ in info.skipped] == [link]
    assert "is a link" in info.skipped[0][1] and latest(run) == run / "step-00000001"
    assert loaded(link) == (2, 2.0)  # when it is given itself
    save(run, One(3), step=3, keep=1)
    assert loaded(run) == (3, 3.0)  # the link is older, though it stays
    assert names(run) == {"step-00000002", "step-00000003"} and loaded(other) == (2, 2.0)
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    with pytest.warns(UserWarning, match="step-00000002 is a link"):
        assert loaded(run) == (3, 3.0)


def test_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save("run", One(1), step=1)
    assert path == latest("run") == load("run", One()).path == tmp_path / "run" / path.name
    assert load(f"run/{path.name}", One()).path == path
    (path / "COMPLETE").rename(path / "COMPLETE.not")
    save("run", One(1), step=0)
    with pytest.warns(UserWarning, match="not the newest"):
        assert load("run", One()).skipped[0][0] == path


def test_what_is_no_path(tmp_path: Path) -> None:
    for wrong in (os.fsencode(tmp_path), 3, None):
        for call in (lambda p: save(p, One(), step=1), lambda p: load(p, One()), latest):
            with pytest.raises(CheckpointError, match=r"path is .*; it must be a string or a Path"):
                call(wrong)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"run is a link to .*nothing, where nothing is"):
        save(run, One(), step=1)
    with pytest.raises(CheckpointError, match="there is nothing at"):
        load(run, One())
    assert latest(run) is None


@pytest.mark.parametrize("step", [numpy.int64(3), numpy.uint8(3), torch.tensor(3)])
def test_integers_of_others(tmp_path: Path, step: Any) -> None:
    save(tmp_path, One(1), step=step, keep=numpy.int64(1))
    assert loaded(tmp_path) == (3, 1.0)


# -- killed


def killed_at(function: str, count: int, body: Callable[[], object]) -> bool:
    """Whether a process with ``body`` was killed: at its ``count``-th call of a function of ``os``."""
    child = os.fork()
    if child == 0:
        original, calls = getattr(os, function), [0]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        try:
            setattr(os, function, deadly)
            body()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


@pytest.mark.parametrize("function", ["write", "rename", "fsync", "mkdir", "unlink", "rmdir"])
@pytest.mark.parametrize("step", [2, 3])
def test_killed(tmp_path: Path, function: str, step: int) -> None:
    """At each call: what load finds is the last whole one, and the next save clears up."""
    count = 0
    while True:
        count += 1
        run = tmp_path / str(count)
        save(run, One(1), step=1)
        save(run, One(2), step=2)
        was = killed_at(function, count, lambda run=run: save(run, One(9), step=step, keep=2))
        assert loaded(run) in ([(2, 2.0), (step, 9.0)] if was else [(step, 9.0)])
        save(run, One(4), step=4, keep=4)
        assert loaded(run) == (4, 4.0)
        assert all(name[-4:].isdigit() for name in names(run)), names(run)
        assert len(names(run)) in (2, 3, 4)
        for name in names(run):
            loaded(run / name)
        if not was:
            break
    assert count > 1


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, One(1), step=1)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, One(2), step=2)
    monkeypatch.undo()
    assert names(tmp_path) == {"step-00000001"}
    assert loaded(tmp_path) == (1, 1.0)


def test_cannot_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, One(1), step=1)
    original = os.rename

    def refuse(source: Any, target: Any) -> None:
        if ".tmp-" in str(source):
            raise PermissionError(13, "Permission denied")
        original(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path, One(2), step=1)
    monkeypatch.undo()
    assert loaded(tmp_path) == (1, 1.0)
    save(tmp_path, One(3), step=2)
    assert names(tmp_path) == {"step-00000001", "step-00000002"}


@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "an old one"])
def test_what_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The save has been done: its folder is returned, and a warning says what takes space."""
    save(tmp_path, One(1), step=1)
    with monkeypatch.context() as patch:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(13, "Permission denied")

        patch.setattr(os, "rmdir", refuse)
        with pytest.warns(UserWarning, match=r"could not be removed.*Permission denied"):
            path = save(tmp_path, One(2), step=step, keep=1)
    assert path.is_dir() and loaded(tmp_path) == (step, 2.0)
    save(tmp_path, One(3), step=3, keep=1)
    assert names(tmp_path) == {"step-00000003"}


def test_a_link_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, One(1), step=1)
    shutil.move(tmp_path / "step-00000001", tmp_path / "elsewhere")
    (tmp_path / "step-00000001").symlink_to(tmp_path / "elsewhere")
    original = os.unlink

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if "step-" in str(path):
            raise PermissionError(13, "Permission denied")
        original(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(UserWarning, match=r"could not be removed.*Permission denied"):
        assert save(tmp_path, One(2), step=1).is_dir()


def test_what_is_in_it(tmp_path: Path) -> None:
    """Files that others read: safetensors, JSON."""
    from safetensors.torch import load_file

    path = save(tmp_path, One(2.5), step=3, extra={"position": 3})
    assert names(path) == {"COMPLETE", "checkpoint.json", "index.json", "rank-00000.safetensors"}
    found = load_file(path / "rank-00000.safetensors")
    assert torch.equal(found["model.value"], torch.full((3,), 2.5))
    info = json.loads((path / "checkpoint.json").read_text())
    assert info["step"] == 3 and info["extra"] == {"position": 3} and info["mesh"] is None
    assert {"torch", "parallel3d", "python"} == info["versions"].keys()


@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "old one"])
def test_the_next_save_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    model = torch.nn.Linear(2, 2)
    save(tmp_path, model, step=1)
    with monkeypatch.context() as patch:  # the files stay, as where the process dies
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        save(tmp_path, model, step=step, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is damaged
        info = load(tmp_path, model)
    assert info.step == step and not info.skipped
    save(tmp_path, model, step=3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
