"""Processes with torchrun's variables, forked from the gloo pool's server: torch is imported once for all."""

import contextlib
import io
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from parallel3d.testing.gloo_pool import _PRELOAD


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float = 60,
    dying: Collection[int] = (),
    **variables: str,
) -> list[tuple[Any, str]]:
    """What ``fn(*args)`` returns and prints in each of ``ranks`` fresh processes, by rank.

    Of those in ``dying``, which don't get to return anything, None.

    ``fn`` initialises the process group itself, from the environment, which ``variables`` add to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    (port,) = free_ports(1)
    pipes, processes = [], []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        pipe, remote = context.Pipe()
        process = context.Process(target=_run, args=(remote, environment, fn, args), daemon=True)
        process.start()
        remote.close()  # so that a process's death is seen as end of file
        pipes.append(pipe)
        processes.append(process)
    deadline = time.monotonic() + timeout
    outcomes = []
    try:
        for rank, pipe in enumerate(pipes):
            if rank in dying:
                outcomes.append((None, ""))
                continue
            assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} takes too long"
            result, text, error = pipe.recv()
            assert error is None, f"rank {rank}: {error}\n{text}"
            outcomes.append((result, text))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return outcomes


def _run(pipe: Connection, environment: dict[str, str], fn: Callable[..., Any], args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ.update(environment)
    text = io.StringIO()
    result, error = None, None
    with contextlib.redirect_stdout(text):
        try:
            result = fn(*args)
        except BaseException:
            error = traceback.format_exc()
    pipe.send((result, text.getvalue(), error))
    pipe.close()
    sys.exit(error is not None)
