"""GlooPool: worker processes on gloo for tests, started once for the whole test run.

Starting eight processes that import torch takes seconds. Each run gets a new default process group. A run in
which a rank fails or hangs ends with an error that says so, and the pool replaces the workers it had to end.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._torch.dtensor import clear_dtensor_caches
from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.testing.worlds import check_count

# Imported once by the forkserver instead of by each worker; modules that are not installed are ignored.
# torch._dynamo is imported by the first collective, pytest by modules of tests.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", __name__, "pytest"]
_STARTUP = 180.0  # seconds a worker may take to import torch
_GRACE = 2.0  # seconds the other ranks have to fail too, once one has
_RELEASE_TIME = 10.0  # seconds to destroy a process group
# torch itself has 15 threads. More than this many: groups of earlier runs still exist, and a thread of gloo
# wakes up a hundred times a second.
_MOST_THREADS = 24
RELEASE = b"release"


@dataclass(frozen=True)
class Job:
    """What the pool sends to one rank for one run: what to call, and in which world."""

    rank: int
    world_size: int
    store: str  # path of the store's file
    timeout: float  # seconds after which a collective fails
    sys_path: tuple[str, ...]  # the pool's
    module: tuple[str, str | None]  # name and file of the one that defines the function
    call: bytes  # the pickled function and arguments


@dataclass(frozen=True)
class Failure:
    rank: int
    summary: str  # type and message of the exception, or how the process ended
    traceback: str = ""  # the remote one; empty if the process died or was ended
    exception: BaseException | None = None  # None if it can't be pickled and loaded here
    died: bool = False  # whether the process ended without an answer, by a signal or ``os._exit``


class WorkerError(RuntimeError):
    """A rank failed in ``GlooPool.run``; the message contains every failed rank's traceback.

    Attributes:
        failures: rank -> its failure, in the order in which they failed. ``__cause__`` is the exception of
            the first one.
        unfinished: ranks that had neither returned nor failed and were ended.
    """

    def __init__(self, message: str, failures: dict[int, Failure], unfinished: list[int]) -> None:
        super().__init__(message)
        self.failures = failures
        self.unfinished = unfinished


class WorkerTimeout(WorkerError, TimeoutError):
    """A run took longer than its ``timeout``; ``unfinished`` are the ranks that did not finish."""


class _Worker:
    """A worker process, and the pool's end of the pipe to it."""

    def __init__(self, context: Any, index: int, threads: int) -> None:
        self.connection: Connection
        self.connection, remote = context.Pipe()
        self.process = context.Process(
            target=serve, args=(remote, threads), name=f"gloo-worker-{index}", daemon=True
        )
        self.process.start()
        remote.close()  # so that reading from a worker that died raises EOFError
        self.ready = False

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it died; the next receive returns None
            self.connection.send_bytes(data)

    def receive(self, timeout: float | None = None) -> tuple[str, bytes] | None:
        """Returns the next message, or None if the process died or does not answer within ``timeout``."""
        with contextlib.suppress(EOFError, OSError):
            if timeout is None or self.connection.poll(max(0.0, timeout)):
                return pickle.loads(self.connection.recv_bytes())
        return None

    def exit_code(self) -> int | None:
        self.process.join(5)
        return self.process.exitcode

    def end(self) -> None:
        """Ends the process, which may hang in a collective."""
        self.connection.close()
        for signal in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                signal()
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

    Workers start with the first ``run``. A pool runs one function at a time. In a script, make it under
    ``if __name__ == "__main__":``, as with ``multiprocessing``.

    Args:
        size: number of workers, the largest world the pool can run.
        threads: torch threads in each worker.
        start_method: ``"forkserver"`` (torch is imported once) or ``"spawn"`` (once per worker); by default
            the first that the platform has.

    Raises:
        MeshError: ``size`` or ``threads`` is not a positive integer.
        Parallel3dError: ``start_method`` is unknown.
    """

    def __init__(self, size: int, *, threads: int = 1, start_method: str | None = None) -> None:
        check_count("size", size)
        check_count("threads", threads)
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

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Calls ``fn(*args)`` on every rank of a new gloo world and returns the results by rank.

        Args:
            fn: a function at the top level of a module that the workers can import. Arguments and results are
                pickled by value; tensors in a result must be on the CPU. Every run starts with
                ``torch.manual_seed(0)``.
            world_size: number of ranks, 1 to ``size``; by default all workers.
            timeout: seconds that the whole run may take, also the timeout of its process groups.

        Raises:
            WorkerError: a rank raised or died. Ranks that do not end within two seconds after that are ended
                and their workers replaced.
            WorkerTimeout: the run took too long; the ranks still running are ended likewise.
            MeshError: ``world_size`` is out of range.
            StateError: the pool is closed, or already running a function.
            Parallel3dError: ``fn`` or an argument can't be pickled, or ``timeout`` is not positive.
        """
        world_size = self.size if world_size is None else world_size
        if self._closed:
            raise StateError("run: this GlooPool is closed; make a new one")
        if self._running:
            raise StateError("run: this GlooPool is already running a function; wait for it")
        if type(world_size) is not int or not 0 < world_size <= self.size:
            raise MeshError(
                f"world_size={world_size!r}: must be an integer from 1 to {self.size}, "
                "the number of workers of this pool"
            )
        if not timeout > 0:
            raise Parallel3dError(f"timeout={timeout!r}: must be a positive number of seconds")
        job = _job(fn, args, world_size, timeout)
        self._running = True
        try:
            workers = self._start(world_size)
            with tempfile.TemporaryDirectory(prefix="gloo-pool-") as directory:
                # A file, because a TCPStore looks up host names, which can take 5 s even on loopback (m).
                store = os.path.join(directory, "store")
                for rank, worker in enumerate(workers):
                    worker.send(pickle.dumps(replace(job, rank=rank, store=store)))
                results, failures = self._collect(workers, timeout)
                unfinished = sorted(set(range(world_size)) - results.keys() - failures.keys())
                self._release(workers, unfinished)
        except BaseException:
            self._end_all()  # interrupted: the state of the workers is unknown
            raise
        finally:
            self._running = False
        if failures or unfinished:
            raise _error(fn, world_size, timeout, failures, unfinished)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the workers. A closed pool can't run again; closing twice is allowed."""
        self._closed = True
        self._end_all()

    def __enter__(self) -> "GlooPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, count: int) -> list[_Worker]:
        """Returns the first ``count`` workers, after starting those that don't run."""
        for index, worker in enumerate(self._workers[:count]):
            if worker is None or not worker.process.is_alive():
                self._end(index)
                self._workers[index] = _Worker(self._context, index, self._threads)
        workers = [worker for worker in self._workers[:count] if worker is not None]
        for index, worker in enumerate(workers):
            worker.ready = worker.ready or worker.receive(_STARTUP) is not None
            if not worker.ready:
                code = worker.exit_code()
                what = "does not answer" if code is None else f"exited with code {code}"
                raise StateError(
                    f"GlooPool: worker {index} {what} while starting; in a script, make the pool "
                    'under if __name__ == "__main__":'
                )
        return workers

    def _collect(
        self, workers: list[_Worker], timeout: float
    ) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Returns results and failures by rank; a rank in neither did not finish in time."""
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
        # A process that died is the cause of its peers' lost connections, even if it is read later.
        ordered = sorted(failures.values(), key=lambda failure: not failure.died)
        return results, {failure.rank: failure for failure in ordered}

    def _release(self, workers: list[_Worker], unfinished: list[int]) -> None:
        """Lets workers that have finished destroy their process groups; ends the others, and those that
        answer "spent": too many threads are left in them."""
        for rank in unfinished:  # first: peers may wait for their sockets to close
            self._end(rank)
        finished = [(rank, worker) for rank, worker in enumerate(workers) if rank not in unfinished]
        for _, worker in finished:
            worker.send(RELEASE)
        deadline = time.monotonic() + _RELEASE_TIME
        for rank, worker in finished:
            message = worker.receive(deadline - time.monotonic())
            if message is None or message[0] == "spent":
                self._end(rank)

    def _end(self, index: int) -> None:
        worker, self._workers[index] = self._workers[index], None
        if worker is not None:
            worker.end()

    def _end_all(self) -> None:
        for index in range(self.size):
            self._end(index)


def _job(fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout: float) -> Job:
    try:
        call = pickle.dumps((fn, args))
    except Exception as error:
        raise Parallel3dError(
            f"GlooPool.run({getattr(fn, '__qualname__', fn)!r}): cannot be sent to the workers "
            f"({error}); pass a function defined at the top level of a module and arguments "
            "that can be pickled"
        ) from error
    module = getattr(fn, "__module__", None) or "__main__"
    return Job(
        rank=-1,
        world_size=world_size,
        store="",
        timeout=timeout + _GRACE,  # the pool's own error names the ranks: let it come first
        sys_path=tuple(os.path.abspath(path) for path in sys.path),
        module=(module, getattr(sys.modules.get(module), "__file__", None)),
        call=call,
    )


def _outcome(rank: int, worker: _Worker) -> Failure | tuple[Any]:
    """Reads a worker's answer: a Failure, or a tuple with the result."""
    message = worker.receive()
    if message is None:
        return Failure(rank, f"process died with exit code {worker.exit_code()}", died=True)
    kind, payload = message
    if kind == "failed":
        failure, pickled = pickle.loads(payload)
        with contextlib.suppress(Exception):  # its constructor may take other arguments
            return replace(failure, exception=pickle.loads(pickled))
        return failure
    try:
        return (pickle.loads(payload),)
    except Exception as error:
        return Failure(rank, f"its result cannot be unpickled here: {error}", exception=error)


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
    ranks_of: dict[str, list[int]] = {}  # ranks often fail alike: show each traceback once
    for failure in failures.values():
        ranks_of.setdefault(failure.traceback.rstrip() or failure.summary, []).append(failure.rank)
    for text, ranks in ranks_of.items():
        lines.append(f"--- rank(s) {', '.join(map(str, ranks))}\n{text}")
    error = WorkerError("\n".join(lines), failures, unfinished)
    error.__cause__ = first.exception
    return error


# The worker process. Pool and worker talk over one pipe. The pool sends a ``Job``; the worker answers
# ``("done", result)`` or ``("failed", (Failure, exception))`` and keeps its process group until the pool
# sends ``RELEASE``, so that no rank closes a connection its peers still read from. Then it answers
# ``("idle", b"")``, or ``("spent", b"")`` if the run has left threads behind: the pool then replaces it.


def serve(connection: Connection, threads: int) -> None:
    """Runs in a worker: executes jobs until the pool closes its end of the pipe or its process has ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()  # prints where a worker crashed
    torch.set_num_threads(threads)
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # else gloo looks up the host name, which may not resolve
            os.environ["GLOO_SOCKET_IFNAME"] = name
    _send(connection, "ready")
    modules = 0
    while True:
        if len(sys.modules) > modules:  # keep imported objects out of each job's garbage collection
            modules = len(sys.modules)
            gc.freeze()
        try:
            _run(connection, pickle.loads(connection.recv_bytes()))
        except (EOFError, BrokenPipeError):
            return


def _end_with_parent() -> None:
    """Ends this worker, even inside a collective, when the pool's process has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(connection: Connection, job: Job) -> None:
    kind, answer, started = "done", b"", False
    try:
        _start_group(job)
        started = True
        answer = pickle.dumps(_call(job))
    except BaseException as error:  # also SystemExit: the worker goes on
        kind, answer = "failed", pickle.dumps(_failure(job.rank, error))
    _send(connection, kind, answer)
    if connection.recv_bytes() != RELEASE or not started:
        # If a peer died while groups were made, torch has counted this group nevertheless: the next one would
        # have another name than on the other ranks, and all would wait for each other.
        raise EOFError
    _clean_up()
    try:
        threads = len(os.listdir("/proc/self/task"))  # all of the process, not only Python's
    except OSError:
        threads = 0
    _send(connection, "spent" if threads > _MOST_THREADS else "idle")


def _start_group(job: Job) -> None:
    store = dist.FileStore(job.store, job.world_size)
    for name, value in (("RANK", job.rank), ("WORLD_SIZE", job.world_size)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


def _call(job: Job) -> Any:
    sys.path.extend(path for path in job.sys_path if path not in sys.path)
    _import_module(*job.module)
    fn, args = pickle.loads(job.call)
    torch.manual_seed(0)  # a run does not depend on earlier runs
    return fn(*args)


def _import_module(name: str, file: str | None) -> None:
    """Imports the module in which a job's function is defined: by its name, or else from its file."""
    if name in sys.modules or file is None:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module was found, but not one that it imports
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _failure(rank: int, error: BaseException) -> tuple[Failure, bytes | None]:
    """Returns the failure and, apart, its exception pickled, as the pool may be unable to load that."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    while error.__traceback__ is not None:  # drop the frames of this file
        if error.__traceback__.tb_frame.f_code.co_filename != __file__:
            break
        error.__traceback__ = error.__traceback__.tb_next
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error.with_traceback(None))
    except Exception:
        pickled = None
    return Failure(rank, summary, text), pickled


def _clean_up() -> None:
    """Undoes what a job may have changed in this worker."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
    clear_dtensor_caches()
    # Models and meshes in reference cycles keep their groups, whose threads wake up every few milliseconds.
    gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _send(connection: Connection, kind: str, payload: bytes = b"") -> None:
    # Not Connection.send: torch makes that one share tensors by file descriptor, which would tie a result to
    # the life of the worker.
    connection.send_bytes(pickle.dumps((kind, payload)))
