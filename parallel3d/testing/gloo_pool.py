"""Real processes for tests: gloo workers that live for the whole test run.

Starting eight processes that import torch costs seconds; the pool pays that once. Each run gets a
fresh default process group. A run in which a rank fails or hangs ends with an error that says so,
and the pool replaces the workers it had to end.
"""

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.testing._gloo_worker import RELEASE, Failure, Job, serve

# What each worker would otherwise import by itself; names that cannot be imported are passed over.
# torch._dynamo is imported by the first collective, pytest by modules of tests.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "parallel3d.testing", "pytest"]
_STARTUP = 180.0  # seconds a worker may take to import torch
_GRACE = 2.0  # seconds the other ranks have to fail too, once one has
_RELEASE_TIME = 10.0  # seconds to destroy a process group


class WorkerError(RuntimeError):
    """A rank failed in ``GlooPool.run``; its message holds every failed rank's traceback.

    Attributes:
        failures: how each failed rank failed, by rank, the first to fail first. The cause
            (``__cause__``) is the first's exception.
        unfinished: ranks that had neither returned nor failed and were ended.
    """

    def __init__(self, message: str, failures: dict[int, Failure], unfinished: list[int]) -> None:
        super().__init__(message)
        self.failures = failures
        self.unfinished = unfinished


class WorkerTimeout(WorkerError, TimeoutError):
    """A run took longer than its ``timeout``; ``unfinished`` says which ranks did not finish."""


class _Worker:
    """One process and the pool's end of its pipe."""

    def __init__(self, context: Any, index: int, threads: int) -> None:
        self.connection: Connection
        self.connection, remote = context.Pipe()
        self.process = context.Process(
            target=serve, args=(remote, threads), name=f"gloo-worker-{index}", daemon=True
        )
        self.process.start()
        remote.close()  # so that a worker's death is seen as end of file
        self.ready = False

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it died; the next receive says so
            self.connection.send_bytes(data)

    def receive(self) -> tuple[str, bytes | None] | None:
        """The next message, or None if the process died."""
        try:
            kind, payload = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return kind, payload

    def end(self) -> None:
        """End the process, which may hang in a collective."""
        self.connection.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)


class GlooPool:
    """``size`` worker processes that run functions as the ranks of gloo worlds.

    ::

        def total(value):
            t = torch.tensor([value + dist.get_rank()])
            dist.all_reduce(t)
            return t

        with GlooPool(4) as pool:
            pool.run(total, 1)  # [tensor([10]), tensor([10]), tensor([10]), tensor([10])]

    Workers start with the first ``run``. One pool runs one function at a time. In a script, make
    it under ``if __name__ == "__main__":``, as with ``multiprocessing``.

    Args:
        size: number of workers, the largest world the pool can run.
        threads: torch threads in each worker.
        start_method: ``"forkserver"`` (one import of torch for all) or ``"spawn"`` (one each);
            by default the first that the platform has.

    Raises:
        MeshError: ``size`` or ``threads`` is not a positive integer.
        Parallel3dError: unknown ``start_method``.
    """

    def __init__(self, size: int, *, threads: int = 1, start_method: str | None = None) -> None:
        for name, value in (("size", size), ("threads", threads)):
            if not _is_count(value):
                raise MeshError(f"{name}={value!r}: must be a positive integer")
        known = [m for m in ("forkserver", "spawn") if m in multiprocessing.get_all_start_methods()]
        start_method = known[0] if start_method is None else start_method
        if start_method not in known:
            raise Parallel3dError(
                f"start_method={start_method!r}: torch needs one of {', '.join(known)}"
            )
        self.size = size
        self._threads = threads
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[_Worker | None] = [None] * size
        self._closed = False
        self._running = False
        _pools.add(self)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """``fn(*args)`` on every rank of a fresh gloo world; the results by rank.

        Args:
            fn: a function at the top level of a module the workers can import. Arguments and
                results are pickled by value; a result must hold CPU tensors only. Every run
                starts with ``torch.manual_seed(0)``.
            world_size: number of ranks, 1 to ``size``; all workers by default.
            timeout: seconds the whole run may take, also the timeout of its process groups.

        Raises:
            WorkerError: a rank raised or died. Ranks that do not end within two seconds after
                that are ended and their workers replaced.
            WorkerTimeout: the run took too long; the ranks still running are ended likewise.
            MeshError: ``world_size`` out of range.
            StateError: the pool is closed, or already running a function.
            Parallel3dError: ``fn`` or an argument cannot be pickled; ``timeout`` not positive.
        """
        world_size = self.size if world_size is None else world_size
        self._check_run(world_size, timeout)
        call = _pickle_call(fn, args)
        self._running = True
        try:
            workers = self._start(world_size)
            with tempfile.TemporaryDirectory(prefix="gloo-pool-") as directory:
                job = _job(fn, call, world_size, timeout, directory)
                for rank, worker in enumerate(workers):
                    worker.send(pickle.dumps(dataclasses.replace(job, rank=rank)))
                results, failures = self._collect(workers, timeout)
                reported = results.keys() | failures.keys()
                unfinished = [rank for rank in range(world_size) if rank not in reported]
                self._release(workers, unfinished)
        except BaseException:
            self._end_all()  # interrupted in the middle: nobody knows what they are doing
            raise
        finally:
            self._running = False
        if failures or unfinished:
            raise _error(fn, world_size, timeout, failures, unfinished)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the workers. A closed pool cannot run again; closing twice is allowed."""
        self._closed = True
        self._end_all()

    def __enter__(self) -> "GlooPool":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_run(self, world_size: int, timeout: float) -> None:
        if self._closed:
            raise StateError("run: this GlooPool is closed; make a new one")
        if self._running:
            raise StateError("run: this GlooPool is already running a function; wait for it")
        if not _is_count(world_size) or world_size > self.size:
            raise MeshError(
                f"world_size={world_size!r}: must be an integer from 1 to {self.size}, "
                "the number of workers of this pool"
            )
        if not timeout > 0:
            raise Parallel3dError(f"timeout={timeout!r}: must be a positive number of seconds")

    def _start(self, count: int) -> list[_Worker]:
        """The first ``count`` workers, started and ready."""
        for index in range(count):
            worker = self._workers[index]
            if worker is None or not worker.process.is_alive():
                if worker is not None:
                    worker.end()
                self._workers[index] = _Worker(self._context, index, self._threads)
        workers = [worker for worker in self._workers[:count] if worker is not None]
        for index, worker in enumerate(workers):
            if worker.ready:
                continue
            alive = worker.connection.poll(_STARTUP)
            message = worker.receive() if alive else None
            if message is None:
                what = f"exited with code {_exit_code(worker)}" if alive else "does not answer"
                raise StateError(
                    f"GlooPool: worker {index} {what} while starting; in a script, make the pool "
                    'under if __name__ == "__main__":'
                )
            worker.ready = True
        return workers

    def _collect(
        self, workers: list[_Worker], timeout: float
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Results and failures by rank; a rank in neither did not finish in time."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                outcome = _outcome(rank, workers[rank])
                if isinstance(outcome, Failure):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                    failures[rank] = outcome
                else:
                    (results[rank],) = outcome
        # A process that died is the reason for its peers' lost connections, even if read later.
        ordered = sorted(failures.values(), key=lambda failure: not failure.died)
        return results, {failure.rank: failure for failure in ordered}

    def _release(self, workers: list[_Worker], unfinished: list[int]) -> None:
        """Let finished workers destroy their groups; end and forget the others, and those that are spent."""
        for rank in unfinished:  # first: peers may wait for their sockets to close
            self._end(rank)
        finished = [
            (rank, worker) for rank, worker in enumerate(workers) if self._workers[rank] is worker
        ]
        for _, worker in finished:
            worker.send(RELEASE)
        deadline = time.monotonic() + _RELEASE_TIME
        for rank, worker in finished:
            answered = worker.connection.poll(max(0.0, deadline - time.monotonic()))
            message = worker.receive() if answered else None
            if message is None or message[0] == "spent":
                self._end(rank)

    def _end(self, index: int) -> None:
        worker, self._workers[index] = self._workers[index], None
        if worker is not None:
            worker.end()

    def _end_all(self) -> None:
        for index in range(self.size):
            self._end(index)


_pools: "weakref.WeakSet[GlooPool]" = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise Parallel3dError(
            f"GlooPool.run({getattr(fn, '__qualname__', fn)!r}): cannot be sent to the workers "
            f"({error}); pass a function defined at the top level of a module and arguments "
            "that can be pickled"
        ) from error


def _job(
    fn: Callable[..., Any], call: bytes, world_size: int, timeout: float, directory: str
) -> Job:
    name = getattr(fn, "__module__", None) or "__main__"
    return Job(
        rank=-1,  # each worker gets its own
        world_size=world_size,
        # A file, because a TCPStore looks up host names, which can take 5 s even on loopback (m).
        store=os.path.join(directory, "store"),
        # Gloo's own timeout comes second, so that the pool's names the ranks.
        timeout=timeout + _GRACE,
        sys_path=tuple(os.path.abspath(path) for path in sys.path),
        module=(name, getattr(sys.modules.get(name), "__file__", None)),
        call=call,
    )


def _outcome(rank: int, worker: _Worker) -> Failure | tuple[Any]:
    """What a rank that has something to say says."""
    message = worker.receive()
    if message is None:
        return Failure(rank, f"process died with exit code {_exit_code(worker)}", died=True)
    kind, payload = message
    assert payload is not None
    if kind == "failed":
        failure, pickled = pickle.loads(payload)
        with contextlib.suppress(Exception):  # such as a constructor with arguments of its own
            return dataclasses.replace(failure, exception=pickle.loads(pickled))
        return failure
    try:
        return (pickle.loads(payload),)
    except Exception as error:
        return Failure(rank, f"its result cannot be unpickled here: {error}", exception=error)


def _exit_code(worker: _Worker) -> int | None:
    worker.process.join(5)
    return worker.process.exitcode


def _error(
    fn: Callable[..., Any],
    world_size: int,
    timeout: float,
    failures: dict[int, Failure],
    unfinished: list[int],
) -> WorkerError:
    name = f"{getattr(fn, '__qualname__', fn)} on {world_size} ranks"
    ended = ", ".join(map(str, unfinished))
    if not failures:
        return WorkerTimeout(
            f"{name}: not finished after {timeout:g} s on rank(s) {ended}", failures, unfinished
        )
    first = next(iter(failures.values()))
    lines = [f"{name}: rank {first.rank} failed first: {first.summary}"]
    if unfinished:
        lines.append(f"rank(s) {ended} did not finish after that and were ended")
    # Ranks that fail together mostly fail alike: show each traceback once.
    alike: dict[str, list[int]] = {}
    for failure in failures.values():
        alike.setdefault(failure.traceback.rstrip() or failure.summary, []).append(failure.rank)
    for text, ranks in alike.items():
        lines.append(f"--- rank(s) {', '.join(map(str, ranks))}\n{text}")
    error = WorkerError("\n".join(lines), failures, unfinished)
    error.__cause__ = first.exception
    return error
