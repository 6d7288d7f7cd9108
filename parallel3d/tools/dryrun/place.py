"""Where an operation of the program is: in which module, phase and step, and on which of a GPU's streams."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from parallel3d._torch.autograd import in_backward_pass
from parallel3d._util.trace import issuing


class Place:
    """Follows the program with torch's global hooks on modules and optimizers.

    Attributes:
        roots: the modules that were called outside any module.
        optimizers: the optimizers that have stepped, with how often.
        steps: number of optimizer steps done; ``on_step`` is called with it after each.
        on_backward: called when a backward begins.
        paused: whether the program runs on real tensors and is not recorded.
    """

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: Counter[Optimizer] = Counter()
        self.steps = 0
        self.on_step = on_step
        self.on_backward: Callable[[], None] | None = None
        self.paused = False
        self._stack: list[nn.Module] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stepping = 0
        self._was_backward = False

    @property
    def module(self) -> str:
        """Path of the innermost module that runs; in backward the engine's unit."""
        if self._stack:
            return self._names.get(self._stack[-1], type(self._stack[-1]).__name__)
        # Outside backward it may still be the unit of the last forward.
        return issuing.unit if in_backward_pass() else ""

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` (with recomputation), ``optimizer`` or ``other``."""
        backward = in_backward_pass()
        begins, self._was_backward = backward and not self._was_backward, backward
        if begins and self.on_backward is not None:
            self.on_backward()
        if backward:
            return "backward"
        return "forward" if self._stack else "optimizer" if self._stepping else "other"

    @property
    def recomputing(self) -> bool:
        """Whether a module runs within backward: activation checkpointing."""
        return bool(self._stack) and in_backward_pass()

    def unrecorded(self) -> Any:
        """Returns a context that runs on real tensors and is not recorded."""
        return patch.object(self, "paused", True)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Registers the hooks for the body."""
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
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.paused:
            while self._stack and self._stack.pop() is not module:
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
        most = max(self.optimizers.values())  # several optimizers step in turn
        if most > self.steps and not self._stepping:
            self.steps = most
            self.on_step(most)


# Streams: which operations come after which.


class Event:
    """A point in a stream; ``after`` and ``collectives`` are those of ``FakeStream``."""

    def __init__(self, stream: FakeStream) -> None:
        self._streams = stream.streams
        stream.collectives -= self._streams.over
        self.after = frozenset(stream.after)
        self.collectives = frozenset(stream.collectives)

    def synchronize(self) -> None:
        """The host waits, and with it what is put on any stream later."""
        self._streams.compute.wait_event(self)

    def wait(self) -> None:
        """The current stream waits."""
        self._streams.current_stream().wait_event(self)


class FakeStream:
    """A stream with the part of CUDA's interface that the engine uses; number 0 is the computation's.

    Attributes:
        after: indices of the operations on other streams, except the computation's, that come before the
            next operation on this one.
        collectives: indices of the collectives that have ended then, without those that the computation has
            waited for.
    """

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number
        self.after: set[int] = set()
        self.collectives: set[int] = set()

    def record_event(self) -> Event:
        """Returns the end of what was put on the stream so far."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """What is put on the stream from now on comes after ``event``; one of a real GPU is ignored."""
        if not isinstance(event, Event):
            return
        if self.number:
            self.after |= event.after
            self.collectives |= event.collectives
            return
        found = sorted(event.collectives - self.streams.over)
        self.streams.over.update(found)
        for index in found:
            after = sorted(event.after) if index == found[-1] else ()
            self.streams.on_wait(index, tuple(after))

    def wait_stream(self, other: FakeStream) -> None:
        """What is put on the stream from now on comes after what was put on ``other`` so far."""
        self.wait_event(other.record_event())


class Streams:
    """Replaces ``torch.cuda`` for the engine: makes streams and has the current one.

    What is put on a stream comes after everything that was put on the computation's before, because the
    engine's streams wait for it first. ``on_wait`` is called when the computation begins to wait for a
    collective, with its index among the collectives and the indices of the operations that come before.
    """

    def __init__(self, on_wait: Callable[[int, tuple[int, ...]], None]) -> None:
        self.on_wait = on_wait
        self._numbers = count(1)
        self.compute = FakeStream(self, 0)
        self._current = self.compute
        self.over: set[int] = set()  # the collectives that the computation has waited for

    def Stream(self, priority: int = 0) -> FakeStream:
        """Returns a new stream."""
        return FakeStream(self, next(self._numbers))

    def current_stream(self) -> FakeStream:
        return self._current

    def stream(self, stream: FakeStream) -> Any:
        """Returns a context in which ``stream`` is the current one."""
        return patch.object(self, "_current", stream)

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Puts an operation on the current stream.

        Returns the stream's number, and the operations that come before.
        """
        stream = self._current
        if stream is self.compute:
            return 0, ()
        after, stream.after = tuple(sorted(stream.after)), {position}
        return stream.number, after

    def arrived(self, index: int) -> bool:
        """What is put on the current stream from now on comes after the collective at ``index``.

        Returns whether the current stream is the computation's.
        """
        if self._current is self.compute:
            self.over.add(index)
            return True
        self._current.collectives.add(index)
        return False
