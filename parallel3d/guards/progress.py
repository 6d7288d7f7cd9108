"""Progress: where this rank is in its training, as far as anything here counts it."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from parallel3d._trace import issuing

__all__ = ["Progress", "counting_steps", "here", "stack_of"]


class Progress:
    """Attributes:
    step: optimizer steps so far, of the optimizer with the most.
    phase: what ``guards.phase`` has set; ``start`` until the first step is over.
    forwards: what ``issuing.forwards`` was after the last step.
    usual: how many forwards with a gradient the last step had.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As at the start."""
        self.step = 0
        self.phase = "start"
        self.forwards = issuing.forwards
        self.usual = 0
        self._begun = issuing.forwards, issuing.runs
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    @property
    def micro_batch(self) -> int:
        """Forwards with a gradient since the last step: the number of the micro-batch under way, from 1."""
        return issuing.forwards - self.forwards

    @property
    def runs(self) -> tuple[int, int]:
        """Forwards that models have begun, with a gradient and without."""
        forwards = issuing.forwards - self._begun[0]
        return forwards, issuing.runs - self._begun[1] - forwards

    def stepped(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` is over."""
        self._steps[optimizer] = count = self._steps.get(optimizer, 0) + 1
        self.step = max(self.step, count)
        self.usual = self.micro_batch
        self.forwards = issuing.forwards

    def __str__(self) -> str:
        """For example ``step 3, unit layers.1, phase step``; steps count from 1."""
        unit = f", unit {issuing.unit}" if issuing.unit else ""
        return f"step {self.step + 1}{unit}, phase {self.phase}"


here = Progress()
"""This rank's."""

Hook = Callable[[Optimizer], Any]


@contextmanager
def counting_steps(*, before: Hook | None = None, after: Hook | None = None) -> Iterator[None]:
    """Within it ``before`` and ``after`` are called around every step of every optimizer."""
    handles = []
    if before is not None:
        handles.append(register_optimizer_step_pre_hook(lambda o, args, kwargs: before(o)))
    if after is not None:
        handles.append(register_optimizer_step_post_hook(lambda o, args, kwargs: after(o)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_LIBRARIES = tuple(
    {str(Path(p).resolve()) for p in (sysconfig.get_path("stdlib"), *torch.__path__)}
    | {str(Path(__file__).resolve().parent)}
)


def stack_of(thread: int, most: int = 3) -> str:
    """What a thread does: its innermost frames outside torch and Python's library, innermost first."""
    frame = sys._current_frames().get(thread)
    found: list[str] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
            found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return ", called by ".join(found) or "unknown"
