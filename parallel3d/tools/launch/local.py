"""``parallel3d run`` and ``parallel3d demo``: start processes on this machine; an error ends in one line.

They need no extra: ``parallel3d demo`` is what someone tries right after installing the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["demo", "examples_folder", "run"]

DEMO_MESH = {"replicate": 2, "shard": 2, "tp": 2}


def run(arguments: Sequence[str]) -> int:
    """Runs a program on several processes with ``torchrun``; if it fails, prints one line instead of
    torchrun's traceback.

    Args:
        arguments: torchrun's own options, the program and its options: ``["--nproc-per-node", "8",
            "train.py"]``.

    Returns:
        The exit code: 0; 130 after Ctrl-C, when the processes have ended; else that of the first process that
        failed, or 128 and the number of the signal that ended it or this one.
    """
    import logging

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What the processes have to say they say themselves; torch sets the level of each of its loggers.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # As torchrun sets it, which explains itself at length.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun.main([example(word) for word in arguments])
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {failure.signal_name()}"
        if code not in (2, 130):  # a user's mistake, Ctrl-C: the program has said it
            print(f"parallel3d run: rank {rank} ended first, with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Trains the small Llama of ``examples/llama/train.py`` on a (2, 2, 2) mesh of eight local processes.

    Its first 20 steps are compared with the plain model's. It runs on the CPU where there are fewer GPUs than
    processes, unless ``PARALLEL3D_DEVICE`` is set.

    Args:
        arguments: more options of ``train.py``. If they give the sizes of a mesh, as many processes start as
            that mesh has ranks.

    Returns:
        The exit code, as ``run`` does.
    """
    import argparse

    parser = argparse.ArgumentParser("parallel3d demo", add_help=False, allow_abbrev=False)
    for axis in DEMO_MESH:
        parser.add_argument(f"--{axis}", default=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(arguments)
    mesh = vars(given) or DEMO_MESH
    ranks = 1
    for axis, size in mesh.items():
        if not str(size).isdecimal() or int(size) < 1:
            print(f"parallel3d demo: --{axis} {size}: give a number from 1 on", file=sys.stderr)
            return 2
        ranks *= int(size)
    sizes = [word for axis in DEMO_MESH for word in (f"--{axis}", str(mesh.get(axis, 1)))]
    print(f"starting {ranks} processes on this machine{_on_cpu(ranks)}", flush=True)
    program = examples_folder() / "llama" / "train.py"
    options = [] if {"--check", "--help", "-h"} & set(rest) else ["--steps", "60", "--check"]
    return run(["--nproc-per-node", str(ranks), str(program), *sizes, *options, *rest])


def _on_cpu(ranks: int) -> str:
    """Chooses the CPU if there are GPUs, but fewer than ``ranks``; returns a text that says so, or ""."""
    import torch

    from parallel3d._util.arguments import counted
    from parallel3d.mesh.build import DEVICE

    count = torch.accelerator.device_count()
    if DEVICE in os.environ or not 0 < count < ranks:
        return ""
    os.environ[DEVICE] = "cpu"
    return f", on the CPU, as it has {counted(count, 'GPU')}"


def examples_folder() -> Path:
    """Returns the folder of the examples: that in the installed package, or that beside it in a checkout.

    Raises:
        FileNotFoundError: neither exists.
    """
    package = Path(__file__).resolve().parents[2]
    places = package / "_examples", package.parent / "examples"
    for place in places:
        if (place / "llama" / "train.py").is_file():
            return place
    raise FileNotFoundError(
        f"no llama/train.py in {' or '.join(map(str, places))}: install the package anew"
    )


def example(path: str) -> str:
    """Returns ``path``, or the installed example's path if ``path`` is one that doesn't exist here."""
    name = path.removeprefix("examples/")
    if name == path or not name.endswith(".py") or Path(path).exists():
        return path
    own = examples_folder() / name
    return str(own) if own.is_file() else path
