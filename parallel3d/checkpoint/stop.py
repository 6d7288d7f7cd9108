"""StopSignal: a signal that asks to stop becomes a flag, on which all ranks agree between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError, StateError


class StopSignal:
    """SIGTERM and SIGUSR1 end the training after the present step, with a last checkpoint::

        with StopSignal() as stop:
            for step in range(steps):
                ...
                if stop.on_any_rank():
                    checkpoint.save(path, model, optimizer, step=step + 1)
                    break

    Within the block such a signal does nothing but set ``requested``: a step or a save that is under way
    goes on. It may come to one rank or to several, also twice: torchrun passes on to all of its workers the
    SIGTERM it gets (and kills those that still run after ``--shutdown-timeout`` seconds, by default 30), and
    SLURM's ``--signal=USR1@120`` sends one 120 s before the time is up (torchrun then needs
    ``--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``). Before and after the block signals do
    what they did. Enter it when there is something to save, not before: until then a process that waits for
    peers which don't come should end at once. Within another StopSignal's block both get the signal. Entered
    again later, it begins with nothing requested.

    Args:
        signals: which; SIGTERM and SIGUSR1 by default.

    Raises:
        Parallel3dError: one is no signal, or one that no process can handle (SIGKILL, SIGSTOP).
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.signals = tuple(map(_as_signal, signals)) or (signal.SIGTERM, signal.SIGUSR1)
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this rank has got such a signal."""
        return self.received is not None

    def on_any_rank(self) -> bool:
        """Whether any rank of the default group has: the same answer on all. All ranks must call it.

        One all-reduce of one number. Who has one in each step already can put ``requested`` into that.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), dtype=torch.int32, device=_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return self.requested if dry_run.active() else bool(flag.item())

    def __enter__(self) -> StopSignal:
        """Handles the signals.

        Raises:
            StateError: in another thread than the main one, which alone can handle signals; or it is
                entered already.
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
                signal.siginterrupt(number, False)  # system calls of torch's threads go on
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: it was installed by C code, and can't be set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        before = self._before.get(signal.Signals(number))
        if isinstance(getattr(before, "__self__", None), StopSignal):
            before(number, frame)  # type: ignore[misc]  # of the block around this one


def _as_signal(value: object) -> signal.Signals:
    try:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        found = signal.Signals(value)
    except ValueError:
        raise Parallel3dError(
            f"StopSignal: {value!r} is no signal; give some of the module signal, such as signal.SIGTERM"
        ) from None
    if found.name in ("SIGKILL", "SIGSTOP"):
        raise Parallel3dError(
            f"StopSignal: no process can handle {found.name}; give another signal"
        )
    return found


def _device() -> torch.device:
    """Where the default group's collectives take tensors: the CPU if they do there."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
