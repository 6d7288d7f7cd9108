"""HostPool: memory of the CPU of a fixed size, given out in pieces and given back."""

from __future__ import annotations

from bisect import insort

import torch

ALIGNMENT = 512
"""Bytes of which every piece has a whole number, so that it begins where any dtype may."""


class PoolPiece:
    """A part of a pool, which it goes back to when nobody refers to this any more.

    Attributes:
        start, size: where it is, in bytes.
    """

    __slots__ = ("_pool", "size", "start")

    def __init__(self, pool: HostPool, start: int, size: int) -> None:
        self._pool, self.start, self.size = pool, start, size

    def __del__(self) -> None:
        self._pool.give_back(self.start, self.size)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Its first ``numel`` elements of ``dtype``."""
        words = self._pool.words[self.start // 4 : (self.start + self.size) // 4]
        return words.view(dtype)[:numel]


class HostPool:
    """``size`` bytes on ``device``, taken when the first piece is.

    A step takes and gives back the same pieces as the one before, the last one first: the first place that is
    large enough is taken, so that there are no gaps that grow.

    Attributes:
        used, most_used: bytes that are given out now, and the most that were.
    """

    def __init__(self, size: int, device: torch.device, *, pin: bool) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used = self.most_used = 0
        self._device, self._pin = device, pin
        self._free = [(0, self.size)] if self.size else []  # (start, size), in order
        self._words: torch.Tensor | None = None

    @property
    def words(self) -> torch.Tensor:
        """The memory, as float32."""
        if self._words is None:
            with torch.inference_mode(False):
                self._words = torch.empty(
                    self.size // 4, dtype=torch.float32, device=self._device, pin_memory=self._pin
                )
        return self._words

    def take(self, size: int) -> PoolPiece | None:
        """Returns a piece of at least ``size`` bytes; None if there is no room."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        for at, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(start + size, room - size)] if room > size else []
                self.used += size
                self.most_used = max(self.most_used, self.used)
                return PoolPiece(self, start, size)
        return None

    def give_back(self, start: int, size: int) -> None:
        """Called when a piece is gone."""
        self.used -= size
        insort(self._free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, room in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((begin, room))
        self._free = joined
