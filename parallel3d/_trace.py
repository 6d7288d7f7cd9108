"""Who is issuing a collective: the one thing the engine tells the recorder.

The engine assigns ``issuing.unit = name`` before a unit's collective and ``testing``'s recorder
reads it when it sees the call. An attribute assignment is all the hot path pays, whether or not a
recorder is active. Who sets a name resets it, so that later calls are not taken for the unit's::

    issuing.unit = self._name
    dist.all_gather_into_tensor(...)
    issuing.unit = ""
"""

__all__ = ["issuing"]


class _Issuing:
    """Name of the unit whose collective is being issued; ``""`` when none is."""

    __slots__ = ("unit",)

    def __init__(self) -> None:
        self.unit: str = ""


issuing = _Issuing()
