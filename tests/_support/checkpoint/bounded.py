"""How much time and memory a call takes; and all that a refused load must leave as it was."""

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from parallel3d.errors import CheckpointError

SECONDS, BYTES = 2.0, 64 << 20


@contextmanager
def in_time(seconds: int = 20) -> Iterator[None]:
    """Fails instead of hanging."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_space(here: bool = True) -> Iterator[None]:
    """If ``here``, this process's disk is full."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    before = os.write
    if here:
        os.write = full  # type: ignore[assignment]
    try:
        yield
    finally:
        os.write = before


def plain(value: Any) -> Any:
    """Comparable to the bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def everything(model: Any, optimizer: Any) -> Any:
    """Of model, optimizer and generators."""
    _, keys, *rest = numpy.random.get_state()
    return copy.deepcopy(
        [
            plain(dict(model.state_dict())),
            plain(optimizer.state_dict()),
            [(id(param), plain(state)) for param, state in optimizer.state.items()],
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            keys.tobytes(),
            rest,
        ]
    )


def peak() -> int:
    """The most memory that this process has had since ``peak_reset``, in bytes."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def refused(
    load: Callable[[], Any],
    model: Any,
    optimizer: Any,
    *,
    bytes_: int = BYTES,
    seconds: float = SECONDS,
    sentinel: Path = Path("sentinel"),
) -> CheckpointError:
    """The error of ``load()``, which changes nothing, takes no time and no memory, and doesn't execute what
    would make the file ``sentinel``."""
    before = everything(model, optimizer)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        start = peak()
    except OSError:
        start = 1 << 62
    began = time.process_time()
    with in_time(), pytest.raises(CheckpointError) as caught:
        load()
    took = time.process_time() - began
    assert not sentinel.exists(), "it was executed"
    assert everything(model, optimizer) == before
    assert took < seconds, f"{took} s"
    assert peak() - start < bytes_, f"{(peak() - start) >> 20} MiB"
    assert len(str(caught.value)) < 2000
    return caught.value
