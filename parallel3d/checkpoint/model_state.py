"""What a checkpoint holds of a model (names, tensors, ties, extra state), and its checkpoint.json, parsed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, spec_of
from parallel3d._torch.fully_shard import plain_name
from parallel3d._util.quantised import packed_kind
from parallel3d.checkpoint.format.files import damaged_if, get_of, shown
from parallel3d.checkpoint.format.index import Index, TensorEntry
from parallel3d.checkpoint.format.storage import read_whole
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import check_at_rest, to_rest, units_of

_LIMIT = 1 << 30  # bytes


class StoredNames:
    """Resolves the names of tensors in values: each may be used once, and only where it belongs.

    Otherwise a value could name a parameter, which would then be read in the value's place.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._taken: set[str] = set()
        self._left = _LIMIT

    def take(self, name: str, where: str) -> TensorEntry:
        """Returns the entry of the tensor ``name``, which a value of ``where`` refers to."""
        entry = self.index.tensors.get(name)
        if entry is None:
            problem = "which isn't stored"
        elif not name.startswith(where):
            problem = f"which isn't {where}'s"
        elif name in self._taken:
            problem = "which has been named before"
        else:
            self._taken.add(name)
            return entry
        raise CorruptCheckpointError(
            f"{self.folder}: checkpoint.json names the tensor {name!r:.80}, {problem}"
        )

    def reader(self, where: str) -> Callable[[str], Tensor]:
        """Returns the ``tensor`` argument of ``decode`` for values of ``where``, which reads whole tensors to
        the CPU: 1 GiB in all."""

        def read(name: str) -> Tensor:
            entry = self.take(name, where)
            self._left -= entry.nbytes
            if self._left < 0:
                raise CheckpointError(
                    f"{self.folder}: {name!r:.200}, {entry.dtype} of shape {entry.shape}, is not read whole "
                    f"by every rank: tensors without a target to read into may have {_LIMIT >> 30} GiB in "
                    "all; if it is of extra, give load a tensor for it: extra={...}, in the structure saved"
                )
            return read_whole(self.folder, self.index, name)

        return read


PREFIX = "model."


@dataclass
class ModelState:
    """The tensors of a model by the names they are stored under: the Parameters themselves, not copies."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Every parameter of the model, by its first name without ``PREFIX``."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and persistent buffers, each once."""
    buffers: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)  # further names -> the first name
    extra: dict[str, Any] = field(default_factory=dict)
    """``get_extra_state()`` of modules, encoded, by module name."""
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)  # those in it
    derived: list[str] = field(default_factory=list)
    """Names of subclasses that also hold something computed from their values, such as a scale."""

    def add(self, name: str, first_name: str, tensor: Tensor) -> None:
        """Adds a tensor, or another name of one."""
        if name != first_name:
            self.ties[PREFIX + name] = PREFIX + first_name
        else:
            self.tensors[PREFIX + name] = _storable(name, tensor, self)


def model_state(model: nn.Module, only: str | None = None) -> ModelState:
    """Returns the state of ``model``; with ``only="trainable"`` that of parameters with ``requires_grad``."""
    for unit in units_of(model, recurse=True):
        check_at_rest(unit, "checkpoint.save or load")
        unit.show_shards()
    state = ModelState()
    first: dict[int, str] = {}
    # Listed once, because an async save blocks training meanwhile.
    modules = [(plain_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        for key, param in module._parameters.items():
            if param is not None:
                name = f"{prefix}.{key}" if prefix else key
                first_name = first.setdefault(id(param), name)
                state.parameters.setdefault(first_name, param)
                if only is None or param.requires_grad:
                    state.add(name, first_name, param)
    if only == "trainable":
        return state
    seen: set[nn.Module] = set()
    for prefix, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                first_name = first.setdefault(id(buffer), name)
                state.add(name, first_name, buffer)
                if name == first_name:
                    state.buffers.append(PREFIX + name)
        if has_extra(module) and module not in seen:
            seen.add(module)
            extra = module.get_extra_state()
            state.extra[prefix] = encode(extra, extra_name(prefix), keeper(state.extra_tensors))
    return state


def bring_to_rest(model: nn.Module, what: str, meta_ok: bool = False) -> None:
    """Reshards all units and registers their sharded parameters; raises StateError if one is in use, or is on
    meta without ``meta_ok``."""
    units = list(units_of(model, recurse=True))
    for unit in units:
        check_at_rest(unit, what)
    for unit in units:
        to_rest(unit, meta_ok)


def extra_name(module: str) -> str:
    """Returns the beginning of the names of tensors in a module's extra state."""
    return f"{PREFIX}{module}._extra_state" if module else f"{PREFIX}_extra_state"


def has_extra(module: nn.Module) -> bool:
    """Returns whether ``module`` defines ``get_extra_state``."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Returns the first name of each parameter, by its id."""
    return {id(param): plain_name(name) for name, param in model.named_parameters()}


def _storable(name: str, tensor: Tensor, state: ModelState) -> Tensor:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no values; call parallel3d.materialize first"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.layout}; checkpoints hold dense tensors only")
    if kind := packed_kind(tensor):
        raise CheckpointError(
            f"{name} is a {kind}, whose values are packed in blocks; checkpoints "
            'hold dense tensors only. only="trainable" leaves out frozen weights, which can be quantised '
            "again from the original model"
        )
    if not hasattr(local, "__tensor_flatten__"):
        return tensor
    values = _inner_values(name, local, state)
    return make_dtensor(values, spec_of(tensor)) if isinstance(tensor, DTensor) else values


def _inner_values(name: str, local: Tensor, state: ModelState) -> Tensor:
    """Returns the inner tensor of a wrapper subclass that holds its values unchanged.

    torchao's float8 weights are such wrappers, some with a scale computed from the values. A subclass that
    holds its values in another form, such as NF4, has no dense tensor to store.
    """
    inner = {attr: getattr(local, attr) for attr in local.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    values = [t for t in inner.values() if (t.shape, t.dtype) == (local.shape, local.dtype)]
    if len(values) != 1 or any(t.numel() > 1 for t in inner.values() if t is not values[0]):
        raise CheckpointError(
            f"{name} is a {type(local).__name__}, whose values are in {', '.join(inner)}; checkpoints hold "
            'dense tensors only. only="trainable" leaves out frozen weights, which can be quantised again '
            "from the original model"
        )
    if len(inner) > 1:
        state.derived.append(name)
    return values[0]


# checkpoint.json: anybody may have written it, so all of it is checked first.


class Contents:
    """What a checkpoint holds besides its tensors: the parsed content of checkpoint.json.

    Attributes:
        step, only, extra: the arguments of ``save``; extra encoded.
        mesh: axis -> size; None for a plain model.
        ranks: how many ranks saved.
        step_seed: the last arguments of ``seed_step``, by name; None if it was not used.
        ties: further names of stored tensors -> the name they are stored under.
        extra_state: of modules, encoded, by module name.
        groups: of optimizers: (parameter names, encoded options, optimizer kind of ``kind_of``, which
            earlier versions did not store); None if no optimizer was saved.
        state: parameter name -> key -> encoded value.

    Raises:
        CorruptCheckpointError: if ``save`` cannot have written it.
    """

    def __init__(self, folder: Path, info: dict[str, Any], index: Index) -> None:
        if not info:
            raise CorruptCheckpointError(
                f"{folder}: checkpoint.json is empty: it was written by torch.distributed.checkpoint.save "
                "with a Writer, and is read by its load with a Reader"
            )
        with damaged_if(f"{folder}: checkpoint.json is damaged"):
            model, rng = get_of(info, "model", dict), get_of(info, "rng", dict)
            self.step, self.ranks = _count(info, "step"), _count(info, "ranks", 1)
            self.only: str | None = model.get("only")
            if self.only not in (None, "trainable") or "only" not in model:
                raise ValueError(f"only is {shown(self.only)}")
            self.mesh: dict[str, int] | None = get_of(info, "mesh", dict, None)
            for axis in self.mesh or ():
                _count(self.mesh, axis, 1)
            self.versions: dict[str, str] = get_of(info, "versions", dict)
            if not all(isinstance(text, str) for text in self.versions.values()):
                raise ValueError(f"versions is {shown(self.versions)}")
            seed = get_of(rng, "step_seed", dict, None)
            if seed is not None:
                keys = ("seed", "step", "micro_batch")
                seed = {key: _count(seed, key, most=1 << 256) for key in keys}
            self.step_seed: dict[str, int] | None = seed
            self.ties: dict[str, str] = get_of(model, "ties", dict)
            for alias, name in self.ties.items():
                known = isinstance(name, str) and name.startswith(PREFIX) and name in index.tensors
                if not known or not alias.startswith(PREFIX) or alias in index.tensors:
                    raise ValueError(f"it ties {alias!r:.80} to {shown(name)}")
            self.extra_state: dict[str, Any] = get_of(model, "extra_state", dict)
            self.groups, self.state = _optimizer(get_of(info, "optimizer", dict, None))
            self.extra: dict[str, Any] = get_of(info, "extra", dict)


def _optimizer(
    stored: dict[str, Any] | None,
) -> tuple[list[tuple[list[str], Any, str | None]] | None, dict[str, dict[str, Any]]]:
    if stored is None:
        return None, {}
    groups = []
    known: set[str] = set()
    for group in get_of(stored, "groups", list):
        names = get_of(group, "params", list)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"a group's params are {shown(names)}")
        if len(names) + len(known) != len(known | set(names)):
            raise ValueError("a parameter is twice in the optimizer's groups")
        known.update(names)
        groups.append((names, get_of(group, "options", dict), get_of(group, "kind", str, None)))
    state = get_of(stored, "state", dict)
    for name in state:
        get_of(state, name, dict)
        if name not in known:
            raise ValueError(f"it has state of {name!r:.80}, which is in no group")
    return groups, state


def _count(holder: Any, key: str, least: int = 0, most: int = 1 << 62) -> int:
    value = get_of(holder, key, int)
    if not least <= value < most:
        raise ValueError(f"{key} is {shown(value)}")
    return int(value)


@dataclass
class ExtraState:
    """Extra state to be given to modules; can be undone."""

    values: list[tuple[nn.Module, Any]] = field(default_factory=list)
    _before: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def apply(self) -> None:
        """Calls ``set_extra_state``."""
        for module, value in self.values:
            self._before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    def undo(self) -> None:
        """Restores the modules' previous extra state."""
        for module, value in reversed(self._before):
            module.set_extra_state(value)


def stored_extra_state(model: nn.Module, contents: Contents, stored: StoredNames) -> ExtraState:
    """Returns what the checkpoint has for the modules of ``model``."""
    modules = {plain_name(n): m for n, m in model.named_modules() if has_extra(m)}
    wanted = modules if contents.only is None else {}
    wrong = sorted(wanted.keys() ^ contents.extra_state.keys())
    if wrong:
        here, there = "the model", str(stored.folder)
        has, lacks = (here, there) if wrong[0] in wanted else (there, here)
        raise CheckpointError(
            f"{has} has extra state of the module {wrong[0]!r}, which {lacks} hasn't"
        )
    result = ExtraState()
    for name, value in contents.extra_state.items():
        module = modules[name]
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"the module {name!r} has get_extra_state, but no set_extra_state"
            )
        result.values.append((module, decode(value, stored.reader(extra_name(name)))))
    return result
