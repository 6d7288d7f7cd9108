"""Where the program is: the module that runs, the phase of the step, the steps done."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from parallel3d._torch.autograd import in_backward_pass
from parallel3d._util.trace import issuing


class Place:
    """Follows the program by torch's global hooks on modules and optimizers.

    Attributes:
        roots: the modules that were called from outside any module.
        optimizers: those that have stepped.
        steps: optimizer steps done.
        on_step: called after each.
        paused: what happens meanwhile does not count.
    """

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.steps = 0
        self.on_step = on_step
        self.on_backward: Callable[[], None] | None = None
        self.paused = False
        self._stack: list[nn.Module] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stepping = 0
        self._done: Counter[int] = Counter()
        self._was_backward = False

    @property
    def module(self) -> str:
        """Path of the innermost module that runs; in backward the engine's unit."""
        if self._stack:
            return self._names.get(self._stack[-1], type(self._stack[-1]).__name__)
        return issuing.unit if in_backward_pass() else ""  # a forward leaves its last unit's

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` (recomputation too), ``optimizer`` or ``other``."""
        backward = in_backward_pass()
        if backward and not self._was_backward and self.on_backward is not None:
            self._was_backward = True
            self.on_backward()
        self._was_backward = backward
        if backward:
            return "backward"
        if self._stack:
            return "forward"
        return "optimizer" if self._stepping else "other"

    @property
    def recomputing(self) -> bool:
        """Whether a module runs within backward: activation checkpointing."""
        return bool(self._stack) and in_backward_pass()

    @contextmanager
    def following(self) -> Iterator[None]:
        """The hooks are there in the body."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._begin_step),
                register_optimizer_step_post_hook(self._end_step),
            ):
                stack.callback(handle.remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.paused:
            return
        if not self._stack and module not in self._names:
            self.roots.append(module)
            for name, each in module.named_modules():
                self._names[each] = name
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.paused:
            return
        while self._stack and self._stack.pop() is not module:
            pass

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.paused:
            return
        self._stepping += 1
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.paused:
            return
        self._stepping -= 1
        self._done[id(optimizer)] += 1
        most = max(self._done.values())  # several optimizers take turns
        if most > self.steps and not self._stepping:
            self.steps = most
            if self.on_step is not None:
                self.on_step(most)
