"""The random generators' states: stored for each rank, and as integers that any mesh can go on from."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.format.index import Index
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.seeding import last_step_seed, seed_step

__all__ = ["RngTarget", "rng_state"]

_PYTHON = 3  # version of random.getstate


def rng_state(ranks: Ranks, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the states of this rank's generators into ``tensors``; returns the integers of ``seed_step``."""
    for kind, state in _states().items():
        tensors[f"rng.{ranks.rank}.{kind}"] = state
    last = last_step_seed()
    return {"step_seed": asdict(last) if last else None}


def _states() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    version, words, gauss = random.getstate()
    if version == _PYTHON:
        found["python"] = torch.tensor(words, dtype=torch.int64)
        found["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    if "numpy" in sys.modules:
        import numpy

        _, keys, *rest = numpy.random.get_state()
        found["numpy"] = torch.tensor([int(k) for k in keys], dtype=torch.int64)
        found["numpy_rest"] = torch.tensor([float(x) for x in rest], dtype=torch.float64)
    device = _accelerator()
    if device is not None:
        found[device.__name__.rpartition(".")[2]] = device.get_rng_state()
    return found


def _accelerator() -> Any:
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module(kind) if kind is not None else None


class RngTarget:
    """Where the states are read to; ``apply`` sets the generators.

    On the ranks and mesh that saved, each goes on where it was. On others from the integers of ``seed_step``,
    if it was used.
    """

    def __init__(self, info: dict[str, Any], index: Index, ranks: Ranks, same_ranks: bool) -> None:
        stored = info.get("rng")
        self._seed = stored.get("step_seed") if isinstance(stored, dict) else None
        self._kinds: dict[str, Tensor] = {}
        if same_ranks:
            prefix = f"rng.{ranks.rank}."
            for name, entry in index.tensors.items():
                if name.startswith(prefix) and sum(entry.shape) < 1 << 16:
                    self._kinds[name.removeprefix(prefix)] = torch.empty(
                        entry.shape, dtype=entry.dtype
                    )
        self.tensors = {f"rng.{ranks.rank}.{kind}": t for kind, t in self._kinds.items()}

    def apply(self, mesh: DeviceMesh | None) -> str:
        """Sets the generators; returns what was done: ``"restored"``, ``"reseeded"`` or ``"left"``."""
        if isinstance(self._seed, dict):
            seed_step(mesh, **{k: int(self._seed[k]) for k in ("seed", "step", "micro_batch")})
        if not self._kinds:
            return "reseeded" if self._seed else "left"
        torch.set_rng_state(self._kinds["cpu"])
        if "python" in self._kinds:
            gauss = self._kinds["python_gauss"].tolist()
            words = tuple(self._kinds["python"].tolist())
            random.setstate((_PYTHON, words, gauss[0] if gauss else None))
        if "numpy" in self._kinds and "numpy" in sys.modules:
            import numpy

            position, has_gauss, gauss = self._kinds["numpy_rest"].tolist()
            keys = numpy.array(self._kinds["numpy"].tolist(), dtype="uint32")
            numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
        device = _accelerator()
        if device is not None and (kind := device.__name__.rpartition(".")[2]) in self._kinds:
            device.set_rng_state(self._kinds[kind])
        return "restored"
