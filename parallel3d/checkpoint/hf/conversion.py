"""A model's tensors by name, their conversion by transformers from a checkpoint and back, and plans of
exports.

An export is planned on all ranks: which tensors it has, and which rank holds which part of them.
transformers' own conversion mapping is run on Traced tensors, so names, joins and splits are those of the
installed version.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel3d._torch.fully_shard import plain_name
from parallel3d._util.arguments import counted
from parallel3d._util.quantised import packed_kind
from parallel3d.checkpoint import pieces
from parallel3d.checkpoint.format.files import NAMES
from parallel3d.checkpoint.hf.layout import (
    Layout,
    Patch,
    Traced,
    Untraceable,
    in_source,
    whole_of,
    within_source,
)
from parallel3d.checkpoint.ranks import Ranks, as_checkpoint_error
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.errors import CheckpointError
from parallel3d.tp.lora import base_names, is_peft_model, is_wrapper

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Names = Mapping[str, str] | Callable[[str], str] | None
"""The model's names -> the file's, as the user gives them."""


@dataclass(frozen=True)
class Entry:
    """A parameter or persistent buffer at rest, with its names (several if tied) in the modules' order."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def entries_of(model: nn.Module) -> list[Entry]:
    """Returns each parameter and persistent buffer once, in order, with its names in the plain model."""
    tensors: dict[int, Tensor] = {}
    names: dict[int, dict[str, None]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                name = plain_name(f"{prefix}.{key}" if prefix else key)
                tensors[id(tensor)] = tensor
                names.setdefault(id(tensor), {})[name] = None
    return [Entry(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def base_entries(model: nn.Module) -> tuple[nn.Module, list[Entry]]:
    """Returns the model whose checkpoint can be loaded into ``model``, and its entries.

    For a model with peft's layers that is the base model, and entries have the base model's names. A
    trainable copy that peft made of a module has entries of its own, with the names of the original.
    """
    entries = entries_of(model)
    base: nn.Module = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    if base is model and not any(is_wrapper(module) for module in model.modules()):
        return model, entries
    base_name = base_names(model)
    named = [{n: None for name in e.names if (n := base_name(name))} for e in entries]
    tied = {name: names for names in named if len(names) > 1 for name in names}
    result = []
    for entry, names in zip(entries, named, strict=True):
        for name in list(names):  # all names of a tied weight, for a copy of it too
            names |= tied.get(name, {})
        if names:
            result.append(Entry(tuple(names), entry.tensor))
    return base, result


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that ``module`` had before ``fully_shard``."""
    for cls in type(module).__mro__:
        extended = issubclass(cls, FSDPModule) or cls.__module__.startswith("parallel3d.")
        if issubclass(cls, nn.Module) and not extended:
            return cls
    return type(module)


def file_names(entries: Iterable[Entry], names: Names) -> dict[str, str]:
    """Returns the model's names -> the file's, as ``names``, the user's mapping or function, says; a name
    missing in the mapping is unchanged. Raises CheckpointError if ``names`` is invalid."""
    own = [name for entry in entries for name in entry.names]
    if isinstance(names, Mapping):
        foreign = [name for name in names if name not in own]
        if foreign:
            raise CheckpointError(f"names has what the model doesn't have: {shown(foreign, own)}")
        result: dict[str, Any] = {name: names.get(name, name) for name in own}
    elif callable(names):
        result = {name: names(name) for name in own}
    else:
        raise CheckpointError(
            f"names is {names!r}; give a mapping or a function, model's name -> file's"
        )
    for name, given in result.items():
        if not isinstance(given, str) or not given:
            raise CheckpointError(f"names gives {given!r} for {name!r}; it must give a name")
    taken: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            first = taken.setdefault(result[name], entry)
            if first is not entry:
                raise CheckpointError(
                    f"names gives {first.name!r} and {name!r} the same name {result[name]!r}"
                )
    return result


Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype."""


def is_transformers(model: nn.Module) -> bool:
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def from_file(
    model: Any, entries: list[Entry], tensors: Tensors
) -> tuple[dict[str, Layout], list[str], list[Any] | None]:
    """Runs transformers' conversion on the shapes and dtypes of a checkpoint's ``tensors``. Returns layouts
    of the model's tensors by name, the checkpoint's names that none of them uses, and the transforms used."""
    core, plain, mapping = _tools(model)
    own = {name: entry.tensor for entry in entries for name in entry.names}
    renamings = [item for item in mapping if not isinstance(item, core.WeightConverter)]
    all_converters = [item for item in mapping if isinstance(item, core.WeightConverter)]
    by_pattern = {key: item for item in all_converters for key in item.source_patterns}

    def rename(name: str) -> tuple[str, str | None]:
        """Returns the model's name for a checkpoint's, and the pattern of the converter that matched."""
        more = model.base_model_prefix, own  # the order of the calls matters to some mappings
        target, pattern = core.rename_source_key(name, renamings, all_converters, *more)
        if target not in own and name in own:
            target, pattern = core.rename_source_key(name, [], [], *more)
        return target, pattern

    layouts: dict[str, Layout] = {}
    converters: dict[str, Any] = {}
    inputs: dict[str, list[str]] = {}
    unexpected: list[str] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        shape, dtype = tensors[name]
        target, pattern = rename(name)
        if target not in own:
            unexpected.append(name)
        elif pattern is None:
            if target in layouts:
                patches = layouts[target].patches
                raise CheckpointError(
                    f"{name!r} and {patches[0].source if patches else 'another'!r} both become {target!r}"
                )
            layouts[target] = whole_of(name, shape)
        else:
            if target not in converters:
                converters[target] = deepcopy(by_pattern[pattern])
            traced = Traced.of(whole_of(name, shape), dtype)
            converters[target].add_tensor(target, name, pattern, traced)
            inputs.setdefault(target, []).append(name)
    for target, converter in converters.items():
        with _errors(f"to make {target!r}", [converter]):
            made = converter.convert(target, model=plain, config=model.config)
        for name, value in made.items():
            layouts[name] = _traced(value, name).origin
            if name not in own:
                unexpected += inputs[target]
    layouts = {name: layout for name, layout in layouts.items() if name in own}
    return layouts, unexpected, [item for item in mapping if item.was_used()]


def to_file(model: Any, tensors: Tensors) -> dict[str, tuple[Layout, torch.dtype]]:
    """Runs transformers' conversion back to a checkpoint on the shapes and dtypes of the model's ``tensors``;
    returns name in the checkpoint -> (layout, dtype)."""
    core, plain, mapping = _tools(model)
    state = {
        name: Traced.of(whole_of(name, shape), dtype) for name, (shape, dtype) in tensors.items()
    }
    with _errors("back", mapping):
        made = core.revert_weight_conversion(plain, state)
    traced = {name: _traced(value, name) for name, value in made.items()}
    return {name: (value.origin, value.dtype) for name, value in traced.items()}


def ignored(model: Any, kind: str) -> Callable[[str], bool]:
    """Returns a function: whether transformers ignores that a name is missing, or unexpected (``kind``)."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected":  # buffers that older checkpoints contain
        buffers = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            patterns.add(r"(^|\.)position_ids$")
    regex = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or r"(?!)")
    return lambda name: regex.search(name) is not None


def _tools(model: Any) -> tuple[Any, Any, list[Any]]:
    """Returns transformers' ``core_model_loading``, ``_as_plain(model)``, the model's conversion mapping."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantized by transformers, which is not supported")
    try:
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:
        raise CheckpointError(
            "the installed transformers has no conversion mapping; install transformers>=5"
        ) from error
    plain = _as_plain(model)
    return core, plain, get_model_conversion_mapping(plain)


def _as_plain(model: Any) -> Any:
    """Returns a shallow copy of ``model`` in which it and the models inside it have the classes that they had
    before ``fully_shard``, because transformers finds conversions by the classes' names."""

    def plain_of(module: nn.Module) -> nn.Module:
        plain = object.__new__(plain_class(module))
        plain.__dict__.update(module.__dict__)
        return plain

    plain: Any = plain_of(model)
    modules = [
        (name, plain_of(module) if name and is_transformers(module) else module)
        for name, module in model.named_modules()
    ]
    modules[0] = ("", plain)
    plain.__dict__["named_modules"] = lambda *_, **__: iter(modules)
    return plain


def _traced(value: Any, name: str) -> Traced:
    value = value[0] if isinstance(value, list) else value
    if not isinstance(value, Traced):
        raise CheckpointError(f"transformers' conversion of {name!r} can't be followed")
    return value


@contextmanager
def _errors(what: str, transforms: list[Any]) -> Iterator[None]:
    """Context manager: turns a conversion's error into a CheckpointError that names its operations."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        names = {type(op).__name__ for each in transforms for op in getattr(each, "operations", ())}
        operations = ", ".join(sorted(names)) or "a renaming"
        if isinstance(error, Untraceable):
            problem = f"can't be followed: {error}"
        else:
            problem = f"failed: {type(error).__name__}: {error}"
        raise CheckpointError(
            f"transformers' conversion {what} ({operations}) {problem}"
        ) from error


@dataclass(frozen=True)
class OutTensor:
    """A tensor that an export writes; ``layout``: of which parts of the model's tensors it consists."""

    name: str
    layout: Layout
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.layout.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Export:
    """A planned export: its tensors in order, and the model's tensors, by name, that they are made of."""

    outputs: tuple[OutTensor, ...]
    tensors: Mapping[str, Tensor]
    boxes: Mapping[
        str, Mapping[pieces.Box, list[int]]
    ]  # with the ranks that hold them (numbers of Ranks)

    def digest(self) -> str:
        """Returns a hash of the plan, equal on all ranks that planned the same export."""
        outputs = [(out.name, out.layout.shape, str(out.dtype)) for out in self.outputs]
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.tensors.items()]
        text = repr((outputs, shapes, sorted(self.boxes.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def parts(self, output: OutTensor, limit: int) -> Iterator[tuple[Patch, list[int]]]:
        """Yields (part of ``output``, the ranks that hold it) in the same order on all ranks; together they
        are ``output``. A part lies in one box of a model's tensor and has at most ``limit`` bytes."""
        for patch in output.layout.patches:
            shape = self.tensors[patch.source].shape
            for (offsets, sizes), holders in self.boxes[patch.source].items():
                for part in within_source(patch, shape, offsets, sizes):
                    for piece in part.bounded(limit // output.dtype.itemsize):
                        yield piece, holders


class HeldParts:
    """The local shards of the model's tensors, from which the values of an export's tensors are taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._pieces = {name: pieces.pieces_of(tensor) for name, tensor in tensors.items()}

    def of(self, patch: Patch) -> Tensor:
        """Returns the values of a part of an export that lies in one local shard: a view of the shard."""
        ((_, alongs),) = in_source(patch, self._shapes[patch.source])
        first = tuple(along.start for along in alongs), (1,) * len(alongs)
        piece = next(p for p in self._pieces[patch.source] if pieces.intersection(p.box, first))
        index: list[int | slice] = []
        for (start, step, dim), offset in zip(alongs, piece.offsets, strict=True):
            begin = start - offset
            if dim is None:
                index.append(begin)
            else:
                index.append(slice(begin, begin + (patch.runs[dim].size - 1) * step + 1, step))
        dims = [along.dim for along in alongs if along.dim is not None]
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        return piece.local[tuple(index)].permute(order).reshape(patch.counts)

    def parts(self, output: OutTensor) -> Iterator[Patch]:
        for patch in output.layout.patches:
            for piece in self._pieces[patch.source]:
                yield from within_source(patch, self._shapes[patch.source], *piece.box)


def check_dtype(dtype: object, call: str) -> None:
    """Raises CheckpointError unless ``dtype`` is None or a floating-point one that safetensors can store."""
    if dtype is None:
        return
    if not (isinstance(dtype, torch.dtype) and dtype in NAMES and dtype.is_floating_point):
        raise CheckpointError(f"{call}: dtype is {dtype!r}; give a floating-point one")


def plan_export(
    model: nn.Module, ranks: Ranks, names: Names, dtype: torch.dtype | None, call: str
) -> Export:
    """Returns the plan of an export, after checking that all ranks have made the same. Collective."""
    tensors, outputs = ranks.on_each(lambda: outputs_of(model, names, dtype, call))
    export = Export(outputs, tensors, _boxes(tensors, ranks))
    digests = ranks.all(export.digest)
    problem: Exception = CheckpointError(
        "this rank's model has other names, shapes, dtypes or placements than the first rank's"
    )
    others = {rank: problem for rank, digest in enumerate(digests) if digest != digests[0]}
    if others:
        raise as_checkpoint_error(others, ranks.size)
    return export


def outputs_of(
    model: nn.Module, names: Names, dtype: torch.dtype | None, call: str
) -> tuple[dict[str, Tensor], tuple[OutTensor, ...]]:
    """Returns (the model's tensors by name, the tensors to export), without communication."""
    tensors: dict[str, Tensor] = {}
    entries = entries_of(model)
    with_transformers = names is None and is_transformers(model)
    # Names that transformers ties to another name's weights are omitted.
    tied = getattr(model, "all_tied_weights_keys", None) if with_transformers else None
    never = getattr(model, "_keys_to_ignore_on_save", None) if with_transformers else None
    for entry in entries:
        kept = [name for name in entry.names if name not in (tied or ())] or list(entry.names[:1])
        if not with_transformers:  # load_hf, its only reader, knows which weights are tied
            kept = kept[:1]
        tensors |= {name: entry.tensor for name in kept if name not in (never or ())}
    if not tensors:
        raise CheckpointError(f"{call}: the model has no parameters and no buffers")
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(
            f"{call}: {meta[0]!r} is on meta, the first of {counted(len(meta), 'tensor')} without values"
        )
    for name, tensor in tensors.items():
        if kind := packed_kind(tensor):
            raise CheckpointError(
                f"{call}: {name!r} is a {kind}, whose values are packed in blocks; a folder holds dense "
                "tensors. save_peft writes adapters alone"
            )
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{call}: {name!r} is {tensor.dtype}, which safetensors don't have"
            )
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if with_transformers:
        layouts = to_file(model, described)
    else:
        in_file = {} if names is None else file_names(entries, names)
        layouts = {
            in_file.get(name, name): (whole_of(name, shape), own)
            for name, (shape, own) in described.items()
        }
    return tensors, tuple(
        OutTensor(name, layout, dtype if dtype is not None and own.is_floating_point else own)
        for name, (layout, own) in layouts.items()
    )


def _boxes(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, dict[pieces.Box, list[int]]]:
    """Returns tensor's name -> box -> the ranks that hold it; ranks outside its mesh are told which."""
    numbers = {rank: i for i, rank in enumerate(ranks.ranks)}
    boxes: dict[str, dict[pieces.Box, list[int]]] = {}
    smaller: list[str] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            boxes[name] = {pieces.whole_box(tensor.shape): list(range(ranks.size))}
        elif tensor.device_mesh.size() < ranks.size:
            smaller.append(name)
            boxes[name] = {}
        else:
            held = pieces.held_boxes(tensor)
            boxes[name] = {box: sorted(numbers[r] for r in by) for box, by in held.items()}

    here = ranks.all(lambda: {name: pieces.boxes_of(tensors[name]) for name in smaller})
    for rank, held_there in enumerate(here):
        for name, of_name in held_there.items():
            for box in of_name:
                boxes[name].setdefault(box, []).append(rank)
    return boxes
