"""The random generators' states: stored for each rank, and as integers that any mesh can go on from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.model_state import Contents
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.checkpoint.stored import Stored
from parallel3d.errors import CorruptCheckpointError
from parallel3d.mesh.seeding import StepSeed, last_step_seed, number_of, set_step_seed

_PYTHON = 3  # version of random.getstate
_MT_WORDS = 624  # of the Mersenne twister
_MOST = 1 << 20  # bytes; known states have some thousands
_KINDS = ("cpu", "python", "python_gauss", "numpy", "numpy_rest", "cuda", "xpu", "mps", "mtia")


def rng_state(ranks: Ranks, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the states of this rank's generators into ``tensors``; returns the integers of ``seed_step``."""
    for kind, state in _states().items():
        tensors[f"rng.{ranks.rank}.{kind}"] = state
    last = last_step_seed()
    return {"step_seed": asdict(last) if last else None}


def _states() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    version, words, gauss = random.getstate()
    assert version == _PYTHON
    found["python"] = torch.tensor(words, dtype=torch.int64)
    found["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    if "numpy" in sys.modules:
        import numpy

        whole = numpy.random.get_state(legacy=False)
        if whole["bit_generator"] == "MT19937":  # not another, set by set_bit_generator
            state = whole["state"]
            found["numpy"] = torch.from_numpy(state["key"].astype("int64"))
            rest = [float(x) for x in (state["pos"], whole["has_gauss"], whole["gauss"])]
            found["numpy_rest"] = torch.tensor(rest, dtype=torch.float64)
    device = _accelerator()
    if device is not None:
        found[_name(device)] = device.get_rng_state()
    return found


def _accelerator() -> Any:
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module(kind) if kind is not None else None


def _name(device: Any) -> str:
    """Of the module torch.cuda, or another's: "cuda"."""
    return str(device.__name__).rpartition(".")[2]


class LoadedRng:
    """The states as they were stored, tried on generators of nobody's; ``apply`` sets the real ones.

    On the ranks and mesh that saved, each goes on where it was. On others from the integers of ``seed_step``,
    if it was used.

    Raises:
        CorruptCheckpointError: they are no states of these generators.
    """

    def __init__(
        self, contents: Contents, stored: Stored, ranks: Ranks, mesh: DeviceMesh | None, same: bool
    ) -> None:
        self._seed: tuple[StepSeed, int] | None = None
        if contents.step_seed is not None:
            given = StepSeed(**contents.step_seed)
            self._seed = given, number_of(given, mesh)
        found: dict[str, Tensor] = {}
        prefix = f"rng.{ranks.rank}."
        for kind in _KINDS if same else ():
            entry = stored.index.tensors.get(prefix + kind)
            if entry is not None and entry.dtype.itemsize * prod(entry.shape) <= _MOST:
                found[kind] = stored.reader(prefix)(prefix + kind)
        try:
            self._set = _setters(found) if same else []
        except (TypeError, ValueError, RuntimeError, OverflowError, KeyError, IndexError) as error:
            raise CorruptCheckpointError(
                f"{stored.folder}: its states of rank {ranks.rank}'s random generators are damaged: {error}"
            ) from error

    def apply(self) -> str:
        """Sets the generators; returns what was done: ``"restored"``, ``"reseeded"`` or ``"left"``."""
        if self._seed is not None:
            set_step_seed(*self._seed)
        for function, state in self._set:
            function(state)
        return "restored" if self._set else "reseeded" if self._seed else "left"


def _setters(found: dict[str, Tensor]) -> list[tuple[Callable[[Any], Any], Any]]:
    """(function, state) for each generator that there is a state of; each state has been tried."""
    setters: list[tuple[Callable[[Any], Any], Any]] = []
    torch.Generator().set_state(found["cpu"])
    setters.append((torch.set_rng_state, found["cpu"]))
    gauss = _list(found["python_gauss"], torch.float64)
    if len(gauss) > 1:
        raise ValueError("Python's")
    words = tuple(_list(found["python"], torch.int64))
    state = _PYTHON, words, gauss[0] if gauss else None
    random.Random().setstate(state)
    setters.append((random.setstate, state))
    if ("numpy" in found or "numpy_rest" in found) and "numpy" in sys.modules:
        import numpy

        position, has_gauss, gauss = _list(found["numpy_rest"], torch.float64)
        keys = numpy.array(_list(found["numpy"], torch.int64), dtype="uint32")
        numbers = int(position), int(has_gauss), gauss
        if not 0 <= numbers[0] <= _MT_WORDS or numbers[1] not in (0, 1):
            raise ValueError("numpy's")
        legacy = ("MT19937", keys, *numbers)
        numpy.random.RandomState().set_state(legacy)
        setters.append((numpy.random.set_state, legacy))
    device = _accelerator()
    if device is not None and (kind := _name(device)) in found:
        torch.Generator(kind).set_state(found[kind])
        setters.append((device.set_rng_state, found[kind]))
    return setters


def _list(tensor: Tensor, dtype: torch.dtype) -> list[Any]:
    if tensor.dtype != dtype or tensor.dim() != 1:
        raise ValueError(f"{tensor.dtype} of {tuple(tensor.shape)}")
    return list(tensor.tolist())
