"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine names the unit whose forward or backward begins, and, around a bucket's own collective, the
bucket's unit (a prefetch is another unit's). ``testing.record_collectives`` reads the name when it sees
a call. Attribute assignments are all the hot path pays, whether or not a recorder is active.
"""

__all__ = ["issuing"]


class _Issuing:
    """Name of the unit whose collectives are being issued; ``""`` when none is known.

    ``with issuing.as_unit(name):`` names another one for a while. ``with issuing.one_call():`` says that what
    is issued within are the members of one call.
    """

    __slots__ = ("_before", "_one_call", "call", "unit")

    def __init__(self) -> None:
        self.unit: str = ""
        self.call: object = None  # other for each call that is issued member by member
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


class _OneCall:
    __slots__ = ("_issuing",)

    def __init__(self, issuing: _Issuing) -> None:
        self._issuing = issuing

    def __enter__(self) -> None:
        self._issuing.call = object()

    def __exit__(self, *exc: object) -> None:
        self._issuing.call = None


issuing = _Issuing()
