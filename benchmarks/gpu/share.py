"""Steps that are timed, and rounds of them that end when their time is over."""

import time
from collections.abc import Callable, Mapping

import torch
from measure import Rounds, alternate
from page import Part

__all__ = ["LEAST", "ROUNDS", "launched", "synced", "take_rounds"]

ROUNDS, LEAST = 20, 4  # rounds wanted on a GPU, and the fewest there are


def synced(function: Callable[[], object], device: str) -> Callable[[], float]:
    """A step for ``take_rounds``: the seconds of one call, until the device has done all of it."""

    def step() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    return step


def launched(
    function: Callable[[], object], device: str, after: Callable[[], object] | None = None
) -> Callable[[], float]:
    """A step for ``take_rounds``: the seconds of one call on the host, which does not wait for the device.

    On a CPU it is CPU time, which leaves other processes out. On a GPU it is real time: a backward runs on
    another thread, for which the caller waits.

    Args:
        after: is called when the device is done, and is not counted.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time

    def step() -> float:
        start = clock()
        function()
        seconds = clock() - start
        synchronize(device)
        if after is not None:
            after()
        return seconds

    return step


def synchronize(device: str) -> None:
    """Waits for the GPU; nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def take_rounds(
    part: Part,
    what: str,
    steps: Mapping[str, Callable[[], float]],
    *,
    small: bool,
    seconds: float,
    steps_per_round: int = 2,
    warmup: int = 3,
) -> Rounds:
    """Returns ``ROUNDS`` rounds of ``measure.alternate``; fewer, but ``LEAST``, once ``seconds`` are over.

    Args:
        part: its notes say where there are fewer than ``ROUNDS``.
        what: the case, for that note.
        steps: variant -> a step that returns its seconds.
        small: ``LEAST`` rounds are enough.
        seconds: what this case may take.
        steps_per_round, warmup: as for ``alternate``.
    """
    end = time.monotonic() + seconds
    taken = Rounds({name: [] for name in steps})
    wanted = LEAST if small else ROUNDS
    done = 0
    while done < LEAST or (done < wanted and time.monotonic() < end):
        # Two at a time: each variant comes first as often as second.
        some = alternate(
            steps, rounds=2, steps_per_round=steps_per_round, warmup=0 if done else warmup
        )
        for name, values in some.seconds.items():
            taken.seconds[name] += values
        done += 2
    if done < wanted:
        part.notes.append(
            f"{what}: {done} rounds instead of {wanted}, its share of the time was over"
        )
    return taken
