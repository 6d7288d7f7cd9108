"""Runs examples/llama/train.py in a process that may kill itself with SIGKILL at a chosen moment.

    KILLS='[{"rank": 2, "moment": "write", "call": 3}]' torchrun --nproc-per-node 4 --max-restarts 1 \\
        tests/_support/kill/moments.py --checkpoint /tmp/run --save-every 2 --steps 6

``KILLS`` is a list of JSON objects, one for each start of the job (torchrun counts them in
``TORCHELASTIC_RESTART_COUNT``); a start beyond the list, and null, kills nobody. The library knows nothing
of this: functions that a moment is in are replaced here before the training begins.
"""

import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[3] / "examples" / "llama" / "train.py"
CALL_DELAY = 0.002
"""Seconds between the begin of a collective and the kill, so that it comes in the middle of it."""


_signal = signal.SIGKILL


def die() -> None:
    """At once: no handler, no ``finally``, no ``atexit``. Unless it was to be another signal."""
    os.kill(os.getpid(), _signal)


def die_later(seconds: float) -> None:
    """Another thread does it, while this one computes or waits in a system call."""

    def wait_and_die() -> None:
        time.sleep(seconds)
        die()

    threading.Thread(target=wait_and_die, daemon=True).start()


class Patch:
    """Replaces a function; at its ``call``-th call, counted from 1, something else happens."""

    def __init__(self, call: int) -> None:
        self.left, self.lock = call, threading.Lock()

    def now(self) -> bool:
        with self.lock:  # a save in the background calls too
            self.left -= 1
            return self.left == 0

    def __call__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: bool = False,
    ) -> None:
        """``before`` is called with the function's arguments; ``after``: dies when the function is done."""
        original = getattr(owner, name)

        def replacement(*args: Any, **options: Any) -> Any:
            now = self.now()
            if now and before is not None:
                before(*args, **options)
            result = original(*args, **options)
            if now and after:
                die()
            return result

        setattr(owner, name, replacement)


def ignore_arguments(function: Callable[[], None]) -> Callable[..., None]:
    return lambda *args, **options: function()


def at_start(patch: Patch) -> None:
    """The ranks have met; the process group is about to be made."""
    from torch import distributed as dist

    patch(dist, "init_process_group", before=ignore_arguments(die))


def in_forward(patch: Patch) -> None:
    import llama

    patch(llama.FeedForward, "forward", before=ignore_arguments(die))


def in_backward(patch: Patch) -> None:
    """When the gradient arrives at what goes into a layer's feed-forward."""
    import llama

    original = llama.FeedForward.forward

    def forward(self: Any, x: Any) -> Any:
        y = original(self, x)
        if patch.now():
            y.register_hook(ignore_arguments(die))
        return y

    llama.FeedForward.forward = forward  # type: ignore[method-assign]


def in_gradient_exchange(patch: Patch) -> None:
    """The gradients' reduce-scatter has begun: the engine's, on a CPU, is an all-to-all."""
    from torch import distributed as dist

    patch(dist, "all_to_all_single", after=True)


def in_all_reduce(patch: Patch) -> None:
    """Of the gradients over ``replicate``, of tensor parallelism's activations, of the loss."""
    from torch import distributed as dist

    patch(dist, "all_reduce", before=lambda *args, **options: die_later(CALL_DELAY))


def in_optimizer(patch: Patch) -> None:
    """Not AdamW's own step: optim.local tries that on a few numbers when it makes the optimizer."""
    from parallel3d.optim.local import LocalSteps

    patch(LocalSteps, "step", after=True)


def in_copy(patch: Patch) -> None:
    """The state is copied for a save in the background, which then begins."""
    from parallel3d.checkpoint import saving

    patch(saving, "copy_to_host", after=True)


def in_write(patch: Patch) -> None:
    """With a half of the bytes written."""
    write = os.write

    def half(file: int, data: Any) -> None:
        write(file, memoryview(data)[: len(data) // 2])
        die()

    patch(os, "write", before=half)


def before_sync(patch: Patch) -> None:
    patch(os, "fsync", before=ignore_arguments(die))


def before_rename(patch: Patch) -> None:
    patch(os, "rename", before=ignore_arguments(die))


def after_rename(patch: Patch) -> None:
    patch(os, "rename", after=True)


def in_remove(patch: Patch) -> None:
    """Of an old checkpoint: its marker is gone, its files aren't."""
    patch(shutil, "rmtree", before=ignore_arguments(die))


def in_load(patch: Patch) -> None:
    patch(os, "preadv", before=ignore_arguments(die))


MOMENTS: dict[str, Callable[[Patch], None]] = {
    "start": at_start,
    "forward": in_forward,
    "backward": in_backward,
    "gradient exchange": in_gradient_exchange,
    "all-reduce": in_all_reduce,
    "optimizer": in_optimizer,
    "copy": in_copy,
    "write": in_write,
    "before fsync": before_sync,
    "before rename": before_rename,
    "after rename": after_rename,
    "remove": in_remove,
    "load": in_load,
}
"""Name -> what arranges that the process dies at that moment's ``call``-th time."""


def arrange(kill: dict[str, Any] | None) -> None:
    """Arranges the kill that is meant for this rank, if it is.

    Args:
        kill: ``rank``, or "all", and either ``moment`` and ``call`` or ``seconds`` from now on; ``signal``:
            the name of another than SIGKILL.
    """
    global _signal
    if kill is None or kill["rank"] not in ("all", int(os.environ.get("RANK", "0"))):
        return
    _signal = signal.Signals[kill.get("signal", "SIGKILL")]
    if "seconds" in kill:
        die_later(kill["seconds"])
    else:
        MOMENTS[kill["moment"]](Patch(kill["call"]))


def run(options: list[str], kill: dict[str, Any] | None) -> None:
    """``python examples/llama/train.py *options`` with such a kill."""
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv[:] = [str(TRAIN), *options]
    arrange(kill)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    kills = json.loads(os.environ.get("KILLS", "[]"))
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run(sys.argv[1:], kills[start] if start < len(kills) else None)
