"""LoRA layers of the peft library: what the rule of a layer means for the adapters around it.

A LoRA layer computes ``base_layer(x) + lora_B(lora_A(dropout(x))) * scaling``. A rule for it applies to the
base layer and determines those of the adapters. If the base layer is split by output features, B is split
like it and A is whole; if it is split by input features, A is split like it and B is whole. peft is not
imported.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from parallel3d._torch.fully_shard import plain_name
from parallel3d.errors import Parallel3dError, PlanError
from parallel3d.tp.styles import Colwise, Replicated, Rowwise, Style, VocabParallel

_WRAPPERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
_INSIDE = ("base_layer", "original_module")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a layer that peft has put around a layer of the model."""
    return _is_of_peft(module, _WRAPPERS)


def is_adapter(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of peft that adds adapters to a layer of the model, such as LoRA."""
    return _is_of_peft(module, ("BaseTunerLayer",))


def is_peft_model(module: nn.Module) -> bool:
    return _is_of_peft(module, ("PeftModel",))


def _is_of_peft(module: nn.Module, names: tuple[str, ...]) -> bool:
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
    return any(package == "peft" and name in names for package, name in classes)


def check_wrapper(module: Any) -> None:
    """Raises PlanError for a layer of peft other than LoRA of a linear layer or embedding."""
    cls = type(module)
    lora = cls.__module__ == "peft.tuners.lora.layer" and cls.__name__ in ("Linear", "Embedding")
    variants = _variants(module) - {_ACTIVATED}
    if not lora or variants:
        kind = ", ".join(sorted(variants)) or f"{cls.__module__}.{cls.__name__}"
        raise PlanError(
            f"it is peft's {kind}, which can't be split over tp: of peft only LoRA of linear layers and "
            "embeddings can, without DoRA or variants but aLoRA. Change the peft config, or use tp=1"
        )


# Adapters from a place of the sequence on: the layer's forward picks these tokens.
_ACTIVATED = "ALoraLinearVariant"


def _variants(module: Any) -> set[str]:
    return {type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()}


def without_adapters(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model`` that shares its parameters and buffers, in which each of peft's layers is
    replaced by its base layer; ``model`` itself if it has none."""
    found = [n for n, m in model.named_modules() if is_wrapper(m) and hasattr(m, "base_layer")]
    if not found:
        return model
    tensors = (*model.parameters(), *model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for name in reversed(found):  # inner ones first
        twin.set_submodule(name, twin.get_submodule(f"{name}.base_layer"))
    return twin


def adapter_styles(style: Style, module: Any) -> Iterator[tuple[str, Style]]:
    """Yields (path relative to ``module``, style) of each adapter of ``module``, a LoRA layer whose base
    layer has ``style``. Raises PlanError if the adapters can't be split to fit that style."""
    if type(module).__name__ == "Embedding":
        if isinstance(style, Replicated) or style == VocabParallel():
            return  # its adapters are parameters, whole, and so are their inputs and outputs
        raise PlanError("peft's LoRA of an embedding can only be split over the vocabulary")
    if not isinstance(style, (Replicated, Colwise, Rowwise)):
        raise PlanError("peft's LoRA of a linear layer can't have this style")
    if "sequence" in style.ends and _ACTIVATED in _variants(module):
        raise PlanError(
            "peft's aLoRA picks tokens by their places in the whole sequence, of which this style has parts; "
            'use input="replicate" and output="replicate"'
        )
    down = up = style
    if isinstance(style, Colwise):
        # Beside parts of the sequence or of the features, a whole weight gets a part of its gradient.
        down = Replicated("whole" if style.input == "replicate" else "partial")
        up = replace(style, chunks=1)
    elif isinstance(style, Rowwise):
        up = Replicated("partial" if style.splits_sequence else "whole")
    for key in module.lora_A:
        yield f"lora_A.{key}", down
        yield f"lora_B.{key}", up


def base_names(model: nn.Module) -> Callable[[str], str]:
    """Returns a function that maps the name of a tensor of ``model``, a ``PeftModel`` or a model with peft's
    layers, to its name in the base model, or to ``""`` if it belongs to an adapter. A trained copy of a layer
    (peft's ``modules_to_save``) gets the name of the original."""
    modules = list(model.named_modules(remove_duplicate=False))
    wrappers = {plain_name(name) for name, module in modules if is_wrapper(module)}
    base = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    prefix = next(plain_name(name) for name, module in modules if module is base)
    start = len(prefix.split(".")) if prefix else 0

    def base_name(name: str) -> str:
        parts = name.split(".")
        if prefix and not name.startswith(f"{prefix}."):
            return ""
        kept, end = [], start
        while end < len(parts):
            if ".".join(parts[:end]) not in wrappers:
                kept.append(parts[end])
            elif parts[end] == "modules_to_save":
                end += 1  # the adapter's name
            elif parts[end] not in _INSIDE:
                return ""
            end += 1
        return ".".join(kept)

    return base_name


# How peft initializes adapters, so that the model is the base model at first.
_INITIALISE: dict[str, Callable[[Tensor], Any]] = {
    "lora_A": functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    "lora_B": nn.init.zeros_,
    "lora_embedding_A": nn.init.zeros_,
    "lora_embedding_B": nn.init.normal_,
}


def adapter_kind(model: nn.Module, path: str) -> str:
    """Returns peft's name of the adapter that the module at ``path`` belongs to, such as ``"lora_A"``; ``""``
    if it belongs to none."""
    parts = path.split(".")
    for end, inner in enumerate(parts):
        if inner not in _INSIDE and is_wrapper(model.get_submodule(".".join(parts[:end]))):
            return inner
    return ""


def check_can_initialise_adapters(model: nn.Module, paths: Iterable[str]) -> None:
    """Raises Parallel3dError if an adapter at one of ``paths`` is unknown to ``initialise_adapter``."""
    configs = getattr(model, "peft_config", {}).values()
    other = any(getattr(config, "init_lora_weights", True) is not True for config in configs)
    for path in paths:
        if (kind := adapter_kind(model, path)) and (other or kind not in _INITIALISE):
            raise Parallel3dError(
                f"materialize: {path} is an adapter of peft's, and only those of LoRA with "
                "init_lora_weights=True can be initialised from the meta device; build the model with "
                "values: without torch.device('meta'), on all ranks with one torch.manual_seed(seed)"
            )


def initialise_adapter(model: nn.Module, path: str, module: nn.Module) -> bool:
    """Initializes the parameters of the module at ``path`` as peft does if it is a LoRA adapter; returns
    whether it is an adapter."""
    kind = adapter_kind(model, path)
    for param in module.parameters(recurse=False) if kind else ():
        _INITIALISE[kind if param.dim() > 1 else "lora_B"](param)
    return bool(kind)
