"""Example inputs, to run a model once: the user's, Hugging Face's, or what the model seems to take."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallel3d._tree import map_tensors
from parallel3d.errors import PlanError
from parallel3d.tp.checks import is_plain

__all__ = ["Example", "check_example", "examples"]

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""

_BATCH, _LENGTH = 2, 6


def check_example(example: Any) -> Example:
    """The user's example, on the CPU.

    Raises:
        PlanError: not ``(args, kwargs)``.
    """
    fits = isinstance(example, tuple) and len(example) == 2
    if not fits or not isinstance(example[0], tuple) or not isinstance(example[1], dict):
        raise PlanError(
            f"example is {type(example).__name__}; it must be (args, kwargs) for the model's forward: a "
            "tuple and a dict, such as ((input_ids,), {})"
        )
    args, kwargs = map_tensors(lambda t: t.detach().to("cpu", copy=True), example)
    return args, kwargs


def examples(model: nn.Module) -> Iterator[Example]:
    """Inputs that may fit ``model``, the likelier first."""
    if hasattr(model, "dummy_inputs") and hasattr(model, "config"):
        yield from _hugging_face(model)
        return
    required = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    for tensor in _inputs_for(model):
        yield tuple(tensor.clone() for _ in required) or (tensor,), {}


def _hugging_face(model: Any) -> Iterator[Example]:
    config, name = model.config, model.main_input_name
    extra = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        yield (), {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width)}
        return
    inputs = dict(model.dummy_inputs)
    if name == "input_ids" and getattr(config, "is_encoder_decoder", False):
        inputs.setdefault("decoder_input_ids", inputs["input_ids"].clone())
    yield (), {**inputs, **extra}
    yield (), inputs


def _inputs_for(model: nn.Module) -> Iterator[torch.Tensor]:
    """By the first module that has weights: token ids, features or images."""
    module: Any
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if is_plain(module, nn.Embedding):
            ids = torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH)
            yield ids % module.num_embeddings
        elif is_plain(module, nn.Conv2d):
            kernel = module.kernel_size
            for times in (1, 2, 3, 4, 5, 6, 7, 8, 14, 16, 28):
                yield torch.randn(_BATCH, module.in_channels, *(k * times for k in kernel))
            for size in (224, 32, 28, 64, 256, 384):
                yield torch.randn(_BATCH, module.in_channels, size, size)
        else:
            features = _features(module)
            if features:
                yield torch.randn(_BATCH, _LENGTH, features)
                yield torch.randn(_BATCH, features)


def _features(module: Any) -> int | None:
    """The size of the last dim that a linear layer, a norm or attention reads."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    if isinstance(module, nn.Linear):
        return module.in_features
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return int(shape[0])
    if hasattr(module, "nx"):
        return int(module.nx)
    return None
