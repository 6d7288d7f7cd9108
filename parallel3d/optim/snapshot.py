"""Snapshot: whether a dict of dicts still has the very objects that it had."""

from __future__ import annotations

from itertools import chain
from operator import is_, itemgetter
from typing import Any

__all__ = ["Snapshot"]


class Snapshot:
    """What an optimizer's state consisted of, compared object by object.

    A step compares hundreds of entries: no Python frame, and no hash of a tensor, for any of them.
    """

    def __init__(self, state: dict[Any, Any]) -> None:
        self._keys, self._entries = list(state), list(state.values())
        self._dicts = [entry for entry in self._entries if isinstance(entry, dict)]
        self._lengths = list(map(len, self._dicts))
        alike: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
        for entry in self._dicts:
            alike.setdefault(tuple(entry), []).append(entry)
        self._alike = [_Alike(names, entries) for names, entries in alike.items() if names]

    def shows(self, state: dict[Any, Any]) -> bool:
        """Whether ``state`` has the same keys and entries in the same order, with the same content."""
        return (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._entries))
            and list(map(len, self._dicts)) == self._lengths
            and all(entries.are_same for entries in self._alike)
        )


class _Alike:
    """Entries with the same names: no Python code for each."""

    def __init__(self, names: tuple[Any, ...], entries: list[dict[Any, Any]]) -> None:
        # A second time, as one name alone would bring no tuple.
        self._read, self._entries = itemgetter(*names, names[0]), entries
        self._values = list(chain.from_iterable(map(self._read, entries)))

    @property
    def are_same(self) -> bool:
        """Whether all names are there, with the same objects."""
        try:
            now = chain.from_iterable(map(self._read, self._entries))
            return all(map(is_, now, self._values))
        except KeyError:
            return False
