"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine names the unit whose forward or backward begins, and, around a bucket's own collective, the
bucket's unit (a prefetch is another unit's). ``testing.record_collectives`` reads the name when it sees
a call. Attribute assignments are all the hot path pays, whether or not a recorder is active.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Issuing:
    """Name of the unit whose collectives are being issued; ``""`` when none is known.

    Attributes:
        made_of: (kind, bytes) of the collective that the messages now issued make together, or None.
        noted: whether the recorder has it already.
        forwards: how many forwards with a gradient roots have begun.
        runs: how many forwards, with or without.
        backwards: how many backwards have reached a root.
        compared: whether ranks compare each collective before it is issued, see ``guards.debug``.
        on_run: called when one begins; None: nobody wants to know. See ``guards.watch``.
        after_backward: called once when the call of autograd's engine under way has returned; see ``audit``.
    """

    def __init__(self) -> None:
        self.unit: str = ""
        self.call: object = None  # other for each call that is issued member by member
        self.made_of: tuple[str, int] | None = None
        self.noted = False
        self.forwards = 0
        self.runs = 0
        self.backwards = 0
        self.compared = False
        self.on_run: Callable[[], None] | None = None
        self.after_backward: Callable[[], None] | None = None

    @contextmanager
    def as_unit(self, name: str) -> Iterator[None]:
        """What is issued in the body belongs to the unit ``name``."""
        before, self.unit = self.unit, name
        try:
            yield
        finally:
            self.unit = before

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """What is issued in the body are the members of one call."""
        self.call = object()
        try:
            yield
        finally:
            self.call = None

    @contextmanager
    def messages_of(self, kind: str, size: int) -> Iterator[None]:
        """What is issued in the body is one collective, or one member, that brings ``size`` bytes."""
        self.made_of, self.noted = (kind, size), False
        try:
            yield
        finally:
            self.made_of = None


issuing = _Issuing()
