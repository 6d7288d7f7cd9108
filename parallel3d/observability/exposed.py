"""Where a step waits for communication, by mesh axis: exposed is what computation does not hide.

Nothing is measured, and nothing costs anything, outside of ``with meter:``. Within it the methods of process
groups that start a collective, and the ``wait`` of what they return, are replaced by ones that take the time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._torch.groups import COLLECTIVES
from parallel3d._util.dry_run import active

WORLD = "world"
"""What the default group is called where no axis has it."""
OTHER = "other"
"""Groups whose ranks are not those of one axis."""


class Clock(Protocol):
    """What waits are measured by."""

    def begin(self) -> None:
        """A step begins."""

    def start(self) -> Any:
        """A wait begins: something that ``stop`` takes."""

    def stop(self, started: Any, axis: str) -> None:
        """It has ended."""

    def issued(self, axis: str) -> None:
        """A collective was issued."""

    def patches(self, patch: Patch) -> None:
        """Replaces more methods, while it measures."""

    def take(self, *, failed: bool = False) -> tuple[float, dict[str, float]]:
        """(seconds since ``begin``, seconds of the waits by axis); ``failed``: an error ended the step."""


class HostClock:
    """Of the calling thread: for collectives on a CPU, which it waits for.

    Args:
        now: seconds, by any clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.began = 0.0

    def begin(self) -> None:
        """See ``Clock``."""
        self.seconds.clear()
        self.began = self.now()

    def start(self) -> float:
        """See ``Clock``."""
        return self.now()

    def stop(self, started: float, axis: str) -> None:
        """See ``Clock``."""
        self.seconds[axis] += self.now() - started

    def issued(self, axis: str) -> None:
        """See ``Clock``."""

    def patches(self, patch: Patch) -> None:
        """See ``Clock``."""

    def take(self, *, failed: bool = False) -> tuple[float, dict[str, float]]:
        """See ``Clock``."""
        return self.now() - self.began, dict(self.seconds)


class Patch:
    """Methods that are others for a while."""

    def __init__(self) -> None:
        self._originals: list[tuple[type, str, Any]] = []

    def __call__(self, kind: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replaces the method that ``kind`` has, or inherits, by ``make(method)``; once."""
        owner = next((c for c in kind.__mro__ if name in vars(c)), None)
        if owner is None or any(o is owner and n == name for o, n, _ in self._originals):
            return
        original = vars(owner)[name]
        self._originals.append((owner, name, original))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        """Puts all back."""
        while self._originals:
            setattr(*self._originals.pop())


class ExposedTime:
    """Measures what is within ``with meter:``, on the thread that enters and on autograd's.

    On a CPU: how long the thread is in collectives and in waits for them. On an accelerator: for how long
    its current stream has nothing to do but to wait for them (see ``StreamClock``). Both contain what a rank
    waits for slower ones. Not seen are collectives in compiled code, and those of C++ (DDP's).

    Args:
        meshes: that name the groups; axes without names are called "0", "1". Of axes that share a group, the
            first. A group of no mesh whose ranks are all in one axis's counts as that axis's: so are those
            that the engine makes for itself.
        clock: by default the device's: ``StreamClock(torch.cuda)`` for meshes of GPUs, else ``HostClock()``.

    Attributes:
        seconds: by axis, of the last body; axes without any are absent. ``"world"``: the default group, where
            it is no axis's; ``"other"``: groups of several axes, or of none.
        total: seconds of the last body. After an error on a GPU nothing is known: 0, and no axes.
    """

    def __init__(self, *meshes: DeviceMesh, clock: Clock | None = None) -> None:
        self.clock: Clock = _clock_of(meshes) if clock is None else clock
        self.axes: dict[str, str] = {}  # name of a group -> axis
        self._ranks: dict[str, set[int]] = {}  # of axes
        self.seconds: dict[str, float] = {}
        self.total = 0.0
        self._kinds: set[type] = set()
        for mesh in meshes:
            for at, axis in enumerate(mesh.mesh_dim_names or map(str, range(mesh.ndim))):
                group = mesh.get_group(at)
                self._add(group, axis)
                self._ranks.setdefault(axis, set(dist.get_process_group_ranks(group)))
        if dist.is_initialized() and dist.group.WORLD is not None:
            self._add(dist.group.WORLD, WORLD)
        self._works: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._patch = Patch()
        self._thread = _Thread(threading.get_ident())

    def _add(self, group: Any, axis: str) -> None:
        self.axes.setdefault(group.group_name, axis)
        self._kinds.add(type(group))

    def _axis_of(self, group: Any) -> str:
        name = group.group_name
        if name not in self.axes:
            try:
                ranks = set(dist.get_process_group_ranks(group))
            except (KeyError, ValueError):  # torch doesn't know it
                ranks = set()
            around = [axis for axis, all_of_it in self._ranks.items() if ranks <= all_of_it]
            self.axes[name] = around[0] if len(ranks) > 1 and around else OTHER
        return self.axes[name]

    @property
    def own(self) -> float:
        """Seconds of the last body without its waits: what this rank took for itself."""
        return max(0.0, self.total - sum(self.seconds.values()))

    def __enter__(self) -> ExposedTime:
        self._thread = _Thread(threading.get_ident())
        for kind in self._kinds:
            for name in COLLECTIVES:
                self._patch(kind, name, self._collective)
        self._patch(dist.Work, "wait", self._wait)
        self.clock.patches(self._patch)
        self.clock.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *rest: object) -> None:
        self._patch.undo()
        self.total, self.seconds = self.clock.take(failed=kind is not None)
        self._works.clear()

    def _collective(self, original: Any) -> Callable[..., Any]:
        clock = self.clock

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            if thread.inside or not thread.counts:
                return original(group, *args, **kwargs)
            axis = self._axis_of(group)
            thread.inside = True
            started = clock.start()
            try:
                work = original(group, *args, **kwargs)
            finally:
                clock.stop(started, axis)
                thread.inside = False
            clock.issued(axis)
            if isinstance(work, dist.Work):
                self._works[work] = axis
                self._patch(type(work), "wait", self._wait)
            return work

        return call

    def _wait(self, original: Any) -> Callable[..., Any]:
        clock = self.clock

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            if thread.inside or not thread.counts:
                return original(work, *args, **kwargs)
            axis = self._works.get(work, OTHER)
            thread.inside = True
            started = clock.start()
            try:
                return original(work, *args, **kwargs)
            finally:
                clock.stop(started, axis)
                thread.inside = False

        return wait


class _Thread(threading.local):
    """What is known of each thread.

    Attributes:
        counts: whether it is the training's: the one that enters, or one of autograd's, which Python has not
            started. A thread that writes a checkpoint isn't.
        inside: whether it is in a call that is measured: what that calls is part of it.
    """

    def __init__(self, entered: int) -> None:  # called once in each thread
        here = threading.get_ident()
        self.inside = False
        self.counts = here == entered or here not in _python_threads()


def _python_threads() -> Iterable[int | None]:
    """Without those that Python only knows of, as logging in a hook makes it know autograd's."""
    return {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}


def _clock_of(meshes: Iterable[DeviceMesh]) -> Clock:
    on_gpus = any(mesh.device_type == "cuda" for mesh in meshes)
    if not on_gpus or active() or not torch.cuda.is_available():
        return HostClock()

    return StreamClock(torch.cuda)


# StreamClock: for how long an accelerator's stream waits for communication.

_AXIS = (
    "_parallel3d_axis"  # of an event: what its stream had communicated over when it was recorded
)


class StreamClock:
    """Puts an event before and after each wait of the stream that computes; see ``exposed.Clock``.

    A wait is a call of a collective or of its work's ``wait`` while that stream is the current one, and a
    wait of that stream for an event of another one, on which a collective was issued before (the engine's
    way). Between two events that nothing delays lie a few microseconds: that much each wait counts at least.

    Args:
        device: ``torch.cuda``, or what has the same ``Event``, ``Stream`` and ``current_stream``.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._compute: Any = None
        self._began: Any = None
        self._waits: list[tuple[str, Any, Any]] = []
        self._last: dict[Any, str] = {}  # stream -> axis of the last collective issued on it

    def begin(self) -> None:
        """See ``Clock``."""
        self._compute = self.device.current_stream()
        self._waits = []
        self._began = self._event()

    def start(self) -> Any:
        """See ``Clock``. None where another stream than the one that computes is the current one."""
        return self._event() if self.device.current_stream() == self._compute else None

    def stop(self, started: Any, axis: str) -> None:
        """See ``Clock``."""
        if started is not None:
            self._waits.append((axis, started, self._event()))

    def issued(self, axis: str) -> None:
        """See ``Clock``."""
        self._last[self.device.current_stream()] = axis

    def patches(self, patch: Patch) -> None:
        """See ``Clock``."""
        patch(self.device.Stream, "record_event", self._record_event)
        patch(self.device.Stream, "wait_event", self._wait_event)

    def take(self, *, failed: bool = False) -> tuple[float, dict[str, float]]:
        """See ``Clock``. Returns when the stream has come so far, and at once after an error: then it may
        wait for ranks that never come.
        """
        seconds: dict[str, float] = defaultdict(float)
        total = 0.0
        if not failed:
            end = self._event()
            end.synchronize()
            for axis, before, after in self._waits:
                seconds[axis] += before.elapsed_time(after) / 1e3
            total = self._began.elapsed_time(end) / 1e3
        self._waits, self._began, self._compute = [], None, None
        return total, dict(seconds)

    def _event(self) -> Any:
        event = self.device.Event(enable_timing=True)
        event.record(self._compute)
        return event

    def _record_event(self, original: Any) -> Callable[..., Any]:
        def record_event(stream: Any, event: Any = None) -> Any:
            made = original(stream, event) if event is not None else original(stream)
            with suppress(AttributeError):  # an event that is not torch.cuda's own
                setattr(made, _AXIS, self._last.get(stream))
            return made

        return record_event

    def _wait_event(self, original: Any) -> Callable[..., Any]:
        def wait_event(stream: Any, event: Any) -> Any:
            axis = getattr(event, _AXIS, None)
            if axis is None or stream != self._compute:
                return original(stream, event)
            before = self._event()
            result = original(stream, event)
            self._waits.append((axis, before, self._event()))
            return result

        return wait_event
