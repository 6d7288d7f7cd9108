"""ProfilerWindow: runs torch.profiler for some steps of a run and writes a trace for Perfetto."""

import os
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError


class ProfilerWindow:
    """Profiles the steps ``first`` to ``last``, both included, on some ranks.

    Each of these ranks writes ``folder/steps-10-12-rank-00003.json`` at the end of the last step, or of the
    run. Open it in ui.perfetto.dev or chrome://tracing. The step before the first is profiled as warm-up and
    dropped. Other steps cost nothing. If the profiler fails, a trace can't be written or the run ends before
    the first step, there is a warning.

    Args:
        folder: created if it does not exist.
        first, last: step numbers, as given to ``Metrics.step``.
        ranks: global ranks; None: all.
        stacks, shapes, memory: with_stack, record_shapes and profile_memory of ``torch.profiler.profile``.

    Raises:
        Parallel3dError: ``first`` is after ``last``, or one of them is no step number.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        first: int,
        last: int,
        *,
        ranks: Collection[int] | None = (0,),
        stacks: bool = False,
        shapes: bool = False,
        memory: bool = False,
    ) -> None:
        first, last = (as_count("ProfilerWindow: a step", step) for step in (first, last))
        if first > last:
            raise Parallel3dError(
                f"ProfilerWindow: the steps {first} to {last}: the first is after the last"
            )
        self.folder, self.first, self.last = Path(folder), first, last
        self.ranks = None if ranks is None else frozenset(ranks)
        self.options: dict[str, Any]
        self.options = {"with_stack": stacks, "record_shapes": shapes, "profile_memory": memory}
        self.path: Path | None = None
        self._profile: Any = None
        self._step: Any = None
        self._rank, self._latest = 0, -1
        self._over = False  # the trace is written, or has failed

    def begin(self, step: int, rank: int) -> None:
        """Called when a step begins: starts the profiler in the step before ``first``."""
        if self._over or (self.ranks is not None and rank not in self.ranks):
            return
        self._rank, self._latest = rank, step
        if self._profile is None:
            # From the step before the first; a run that resumes later profiles the rest of the window.
            if not max(self.first - 1, 0) <= step <= self.last:
                return
            self._attempt(lambda: self._start(step))
        if self._profile is not None:
            self._step = profiler.record_function(f"step {step}")
            self._step.__enter__()

    def _start(self, step: int) -> None:
        warmup = max(self.first - step, 0)
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a window without warm-up is less exact
            schedule = profiler.schedule(
                wait=0, warmup=warmup, active=self.last - max(self.first, step) + 1, repeat=1
            )
            self._profile = profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._save, **self.options
            )
            self._profile.start()

    def end(self, step: int) -> None:
        """Called when a step has ended: writes the trace after the step ``last``."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._profile is not None:
            if step >= self.last:
                self.close()
            else:
                self._attempt(self._profile.step)

    def close(self) -> None:
        """Ends the window, and writes the steps profiled so far."""
        if self._profile is not None:
            self._attempt(self._profile.stop)  # calls _save, unless all steps were warm-up
            self._profile = None
            self._over = self._over or self._latest >= self.first
        if 0 <= self._latest < self.first and not self._over:
            warnings.warn(
                f"no trace of rank {self._rank}: the run ended after step {self._latest}, before the steps "
                f"{self.first} to {self.last}",
                stacklevel=2,
            )

    def check_ranks(self, world_size: int) -> None:
        """Warns if some of ``ranks`` do not exist, as a resumed run may have fewer ranks."""
        absent = sorted((self.ranks or set()) - set(range(world_size)))
        if absent:
            warnings.warn(
                f"no traces of the ranks {', '.join(map(str, absent))}: there are only {world_size}",
                stacklevel=2,
            )

    def _attempt(self, what: Callable[[], object]) -> None:
        """Calls ``what``; if it raises, as when another profiler is on, warns and profiles no more."""
        try:
            what()
        except Exception as error:
            text = f"no trace of rank {self._rank}: the profiler failed: {error}"
            warnings.warn(text, stacklevel=3)
            self._profile, self._over = None, True

    def _save(self, profile: Any) -> None:
        name = f"steps-{self.first}-{self.last}-rank-{self._rank:05d}.json"
        path = self.folder / name
        part = self.folder / f"{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:
            for left in self.folder.glob(f"{part.name}*"):  # also a temporary file of torch's
                with suppress(OSError):
                    left.unlink()
            warnings.warn(f"the trace {path} could not be written: {error}", stacklevel=2)
        else:
            self.path = path


def parse_steps(text: str) -> tuple[int, int]:
    """Parses ``"10:12"`` as (10, 12) and ``"10"`` as (10, 10).

    Raises:
        Parallel3dError: ``text`` is neither.
    """
    first, colon, last = text.partition(":")
    with suppress(ValueError):
        steps = int(first), int(last if colon else first)
        if 0 <= steps[0] <= steps[1]:
            return steps
    raise Parallel3dError(f"the steps {text!r}: give FIRST:LAST, both included, such as 10:12")
