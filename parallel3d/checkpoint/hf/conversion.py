"""How transformers turns the tensors of a checkpoint into a model's parameters, and back, as Layouts.

Its own conversion mapping is run, on tensors without values: what names become, which tensors are joined or
cut, is whatever the installed transformers does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel3d.checkpoint.hf.entries import Entry, plain_class
from parallel3d.checkpoint.hf.layout import Layout, Untraceable, whole_of
from parallel3d.checkpoint.hf.traced import Traced
from parallel3d.errors import CheckpointError

__all__ = [
    "Converted",
    "Tensors",
    "from_file",
    "ignored",
    "is_transformers",
    "tied_away",
    "to_file",
]

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype."""


def is_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers' (or of a class that extends it)."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


class Converted(NamedTuple):
    """What becomes of a checkpoint's tensors.

    Attributes:
        layouts: of the model's tensors, by their names.
        unexpected: names in the checkpoint that none is made of.
        used: transformers' transforms that it took, which the model remembers for its export; None
            without transformers.
    """

    layouts: dict[str, Layout]
    unexpected: list[str]
    used: list[Any] | None


def from_file(model: Any, entries: list[Entry], tensors: Tensors) -> Converted:
    """Of which of a checkpoint's ``tensors`` the model's are made.

    Raises:
        CheckpointError: a conversion that can't be followed, or doesn't fit.
    """
    core, plain, mapping = _tools(model)
    own = {name: entry.tensor for entry in entries for name in entry.names}
    rename = _Renaming(core, mapping, model.base_model_prefix, own)
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
                other = layouts[target].patches
                raise CheckpointError(
                    f"{name!r} and {other[0].source if other else 'another'!r} both become {target!r}"
                )
            layouts[target] = whole_of(name, shape)
        else:
            if target not in converters:
                converters[target] = deepcopy(rename.converters[pattern])
            traced = Traced.of(whole_of(name, shape), dtype)
            converters[target].add_tensor(target, name, pattern, traced)
            inputs.setdefault(target, []).append(name)
    for target, converter in converters.items():
        with _following(f"to make {target!r}", [converter]):
            made = converter.convert(target, model=plain, config=model.config)
        for name, value in made.items():
            layouts[name] = _traced(value, name).origin
            if name not in own:
                unexpected += inputs[target]
    layouts = {name: layout for name, layout in layouts.items() if name in own}
    return Converted(layouts, unexpected, [each for each in mapping if each.was_used()])


def to_file(model: Any, tensors: Tensors) -> dict[str, tuple[Layout, torch.dtype]]:
    """The inverse: of which of the model's ``tensors`` those of a checkpoint are made.

    Returns:
        Layout and dtype by the checkpoint's name.

    Raises:
        CheckpointError: a conversion that can't be followed, or doesn't fit.
    """
    core, plain, mapping = _tools(model)
    state = {
        name: Traced.of(whole_of(name, shape), dtype) for name, (shape, dtype) in tensors.items()
    }
    with _following("back", mapping):
        made = core.revert_weight_conversion(plain, state)
    traced = {name: _traced(value, name) for name, value in made.items()}
    return {name: (value.origin, value.dtype) for name, value in traced.items()}


def ignored(model: Any, kind: str) -> Callable[[str], bool]:
    """Whether transformers passes over a name that is ``kind``: "missing" or "unexpected"."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected":  # buffers that checkpoints used to hold
        buffers = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            patterns.add(r"(^|\.)position_ids$")
    found = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or r"(?!)")
    return lambda name: found.search(name) is not None


def tied_away(model: Any) -> set[str]:
    """Names that a checkpoint leaves out, as transformers ties them to another one's weights."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


class _Renaming:
    """What a checkpoint's names become; the order of the calls matters to some mappings."""

    def __init__(
        self, core: Any, mapping: list[Any], base_prefix: str, own: Mapping[str, Any]
    ) -> None:
        self._core, self._base, self._own = core, base_prefix, own
        self._renamings = [each for each in mapping if not isinstance(each, core.WeightConverter)]
        self._converters = [each for each in mapping if isinstance(each, core.WeightConverter)]
        self.converters = {key: each for each in self._converters for key in each.source_patterns}

    def __call__(self, name: str) -> tuple[str, str | None]:
        """The model's name, and the converter's pattern that it matched if one did."""
        target, pattern = self._renamed(name, self._renamings, self._converters)
        if target not in self._own and name in self._own:
            return self._renamed(name, [], [])
        return target, pattern

    def _renamed(self, name: str, renamings: list, converters: list) -> tuple[str, str | None]:
        return self._core.rename_source_key(name, renamings, converters, self._base, self._own)


def _tools(model: Any) -> tuple[Any, Any, list[Any]]:
    """transformers' loading code, the model as it sees it, and the model's conversion mapping."""
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
    """``model`` as it was before its class, and those of models inside it, were extended.

    transformers looks its conversions up by the classes' names and modules.
    """

    def plain_of(module: nn.Module) -> nn.Module:
        cls = plain_class(module)
        other = object.__new__(cls)
        other.__dict__.update(module.__dict__)
        return other

    plain: Any = plain_of(model)
    modules = [
        (name, plain_of(module) if name and is_transformers(module) else module)
        for name, module in model.named_modules()
    ]
    modules[0] = ("", plain)
    plain.__dict__["named_modules"] = lambda *_, **__: iter(modules)
    return plain


def _traced(value: Any, name: str) -> Traced:
    if isinstance(value, list):
        value = value[0]
    if not isinstance(value, Traced):
        raise CheckpointError(f"transformers' conversion of {name!r} can't be followed")
    return value


@contextmanager
def _following(what: str, transforms: list[Any]) -> Iterator[None]:
    """Makes a conversion's failure an error that names its operations."""
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
