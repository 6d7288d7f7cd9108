"""LoRA layers of the peft library: what the rule of a layer means for the adapters around it.

A LoRA layer computes ``base_layer(x) + lora_B(lora_A(dropout(x))) * scaling``. A rule for it is the base
layer's, and determines the adapters': split by output features, B is split like the base layer and A is
whole; split by input features, A is split like it and B is whole. peft is not imported.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from parallel3d.errors import Parallel3dError, PlanError
from parallel3d.tp.styles import Colwise, Replicated, Rowwise, Style, VocabParallel

_WRAPPERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of peft around one of the model's."""
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
    return any(package == "peft" and name in _WRAPPERS for package, name in classes)


def check_wrapper(module: Any) -> None:
    """Raises PlanError for a layer of peft that isn't LoRA as above."""
    cls = type(module)
    lora = cls.__module__ == "peft.tuners.lora.layer" and cls.__name__ in ("Linear", "Embedding")
    variants = {type(v).__name__ for v in getattr(module, "lora_variant", {}).values()}
    if not lora or variants:
        kind = ", ".join(sorted(variants)) or f"{cls.__module__}.{cls.__name__}"
        raise PlanError(
            f"it is peft's {kind}, which can't be split over tp: of peft only LoRA of linear layers and "
            "embeddings can, without DoRA or other variants. Change the peft config, or use tp=1"
        )


def without_adapters(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model``, with its parameters and buffers, in which peft's layers are replaced by
    the layers inside them; ``model`` itself if there are none."""
    found = [n for n, m in model.named_modules() if is_wrapper(m) and hasattr(m, "base_layer")]
    if not found:
        return model
    tensors = (*model.parameters(), *model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for name in reversed(found):  # inner ones first
        twin.set_submodule(name, twin.get_submodule(f"{name}.base_layer"))
    return twin


def adapter_styles(style: Style, module: Any) -> Iterator[tuple[str, Style]]:
    """Yields the path from ``module``, a LoRA layer, and the style of each adapter, for the base layer's
    ``style``; raises PlanError if there are none."""
    name = type(module).__name__
    embedding = isinstance(style, VocabParallel) and style.output == "replicate"
    if not isinstance(style, (Replicated, Colwise if name == "Linear" else (), Rowwise)):
        if name == "Embedding" and embedding:
            return  # its adapters are parameters, whole, and so are their inputs and outputs
        raise PlanError(f"peft's LoRA {name} can't be split so")
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


def adapter_kind(model: nn.Module, path: str) -> str:
    """Returns the kind of adapter that the module at ``path`` is, such as ``"lora_A"``; ``""``: none."""
    parts = path.split(".")
    for end in range(len(parts)):
        inner = parts[end]
        if is_wrapper(model.get_submodule(".".join(parts[:end]))) and inner not in _WRAPPED:
            return inner
    return ""


_WRAPPED = ("base_layer", "original_module")
_INITIALISED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def check_can_initialise_adapters(model: nn.Module, paths: Iterable[str]) -> None:
    """Raises Parallel3dError for an adapter at one of ``paths`` that ``initialise_adapter`` doesn't know."""
    configs = getattr(model, "peft_config", {})
    ways = {getattr(config, "init_lora_weights", True) for config in configs.values()}
    for path in paths:
        kind = adapter_kind(model, path)
        if kind and (kind not in _INITIALISED or ways - {True, False}):
            raise Parallel3dError(
                f"materialize: {path} is an adapter of peft's, and only those of LoRA with "
                "init_lora_weights=True or False can be initialised from the meta device; build the model "
                "with values: without torch.device('meta'), on all ranks with one torch.manual_seed(seed)"
            )


def initialise_adapter(model: nn.Module, path: str, module: Any) -> bool:
    """Initializes ``module`` as peft does if it is a LoRA layer's adapter; returns whether it is one."""
    kind = adapter_kind(model, path)
    configs = getattr(model, "peft_config", {})
    for name, param in module.named_parameters(recurse=False) if kind else ():
        adapter = name if "embedding" in kind else path.rpartition(".")[2]
        as_linear = getattr(configs.get(adapter), "init_lora_weights", True) is False
        if kind == "lora_embedding_B" or (as_linear and "embedding" in kind):
            nn.init.normal_(param)
        elif kind == "lora_A" or as_linear:
            module.reset_parameters()
        else:
            nn.init.zeros_(param)
    return bool(kind)
