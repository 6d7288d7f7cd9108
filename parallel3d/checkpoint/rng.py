"""Random generators: their states, stored per rank, and the arguments of ``seed_step``, for other meshes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.format.files import damaged_if
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.checkpoint.state import Contents, StoredNames
from parallel3d.mesh.seeding import StepSeed, last_step_seed, number_of, set_step_seed

_PYTHON = 3  # version of random.getstate
_MT_WORDS = 624  # of the Mersenne twister
_LIMIT = 1 << 20  # bytes; known states have some thousands
_KINDS = ("cpu", "python", "python_gauss", "numpy", "numpy_rest", "cuda", "xpu", "mps", "mtia")


def rng_state(ranks: Ranks, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Adds this rank's generator states to ``tensors``; returns the arguments of the last ``seed_step``."""
    tensors |= {f"rng.{ranks.rank}.{kind}": state for kind, state in _states().items()}
    last = last_step_seed()
    return {"step_seed": asdict(last) if last else None}


def _states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    version, words, gauss = random.getstate()
    assert version == _PYTHON
    states["python"] = torch.tensor(words, dtype=torch.int64)
    states["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    if "numpy" in sys.modules:
        import numpy

        whole = numpy.random.get_state(legacy=False)
        if whole["bit_generator"] == "MT19937":  # not another, set by set_bit_generator
            state = whole["state"]
            states["numpy"] = torch.from_numpy(state["key"].astype("int64"))
            rest = [float(x) for x in (state["pos"], whole["has_gauss"], whole["gauss"])]
            states["numpy_rest"] = torch.tensor(rest, dtype=torch.float64)
    for name, device in _accelerator().items():
        states[name] = device.get_rng_state()
    return states


def _accelerator() -> dict[str, Any]:
    """Returns {"cuda": torch.cuda} or the like for the accelerator; empty without one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if kind is None else {kind.type: torch.get_device_module(kind)}


def loaded_rng(
    contents: Contents, stored: StoredNames, ranks: Ranks, mesh: DeviceMesh | None, same: bool
) -> Callable[[], str]:
    """Tries the stored states on temporary generators, and returns a function that sets the real ones and
    returns what was done: ``"restored"`` if ``same``, on the ranks and mesh that saved; else ``"reseeded"``
    with the saved arguments of ``seed_step``, or ``"left"`` without them."""
    seed = None
    if contents.step_seed is not None:
        given = StepSeed(**contents.step_seed)
        seed = given, number_of(given, mesh)
    states: dict[str, Tensor] = {}
    prefix = f"rng.{ranks.rank}."
    for kind in _KINDS if same else ():
        entry = stored.index.tensors.get(prefix + kind)
        if entry is not None and entry.nbytes <= _LIMIT:
            states[kind] = stored.reader(prefix)(prefix + kind)
    what = f"{stored.folder}: its states of rank {ranks.rank}'s random generators are damaged"
    with damaged_if(what, (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError)):
        setters = _setters(states) if same else []

    def apply() -> str:
        if seed is not None:
            set_step_seed(*seed)
        for function, state in setters:
            function(state)
        return "restored" if setters else "reseeded" if seed else "left"

    return apply


def _setters(states: dict[str, Tensor]) -> list[tuple[Callable[[Any], Any], Any]]:
    """Returns (function to set it, state) for each generator with a stored state, after trying the state."""
    setters: list[tuple[Callable[[Any], Any], Any]] = []
    torch.Generator().set_state(states["cpu"])
    setters.append((torch.set_rng_state, states["cpu"]))
    gauss = _list(states["python_gauss"], torch.float64)
    if len(gauss) > 1:
        raise ValueError("Python's")
    words = tuple(_list(states["python"], torch.int64))
    state = _PYTHON, words, gauss[0] if gauss else None
    random.Random().setstate(state)
    setters.append((random.setstate, state))
    if ("numpy" in states or "numpy_rest" in states) and "numpy" in sys.modules:
        import numpy

        position, has_gauss, gauss = _list(states["numpy_rest"], torch.float64)
        keys = numpy.array(_list(states["numpy"], torch.int64), dtype="uint32")
        numbers = int(position), int(has_gauss), gauss
        if not 0 <= numbers[0] <= _MT_WORDS or numbers[1] not in (0, 1):
            raise ValueError("numpy's")
        legacy = ("MT19937", keys, *numbers)
        numpy.random.RandomState().set_state(legacy)
        setters.append((numpy.random.set_state, legacy))
    for name, device in _accelerator().items():
        if name in states:
            torch.Generator(name).set_state(states[name])
            setters.append((device.set_rng_state, states[name]))
    return setters


def _list(tensor: Tensor, dtype: torch.dtype) -> list[Any]:
    if tensor.dtype != dtype or tensor.dim() != 1:
        raise ValueError(f"{tensor.dtype} of {tuple(tensor.shape)}")
    return list(tensor.tolist())
