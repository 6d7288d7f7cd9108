"""Starts the ranks of a job as torchrun does, again after each crash, without importing torch each time."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from _support.kill import moments

Kill = dict[str, Any]
"""See moments.arrange."""

GRACE = 30.0
"""Seconds that ranks have after SIGTERM, as under torchrun, before they are killed."""
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "torch.distributed.checkpoint"]
_PRELOAD += ["parallel3d", "parallel3d.checkpoint.loading", "parallel3d.checkpoint.saving"]
_PRELOAD += ["parallel3d.parallelize", "rich.progress"]


@dataclass(frozen=True)
class Ending:
    """How one start of a job ended.

    Attributes:
        killed: ranks that killed themselves.
        failed: whether any rank ended otherwise than with 0.
        forced: ranks that did not end on SIGTERM, and were killed.
        seconds: from start to end.
        peers: seconds until the others had ended after the first did.
    """

    killed: list[int]
    failed: bool
    forced: list[int]
    seconds: float
    peers: float


def run_ranks(
    options: Sequence[str], world: int, kill: Kill | None, output: Path, limit: float = 300
) -> Ending:
    """Runs ``train.py`` on ``world`` gloo processes until all have ended; their output goes to a file.

    When one has ended with an error, the others get SIGTERM, and after ``GRACE`` seconds SIGKILL.

    Raises:
        TimeoutError: they run for longer than ``limit`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    start, port = time.monotonic(), _free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world, port, list(options), kill, output))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    forced: list[int] = []
    first_end: float | None = None
    deadline = start + limit
    while running := [p for p in processes if p.exitcode is None]:
        wait([p.sentinel for p in running], max(0.0, min(deadline - time.monotonic(), 1.0)))
        if first_end is None and any(p.exitcode for p in processes):
            first_end = time.monotonic()
            deadline = min(deadline, first_end + GRACE)
            for process in running:
                process.terminate()
        if time.monotonic() > deadline:
            forced = [rank for rank, p in enumerate(processes) if p.exitcode is None]
            for rank in forced:
                processes[rank].kill()
            if first_end is None:
                raise TimeoutError(f"{len(forced)} of {world} ranks still run; see {output}")
            deadline = float("inf")
    end = time.monotonic()
    codes = [p.exitcode for p in processes]
    killed = [rank for rank, code in enumerate(codes) if code == -9 and rank not in forced]
    peers = end - (first_end or end)
    return Ending(killed, any(codes), forced, end - start, peers)


def run_by_torchrun(
    options: Sequence[str], world: int, kills: Sequence[Kill], output: Path, limit: float = 600
) -> int:
    """The same by torchrun, which starts the job again after each of ``kills``; its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "--max-restarts", str(len(kills))]
    environment = os.environ | {"KILLS": json.dumps(list(kills)), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    with output.open("a") as file:
        return subprocess.run(
            [*command, moments.__file__, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=limit,
        ).returncode


def _rank(
    rank: int, world: int, port: int, options: list[str], kill: Kill | None, output: Path
) -> None:
    """One rank: torchrun's variables, its output to the file, then the script."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "KILLS", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(name, None)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may have no address
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    moments.run(options, kill)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
