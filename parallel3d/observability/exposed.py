"""ExposedTime: measures how long a step waits for communication that computation does not hide, by mesh axis.

Within ``with meter:`` the methods of process groups that issue a collective, and ``wait`` of the works that
they return, are replaced by methods that measure time. Outside, nothing is measured and nothing costs time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._torch.dtensor import axis_groups
from parallel3d._torch.groups import COLLECTIVES

WORLD = "world"  # name of the default group if no axis has it
OTHER = "other"  # name of groups whose ranks are not those of one axis


class StreamPatch:
    """Replaces methods of classes until ``undo``."""

    def __init__(self) -> None:
        self._originals: dict[tuple[type, str], Any] = {}

    def __call__(self, kind: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replaces the method ``name`` of ``kind`` (own or inherited) by ``make(method)``, once only."""
        owner = next((c for c in kind.__mro__ if name in vars(c)), None)
        if owner is not None and (owner, name) not in self._originals:
            self._originals[owner, name] = original = vars(owner)[name]
            setattr(owner, name, make(original))

    def undo(self) -> None:
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()


class HostClock:
    """Measures waits of the calling thread, for collectives on a CPU.

    Args:
        now: returns seconds, by any clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.began = 0.0

    def begin(self) -> None:
        self.seconds.clear()
        self.began = self.now()

    def start(self) -> Any:
        """Begins a wait and returns the argument for ``stop``."""
        return self.now()

    def stop(self, started: Any, axis: str) -> None:
        self.seconds[axis] += self.now() - started

    def issued(self, axis: str) -> None:
        """Called after a collective over ``axis`` was issued; does nothing for a CPU."""

    def patches(self, patch: StreamPatch) -> None:
        """Called before a measured step, to replace further methods by ``patch``; does nothing for a CPU."""

    def take(self, *, failed: bool = False) -> tuple[float, dict[str, float]]:
        """Ends the measured step; ``failed``: its body raised an error.

        Returns the seconds since ``begin``, and the seconds of the waits by axis.
        """
        return self.now() - self.began, dict(self.seconds)


# Of an event: the axis of the last collective issued on its stream before it.
_AXIS = "_parallel3d_axis"


class StreamClock(HostClock):
    """Measures waits of an accelerator's compute stream, by events recorded before and after each wait.

    A wait is a call of a collective or of its work's ``wait`` while the compute stream is the current one, or
    a wait of the compute stream for an event of another stream on which a collective was issued before (as
    the engine does). Two events with nothing between them are a few microseconds apart, the least that a wait
    counts.

    Args:
        device: ``torch.cuda``, or a stand-in with the same ``Event``, ``Stream`` and ``current_stream``.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._compute: Any = None
        self._began: Any = None
        self._waits: list[tuple[str, Any, Any]] = []
        self._last: dict[Any, str] = {}  # stream -> axis of the last collective issued on it

    def begin(self) -> None:
        self._compute = self.device.current_stream()
        self._waits = []
        self._began = self._event()

    def start(self) -> Any:
        """Returns a recorded event, or None if the current stream is not the compute stream."""
        return self._event() if self.device.current_stream() == self._compute else None

    def stop(self, started: Any, axis: str) -> None:
        if started is not None:
            self._waits.append((axis, started, self._event()))

    def issued(self, axis: str) -> None:
        self._last[self.device.current_stream()] = axis

    def patches(self, patch: StreamPatch) -> None:
        patch(self.device.Stream, "record_event", self._record_event)
        patch(self.device.Stream, "wait_event", self._wait_event)

    def take(self, *, failed: bool = False) -> tuple[float, dict[str, float]]:
        """As ``HostClock.take``; waits for the compute stream, unless ``failed``: ranks may be absent."""
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
            recorded = original(stream, event) if event is not None else original(stream)
            with suppress(AttributeError):  # an event that is not torch.cuda's own
                setattr(recorded, _AXIS, self._last.get(stream))
            return recorded

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


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the names of the mesh's axes, or "0", "1", ..."""
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


class ExposedTime:
    """Measures the waits for collectives in the body of ``with meter:``, on the thread that enters it and on
    autograd's threads.

    On a CPU a wait is the time that the thread is in a collective or in ``wait``; on an accelerator the time
    that its current stream can only wait for one (see ``StreamClock``). Both include waiting for slower
    ranks. Collectives in compiled code and those issued in C++ (DDP's) are not seen.

    Args:
        meshes: a wait for one of their process groups counts as its axis's; axes without names are "0", "1".
            If several axes share a group it counts as the first one's. A group of no mesh whose ranks are all
            in one axis's counts as that axis's, as do those that the engine makes for itself.
        clock: by default ``StreamClock(torch.cuda)`` for meshes of GPUs, else ``HostClock()``.

    Attributes:
        seconds: of waits in the last body, by axis; axes without a wait are absent. ``"world"`` is the
            default group if it is no axis's, ``"other"`` are groups of several axes or of none.
        total: seconds of the last body. After an error on a GPU nothing is known: 0, and no axes.
    """

    def __init__(self, *meshes: DeviceMesh, clock: HostClock | None = None) -> None:
        if clock is None:
            on_gpus = any(mesh.device_type == "cuda" for mesh in meshes)
            clock = (
                StreamClock(torch.cuda) if on_gpus and torch.cuda.is_available() else HostClock()
            )
        self.clock = clock
        self.axes: dict[str, str] = {}  # name of a group -> axis
        self._ranks: dict[str, set[int]] = {}  # by axis
        self.seconds: dict[str, float] = {}
        self.total = 0.0
        self._kinds: set[type] = set()
        for mesh in meshes:
            groups = {axis: mesh.get_group(at) for at, axis in enumerate(axis_names(mesh))}
            if mesh.mesh_dim_names:
                groups = axis_groups(mesh)
            for axis, group in groups.items():
                self._add(group, axis)
                self._ranks.setdefault(axis, set(dist.get_process_group_ranks(group)))
        if dist.is_initialized() and dist.group.WORLD is not None:
            self._add(dist.group.WORLD, WORLD)
        self._works: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._patch = StreamPatch()
        self._thread = _Thread(threading.get_ident())

    def _add(self, group: Any, axis: str) -> None:
        self.axes.setdefault(group.group_name, axis)
        self._kinds.add(type(group))

    def _axis_of(self, group: Any) -> str:
        name = group.group_name
        if name not in self.axes:
            try:
                ranks = set(dist.get_process_group_ranks(group))
            except (KeyError, ValueError):  # torch does not know the group
                ranks = set()
            # The smallest, the last of equals: of cp and shard_cp the one that parameters are sharded over.
            around = [axis for axis in reversed(self._ranks) if ranks <= self._ranks[axis]]
            near = min(around, key=lambda axis: len(self._ranks[axis]), default=OTHER)
            self.axes[name] = near if len(ranks) > 1 else OTHER
        return self.axes[name]

    @property
    def names(self) -> list[str]:
        """Names of the axes with several ranks, and of axes joined from others, such as ``shard_cp``."""
        return [axis for axis, ranks in self._ranks.items() if len(ranks) > 1]

    @property
    def own(self) -> float:
        """Seconds of the last body, less its waits for communication."""
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
        def issued(work: Any, axis: str) -> None:
            self.clock.issued(axis)
            if isinstance(work, dist.Work):
                self._works[work] = axis
                self._patch(type(work), "wait", self._wait)

        return self._measured(original, self._axis_of, issued)

    def _wait(self, original: Any) -> Callable[..., Any]:
        return self._measured(original, lambda work: self._works.get(work, OTHER), lambda *_: None)

    def _measured(
        self, original: Any, axis_of: Callable[[Any], str], issued: Callable[[Any, str], None]
    ) -> Callable[..., Any]:
        """Returns a method that calls ``original``, counts its time as a wait for ``axis_of(self)``, and then
        calls ``issued(result, axis)``."""
        clock = self.clock

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            if thread.inside or not thread.counts:
                return original(target, *args, **kwargs)
            axis = axis_of(target)
            thread.inside = True
            started = clock.start()
            try:
                result = original(target, *args, **kwargs)
            finally:
                clock.stop(started, axis)
                thread.inside = False
            issued(result, axis)
            return result

        return call


class _Thread(threading.local):
    """Per thread: whether its waits count, and whether it is in a call that is measured."""

    def __init__(self, entered: int) -> None:  # called once in each thread
        here = threading.get_ident()
        self.inside = False  # whether it is in a measured call, whose own calls are part of it
        # Whether it is the thread that enters, or one of autograd's, which Python has not started. A thread
        # that writes a checkpoint is neither. Dummy threads are ones that Python only knows of, such as
        # autograd's after logging in a hook.
        started = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        self.counts = here == entered or all(here != thread.ident for thread in started)
