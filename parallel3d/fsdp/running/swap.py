"""Swap: puts the parameters of many groups into their modules and back, in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, call, is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.fsdp.group import ParamGroup

__all__ = ["Swap"]

_HOLDERS = attrgetter("holders")
_SHOWN = attrgetter("shown")
_KEPT = attrgetter("kept")


class Swap:
    """Does what ``show`` and ``hide`` of each of ``groups`` do, which cast no buffers."""

    def __init__(self, groups: Sequence[ParamGroup] = ()) -> None:
        self.groups = groups
        self._note()

    def _note(self) -> None:
        self._holders = [group.holders for group in self.groups]
        places = [place for holders in self._holders for place in holders]
        self._updates = [holder.update for holder, _, _ in places]
        self._at_rest = [at_rest for _, at_rest, _ in places]
        self._computing = [computing for _, _, computing in places]

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if any(map(_SHOWN, self.groups)):
            for group in self.groups:
                group.show()
        else:
            self._put(self._computing, shown=True)

    def hide(self) -> None:
        """Puts the sharded ones back, but for what ``unshard()`` shows."""
        if not all(map(_SHOWN, self.groups)) or any(map(_KEPT, self.groups)):
            for group in self.groups:
                if not group.kept:
                    group.hide()
        else:
            self._put(self._at_rest, shown=False)

    def _put(self, values: list[dict[str, Any]], *, shown: bool) -> None:
        if not all(map(is_, map(_HOLDERS, self.groups), self._holders)):
            at_rest = values is self._at_rest
            self._note()  # the groups have listed theirs anew
            values = self._at_rest if at_rest else self._computing
        if shown:  # first: hiding then undoes what an interruption has left
            _exhaust(map(setattr, self.groups, repeat("shown"), repeat(True)))
        _exhaust(map(call, self._updates, values))
        if not shown:
            _exhaust(map(setattr, self.groups, repeat("shown"), repeat(False)))


def _exhaust(iterator: Any) -> None:
    deque(iterator, maxlen=0)
