"""Place: in which module, phase and step of the program an operation runs."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from parallel3d._torch.autograd import in_backward_pass
from parallel3d._util.trace import issuing

_OURS = ("parallel3d._trace.", "parallel3d._util.", "parallel3d.tools.dryrun.")
_UNSEEN = ("torch.", "contextlib.", "unittest.", *_OURS)
_SEEN = "torch.distributed.fsdp."  # of torch, the code that makes streams


class Place:
    """Follows the program's modules and optimizers by torch's global hooks: where does an operation run?

    Attributes:
        roots: the modules that were called outside any module.
        optimizers: optimizer -> how often it has stepped.
        steps: number of optimizer steps done; after each, ``on_step`` is called with it.
        on_backward: called when a backward begins.
        on_forward: called with the inputs of a module that is called outside any module.
        on_optimizer: called with an optimizer that has stepped.
        paused: whether the program runs on real tensors now, and nothing is recorded.
    """

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: Counter[Optimizer] = Counter()
        self.steps = 0
        self.on_step = on_step
        self.on_backward: Callable[[], None] | None = None
        self.on_forward: Callable[[Any], None] | None = None
        self.on_optimizer: Callable[[Optimizer], None] | None = None
        self.paused = False
        self._stack: list[nn.Module] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stepping = 0
        self._was_backward = False

    @property
    def module(self) -> str:
        """Path of the innermost module that runs; in a backward outside modules the engine's unit."""
        if self._stack:
            return self._names.get(self._stack[-1], type(self._stack[-1]).__name__)
        # Outside backward it may still be the unit of the last forward.
        return issuing.unit if in_backward_pass() else ""

    @property
    def phase(self) -> str:
        """ "forward", "backward" (recomputation included), "optimizer" or "other"."""
        backward = in_backward_pass()
        begins, self._was_backward = backward and not self._was_backward, backward
        if begins and self.on_backward is not None:
            self.on_backward()
        if backward:
            return "backward"
        return "forward" if self._stack else "optimizer" if self._stepping else "other"

    @property
    def recomputing(self) -> bool:
        """Whether a module runs within backward, as activation checkpointing does."""
        return bool(self._stack) and in_backward_pass()

    def unrecorded(self) -> Any:
        """Returns a context in which the program runs on real tensors and nothing is recorded."""
        return patch.object(self, "paused", True)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within this context the hooks are registered."""
        with (
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._begin_step),
            optimizers.register_optimizer_step_post_hook(self._end_step),
        ):
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.paused:
            return
        if not self._stack and module not in self._names:
            self.roots.append(module)
            self._names.update({submodule: name for name, submodule in module.named_modules()})
        if not self._stack and self.on_forward is not None:
            self.on_forward(args)
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while not self.paused and self._stack and self._stack.pop() is not module:
            pass

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.paused:
            self._stepping += 1
            self.optimizers.setdefault(optimizer, 0)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.paused:
            return
        self._stepping -= 1
        self.optimizers[optimizer] += 1
        if self.on_optimizer is not None and not self._stepping:
            self.on_optimizer(optimizer)
        most = max(self.optimizers.values())  # several optimizers step in turn
        if most > self.steps and not self._stepping:
            self.steps = most
            self.on_step(most)


def running_line() -> tuple[CodeType, int] | None:
    """Returns (code, line number) that runs: the user's, the engine's, or torch's ``fully_shard``'s."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "") + "."
        if name.startswith(_SEEN) or not name.startswith(_UNSEEN):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def line_text(line: tuple[CodeType, int] | None) -> str:
    """Returns the line as "file:line, in function"."""
    return "?" if line is None else f"{line[0].co_filename}:{line[1]}, in {line[0].co_name}"
