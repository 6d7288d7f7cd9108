"""What a checkpoint holds of a model and its optimizers, and how it is loaded on any mesh.

Of a model: names, tensors, ties, extra state. Of optimizers: state by parameter name, and options.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec, spec_of
from parallel3d._torch.fully_shard import plain_name
from parallel3d._util.arguments import counted
from parallel3d._util.quantised import packed_kind, wrapper_kind
from parallel3d.checkpoint.format.files import damaged_if, get_of
from parallel3d.checkpoint.format.folder import Index, TensorEntry
from parallel3d.checkpoint.format.storage import read_whole
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import check_at_rest, to_rest, units_of
from parallel3d.optim.step_in_backward import StepInBackward

_LIMIT = 1 << 30  # bytes


class StoredNames:
    """Looks up stored tensors that values in checkpoint.json name. Each may be named once, and only by a
    value that it belongs to, so that a damaged file can't have a parameter read in a value's place."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._taken: set[str] = set()
        self._left = _LIMIT

    def take(self, name: str, where: str) -> TensorEntry:
        """Returns the index entry of ``name``, which must begin with ``where``, the value that names it."""
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
        """Returns a function for ``decode`` that reads a tensor named by a value of ``where``, whole and to
        the CPU. It raises CheckpointError if all tensors that are read so have more than 1 GiB."""

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
        """Adds a tensor as ``name``; or notes ``name`` as a further name of the tensor ``first_name``."""
        if name != first_name:
            self.ties[PREFIX + name] = PREFIX + first_name
        else:
            self.tensors[PREFIX + name] = _storable(name, tensor, self)


def model_state(model: nn.Module, only: str | None = None) -> ModelState:
    """Returns the model's state; with ``only="trainable"`` just parameters that have ``requires_grad``."""
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
    """Reshards all units and registers their sharded parameters. Raises StateError if one is in use, in a
    forward or backward, say, or is on meta without ``meta_ok``; ``what`` is for the error."""
    units = list(units_of(model, recurse=True))
    for unit in units:
        check_at_rest(unit, what)
    for unit in units:
        to_rest(unit, meta_ok)


def extra_name(module: str) -> str:
    """Returns how the stored names of tensors in the module's extra state begin."""
    return f"{PREFIX}{module}._extra_state" if module else f"{PREFIX}_extra_state"


def has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _storable(name: str, tensor: Tensor, state: ModelState) -> Tensor:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no values; call parallel3d.materialize first"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.layout}; checkpoints hold dense tensors only")
    if kind := packed_kind(tensor):
        raise _not_dense(name, kind, "packed in blocks")
    if not hasattr(local, "__tensor_flatten__"):
        return tensor
    values = _inner_values(name, local, state)
    return make_dtensor(values, spec_of(tensor)) if isinstance(tensor, DTensor) else values


def _not_dense(name: str, kind: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is a {kind}, whose values are {where}; checkpoints hold dense tensors only. "
        'only="trainable" leaves out frozen weights, which can be quantised again from the original model'
    )


def _inner_values(name: str, local: Tensor, state: ModelState) -> Tensor:
    """Returns the inner tensor in which a wrapper subclass holds its values unchanged, as torchao's float8
    weights do, some with a scale computed from them; raises CheckpointError for others, such as NF4."""
    inner = {attr: getattr(local, attr) for attr in local.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    values = [t for t in inner.values() if (t.shape, t.dtype) == (local.shape, local.dtype)]
    if len(values) != 1 or any(t.numel() > 1 for t in inner.values() if t is not values[0]):
        raise _not_dense(name, type(local).__name__, f"in {', '.join(inner)}")
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
        extra_state: module name -> the module's extra state, encoded.
        groups: the optimizers' parameter groups: (parameter names, encoded options, optimizer kind of
            ``kind_of``, which earlier versions did not store); None if no optimizer was saved.
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
                raise ValueError(f"only is {reprlib.repr(self.only)}")
            self.mesh: dict[str, int] | None = get_of(info, "mesh", dict, None)
            for axis in self.mesh or ():
                _count(self.mesh, axis, 1)
            self.versions: dict[str, str] = get_of(info, "versions", dict)
            if not all(isinstance(text, str) for text in self.versions.values()):
                raise ValueError(f"versions is {reprlib.repr(self.versions)}")
            seed = get_of(rng, "step_seed", dict, None)
            if seed is not None:
                keys = ("seed", "step", "micro_batch")
                seed = {key: _count(seed, key, most=1 << 256) for key in keys}
            self.step_seed: dict[str, int] | None = seed
            self.ties: dict[str, str] = get_of(model, "ties", dict)
            for alias, name in self.ties.items():
                known = isinstance(name, str) and name.startswith(PREFIX) and name in index.tensors
                if not known or not alias.startswith(PREFIX) or alias in index.tensors:
                    raise ValueError(f"it ties {alias!r:.80} to {reprlib.repr(name)}")
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
            raise ValueError(f"a group's params are {reprlib.repr(names)}")
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
        raise ValueError(f"{key} is {reprlib.repr(value)}")
    return int(value)


@dataclass
class ExtraState:
    """Values for modules' ``set_extra_state``, which can be undone."""

    values: list[tuple[nn.Module, Any]] = field(default_factory=list)
    _before: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def apply(self) -> None:
        """Gives each module its value, keeping the present one for ``undo``."""
        for module, value in self.values:
            self._before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    def undo(self) -> None:
        for module, value in reversed(self._before):
            module.set_extra_state(value)


def stored_extra_state(model: nn.Module, contents: Contents, stored: StoredNames) -> ExtraState:
    """Returns the modules' stored extra state; raises unless the checkpoint has it for the same modules."""
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


OPTIMIZER = "optimizer."
NO_OPTIONS = ("params", "param_names")
_SAME = {"AdamW": "Adam"}  # their state and options are the same, so one can load the other's


def stateful(optimizer: Any) -> Any:
    """Returns the optimizer that has the state: ``optimizer``, or the one that ``step_in_backward`` wraps."""
    while isinstance(optimizer, StepInBackward):
        optimizer = optimizer.optimizer
    return optimizer


def kind_of(optimizer: Optimizer) -> str:
    """Returns the name of the base class, the one right below ``torch.optim.Optimizer``, which defines the
    state: so a user's subclass of AdamW, or what ``optim.local`` makes of it, can load AdamW's state."""
    mro = type(stateful(optimizer)).__mro__
    classes = [c for c in mro if issubclass(c, Optimizer) and c is not Optimizer]
    name = classes[-1].__name__ if classes else Optimizer.__name__
    return _SAME.get(name, name)


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """Returns a user's argument as a list; raises CheckpointError unless it is optimizers, or None."""
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    result: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for item in result:
        if not isinstance(item, Optimizer):
            raise CheckpointError(
                f"optimizer is {item!r}; it must be a torch.optim.Optimizer, or several"
            )
    return result


def optimizer_state(
    names: Mapping[int, str], optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Adds the tensors of the optimizers' state to ``tensors``; returns their groups and state as JSON
    values. ``names``: a parameter's id -> its name."""
    keep = keeper(tensors)
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    known: set[str] = set()
    for optimizer in optimizers:
        for key in optimizer.state:
            if not isinstance(key, Tensor) and optimizer.state[key]:
                raise CheckpointError(
                    f"the optimizer has state for {key!r:.80}, which is not a parameter; a checkpoint holds "
                    "state of parameters: put that into extra"
                )
        for number, group in enumerate(optimizer.param_groups):
            own = _names_of(group, number, names)
            twice = next((name for name in own if name in known), None)
            known.update(own)
            if twice is not None or len(set(own)) != len(own):
                raise CheckpointError(f"parameter {twice or own[0]!r} is in two of the optimizers")
            options = {k: v for k, v in group.items() if k not in NO_OPTIONS}
            options = encode(options, f"{OPTIMIZER}group {len(groups)}", keep)
            groups.append({"params": own, "options": options, "kind": kind_of(optimizer)})
            for name, param in zip(own, group["params"], strict=True):
                if entry := optimizer.state.get(param):
                    where = f"{OPTIMIZER}{name}"
                    state[name] = {k: encode(v, f"{where}.{k}", keep) for k, v in entry.items()}
    return {"groups": groups, "state": state}


def _names_of(group: dict[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    result = []
    for place, param in enumerate(group["params"]):
        name = names.get(id(param))
        if name is None:
            raise CheckpointError(
                f"parameter {place} of the optimizer's group {number}, of shape {tuple(param.shape)}, isn't "
                "one of the model's; make the optimizer after parallelize, from model.parameters()"
            )
        result.append(name)
    return result


def _copied(value: Any, current: Any) -> Any:
    """Returns a copy of an option's stored value, as two groups may get it; on the device of ``current``."""
    if isinstance(value, Tensor):
        return value.to(current.device, copy=True) if isinstance(current, Tensor) else value.clone()
    return copy.deepcopy(value)


def alike(current: Any, stored: Any) -> bool:
    """Returns whether an option's ``stored`` value may replace the ``current`` one, by their types."""
    if current is None or stored is None or (_is_number(current) and _is_number(stored)):
        return True
    if isinstance(current, (list, tuple)) and isinstance(stored, (list, tuple)):
        return len(current) == len(stored) and all(map(alike, current, stored))
    return type(current) is type(stored)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def empty_state(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns new memory of ``param``'s shape and placements and of ``dtype``, plain even if it is float8."""
    if not wrapper_kind(param):
        return torch.empty_like(param.detach(), dtype=dtype)
    if not isinstance(param, DTensor):
        return torch.empty(param.shape, dtype=dtype, device=param.device)
    local = get_local_tensor(param)
    empty = torch.empty(local.shape, dtype=dtype, device=local.device)
    return make_dtensor(empty, make_spec(param.device_mesh, param.placements, param.shape, dtype))


class LoadedOptimizers:
    """The optimizers that stored state is loaded into. ``tensors``, by stored name, are those to read into:
    existing state where it fits, else new tensors, placed as the parameter if of its shape, else whole."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        contents: Contents,
        stored: StoredNames,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._stored = stored
        self._states: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not optimizers:
            return
        if contents.groups is None:
            raise CheckpointError(
                f"{stored.folder} was saved without an optimizer; load it without one"
            )
        names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        self._same_torch = contents.versions.get("torch") == torch.__version__
        # By parameter name: (encoded options, decoded ones, kind of optimizer).
        self._groups: dict[str, tuple[Any, dict[str, Any], str | None]] = {}
        for number, (members, encoded, kind) in enumerate(contents.groups):
            options = decode(encoded, stored.reader(f"optimizer.group {number}["))
            if any(not isinstance(key, str) or key in NO_OPTIONS for key in options):
                raise CorruptCheckpointError(
                    f"{stored.folder}: checkpoint.json is damaged: an optimizer's group has invalid options"
                )
            self._groups |= dict.fromkeys(members, (encoded, options, kind))
        wanted: set[str] = set()
        for optimizer in optimizers:
            entries: dict[Tensor, dict[str, Any]] = {}
            for number, group in enumerate(optimizer.param_groups):
                own = _names_of(group, number, names)
                wanted.update(own)
                self._options.append((group, self._options_of(optimizer, number, own)))
                for name, param in zip(own, group["params"], strict=True):
                    if name in contents.state:
                        old = optimizer.state.get(param) or {}
                        entries[param] = self._entry(name, param, contents.state[name], old)
            self._states.append((optimizer, entries))
        lost = [name for name in self._groups if name not in wanted]
        if lost:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {counted(len(lost), 'parameter')} that the "
                f"optimizer doesn't have, the first {lost[0]!r}; give it the same parameters"
            )

    def _options_of(
        self, optimizer: Optimizer, number: int, names: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the stored options of the optimizer's group ``number``, with the parameters ``names``."""
        missing = [name for name in names if name not in self._groups]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no optimizer state of {counted(len(missing), 'parameter')} of "
                f"the optimizer's group {number}, the first {missing[0]!r}; give the optimizer the "
                "parameters that it had"
            )
        if not names:
            return {}
        class_name = type(optimizer).__name__
        encoded, options, _ = self._groups[names[0]]
        for name in names:
            other, own, kind = self._groups[name]
            if kind not in (kind_of(optimizer), None):
                if kind == "Adam" and own.get("decoupled_weight_decay") is True:
                    kind = "AdamW"
                raise CheckpointError(
                    f"the optimizer's group {number} was saved from another optimizer than {class_name}: it "
                    f"was {kind:.80}'s"
                )
            if other != encoded:
                raise CheckpointError(
                    f"the optimizer's group {number} has {names[0]!r} and {name!r}, which were saved in "
                    "groups with different options; divide the parameters into the groups that they had"
                )
        current = optimizer.param_groups[number]
        # A newer torch has options that an older one had not; a scheduler adds some.
        lacking = [key for key in optimizer.defaults if key in current and key not in options]
        if lacking and (self._same_torch or any(key not in current for key in options)):
            raise CheckpointError(
                f"the optimizer's group {number} has the option {lacking[0]!r}, which was not saved: the "
                f"checkpoint is of another optimizer than {class_name}"
            )
        for key, value in options.items():
            if key in current and not alike(current[key], value):
                raise CheckpointError(
                    f"the optimizer's group {number} has {key}={current[key]!r:.80}; saved was "
                    f"{value!r:.80}, which is of another type"
                )
        return {key: _copied(value, current.get(key)) for key, value in options.items()}

    def _entry(
        self, name: str, param: Tensor, stored: dict[str, Any], old: dict[str, Any]
    ) -> dict[str, Any]:
        entry = {}
        for key, value in stored.items():
            where = f"{OPTIMIZER}{name}.{key}"
            at = value.get("$tensor") if isinstance(value, dict) and len(value) == 1 else None
            target = self._in_place(at, old.get(key), where) if isinstance(at, str) else None
            if target is None:
                target = decode(value, partial(self._allocate, param=param, where=where))
            entry[key] = target
        return entry

    def _in_place(self, at: str, old: Any, where: str) -> Tensor | None:
        """Returns ``old``, a tensor of the optimizer's state, if the stored ``at`` can be read into it."""
        entry = self._stored.index.tensors.get(at)
        if entry is None or not isinstance(old, Tensor):
            return None
        if old.dim() and tuple(old.shape) != entry.shape:
            raise CheckpointError(
                f"{where.removeprefix(OPTIMIZER)} of the optimizer has the shape {tuple(old.shape)}, in the "
                f"checkpoint {entry.shape}"
            )
        fits = tuple(old.shape) == entry.shape and old.dtype == entry.dtype
        if not fits or wrapper_kind(old) or old.is_inference() or old.requires_grad:
            return None
        if shares_memory_within(old):
            return None
        self._stored.take(at, where)
        self.tensors[at] = old.detach()
        return old

    def _allocate(self, at: str, *, param: Tensor, where: str) -> Tensor:
        """Returns new memory for the stored tensor ``at`` of the optimizer's state of ``param``."""
        entry = self._stored.take(at, where)
        if entry.shape == tuple(param.shape):
            target = empty_state(param, entry.dtype)
        elif len(entry.chunks) > 1:
            raise CheckpointError(
                f"{at} is stored in parts, of shape {entry.shape}, other than its parameter's "
                f"{tuple(param.shape)}: its placements on this mesh aren't known before the optimizer has "
                "made its state; take a step before load"
            )
        else:
            sharded = isinstance(param, DTensor)
            device = torch.device(param.device_mesh.device_type) if sharded else param.device  # type: ignore[attr-defined]
            target = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        self.tensors[at] = target
        return target

    def commit(self) -> None:
        """Gives the optimizers the tensors and options that have been read."""
        for optimizer, entries in self._states:
            for param in {param for group in optimizer.param_groups for param in group["params"]}:
                optimizer.state.pop(param, None)
            for param, entry in entries.items():
                optimizer.state[param] = entry
        for group, options in self._options:
            group.update(options)
