"""HooksOff: takes units' forward hooks off their modules while they have nothing to do.

A module with hooks is called by a longer way, and each hook is a call: for a small unit more than all else
the engine does. Where the root shows a unit's parameters (see ``Residents``), what is left for them is to see
the first gradient that reaches an output, and that only for what is recomputed in backward. The root's own
outputs see to it, unless a backward begins at a tensor inside the model; so the hooks stay on in a model that
has called ``torch.utils.checkpoint``, and in the first forward, which shows that.

A module with hooks of others keeps all, and one that is given some during a forward has both afterwards.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import itemgetter, setitem
from typing import Any

from torch import nn

from parallel3d._torch.checkpointed import checkpointed_calls, sees_checkpointed_calls

__all__ = ["HooksOff"]

_Hooks = OrderedDict[int, Callable[..., Any]]
_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"


class HooksOff:
    """See the module's docstring.

    Attributes:
        modules: whose hooks they are, weakly; each has one of ours of either kind.
        may: whether they may be off: forwards have shown that nothing is recomputed; None before the first.
    """

    fewest_calls = checkpointed_calls()  # of checkpoint, seen so far

    def __init__(self) -> None:
        self.modules: Sequence[weakref.ref[nn.Module]] = []
        self.may: bool | None = None
        # While they are off only: the hooks hold the units.
        self._attributes: list[dict[str, Any]] = []
        self._hooks: dict[str, list[_Hooks]] = {}
        self._none: dict[str, list[_Hooks]] = {_BEFORE: [], _AFTER: []}

    def begin(self) -> None:
        """A forward of the root begins, in which the modules' parameters are shown."""
        HooksOff.fewest_calls = min(HooksOff.fewest_calls, checkpointed_calls())
        if not self.may:
            return
        attributes = [vars(module) for ref in self.modules if (module := ref()) is not None]
        hooks = _read(attributes)
        if sum(map(len, hooks[_BEFORE])) + sum(map(len, hooks[_AFTER])) > 2 * len(attributes):
            ours = map(max, map(len, hooks[_BEFORE]), map(len, hooks[_AFTER]))
            attributes = list(compress(attributes, [count == 1 for count in ours]))
            hooks = _read(attributes)
        for none in self._none.values():
            none += [OrderedDict() for _ in range(len(none), len(attributes))]
        self._attributes, self._hooks = attributes, hooks
        self._put(self._none)

    def end(self, *, backward_to_come: bool) -> None:
        """It has ended."""
        if backward_to_come and self.may is not False:
            seen = sees_checkpointed_calls()
            self.may = seen and checkpointed_calls() <= HooksOff.fewest_calls
        if not self._attributes:
            return
        for name, none in self._none.items():
            if any(none):
                self._merge(self._hooks[name], none)
        self._put(self._hooks)
        self._attributes, self._hooks = [], {}

    def _merge(self, hooks: list[_Hooks], given: list[_Hooks]) -> None:
        """Ours, and those that modules have been given in this forward, whose handles know that dict only."""
        for index, new in enumerate(given):
            if new:
                for key, hook in hooks[index].items():
                    new[key] = hook
                    new.move_to_end(key, last=False)
                hooks[index], given[index] = new, OrderedDict()

    def _put(self, hooks: dict[str, list[_Hooks]]) -> None:
        for name, each in hooks.items():
            deque(map(setitem, self._attributes, repeat(name), each), maxlen=0)


def _read(attributes: list[dict[str, Any]]) -> dict[str, list[_Hooks]]:
    return {name: list(map(itemgetter(name), attributes)) for name in (_BEFORE, _AFTER)}
