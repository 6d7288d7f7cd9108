"""Stores that freeze, and monitors of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel3d.guards.board import Note
from parallel3d.guards.session import Monitor

SILENCE = 0.4  # seconds


KILLED = 6.0  # after which a frozen store's host is killed, long after all are to have given up


OFTEN, NEVER = 0.5, 1000.0  # grace; the thread looks ten times in it


class Freezing:
    """A store in this process that can be frozen: who asks it then waits, until its host is killed."""

    def __init__(self) -> None:
        self.table: dict[str, bytes] = {}
        self.frozen = False
        self.asked = threading.Event()  # while it is frozen
        self.killed = threading.Event()

    def clone(self) -> "Freezing":
        return self

    def answer(self) -> None:
        if self.frozen:
            self.asked.set()
            self.killed.wait(KILLED)
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self.answer()
        self.table[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.answer()
        return self.table[key]

    def check(self, keys: list[str]) -> bool:
        self.answer()
        return all(key in self.table for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.answer()
        self.table[key] = str(int(self.table.get(key, b"0")) + amount).encode()
        return int(self.table[key])


@contextmanager
def monitor(
    store: Any, grace: float, silence: float | None = SILENCE, world_size: int = 2
) -> Iterator[Monitor]:
    watching = Monitor(store, rank=1, world_size=world_size, grace=grace, silence=silence)
    watching.start()
    try:
        yield watching
    finally:
        store.killed.set()
        watching.end()
        watching.close()


NOTE = Note("lost", 1, "a collective failed")
