"""Warns once if the loss is nan on some ranks only, and names the ranks.

A mean over no rows, or over labels that are all ignored, is nan. Its gradient may be nan, which the reduction
spreads to all ranks, or zero, which makes the reduced gradient too small on all ranks.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from contextlib import suppress

import torch
from torch import distributed as dist

from parallel3d._util.trace import issuing
from parallel3d.mesh.agreement import name_ranks
from parallel3d.mesh.store import others

_TOPIC = "parallel3d/nan losses"
_BEHIND = 3  # backwards after which all ranks know their device's value
# Of a value that is still on its way to the CPU; a loss of inf is looked at in vain.
_UNSET = math.inf


class NanLosses:
    """Looks at this rank's losses until one is nan, and then compares with those of other ranks."""

    def __init__(self) -> None:
        self.looks = True  # no loss was nan so far
        # The store, and the number of the forward.
        self._posted: tuple[dist.Store, int] | None = None
        self._first = 0  # forwards of this rank before all ranks came together
        self._on_the_way: deque[tuple[int, torch.Tensor]] = deque()  # from an accelerator
        self._free: list[torch.Tensor] = []
        self._due = 0  # backwards until ``say`` may ask

    def meet(self) -> None:
        """Called when all ranks are at the same point: forwards are counted from here on, as ranks may have
        run different numbers of them before."""
        self._first = issuing.forwards

    def post(self, number: int) -> None:
        """Posts that this rank's loss was nan after its forward ``number``."""
        self.looks = False
        number -= self._first
        found = others()
        if found is not None:
            store, rank, _ = found
            with suppress(RuntimeError):  # the store has ended
                store.set(f"{_TOPIC}/{rank}", str(number))
                self._posted = store, number

    def say(self) -> None:
        """Warns, on the first of the ranks whose loss is nan, if the loss of other ranks is not.

        Called when every rank has posted its nan, if it has one. On the CPU that is the end of the backward,
        in whose reductions all ranks take part.
        """
        if self._posted is None:
            return
        if self._due:
            self._due -= 1
            return
        found, posted, self._posted = others(), self._posted, None
        if found is None or found[0] is not posted[0]:
            return
        store, rank, world_size = found
        number = posted[1]
        with suppress(RuntimeError):
            keys = {other: f"{_TOPIC}/{other}" for other in range(world_size)}
            first = {r: int(store.get(key)) for r, key in keys.items() if store.check([key])}
            nan = [other for other, its in first.items() if its == number]
            # A rank whose loss was nan earlier has warned, and its nan may have reached all ranks.
            if min(first.values()) == number and nan[0] == rank and len(nan) < world_size:
                rest = name_ranks({*range(world_size)} - {*nan})
                warnings.warn(
                    f"the loss is nan on {name_ranks(nan)}, and not on {rest}, after forward {number}. "
                    "Gradients are means over the data ranks: nan reaches all of them, and a rank whose loss "
                    "is a mean over no rows, or no labels, brings zeros, which makes all gradients too "
                    "small. Where ranks have other numbers of rows or labels, use "
                    "parallel3d.optim.global_mean(loss_sum, number), with 0 where a rank has none",
                    stacklevel=6,  # the call of Tensor.backward
                )

    def look_later(self, loss: torch.Tensor) -> None:
        """Starts a copy of ``loss``, on an accelerator, to the CPU, without waiting for it; and looks at the
        copies of earlier losses that have arrived."""
        while self._on_the_way and (value := self._on_the_way[0][1].item()) != _UNSET:
            number, copy = self._on_the_way.popleft()
            self._free.append(copy)
            if math.isnan(value) and self.looks:
                self.post(number)
                self._due = _BEHIND
        if self.looks:
            pinned = loss.device.type == "cuda"
            copy = self._free.pop() if self._free else torch.empty((), pin_memory=pinned)
            copy.fill_(_UNSET).copy_(loss.detach().reshape(()), non_blocking=True)
            self._on_the_way.append((issuing.forwards, copy))


nan_losses = NanLosses()
"""Those of this process."""
