"""What a checkpoint holds of a model: names, tensors, ties."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, spec_of
from parallel3d.checkpoint.format.index import Index, shown
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import check_at_rest, units_of

PREFIX = "model."
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class ModelState:
    """The tensors of a model as they lie, by the name they are stored under: Parameters, not copies.

    Attributes:
        parameters: every parameter of the model, by its first name.
        tensors: parameters and persistent buffers, each once.
        buffers: names of those that are buffers.
        ties: other names of these -> the first.
        extra: modules' ``get_extra_state()``, encoded; by module.
        extra_tensors: that are in these.
        derived: names of wrapper subclasses that hold more than their values, such as a precomputed scale.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)


def model_state(model: nn.Module, only: str | None = None) -> ModelState:
    """The state of ``model``; with ``only="trainable"`` that of parameters with ``requires_grad``.

    Raises:
        StateError: a unit is in a forward or backward, where parameters are others.
        CheckpointError: a parameter or buffer is on the meta device, or a module's extra state can't be kept.
    """
    for unit in units_of(model, recurse=True):
        check_at_rest(unit, "checkpoint.save or load")
        unit.show_shards()
    state = ModelState()
    first: dict[int, str] = {}
    # Once for all that a save asks: an async one blocks training meanwhile.
    modules = [(plain_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        for key, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            known = first.setdefault(id(param), name)
            if known == name:
                state.parameters[name] = param
            if only == "trainable" and not param.requires_grad:
                continue
            if known != name:
                state.ties[PREFIX + name] = PREFIX + known
            else:
                state.tensors[PREFIX + name] = _checked(name, param, state)
    if only == "trainable":
        return state
    seen: set[nn.Module] = set()
    for prefix, module in modules:
        at = f"{prefix}." if prefix else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                known = first.setdefault(id(buffer), at + key)
                if known != at + key:
                    state.ties[PREFIX + at + key] = PREFIX + known
                else:
                    state.tensors[PREFIX + at + key] = _checked(at + key, buffer, state)
                    state.buffers.append(PREFIX + at + key)
        if has_extra(module) and module not in seen:
            seen.add(module)
            where = f"{PREFIX}{at}_extra_state"
            state.extra[prefix] = encode(
                module.get_extra_state(), where, keeper(state.extra_tensors)
            )
    return state


def has_extra(module: nn.Module) -> bool:
    """Whether it has a ``get_extra_state`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its first name."""
    return {id(param): plain_name(name) for name, param in model.named_parameters()}


def plain_name(name: str) -> str:
    """Without what ``torch.compile(model)`` and checkpoint_wrapper put into it."""
    if not any(part in name for part in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _checked(name: str, tensor: Tensor, state: ModelState) -> Tensor:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no values; call parallel3d.materialize first"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.layout}; checkpoints hold dense tensors only")
    if not hasattr(local, "__tensor_flatten__"):
        return tensor
    values = _values_of(name, local, state)
    return make_dtensor(values, spec_of(tensor)) if isinstance(tensor, DTensor) else values


def _values_of(name: str, local: Tensor, state: ModelState) -> Tensor:
    """The one inner tensor of a wrapper subclass that holds its values as they are.

    A float8 weight of torchao's is such a wrapper, with a scale derived from the values at times. One that
    holds its values in another form (NF4) has no dense tensor to store.
    """
    inner = {each: getattr(local, each) for each in local.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    values = [t for t in inner.values() if (t.shape, t.dtype) == (local.shape, local.dtype)]
    if len(values) != 1 or any(t.numel() > 1 for t in inner.values() if t is not values[0]):
        raise CheckpointError(
            f"{name} is a {type(local).__name__}, whose values lie in {', '.join(inner)}; checkpoints hold "
            'dense tensors only. only="trainable" leaves out frozen weights, which come again from the model '
            "that they were quantised from"
        )
    if len(inner) > 1:
        state.derived.append(name)
    return values[0]


# What checkpoint.json says, taken apart: anybody may have written it, so all of it is looked at
# first.

_LARGEST = 1 << 62


@dataclass(frozen=True)
class Contents:
    """Of one checkpoint, beside its tensors.

    Attributes:
        step: how many steps had been done.
        mesh: axis -> size; None for a plain model.
        versions: of torch and the like.
        ranks: how many saved.
        step_seed: what ``seed_step`` was last given, by name; None if it wasn't used.
        only: as ``save`` was given.
        ties: other names of stored tensors -> theirs.
        extra_state: of modules, encoded, by their names.
        groups: of optimizers: (parameters' names, options encoded, kind of optimizer: as ``kind_of`` names
            it, None in what earlier versions wrote); None if none were saved.
        state: parameter's name -> key -> value, encoded.
        extra: encoded.
    """

    step: int
    mesh: dict[str, int] | None
    versions: dict[str, str]
    ranks: int
    step_seed: dict[str, int] | None
    only: str | None
    ties: dict[str, str]
    extra_state: dict[str, Any]
    groups: list[tuple[list[str], Any, str | None]] | None
    state: dict[str, dict[str, Any]]
    extra: dict[str, Any]


def read_contents(folder: Path, info: dict[str, Any], index: Index) -> Contents:
    """Takes checkpoint.json's object apart.

    Raises:
        CorruptCheckpointError: ``save`` can't have written it.
    """
    if not info:
        raise CorruptCheckpointError(
            f"{folder}: checkpoint.json is empty: it was written by torch.distributed.checkpoint.save with "
            "a Writer, and is read by its load with a Reader"
        )
    try:
        return _contents(info, index)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: checkpoint.json is damaged: {error}") from None


def _contents(info: dict[str, Any], index: Index) -> Contents:
    model = _get(info, "model", dict)
    only = model.get("only")
    if only not in (None, "trainable") or "only" not in model:
        raise CorruptCheckpointError(f"only is {shown(only)}")
    mesh = None if info.get("mesh") is None else _get(info, "mesh", dict)
    versions = _get(info, "versions", dict)
    if not all(isinstance(text, str) for text in versions.values()):
        raise CorruptCheckpointError(f"versions is {shown(versions)}")
    groups, state = _optimizer(info)
    return Contents(
        step=_count(info, "step"),
        mesh=None if mesh is None else {axis: _count(mesh, axis, 1) for axis in mesh},
        versions=versions,
        ranks=_count(info, "ranks", 1),
        step_seed=_step_seed(_get(info, "rng", dict)),
        only=only,
        ties=_ties(_get(model, "ties", dict), index),
        extra_state=_get(model, "extra_state", dict),
        groups=groups,
        state=state,
        extra=_get(info, "extra", dict),
    )


def _step_seed(rng: dict[str, Any]) -> dict[str, int] | None:
    if rng.get("step_seed") is None:
        return None
    seed = _get(rng, "step_seed", dict)
    return {name: _count(seed, name, most=1 << 256) for name in ("seed", "step", "micro_batch")}


def _ties(ties: dict[str, Any], index: Index) -> dict[str, str]:
    for alias, name in ties.items():
        known = isinstance(name, str) and name.startswith(PREFIX) and name in index.tensors
        if not known or not alias.startswith(PREFIX) or alias in index.tensors:
            raise CorruptCheckpointError(f"it ties {alias!r:.80} to {shown(name)}")
    return ties


def _optimizer(
    info: dict[str, Any],
) -> tuple[list[tuple[list[str], Any, str | None]] | None, dict[str, dict[str, Any]]]:
    if info.get("optimizer") is None:
        return None, {}
    stored = _get(info, "optimizer", dict)
    groups = []
    known: set[str] = set()
    for group in _get(stored, "groups", list):
        names = _get(group, "params", list)
        if not all(isinstance(name, str) for name in names):
            raise CorruptCheckpointError(f"a group's params are {shown(names)}")
        twice = len(names) + len(known) != len(known | set(names))
        known.update(names)
        if twice:
            raise CorruptCheckpointError("a parameter is twice in the optimizer's groups")
        kind = None if group.get("kind") is None else _get(group, "kind", str)
        groups.append((names, _get(group, "options", dict), kind))
    state = _get(stored, "state", dict)
    for name in state:
        _get(state, name, dict)
        if name not in known:
            raise CorruptCheckpointError(f"it has state of {name!r:.80}, which is in no group")
    return groups, state


def _get(holder: Any, key: str, kind: type) -> Any:
    found = holder.get(key) if isinstance(holder, dict) else None
    if type(found) is not kind:
        raise CorruptCheckpointError(f"{key} is {shown(found)}")
    return found


def _count(holder: dict[str, Any], key: str, least: int = 0, most: int = _LARGEST) -> int:
    found = _get(holder, key, int)
    if not least <= found < most:
        raise CorruptCheckpointError(f"{key} is {shown(found)}")
    return int(found)


# What modules keep beside tensors, by ``get_extra_state`` and ``set_extra_state``.


class LoadedExtraState:
    """What modules' ``set_extra_state`` is to be given; can be undone.

    Attributes:
        any: whether there is something.
    """

    def __init__(self, model: nn.Module, contents: Contents, stored: Stored) -> None:
        modules = {plain_name(n): m for n, m in model.named_modules() if has_extra(m)}
        wanted = modules if contents.only is None else {}
        wrong = sorted(wanted.keys() ^ contents.extra_state.keys())
        if wrong:
            here, there = "the model", str(stored.folder)
            has, lacks = (here, there) if wrong[0] in wanted else (there, here)
            raise CheckpointError(
                f"{has} has extra state of the module {wrong[0]!r}, which {lacks} hasn't"
            )
        self.any = bool(wanted)
        self._before: list[tuple[nn.Module, Any]] = []
        self._values = []
        for name, value in contents.extra_state.items():
            module, at = modules[name], f"{PREFIX}{name}." if name else PREFIX
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise CheckpointError(
                    f"the module {name!r} has get_extra_state, but no set_extra_state"
                )
            self._values.append((module, decode(value, stored.reader(f"{at}_extra_state"))))

    def apply(self) -> None:
        """Calls ``set_extra_state``."""
        for module, value in self._values:
            self._before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    def undo(self) -> None:
        """Gives back to modules what they had."""
        for module, value in reversed(self._before):
            module.set_extra_state(value)
