"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine names the unit whose forward or backward begins, and, around a bucket's own collective, the
bucket's unit (a prefetch is another unit's). ``testing.record_collectives`` reads the name when it sees
a call. Attribute assignments are all the hot path pays, whether or not a recorder is active.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["issuing"]


class _Issuing:
    """Name of the unit whose collectives are being issued; ``""`` when none is known.

    ``with issuing.as_unit(name):`` names another one for a while.

    Attributes:
        one: (kind, bytes) of the collective that the messages being issued are together, until the
            recorder has noted it; then ``noted``.
    """

    __slots__ = ("_before", "noted", "one", "unit")

    def __init__(self) -> None:
        self.unit: str = ""
        self._before: str = ""
        self.one: tuple[str, int] | None = None
        self.noted = False

    def as_unit(self, name: str) -> "_Issuing":
        """Not to be nested: collectives are leaves."""
        self._before, self.unit = self.unit, name
        return self

    @contextmanager
    def as_one(self, kind: str, size: int) -> Iterator[None]:
        """What is issued in the body is one collective, which brings every rank ``size`` bytes."""
        self.one, self.noted = (kind, size), False
        try:
            yield
        finally:
            self.one = None

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.unit = self._before


issuing = _Issuing()
