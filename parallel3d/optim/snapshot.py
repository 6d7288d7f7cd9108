"""Snapshot: whether a dict of dicts still has the very objects that it had."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

__all__ = ["Snapshot"]


class Snapshot:
    """What an optimizer's state consisted of, compared object by object.

    A step compares hundreds of entries: no Python frame, and no hash of a tensor, for any of them.
    """

    def __init__(self, state: dict[Any, Any]) -> None:
        self._keys, self._entries = list(state), list(state.values())
        self._dicts = [entry for entry in self._entries if isinstance(entry, dict)]
        self._names = list(chain.from_iterable(self._dicts))
        self._only_strings = set(map(type, self._names)) <= {str}
        self._values = list(self._values_now())

    def shows(self, state: dict[Any, Any]) -> bool:
        """Whether ``state`` has the same keys and entries in the same order, with the same content."""
        return (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._entries))
            and sum(map(len, self._dicts)) == len(self._names)
            and self._same_names()
            and all(map(is_, self._values_now(), self._values))
        )

    def _same_names(self) -> bool:
        now = chain.from_iterable(self._dicts)
        if self._only_strings:  # twice as fast, and a comparison of others may be anything
            return list(now) == self._names
        return all(map(is_, now, self._names))

    def _values_now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))
