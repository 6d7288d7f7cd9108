"""HostPool: memory of the CPU of a fixed size, given out in pieces and given back."""

from __future__ import annotations

from bisect import insort

import torch

ALIGNMENT = 512
"""Bytes of which every piece has a whole number, so that it begins where any dtype may."""


class PoolPiece:
    """A part of a pool. It is returned to the pool when this object is garbage-collected.

    Attributes:
        start, size: first byte in the pool, and number of bytes.
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
    """A pool of ``size`` bytes on ``device``, allocated with the first piece.

    A piece gets the first gap that is large enough. Every step allocates and frees the same pieces, the last
    one first, so the pool doesn't fragment over time.

    Attributes:
        used, most_used: bytes that are allocated now, and the largest number so far.
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
