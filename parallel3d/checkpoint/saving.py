"""save: all ranks write one checkpoint of a run, now or in the background."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, spec_of
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util import dry_run
from parallel3d._util.arguments import as_bool, as_count
from parallel3d._util.version import __version__
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.files import bytes_of
from parallel3d.checkpoint.format.lock import Lock
from parallel3d.checkpoint.format.storage import SavePlanner, Writer
from parallel3d.checkpoint.ranks import Ranks, check_same, dcp_errors, ranks_of, run_in_background
from parallel3d.checkpoint.rng import rng_state
from parallel3d.checkpoint.state import PREFIX, as_optimizers, model_state, optimizer_state
from parallel3d.checkpoint.values import as_dict, encode, keeper
from parallel3d.errors import CheckpointError
from parallel3d.fsdp.inspect import owner_of
from parallel3d.mesh.joined import axis_sizes

_host_buffers: dict[str, Tensor] = {}
"""Buffers of the last copy, kept because memory that is already mapped is faster."""


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies on the CPU with the same placements, in memory that the next call uses again."""
    locals_ = {
        name: get_local_tensor(t) if isinstance(t, DTensor) else t for name, t in tensors.items()
    }
    for name in _host_buffers.keys() - locals_.keys():
        del _host_buffers[name]
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    copies: dict[str, Tensor] = {}
    for name, local in locals_.items():
        known = _host_buffers.get(name)
        if known is None or known.shape != local.shape or known.dtype != local.dtype:
            pinned = local.device.type == "cuda"
            known = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            _host_buffers[name] = known
        by_kind.setdefault((local.device, local.dtype), []).append((known, local.detach()))
        tensor = tensors[name]
        sharded = isinstance(tensor, DTensor)
        copies[name] = make_dtensor(known, spec_of(tensor)) if sharded else known  # type: ignore[arg-type]
    with torch.no_grad():
        for (device, _), pairs in by_kind.items():
            if device.type == "cpu":
                foreach_copy_(*map(list, zip(*pairs, strict=True)))
            else:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        for kind in {device.type for device, _ in by_kind} - {"cpu"}:
            torch.get_device_module(kind).current_stream().synchronize()
    return copies


def mesh_of(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """Returns the mesh with the most axes among the parameters' meshes; None for a plain model."""
    # A parameter's own mesh may be an equal one made earlier, whose shard and cp are others.
    owners = ((p, owner_of(p)) for p in parameters if isinstance(p, DTensor))
    meshes = [p.device_mesh if owner is None else owner.on.mesh for p, owner in owners]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def axes_of(mesh: DeviceMesh | None) -> dict[str, int] | None:
    if mesh is None:
        return None
    if mesh.mesh_dim_names is None:
        return {f"axis {number}": size for number, size in enumerate(mesh.shape)}
    return axis_sizes(mesh)


_MAX_STEP = 10**18  # the folder's name has 18 digits at most


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
    """Writes the checkpoint ``path/step-...`` of a model, which ``load`` reads on any mesh.

    All ranks must call it. Each writes what it holds, every value once, as safetensors; an index has a
    checksum of each block. The folder has a temporary name until everything is on the disk, so a killed
    process leaves earlier checkpoints unchanged. Parameters, persistent buffers and optimizer state keep
    their dtypes and values; tied parameters are stored once.

    Args:
        path: the run's folder, made if it does not exist; the same for all ranks, on a shared file system.
        model: sharded, replicated or plain.
        optimizer: one, several or none; of ``torch.optim``, ``parallel3d.optim`` or from step_in_backward.
        step: how many steps have been done. A checkpoint of the same step is replaced.
        extra: further values by name, such as the position in the data or a scheduler's ``state_dict()``:
            numbers, strings, lists, dicts, tensors. Except for DTensors the first rank's are stored; so are
            buffers, with a warning that names those that differ between ranks.
        async_: copy the state to host memory and write in the background. The next ``save`` or ``load`` first
            waits for it. Wait for the last one before destroying the process group.
        keep: how many checkpoints of ``path`` to keep, including this one; None: all.
        only: ``"trainable"``: store parameters with ``requires_grad`` alone, as for LoRA, and no buffers.

    Returns:
        The checkpoint's folder, in which a dry run writes nothing; with ``async_`` a future of it, whose
        ``result()`` raises any error.

    Raises:
        CheckpointError: on all ranks, if one cannot write or something cannot be stored; earlier checkpoints
            are unchanged.
    """
    step, async_ = as_count("step", step), as_bool("async_", async_)
    if step >= _MAX_STEP:
        raise CheckpointError(f"step is {step}; it must be below {_MAX_STEP:.0e}")
    if keep is not None:
        keep = as_count("keep", keep, least=1)
    if only not in (None, "trainable"):
        raise CheckpointError(f'only is {only!r}; it must be "trainable", or None for everything')
    run_folder = folders.as_path(path).absolute()
    if dry_run.active():  # there are no values and no other ranks
        folder = folders.step_folder(run_folder, step)
        if not async_:
            return folder
        future: Future[Path] = Future()
        future.set_result(folder)
        return future
    work = _Save(run_folder, step, keep, ranks_of(model, "save"), only)
    try:
        with torch.inference_mode(False), torch.no_grad():
            work.collect(model, as_optimizers(optimizer), extra)
            if async_:
                work.tensors = copy_to_host(work.tensors)
    except Exception as error:  # raised on all ranks by ``run``
        work.problem = error
    return run_in_background(work.run, work.ranks) if async_ else work.run()


@dataclass
class _Save:
    """One call of ``save``: what it collects from the model and optimizers, and how that is written."""

    run_folder: Path
    step: int
    keep: int | None
    ranks: Ranks
    only: str | None
    problem: Exception | None = None  # the error for which this rank has nothing to write
    optimizers: int = 0  # how many were given
    tensors: dict[str, Tensor] = field(default_factory=dict)  # what DCP stores, by name
    info: dict[str, Any] = field(default_factory=dict)  # the content of checkpoint.json
    placements: dict[str, Any] = field(default_factory=dict)  # of parameters, by name
    buffers: dict[str, int] = field(default_factory=dict)  # name -> checksum of this rank's

    def collect(
        self, model: nn.Module, optimizers: list[Optimizer], extra: Mapping[str, Any] | None
    ) -> None:
        state = model_state(model, self.only)
        self.optimizers = len(optimizers)
        params = state.parameters
        # Recorded now, as a forward may register other parameters; formatting them takes time.
        self.placements = {n: p.placements for n, p in params.items() if isinstance(p, DTensor)}
        names = {id(param): name for name, param in params.items()}
        tensors = self.tensors = {**state.tensors, **state.extra_tensors}
        values: dict[str, Tensor] = {}
        self.info = {
            "step": self.step,
            "ranks": self.ranks.size,
            "rng": rng_state(self.ranks, tensors),
            "model": {"only": self.only, "ties": state.ties, "extra_state": state.extra},
            "optimizer": optimizer_state(names, optimizers, tensors) if optimizers else None,
            "extra": encode(as_dict("extra", extra), "extra", keeper(values)),
            "mesh": axes_of(mesh_of(params.values())),
        }
        if self.ranks.size > 1:
            self.buffers = {name: _checksum(tensors[name]) for name in state.buffers}
        if not self.ranks.is_first:
            # Only the first rank's are stored, so that they are consistent even if ranks differ.
            for name in (*state.buffers, *state.extra_tensors, *values):
                holder = tensors if name in tensors else values
                if not isinstance(holder[name], DTensor):
                    del holder[name]
        tensors |= values

    def run(self) -> Path:
        """Writes the checkpoint and returns the first rank's path. Collective."""
        writer: _LockingWriter | None = None
        try:
            found = self.ranks.all(self._arguments)
            check_same("save", [arguments for _, arguments, _ in found])
            self._compare_buffers([buffers for *_, buffers in found])
            final = folders.step_folder(found[0][0], self.step)
            writer = _LockingWriter(final, self.step, self._info, self.ranks.size)
            with dcp_errors(self.ranks):
                dcp.save(
                    self.tensors,
                    storage_writer=writer,
                    planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self.ranks.group,
                    no_dist=self.ranks.group is None,
                )
            if self.ranks.is_first:
                self._prune(final.parent)
            return final
        except CheckpointError:
            if self.ranks.is_first and writer is not None and writer.folder is not None:
                folders.discard(writer.folder)
            if (
                not self.ranks.is_whole()
            ):  # DCP then runs for this rank alone: only it has the error
                self.ranks.give_up()
            raise
        except BaseException:  # of this rank alone, as when a collective loses a rank
            self.ranks.give_up()
            raise
        finally:
            self.tensors, self.placements = {}, {}  # keep nothing of the model alive
            if writer is not None and writer.lock is not None:
                writer.lock.release()

    def _info(self) -> dict[str, Any]:
        plan = {name: str(list(map(str, placed))) for name, placed in self.placements.items()}
        python = platform.python_version()
        versions = {"parallel3d": __version__, "torch": torch.__version__, "python": python}
        return {**self.info, "plan": plan, "versions": versions}

    def _prune(self, run: Path) -> None:
        """Removes older checkpoints of ``run``; only warns if that fails, as the new one is complete."""
        try:
            folders.note_newest(run)
            if self.keep is not None:
                folders.prune(run, self.keep)
        except OSError as error:
            warnings.warn(f"old checkpoints could not be removed: {error}", stacklevel=4)

    def _compare_buffers(self, of_ranks: list[dict[str, int]]) -> None:
        """Warns, on the first rank, of buffers that differ; ``of_ranks``: for each rank name -> checksum."""
        names = [
            name.removeprefix(PREFIX)
            for name, value in self.buffers.items()
            if any(other.get(name, value) != value for other in of_ranks)
        ]
        if names and self.ranks.is_first:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            warnings.warn(
                f"checkpoint.save: buffers {shown} differ between ranks; the first rank's are stored. "
                "Average or broadcast them before (BatchNorm's statistics: nn.SyncBatchNorm)",
                stacklevel=4,
            )

    def _arguments(self) -> tuple[Path, dict[str, object], dict[str, int]]:
        """Returns (run's folder, arguments that must be the same on all ranks, checksums of buffers)."""
        if self.problem is not None:
            raise self.problem
        number = self.optimizers
        arguments: dict[str, object] = {"step": self.step, "only": self.only, "optimizers": number}
        return self.run_folder, arguments, self.buffers


def _checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of a tensor's values; 0 for a DTensor, of which each rank has another part."""
    if isinstance(tensor, DTensor):
        return 0
    copied = tensor.detach().cpu().contiguous()  # has a name, as bytes_of doesn't keep it alive
    return crc32(bytes_of(copied))


class _LockingWriter(Writer):
    """A Writer whose first rank takes the run's lock before it makes the checkpoint's folder."""

    def __init__(
        self, path: Path, step: int, info: Callable[[], dict[str, Any]], ranks: int
    ) -> None:
        super().__init__(path, info, ranks)
        self.step = step

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folders.check_place(self.path)
        run = self.path.parent
        run.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(run, self.step)
        folders.check_alone(run)
        return super().prepare_global_plan(plans)
