"""How many calls of ``torch.utils.checkpoint`` graphs hold: a private count, tried before it is used."""

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from sys import getrefcount
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

__all__ = ["checkpointed_calls", "sees_checkpointed_calls"]


def _kinds() -> tuple[type, ...]:
    return (_checkpoint._CheckpointFrame, _checkpoint.CheckpointFunction._backward_cls)


def checkpointed_calls() -> int:
    """How many calls of torch's ``checkpoint`` graphs hold, and some number that stays the same.

    Each of them has an object of a class that is theirs. Of use only if ``sees_checkpointed_calls()``.
    """
    try:
        return sum(map(getrefcount, _kinds()))
    except AttributeError:
        return 0


def sees_checkpointed_calls() -> bool:
    """Whether a call of either kind shows in ``checkpointed_calls`` for as long as its graph lives.

    Tried once. Where it does not, which another torch or another Python may bring, a warning says so.
    """
    # A call imports the compiler, which takes seconds. Before anything has, none was made: then it is enough
    # that the classes are there and their objects are counted.
    return _is_seen(with_calls="torch._dynamo" in sys.modules)


@functools.cache
def _is_seen(*, with_calls: bool) -> bool:
    trial = _call if with_calls else _make
    found: list[bool] = []

    def look() -> None:
        with suppress(Exception):  # of a torch whose private names are others
            found.append(_shows(trial, 0) and _shows(trial, 1))

    # In a thread of its own: modes, saved tensor hooks and grad mode are a thread's, and this may be called
    # within any of the user's.
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if not any(found):
        warnings.warn(
            f"torch {torch.__version__}: calls of torch.utils.checkpoint can't be counted, so units keep "
            "their forward hooks where nothing is sharded; each step costs the CPU a little more",
            stacklevel=3,
        )
    return any(found)


def _call(reentrant: int) -> Any:
    x = torch.zeros((), device="cpu", requires_grad=True)
    return _checkpoint.checkpoint(
        torch.sin, x, use_reentrant=bool(reentrant), preserve_rng_state=False
    )


def _make(kind: int) -> Any:
    made = _kinds()[kind]
    return made.__new__(made)  # type: ignore[call-overload]


def _shows(trial: Callable[[Any], Any], kind: int) -> bool:
    before = checkpointed_calls()
    held = trial(kind)
    during = checkpointed_calls()
    del held
    return during > before == checkpointed_calls()
