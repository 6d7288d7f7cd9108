"""save: all ranks write one checkpoint of a run, now or in the background."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, spec_of
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util import dry_run
from parallel3d._util.arguments import as_bool, as_count
from parallel3d._util.version import __version__
from parallel3d.checkpoint.dcp import dcp_errors
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.folder import check_alone, looked
from parallel3d.checkpoint.format.lock import Lock
from parallel3d.checkpoint.format.reader import SavePlanner
from parallel3d.checkpoint.format.writer import Writer
from parallel3d.checkpoint.model_state import ModelState, model_state
from parallel3d.checkpoint.optimizer_state import as_optimizers, optimizer_state
from parallel3d.checkpoint.ranks import Ranks, check_same, ranks_of, run_in_background
from parallel3d.checkpoint.rng import rng_state
from parallel3d.checkpoint.values import as_dict, encode, keeper
from parallel3d.errors import CheckpointError

# copy_to_host: a copy of the state to write from, while training changes the state.

_buffers: dict[str, Tensor] = {}
"""Of the last copy: memory that is there need not be asked for, and its pages are."""


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the same layouts on the CPU, in memory of their own.

    The memory is used again by the next call: what was written from it must be done by then.
    """
    locals_ = {
        name: get_local_tensor(t) if isinstance(t, DTensor) else t for name, t in tensors.items()
    }
    for name in [name for name in _buffers if name not in locals_]:
        del _buffers[name]
    for name, local in locals_.items():
        known = _buffers.get(name)
        if known is None or known.shape != local.shape or known.dtype != local.dtype:
            pinned = local.device.type == "cuda"
            _buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
    _copy([_buffers[name] for name in locals_], list(locals_.values()))
    return {
        name: make_dtensor(_buffers[name], spec_of(t)) if isinstance(t, DTensor) else _buffers[name]
        for name, t in tensors.items()
    }


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            pair = groups.setdefault((source.device, source.dtype), ([], []))
            pair[0].append(target)
            pair[1].append(source.detach())
        for (device, _), (to, of) in groups.items():
            if device.type == "cpu":
                foreach_copy_(to, of)
                continue
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
        for kind in {device.type for device, _ in groups} - {"cpu"}:
            torch.get_device_module(kind).current_stream().synchronize()


# What checkpoint.json says of a run beside its values: mesh, plan, versions.


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh with the most axes that a parameter of ``model`` lies on; None for a plain model."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def describe(parameters: Mapping[str, nn.Parameter]) -> Callable[[], dict[str, Any]]:
    """Looks at a model's parameters at rest, by name; what is returned says it, when asked, as it was then.

    JSON values: ``mesh`` (axes and sizes), ``plan`` (parameter -> placements), ``versions``.
    """
    # Between the two a forward may show other parameters; and strings by the hundred take their time.
    sharded = [(name, p) for name, p in parameters.items() if isinstance(p, DTensor)]
    mesh = max((p.device_mesh for _, p in sharded), key=lambda mesh: mesh.ndim, default=None)
    return partial(_described, axes_of(mesh), [(name, p.placements) for name, p in sharded])


def _described(
    axes: dict[str, int] | None, placed: list[tuple[str, tuple[Placement, ...]]]
) -> dict[str, Any]:
    return {
        "mesh": axes,
        "plan": {name: str(list(map(str, placements))) for name, placements in placed},
        "versions": {
            "parallel3d": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def axes_of(mesh: DeviceMesh | None) -> dict[str, int] | None:
    """Axis -> size; None for no mesh."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))


_MOST_STEPS = 10**18  # its folder's name has 18 digits at most


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    async_: bool = False,
    keep: int | None = 3,
    only: str | None = None,
) -> Path | Future[Path]:
    """Writes the checkpoint ``path/step-...`` of a model as it lies on its mesh; ``load`` reads it on any.

    Every rank writes what it holds, each value once, as safetensors; an index has a checksum of each block.
    Until all is on the disk the folder has another name: whoever is killed leaves the checkpoints before it
    as they are. Parameters, persistent buffers and optimizer state keep their dtypes and values; tied ones
    are stored once. All ranks must call it.

    Args:
        path: the run's folder; made if it isn't there. The same for all ranks, on a file system they share.
        optimizer: one, several or none; of ``torch.optim``, ``parallel3d.optim`` or by step_in_backward.
        step: how many steps have been done. A checkpoint of this step is replaced.
        extra: more to keep, by name: the data's position, a scheduler's ``state_dict()``: numbers, strings,
            lists, dicts, tensors. All but DTensors is the first rank's, and so are buffers.
        async_: only copy the state (to host memory), and write in the background. One such save can be
            under way: the next call, or ``load``, waits for it first. Wait for the last before you
            end the process group.
        keep: how many checkpoints of ``path`` to leave, this one among them; None: all.
        only: ``"trainable"``: parameters with ``requires_grad`` alone, as for LoRA's, and no buffers.

    Returns:
        The checkpoint's folder, in which a dry run writes nothing; with ``async_`` a future of it, whose
        ``result()`` raises what went wrong.

    Raises:
        CheckpointError: on all ranks, if one can't write (no space, no rights), or something can't be kept;
            what was saved before is as it was.
    """
    step, async_ = as_count("step", step), as_bool("async_", async_)
    if step >= _MOST_STEPS:
        raise CheckpointError(f"step is {step}; it must be below {_MOST_STEPS:.0e}")
    if keep is not None:
        keep = as_count("keep", keep, least=1)
    if only not in (None, "trainable"):
        raise CheckpointError(f'only is {only!r}; it must be "trainable", or None for everything')
    run_folder = folders.as_path(path).absolute()
    if dry_run.active():  # there are no values, and nobody to meet
        return _not_written(folders.step_folder(run_folder, step), async_)
    state: ModelState | None = None
    problem: Exception | None = None
    try:
        with torch.inference_mode(False), torch.no_grad():
            state = model_state(model, only)
    except Exception as error:  # told to the other ranks, who are on their way to write
        problem = error
    ranks = ranks_of(model, "save", state.parameters.values() if state else None)
    work = _Work(run_folder, step, keep, ranks, only=only, problem=problem)
    if state is not None:
        work.collect(state, optimizer, extra, async_=async_)
    return run_in_background(work.run) if async_ else work.run()


def _not_written(folder: Path, async_: bool) -> Path | Future[Path]:
    if not async_:
        return folder
    future: Future[Path] = Future()
    future.set_result(folder)
    return future


@dataclass
class _Work:
    """One save.

    Attributes:
        tensors: what DCP stores, by name.
        optimizers: how many were given.
        info: for checkpoint.json.
        description: more for it.
        problem: why this rank has nothing to write.
    """

    run_folder: Path
    step: int
    keep: int | None
    ranks: Ranks
    only: str | None = None
    optimizers: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    description: Callable[[], dict[str, Any]] = dict
    problem: Exception | None = None

    def collect(
        self,
        state: ModelState,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        extra: Mapping[str, Any] | None,
        *,
        async_: bool,
    ) -> None:
        """Finds all that is to be stored; with ``async_`` copies it."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._collect(state, as_optimizers(optimizer), extra)
                if async_:
                    self.tensors = copy_to_host(self.tensors)
        except Exception as error:  # told as above
            self.problem = error

    def _collect(
        self, state: ModelState, optimizers: list[Optimizer], extra: Mapping[str, Any] | None
    ) -> None:
        self.optimizers = len(optimizers)
        self.description = describe(state.parameters)
        names = {id(param): name for name, param in state.parameters.items()}
        tensors = self.tensors = {**state.tensors, **state.extra_tensors}
        values: dict[str, Tensor] = {}
        self.info = {
            "step": self.step,
            "ranks": self.ranks.size,
            "rng": rng_state(self.ranks, tensors),
            "model": {"only": self.only, "ties": state.ties, "extra_state": state.extra},
            "optimizer": optimizer_state(names, optimizers, tensors) if optimizers else None,
            "extra": encode(as_dict("extra", extra), "extra", keeper(values)),
        }
        for name in () if self.ranks.is_first else (*state.buffers, *state.extra_tensors, *values):
            # The first rank's: where others have different ones, what is stored still goes together.
            found = tensors if name in tensors else values
            if not isinstance(found[name], DTensor):
                del found[name]
        tensors |= values

    def run(self) -> Path:
        """Writes. Collective. Returns the first rank's path."""
        writer: _LockingWriter | None = None
        try:
            final = self._agreed()
            writer = _LockingWriter(
                final, lambda: {**self.info, **self.description()}, ranks=self.ranks.size
            )
            with dcp_errors(alone=self.ranks.group is None, size=self.ranks.size):
                dcp.save(
                    self.tensors,
                    storage_writer=writer,
                    planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self.ranks.group,
                    no_dist=self.ranks.group is None,
                )
            if self.ranks.is_first:
                self._tidy(final.parent)
            return final
        except CheckpointError:
            if self.ranks.is_first and writer is not None and writer.folder is not None:
                folders.discard(writer.folder)
            raise
        except BaseException:  # of this rank alone: a peer is gone
            self.ranks.give_up()
            raise
        finally:
            self.tensors, self.description = {}, dict  # nothing of the model's is kept
            if writer is not None and writer.lock is not None:
                writer.lock.release()

    def _tidy(self, run: Path) -> None:
        """Removes what is older. The checkpoint is whole: what goes wrong here is a warning."""
        try:
            looked(run)
            if self.keep is not None:
                folders.prune(run, self.keep)
        except OSError as error:
            warnings.warn(f"old checkpoints could not be removed: {error}", stacklevel=4)

    def _agreed(self) -> Path:
        """The folder, when every rank has something to write and all are saving the same."""
        found = self.ranks.all(self._given)
        check_same("save", [what for _, what in found])
        return folders.step_folder(found[0][0], self.step)

    def _given(self) -> tuple[Path, dict[str, object]]:
        if self.problem is not None:
            raise self.problem
        given: dict[str, object] = {
            "step": self.step,
            "only": self.only,
            "optimizers": self.optimizers,
        }
        return self.run_folder, given


class _LockingWriter(Writer):
    """A Writer that holds the run's lock, on the first rank, from before it makes a folder."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folders.check_place(self.path)
        run = self.path.parent
        run.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(run, folders.step_of(self.path))
        check_alone(run)
        return super().prepare_global_plan(plans)
