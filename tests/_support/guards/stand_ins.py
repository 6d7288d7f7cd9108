"""What stands in for NCCL: kernels that run until their communicator is aborted; and a rank that fails."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from parallel3d import PeerFailureError, guards
from parallel3d.guards import session
from parallel3d.guards.board import Board, Note
from parallel3d.testing import fake_world

GRACE = timedelta(seconds=0.5)
FAILED = Note("failed", 1, "LookupError: no more samples", "step 3, phase step", 2)
NAMES_IT = r"rank 1 failed first, at step 3, phase step: LookupError: no more samples"


class Nccl:
    """A NCCL backend; ``on_abort`` is called by ``abort``, before its kernels end."""

    def __init__(self, on_abort: Callable[[], None] = lambda: None) -> None:
        self.on_abort = on_abort
        self.aborts = 0
        self.ended = threading.Event()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborts += 1
        self.on_abort()
        self.ended.set()

    def synchronize(self) -> None:
        """As ``torch.cuda.synchronize`` does: returns when the kernels have ended, and raises nothing."""
        assert self.ended.wait(20), "nobody has ended the kernels"


class Gloo:
    """A gloo backend whose waits fail when they are to."""

    def __init__(self) -> None:
        self.aborts = self.woken = 0

    def name(self) -> str:
        return "gloo"

    def abort(self) -> None:
        self.aborts += 1

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.woken += 1
        raise RuntimeError("Timed out waiting 1ms for recv operation to complete")


class Group:
    """A process group of two ranks with these backends, by type of device."""

    def __init__(self, **backends: Any) -> None:
        self._device_types = [torch.device(device) for device in backends]
        self._backends = backends

    def _get_backend(self, device: torch.device) -> Any:
        return self._backends[device.type]

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Job:
    """This process as rank 0 of two; rank 1 is whoever calls ``rank_1_posts``."""

    def __init__(self, patch: pytest.MonkeyPatch, groups: Sequence[Any]) -> None:
        self.store = dist.HashStore()
        patch.setattr(session, "all_groups", lambda: list(groups))
        patch.setattr(session, "others", lambda: (self.store, 0, 2))
        self._boards: dict[int, Board] = {}
        self._watches = 0

    @contextmanager
    def watch(self, **options: Any) -> Iterator[session.Monitor]:
        """The real one, with its thread."""
        self._watches += 1
        with guards.watch(**{"grace": GRACE, "silence": None, **options}):
            yield monitor_of_watch()

    def board(self) -> Board:
        """Rank 1's, of the present watch."""
        topic = dist.PrefixStore("parallel3d/guards/watch", self.store)
        table = dist.PrefixStore(str(self._watches), topic)
        return self._boards.setdefault(self._watches, Board(table, 2))

    def rank_1_posts(self, *notes: Note) -> None:
        for note in notes or (FAILED,):
            self.board().post(note)

    def rank_1_fails(self, *backends: Nccl) -> None:
        """And the kernels that wait for it end."""
        self.rank_1_posts(FAILED)
        for backend in backends:
            backend.synchronize()


@contextmanager
def job(*groups: Any) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch, fake_world(0, 2):
        yield Job(patch, groups)


@contextmanager
def failing_job(
    *groups: Any, match: str = NAMES_IT
) -> Iterator[tuple[Job, pytest.ExceptionInfo[PeerFailureError]]]:
    """The body is watched, and ends in a PeerFailureError; of which more can be asked after the body."""
    with (
        job(*groups) as ranks,
        pytest.raises(PeerFailureError, match=match) as caught,
        ranks.watch(),
    ):
        yield ranks, caught


def monitor_of_watch() -> session.Monitor:
    """That of the watch that is entered."""
    now = session.current_session()
    assert now is not None
    monitor = now.open()
    assert monitor is not None
    return monitor


def until(done: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Waits for it; returns whether it came."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(done())
