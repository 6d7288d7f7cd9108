"""What is on the screen, and what Ctrl-C does, before torch is imported, which takes seconds."""

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

__all__ = ["announce", "command", "is_first_rank", "since_start"]

START = time.perf_counter()


def announce() -> None:
    """Says what starts. Until the training handles Ctrl-C itself, it ends the process without a traceback."""
    if is_first_rank() and not {"--json", "--help", "-h"} & set(sys.argv):
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rank = os.environ.get("RANK", "0")  # one of each machine
        print(since_start(f"rank {rank} of {ranks}: importing torch"), flush=True)
    signal.signal(signal.SIGINT, _stop)


def since_start(text: str) -> str:
    """``text`` behind the seconds since the start; its other lines are indented."""
    return f"{time.perf_counter() - START:5.1f} s  " + text.replace("\n", "\n" + " " * 9)


def command() -> str:
    """The command that starts this program again."""
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --nproc-per-node {processes}" if processes else "python"
    return " ".join([launcher, *sys.argv])


def is_first_rank() -> bool:
    """Whether this process is the one of its machine that prints, before there is a process group."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if is_first_rank():
        print("\nstopped before the first step", flush=True)
    os._exit(128 + number)  # no traceback, and no waiting for ranks that end too
