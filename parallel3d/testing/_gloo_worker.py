"""What runs inside a worker process of ``GlooPool``.

Talks over one pipe. The pool sends a ``Job``; the worker answers ``("done", result)`` or
``("failed", (Failure, exception))`` and keeps its process group until the pool sends ``RELEASE``,
so that no rank closes a connection its peers still read from; then it answers ``("idle", None)``, or
``("spent", None)`` where the run has left threads behind: the pool ends it and starts another.
"""

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._torch.dtensor import clear_dtensor_caches

RELEASE = b"release"
# More than that and groups of runs gone by are still there: 15 are torch's own. A thread of gloo wakes a
# hundred times a second, so that some runs' worth of them take a core for nothing.
_MOST_THREADS = 24


@dataclass(frozen=True)
class Job:
    """One run, as one rank sees it."""

    rank: int
    world_size: int
    store: str  # path of the store's file
    timeout: float  # seconds after which a collective gives up
    sys_path: tuple[str, ...]
    module: tuple[str, str | None]  # name and file of the module that defines the function
    call: bytes  # pickled (function, arguments)


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: the rank.
        summary: type and message of the exception, or what became of the process.
        traceback: the remote traceback; empty if the process died or was ended.
        exception: the exception itself where it can be pickled and loaded here, else None.
        died: the process ended without a word, by a signal or ``os._exit``.
    """

    rank: int
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    died: bool = False


def serve(connection: Connection, threads: int) -> None:
    """Run jobs until the pool closes its end of the pipe or its process is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()  # where a worker that crashes was
    torch.set_num_threads(threads)
    loopback = _loopback_interface()
    if loopback is not None:  # gloo would look up the host name, which may not resolve
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    _send(connection, "ready", None)
    modules = 0
    while True:
        if len(sys.modules) > modules:
            # What was imported stays: not to be looked through after each job.
            modules = len(sys.modules)
            gc.freeze()
        try:
            job: Job = pickle.loads(connection.recv_bytes())
            _run(connection, job)
        except (EOFError, BrokenPipeError):
            return


def _end_with_parent() -> None:
    """End this process, even in the middle of a collective, once the pool's process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(connection: Connection, job: Job) -> None:
    kind, answer, started = "done", None, False
    try:
        _start_group(job)
        started = True
        answer = pickle.dumps(_call(job))
    except BaseException as error:  # also SystemExit: the worker outlives what it runs
        kind, answer = "failed", pickle.dumps(_failure(job.rank, error))
    _send(connection, kind, answer)
    if connection.recv_bytes() != RELEASE or not started:
        # Where a peer died while groups were made, torch has counted this one all the same: the next
        # would have another name than on the other ranks, and all would wait for each other.
        raise EOFError
    _clean_up()
    _send(connection, "spent" if _threads() > _MOST_THREADS else "idle", None)


def _threads() -> int:
    """Of this process, also those that Python has not made; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _start_group(job: Job) -> None:
    timeout = timedelta(seconds=job.timeout)
    store = dist.FileStore(job.store, job.world_size)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
    )


def _call(job: Job) -> Any:
    sys.path.extend(path for path in job.sys_path if path not in sys.path)
    _import_module(*job.module)
    fn: Callable[..., Any]
    fn, args = pickle.loads(job.call)
    torch.manual_seed(0)  # a run does not depend on the runs before it
    return fn(*args)


def _import_module(name: str, file: str | None) -> None:
    """Make the module of the function importable, from its file where its name is not enough."""
    if name in sys.modules or file is None:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module was found; something it imports was not
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _failure(rank: int, error: BaseException) -> tuple[Failure, bytes | None]:
    """How ``error`` failed the rank; the error apart, as the pool may not be able to load it."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    while error.__traceback__ is not None:  # a reader wants the frames below this file's
        if error.__traceback__.tb_frame.f_code.co_filename != __file__:
            break
        error.__traceback__ = error.__traceback__.tb_next
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error.with_traceback(None))
    except Exception:  # the text says it all the same
        pickled = None
    return Failure(rank, summary, text), pickled


def _clean_up() -> None:
    """Leave nothing of this run to the next."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
    clear_dtensor_caches()
    # Models and meshes in cycles keep their groups, whose threads wake up every few milliseconds.
    gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _send(connection: Connection, kind: str, payload: bytes | None) -> None:
    # Plain pickle, not Connection.send: torch teaches that one to share tensors by file
    # descriptor, which would tie a result to the life of the worker.
    connection.send_bytes(pickle.dumps((kind, payload)))


def _loopback_interface() -> str | None:
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            return name
    return None
