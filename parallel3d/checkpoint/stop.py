"""StopSignal: turns a signal that asks to stop into a flag, on which all ranks agree between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError, StateError

_DEFAULT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ONE_PRESS = 0.5
"""Seconds within which a second SIGINT is the first one, which a launcher has sent on."""


class StopSignal:
    """Lets Ctrl-C, SIGTERM and SIGUSR1 end the training after the current step, with a last checkpoint::

        with StopSignal() as stop:
            for step in range(steps):
                ...
                if stop.on_any_rank():
                    checkpoint.save(path, model, optimizer, step=step + 1)
                    break

    Within the block such a signal only sets ``requested``; a step or a save continues. One or several ranks
    may receive it, also twice. torchrun sends the SIGTERM that it receives to all its workers and kills those
    that still run after ``--shutdown-timeout`` seconds (30 by default). SLURM's ``--signal=USR1@120`` sends
    SIGUSR1 120 s before the time limit; torchrun then needs ``--signals-to-handle
    SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``. A second Ctrl-C (SIGINT) ends the process at once, with exit code
    130 and without a traceback; torchrun sends the first one again, so two within half a second count as one;
    for the second it sends SIGTERM, which after a SIGINT also ends the process at once. Outside the block the
    previous handlers are in place. Enter it when there is something to save: before that, a process that
    waits for missing peers should end at once. In nested blocks both StopSignals receive the signal. Entering
    it again resets ``requested``.

    Args:
        signals: SIGINT, SIGTERM and SIGUSR1 by default.

    Raises:
        Parallel3dError: if one is not a signal, or one that no process can handle (SIGKILL, SIGSTOP).
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.signals = tuple(map(_as_signal, signals)) or _DEFAULT
        self.received: signal.Signals | None = None
        self._at = 0.0  # when
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this rank has received one of the signals."""
        return self.received is not None

    def on_any_rank(self) -> bool:
        """Returns whether any rank of the default group has received one. All ranks must call it.

        It is one all-reduce of one number. A program that has an all-reduce in each step may include
        ``requested`` in it instead.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested
        # On the CPU if the default group has a backend for it.
        kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
        device = "cpu" if "cpu" in kinds else kinds[0]
        flag = torch.tensor(int(self.requested), dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return self.requested if dry_run.active() else bool(flag.item())

    def __enter__(self) -> StopSignal:
        """Installs the handlers.

        Raises:
            StateError: outside the main thread, the only one that can install handlers; or if already
                entered.
        """
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "StopSignal must be entered in the main thread: Python handles signals there"
            )
        if self._before:
            raise StateError(
                "this StopSignal is entered already; make another one for a block within its block"
            )
        self.received = None
        try:
            for number in dict.fromkeys(self.signals):
                self._before[number] = signal.signal(number, self._receive)
                signal.siginterrupt(number, False)  # system calls of torch's threads continue
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: it was installed by C code and cannot be set from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number), now
        elif now - self._at > _ONE_PRESS and (
            number == signal.SIGINT or (number == signal.SIGTERM and self.received is signal.SIGINT)
        ):
            os._exit(128 + signal.SIGINT)  # no traceback, and no waiting for peers in a collective
        before = self._before.get(signal.Signals(number))
        if isinstance(getattr(before, "__self__", None), StopSignal):
            before(number, frame)  # type: ignore[misc]  # of an enclosing StopSignal


def _as_signal(value: object) -> signal.Signals:
    try:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        result = signal.Signals(value)
    except ValueError:
        raise Parallel3dError(
            f"StopSignal: {value!r} is not a signal; give some of the module signal, such as signal.SIGTERM"
        ) from None
    if result.name in ("SIGKILL", "SIGSTOP"):
        raise Parallel3dError(
            f"StopSignal: no process can handle {result.name}; give another signal"
        )
    return result
