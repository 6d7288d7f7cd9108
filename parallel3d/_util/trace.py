"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine names the unit whose forward or backward begins, and, around a bucket's own collective, the
bucket's unit (a prefetch is another unit's). ``testing.record_collectives`` reads the name when it sees
a call. Attribute assignments are all the hot path pays, whether or not a recorder is active.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Issuing:
    """For which unit collectives are issued now, and counters and callbacks that other packages read."""

    def __init__(self) -> None:
        self.unit: str = ""  # "": none is known
        self.call: object = None  # other for each call that is issued member by member
        # (kind, bytes) of the collective that the messages now issued make together.
        self.made_of: tuple[str, int] | None = None
        self.noted = False  # whether the recorder has it already
        self.forwards = 0  # with a gradient, that roots have begun
        self.runs = 0  # forwards with or without
        self.backwards = 0  # that have reached a root
        self.compared = False  # whether ranks compare each collective first, see ``guards.debug``
        self.on_run: Callable[[], None] | None = (
            None  # called when a forward begins; ``guards.watch``
        )
        # Called once when the call of autograd's engine under way has returned; see ``audit``.
        self.after_backward: Callable[[], None] | None = None

    @contextmanager
    def as_unit(self, name: str) -> Iterator[None]:
        """Context manager whose collectives are issued for the unit ``name``."""
        before, self.unit = self.unit, name
        try:
            yield
        finally:
            self.unit = before

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Context manager whose collectives the recorder counts as one coalesced call."""
        self.call = object()
        try:
            yield
        finally:
            self.call = None

    @contextmanager
    def messages_of(self, kind: str, size: int) -> Iterator[None]:
        """Context manager whose point-to-point messages are recorded as one ``kind`` of ``size`` bytes."""
        self.made_of, self.noted = (kind, size), False
        try:
            yield
        finally:
            self.made_of = None


issuing = _Issuing()
