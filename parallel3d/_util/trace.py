"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine names the unit whose forward or backward begins, and, around a bucket's own collective, the
bucket's unit (a prefetch is another unit's). ``testing.record_collectives`` reads the name when it sees
a call. Attribute assignments are all the hot path pays, whether or not a recorder is active.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Issuing:
    """Name of the unit whose collectives are being issued; ``""`` when none is known.

    ``with issuing.as_unit(name):`` names another one for a while. ``with issuing.one_call():`` says that what
    is issued within are the members of one call.

    Attributes:
        made_of: (kind, bytes) of the collective that the messages now issued make together, or None.
        noted: whether the recorder has it already.
        forwards: how many forwards with a gradient roots have begun.
        runs: how many forwards, with or without.
        on_run: called when one begins; None: nobody wants to know. See ``guards.watch``.
    """

    __slots__ = (
        "_before",
        "_one_call",
        "call",
        "forwards",
        "made_of",
        "noted",
        "on_run",
        "runs",
        "unit",
    )

    def __init__(self) -> None:
        self.unit: str = ""
        self.call: object = None  # other for each call that is issued member by member
        self.made_of: tuple[str, int] | None = None
        self.noted = False
        self.forwards = 0
        self.runs = 0
        self.on_run: Callable[[], None] | None = None
        self._before: str = ""
        self._one_call = _OneCall(self)

    def as_unit(self, name: str) -> "_Issuing":
        """Not to be nested: collectives are leaves."""
        self._before, self.unit = self.unit, name
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.unit = self._before

    def one_call(self) -> "_OneCall":
        """Not to be nested either."""
        return self._one_call

    @contextmanager
    def messages_of(self, kind: str, size: int) -> Iterator[None]:
        """What is issued in the body is one collective, or one member, that brings ``size`` bytes."""
        self.made_of, self.noted = (kind, size), False
        try:
            yield
        finally:
            self.made_of = None


class _OneCall:
    __slots__ = ("_issuing",)

    def __init__(self, issuing: _Issuing) -> None:
        self._issuing = issuing

    def __enter__(self) -> None:
        self._issuing.call = object()

    def __exit__(self, *exc: object) -> None:
        self._issuing.call = None


issuing = _Issuing()
