"""The checkpoints of a training run: it goes on where it was, on any number of processes."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from starting import command
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import parallel3d as p3d

__all__ = ["Run"]


class Run:
    """How far a run is, and its checkpoints beside one another in a folder.

    Args:
        folder: of the run, shared by all ranks; None: nothing is saved.
        fixed: option -> value, of those that must be the same when the run goes on.
        every: steps between two checkpoints.
        keep: how many checkpoints to leave.
        background: write them in the background.

    Attributes:
        step: steps done.
        samples: samples consumed, which is the number of the next.
        saved: step of the newest checkpoint of this process's.
    """

    def __init__(
        self, folder: Path | None, fixed: dict[str, Any], *, every: int, keep: int, background: bool
    ) -> None:
        self.folder, self.fixed = folder, fixed
        self.every, self.keep, self.background = every, keep, background
        self.step, self.samples = 0, 0
        self.saved: int | None = None
        self._writing: Future[Path] | None = None

    def resume(self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> str | None:
        """Reads the newest whole checkpoint of the folder, if it has any, on all ranks.

        Returns:
            What it has read, for people; None if there is nothing yet.

        Raises:
            CheckpointError: on all ranks: it is another run's, or another model's, or all are damaged.
        """
        if self.folder is None or p3d.checkpoint.latest(self.folder) is None:
            return None
        info = p3d.checkpoint.load(self.folder, model, optimizer)
        for option, now in self.fixed.items():
            then = info.extra.get("fixed", {}).get(option)
            if then != now:
                raise p3d.CheckpointError(
                    f"{info.path} is of a run with {option} {then}; this one has {now}. Go on with the "
                    f"same, or give --checkpoint another folder"
                )
        schedule.load_state_dict(info.extra["schedule"])
        self.step = self.saved = info.step
        self.samples = info.extra["samples"]
        mesh = " x ".join(f"{axis} {size}" for axis, size in (info.mesh or {}).items())
        return f"{info.path}: {self.step} steps, {self.samples} samples, saved on {mesh or 'one process'}"

    def advance(self, samples: int) -> None:
        """One more step is done, with so many samples."""
        self.step += 1
        self.samples += samples

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.folder is not None and self.step % self.every == 0

    def save(self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
        """Saves, or in the background begins to, unless this step has been. All ranks call it."""
        if self.folder is not None and self.saved != self.step:
            result = p3d.checkpoint.save(
                self.folder,
                model,
                optimizer,
                step=self.step,
                extra={
                    "samples": self.samples,
                    "schedule": schedule.state_dict(),
                    "fixed": self.fixed,
                },
                async_=self.background,
                keep=self.keep,
            )
            self._writing = result if isinstance(result, Future) else None
            self.saved = self.step

    def wait(self) -> None:
        """Returns when the last checkpoint is whole."""
        if self._writing is not None:
            self._writing.result()

    @property
    def where(self) -> str:
        """What has become of the last step."""
        if self.folder is None:
            return "nothing is saved without --checkpoint"
        return f"saved {self.step} in {self.folder}; to go on: {command()}"
