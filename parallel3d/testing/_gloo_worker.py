"""The worker process of ``GlooPool``.

Pool and worker talk over one pipe. The pool sends a ``Job``; the worker answers ``("done", result)`` or
``("failed", (Failure, exception))`` and keeps its process group until the pool sends ``RELEASE``, so that no
rank closes a connection its peers still read from. Then it answers ``("idle", b"")``, or ``("spent", b"")``
if the run has left threads behind: the pool then replaces the worker.
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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._torch.dtensor import clear_dtensor_caches

RELEASE = b"release"
# torch itself has 15 threads. More than this many: groups of earlier runs still exist, and a thread of gloo
# wakes up a hundred times a second.
_MOST_THREADS = 24


@dataclass(frozen=True)
class Job:
    """One run, as one rank gets it.

    Attributes:
        store: path of the store's file.
        timeout: seconds after which a collective fails.
        sys_path: the pool's ``sys.path``.
        module: name and file of the module that defines the function.
        call: the pickled function and arguments.
    """

    rank: int
    world_size: int
    store: str
    timeout: float
    sys_path: tuple[str, ...]
    module: tuple[str, str | None]
    call: bytes


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        summary: type and message of the exception, or how the process ended.
        traceback: the remote traceback; empty if the process died or was ended.
        exception: the exception, or None if it can't be pickled and loaded here.
        died: whether the process ended without an answer, by a signal or ``os._exit``.
    """

    rank: int
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    died: bool = False


def serve(connection: Connection, threads: int) -> None:
    """Runs jobs until the pool closes its end of the pipe or its process has ended."""
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
    """Ends this process, even inside a collective, when the pool's process has ended."""
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
    """Imports the module of the function, from its file if it can't be found by name."""
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
    """Returns the failure, and the pickled exception apart, as the pool may not be able to load it."""
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
    """Undoes what the run may have changed in this process."""
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
