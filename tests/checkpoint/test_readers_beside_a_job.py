"""Who loads from a run's folder while a job saves there and removes what is older."""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.checkpoint import latest, load, loading, save
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.storage import Reader
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool


class One(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((3,), float(value)))
        self.more = nn.Parameter(torch.full((5,), float(value)))


def loaded(run: Path) -> tuple[int, float, float]:
    """What load finds, which nothing is wrong with."""
    model = One(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info = load(run, model)
    assert not info.skipped
    return info.step, model.value[0].item(), model.more[0].item()


def before_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, what: Callable[[], object]
) -> None:
    """``what`` happens before the ``number``-th call."""
    original, calls = getattr(owner, name), [0]

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            what()
        return original(*args, **kwargs)

    patch.setattr(owner, name, noted)


MOMENTS = [
    (folders, "open_checkpoint"),
    (files, "loads"),
    (Reader, "prepare_local_plan"),
    (Reader, "read_data"),
]


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next"])
@pytest.mark.parametrize(("owner", "name"), MOMENTS, ids=[name for _, name in MOMENTS])
def test_the_newest_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: int
) -> None:
    save(tmp_path, One(1), step=1)
    before_call(monkeypatch, owner, name, 1, lambda: save(tmp_path, One(2), step=step, keep=1))
    assert loaded(tmp_path) == (step, 2.0, 2.0)


def test_removed_within_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some values are in the model already: they are replaced."""
    save(tmp_path, One(1), step=1)
    original, calls = os.preadv, [0]

    def removed(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:  # two verified, one read
            save(tmp_path, One(2), step=2, keep=1)
            raise OSError(116, "Stale file handle")
        return original(*args)

    monkeypatch.setattr(os, "preadv", removed)
    assert loaded(tmp_path) == (2, 2.0, 2.0) and calls[0] > 3


def test_all_are_removed_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end, with an error that says what to change."""
    monkeypatch.setattr(loading, "_LOOKS", 3)
    save(tmp_path, One(1), step=1)
    original, calls = folders.open_checkpoint, [1]

    def slow(folder: Path) -> Any:
        calls[0] += 1
        save(tmp_path, One(2), step=calls[0], keep=1)
        return original(folder)

    monkeypatch.setattr(folders, "open_checkpoint", slow)
    with pytest.raises(CheckpointError, match=r"3 checkpoints of .* let it keep more"):
        load(tmp_path, One(0))


def test_a_listing_that_has_missed_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one was removed before it was listed, and the new one came behind that place."""
    save(tmp_path, One(1), step=1)
    original, calls = folders._listed, [0]

    def missing(run: Path) -> list[Path]:
        calls[0] += 1
        return [] if calls[0] == 1 else original(run)

    monkeypatch.setattr(folders, "_listed", missing)
    assert latest(tmp_path) == tmp_path / "step-00000001"


def test_removed_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name was read, its marker was not: it comes first, as one to be looked at, and is gone."""
    save(tmp_path, One(1), step=1)
    save(tmp_path, One(2), step=2)
    gone = tmp_path / "step-00000001"
    original, calls = folders._serial, [0]

    def removed(folder: Path) -> int | None:
        if folder == gone and not calls[0]:
            calls[0] += 1
            folders.discard(gone)
        return original(folder)

    monkeypatch.setattr(folders, "_serial", removed)
    assert loaded(tmp_path) == (2, 2.0, 2.0) and calls == [1]


def loading_beside(run: Path, times: int, steps_seen: int) -> set[int]:
    """Loads ``times`` times at least, and until ``steps_seen`` checkpoints were met (or far more times)."""
    model, steps, loads = nn.Linear(64, 64), set(), 0
    while loads < times or (len(steps) < steps_seen and loads < 100 * times):
        loads += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            info = load(run, model)
        assert torch.equal(model.bias, torch.full((64,), float(info.step)))
        steps.add(info.step)
    return steps


def test_ranks_beside_a_job_that_keeps_one(tmp_path: Path, gloo_pool: GlooPool) -> None:
    def saved(step: int) -> None:
        model = nn.Linear(64, 64)
        nn.init.constant_(model.bias, step)
        save(tmp_path, model, step=step, keep=1)

    saved(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Five at once: each may be removed while it is read, and the tries are more than that. Then a
            # pause that a load fits into, on a busy machine too.
            for step in range(2, 10**6):
                saved(step)
                if step % 5 == 0:
                    time.sleep(0.3)
        finally:
            os._exit(code)
    try:
        a, b = gloo_pool.run(loading_beside, tmp_path, 30, 4, world_size=2)
        assert a == b and len(a) >= 4
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
