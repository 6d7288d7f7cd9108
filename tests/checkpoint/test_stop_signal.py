"""A signal that asks to stop is a flag; all ranks agree on it."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from parallel3d import Parallel3dError, StateError
from parallel3d.checkpoint import StopSignal
from parallel3d.testing import GlooPool
from parallel3d.testing.gloo_pool import _PRELOAD


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_within_the_block_it_is_a_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested and not stop.on_any_rank()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as torchrun and its own caller may both send it, at once
        assert stop.requested and stop.on_any_rank()
        assert stop.received is number
    assert signal.getsignal(number) is before


def receive(*signals: int) -> None:
    """They arrive 0.6 seconds apart in the middle of a step; its exit code is then 0."""
    with StopSignal():
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.6)
    os._exit(0)


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        pytest.param((signal.SIGINT, signal.SIGINT), 130, marks=pytest.mark.full),
        # torchrun's answer to the second Ctrl-C
        pytest.param((signal.SIGINT, signal.SIGTERM), 130, marks=pytest.mark.slow),
        pytest.param((signal.SIGTERM, signal.SIGINT), 130, marks=pytest.mark.full),
        pytest.param((signal.SIGTERM, signal.SIGTERM), 0, marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGUSR1), 0, marks=pytest.mark.full),
    ],
)
def test_a_second_ctrl_c_ends_the_process_at_once(signals: tuple[int, ...], code: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    process = context.Process(target=receive, args=signals, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == code


def test_handlers_come_back_after_an_error() -> None:
    mine = signal.signal(signal.SIGUSR1, lambda *args: None)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(ZeroDivisionError), StopSignal(signal.SIGUSR1):
            _ = 1 / 0
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, mine)


def test_other_signals_do_what_they_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal(signal.SIGUSR1):
        assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) as pool, pytest.raises(StateError, match="main thread"):
        pool.submit(StopSignal().__enter__).result()


def test_twice_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        with pytest.raises(StateError, match="entered already"), stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_once_more_begins_anew() -> None:
    stop = StopSignal()
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert stop.requested
    with stop:
        assert not stop.requested and not stop.on_any_rank()


def test_within_another_both_are_told() -> None:
    with StopSignal() as outer:
        with StopSignal(signal.SIGTERM) as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.requested
        assert outer.received is signal.SIGTERM


@pytest.mark.parametrize(
    "bad", ["SIGTERM", 0, True, 1.5, [signal.SIGTERM], signal.SIGKILL, signal.SIGSTOP, None]
)
def test_what_is_no_signal(bad: object) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Parallel3dError, match="StopSignal: "):
        StopSignal(signal.SIGTERM, bad)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before
    assert StopSignal(15).signals == (signal.SIGTERM,)  # type: ignore[arg-type]


def test_one_that_cannot_be_handled_leaves_the_others_alone(monkeypatch) -> None:
    before, really = signal.getsignal(signal.SIGTERM), signal.signal

    def refuse(number: signal.Signals, handler: object) -> object:
        if number == signal.SIGUSR1:
            raise OSError(22, "Invalid argument")
        return really(number, handler)  # type: ignore[arg-type]

    monkeypatch.setattr(signal, "signal", refuse)
    with pytest.raises(OSError, match="Invalid"), StopSignal():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def stop_on(rank: int | None) -> list[bool]:
    with StopSignal() as stop:
        before = stop.on_any_rank()
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return [before, stop.on_any_rank(), stop.requested]


def test_one_rank_is_enough(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(stop_on, 1, world_size=3)
    assert found == [[False, True, rank == 1] for rank in range(3)]
    assert gloo_pool.run(stop_on, None, world_size=2) == [[False] * 3] * 2
