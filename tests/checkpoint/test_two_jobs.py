"""Two jobs in one folder: the second that saves finds the first, and who loads sees whole checkpoints."""

import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.small_models import One, names
from torch import nn

from parallel3d.checkpoint import latest, load, loading, save
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format import lock as locks
from parallel3d.checkpoint.format.lock import LOCK, this_process
from parallel3d.checkpoint.format.storage import Reader, Writer
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool


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


@contextmanager
def another_job(body: Callable[[Callable[[], None]], object]) -> Iterator[tuple[int, Any]]:
    """(its number, a function that lets it go on) of a process that runs ``body(stop)``, once it has called
    ``stop``; each further call waits for the next ``stop``, or for the end: True if that was a good one."""
    there, here = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:

            def stop() -> None:
                os.write(there[1], b".")
                os.read(here[0], 1)

            warnings.simplefilter("ignore")
            body(stop)
            code = 0
        finally:
            os._exit(code)
    os.close(there[1])
    ended: list[bool] = []

    def go_on() -> bool:
        os.write(here[1], b".")
        if os.read(there[0], 1):
            return True
        ended.append(os.waitpid(child, 0)[1] == 0)
        return ended[0]

    try:
        assert os.read(there[0], 1) == b"."
        yield child, go_on
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for number in (*there[:1], *here):
            os.close(number)


def saving_slowly(run: Path, step: int, keep: int = 3) -> Callable[[Callable[[], None]], object]:
    def body(stop: Callable[[], None]) -> None:
        original = Writer.write_data

        def slow(self: Writer, *args: Any) -> Any:
            stop()
            return original(self, *args)

        Writer.write_data = slow  # type: ignore[method-assign]
        save(run, One(float(step)), step=step, keep=keep)

    return body


def test_the_second_finds_the_first(tmp_path: Path) -> None:
    save(tmp_path, One(1), step=1)
    with another_job(saving_slowly(tmp_path, 2)) as (child, go_on):
        before = names(tmp_path)
        assert any(".tmp-" in name for name in before)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, One(9), step=9, keep=1)
        for text in (
            str(tmp_path),
            f"process {child} on host {socket.gethostname()}",
            "saving step 2 since 20",
            "UTC",
            "give it another folder",
            str(tmp_path / LOCK),
        ):
            assert text in str(caught.value), caught.value
        assert names(tmp_path) == before
        assert go_on()
    assert load(tmp_path, One(0)).step == 2 and LOCK not in names(tmp_path)
    save(tmp_path, One(9), step=9, keep=1)
    assert names(tmp_path) == {"step-00000009"}


def test_a_second_save_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread of the user's own."""
    caught: list[BaseException] = []

    def other() -> None:
        try:
            save(tmp_path, One(3), step=3)
        except CheckpointError as error:
            caught.append(error)

    def aside() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    before_call(monkeypatch, Writer, "write_data", 1, aside)
    save(tmp_path, One(2), step=2)
    assert str(os.getpid()) in str(caught[0])
    assert names(tmp_path) == {"step-00000002"}


def test_a_killed_one_is_said_and_forgotten(tmp_path: Path) -> None:
    save(tmp_path, One(1), step=1)
    with another_job(saving_slowly(tmp_path, 2)) as (child, _):
        os.kill(child, signal.SIGKILL)  # not waited for yet: a zombie is dead
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with pytest.warns(UserWarning, match=f"left by process {child} on host .* has ended"):
            save(tmp_path, One(3), step=3)
    assert names(tmp_path) == {"step-00000001", "step-00000003"}


# -- Locks that are found ------------------------------------------------------------------------------


def lock_of(run: Path, **owner: Any) -> Path:
    """One of this process, with other values."""
    run.mkdir(exist_ok=True)
    text = {
        "parallel3d lock": "other",
        "owner": {**asdict(this_process()), "token": "other", **owner},
        "since": time.time(),
        "step": 5,
    }
    (run / LOCK).write_text(json.dumps(text) + "\n000000000000\n")  # as older versions did
    return run / LOCK


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SILENCE", 0.6)
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "_UNREADABLE", 0.3)
    monkeypatch.setattr(locks, "_LOOK", 0.05)
    monkeypatch.setattr(locks, "_SETTLE", 0.2)


@pytest.mark.parametrize(
    "owner", [{"start": 1}, {"pid": 2**31 - 1}], ids=["its number has come again", "it is gone"]
)
def test_of_a_process_that_has_ended(tmp_path: Path, owner: dict[str, Any]) -> None:
    lock_of(tmp_path, **owner)
    with pytest.warns(UserWarning, match="that process has ended: it is removed"):
        save(tmp_path, One(1), step=1)
    assert names(tmp_path) == {"step-00000001"}


def test_of_another_machine_that_is_silent(tmp_path: Path, short: None) -> None:
    """Whatever its clock says, and although a process here has the same number."""
    lock_of(tmp_path, machine="other", host="node-7", began=time.time() + 9e6)
    with pytest.warns(UserWarning, match="process .* on host node-7.* no sign of life for"):
        save(tmp_path, One(1), step=1)
    assert names(tmp_path) == {"step-00000001"}


def test_of_another_machine_that_lives(tmp_path: Path, short: None) -> None:
    path, ended = lock_of(tmp_path, machine="other", host="node-7"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"is being saved into already.* on host node-7"):
            save(tmp_path, One(1), step=1)
    finally:
        ended.set()
        thread.join()
    assert names(tmp_path) == {LOCK}


def test_a_long_save_gives_signs_of_life(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def look() -> None:
        for _ in range(2):
            found.append((tmp_path / LOCK).stat().st_mtime_ns)
            time.sleep(0.4)

    before_call(monkeypatch, Writer, "write_data", 1, look)
    save(tmp_path, One(1), step=1)
    assert found[0] < found[1]


@pytest.mark.parametrize(
    "text",
    ["", "a user's own", "[1]", '{"parallel3d lock": 3}', "\0" * 400],
    ids=["empty", "text", "list", "other", "zeros"],
)
def test_what_is_no_lock_is_left(tmp_path: Path, short: None, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(CheckpointError, match=r"doesn't say who saves there.*remove that file"):
        save(tmp_path, One(1), step=1)
    assert (tmp_path / LOCK).read_text() == text and names(tmp_path) == {LOCK}


def test_a_folder_is_no_lock(tmp_path: Path, short: None) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(CheckpointError, match=r"doesn't say who saves there.*remove that file"):
        save(tmp_path, One(1), step=1)


@pytest.mark.parametrize(
    "owner",
    [{"pid": -1}, {"pid": 2**70}, {"pid": True}, {"host": 3}, {"host": "a\nb"}, {"began": "x"}],
)
def test_hostile_owners(tmp_path: Path, short: None, owner: dict[str, Any]) -> None:
    lock_of(tmp_path, **owner)
    with pytest.raises(CheckpointError, match="doesn't say who saves there"):
        save(tmp_path, One(1), step=1)


def test_a_lock_that_is_lost_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was frozen, on another machine say, and another job has gone on."""
    save(tmp_path, One(1), step=1)
    before_call(monkeypatch, Writer, "write_data", 1, lambda: lock_of(tmp_path, host="node-7"))
    with pytest.raises(CheckpointError, match=r"taken over by process .* on host node-7"):
        save(tmp_path, One(2), step=2, keep=1)
    assert names(tmp_path) == {"step-00000001", LOCK}
    assert b"node-7" in (tmp_path / LOCK).read_bytes()


def test_a_lock_that_somebody_has_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_call(monkeypatch, Writer, "write_data", 1, (tmp_path / LOCK).unlink)
    save(tmp_path, One(2), step=2)
    assert names(tmp_path) == {"step-00000002"} and not locks._held


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with another_job(saving_slowly(tmp_path, 2)) as (_, go_on):
        with pytest.raises(CheckpointError, match="is being saved into already"):
            save(tmp_path, One(3), step=3)
        assert go_on()
    save(tmp_path, One(3), step=3)
    assert names(tmp_path) == {"step-00000002", "step-00000003"}


def test_many_at_once_after_one_was_killed(tmp_path: Path) -> None:
    """Whoever breaks its lock, no two save at the same time, and nothing is left."""
    lock_of(tmp_path, start=1)
    children = []
    for step in range(1, 9):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                warnings.simplefilter("ignore")
                save(tmp_path, One(step), step=step, keep=None)
                code = 0
            except CheckpointError as error:
                code = 2 if "saved into already" in str(error) else 3
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    done = {f"step-{step:08d}" for step, code in enumerate(codes, 1) if code == 0}
    assert set(codes) <= {0, 2} and done, codes
    assert names(tmp_path) == done
    for name in done:
        assert load(tmp_path / name, One(0)).step == int(name[-8:])


# -- Between two saves ---------------------------------------------------------------------------------


def saving_twice(run: Path) -> Callable[[Callable[[], None]], object]:
    def body(stop: Callable[[], None]) -> None:
        stop()
        save(run, One(2), step=2)
        stop()
        try:
            save(run, One(4), step=4)
        except CheckpointError as error:
            assert str(error).count("another job saves here too") == 1
            assert f"process {os.getppid()} on host" in str(error) and "step-00000003" in str(error)
            stop()

    return body


def test_jobs_that_take_turns(tmp_path: Path) -> None:
    """Told to both: the one that was started later can't go on."""
    save(tmp_path, One(1), step=1)
    with another_job(saving_twice(tmp_path)) as (child, go_on):
        assert go_on()
        with pytest.warns(
            UserWarning, match=f"another job saves here too: process {child} on host"
        ):
            save(tmp_path, One(3), step=3)
        assert go_on()
        assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000003"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(tmp_path, One(5), step=5)


@pytest.mark.parametrize("look", [latest, lambda run: load(run, One(0))], ids=["latest", "load"])
def test_one_that_has_looked_goes_on(tmp_path: Path, look: Callable[[Path], object]) -> None:
    save(tmp_path, One(1), step=1)
    with another_job(saving_twice(tmp_path)) as (_, go_on):
        assert go_on()
        look(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(tmp_path, One(3), step=3)


def test_after_one_that_has_ended(tmp_path: Path) -> None:
    """A job that a script starts and waits for, and saves again itself."""
    save(tmp_path, One(1), step=1)
    with another_job(saving_twice(tmp_path)) as (child, go_on):
        assert go_on()
        os.kill(child, signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, One(3), step=3)


# -- Ranks ---------------------------------------------------------------------------------------------


def ranks_saving(run: Path, async_: bool) -> str:
    try:
        future = save(run, nn.Linear(2, 2), step=1, async_=async_)
        if async_:
            future.result()  # type: ignore[union-attr]
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("async_", [False, True], ids=["now", "in the background"])
def test_all_ranks_are_told(tmp_path: Path, gloo_pool: GlooPool, async_: bool) -> None:
    path = lock_of(tmp_path)  # of this process, which lives
    for text in gloo_pool.run(ranks_saving, tmp_path, async_, world_size=2):
        assert f"is being saved into already, by process {os.getpid()} on host" in text
    path.unlink()
    assert gloo_pool.run(ranks_saving, tmp_path, async_, world_size=2) == ["", ""]
    assert names(tmp_path) == {"step-00000001"}


# -- Who loads while a job saves there and removes what is older -----------------------------------------


def loaded(run: Path) -> tuple[int, float, float]:
    """What load finds, which nothing is wrong with."""
    model = One(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info = load(run, model)
    assert not info.skipped
    return info.step, model.value[0].item(), model.more[0].item()


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
                    time.sleep(1.0)
        finally:
            os._exit(code)
    try:
        a, b = gloo_pool.run(loading_beside, tmp_path, 30, 4, world_size=2)
        assert a == b and len(a) >= 4
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
