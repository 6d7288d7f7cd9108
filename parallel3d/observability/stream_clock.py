"""StreamClock: for how long an accelerator's stream waits for communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from parallel3d.observability.exposed import Patch

__all__ = ["StreamClock"]

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
