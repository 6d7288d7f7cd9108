"""Examples: small inputs that a model's forward may take."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._trace.copies import with_values
from parallel3d._util.trees import map_tensors
from parallel3d.errors import PlanError

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""

_BATCH, _LENGTH = 2, 6


def check_example(example: Any) -> Example:
    """Returns the user's ``(args, kwargs)`` on the CPU, with values; raises PlanError for anything else."""
    fits = isinstance(example, tuple) and len(example) == 2
    if not fits or not isinstance(example[0], tuple) or not isinstance(example[1], dict):
        raise PlanError(
            f"example is {type(example).__name__}; it must be (args, kwargs) for the model's forward: a "
            "tuple and a dict, such as ((input_ids,), {})"
        )
    generator = torch.Generator().manual_seed(0)
    args, kwargs = map_tensors(lambda t: with_values(t, generator), example)
    return args, kwargs


_MOST_INPUTS = 48
"""How many inputs of other shapes are tried; large convolutional models have hundreds that don't fit."""


def examples(model: nn.Module) -> Iterator[Example]:
    """Yields inputs that may fit ``model``, the most likely first."""
    if hasattr(model, "dummy_inputs") and hasattr(model, "config"):
        yield from _hugging_face(model)
        return
    required = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tried: set[tuple[torch.Size, int]] = set()
    for tensor in _inputs_for(model):
        key = tensor.shape, -1 if tensor.is_floating_point() else int(tensor.max())
        if key not in tried:
            tried.add(key)
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            yield tuple(tensor.clone() for _ in required) or (tensor,), {}
        if len(tried) == _MOST_INPUTS:
            return


def _hugging_face(model: Any) -> Iterator[Example]:
    config, name = model.config, model.main_input_name
    extra = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        sizes = size if isinstance(size, (tuple, list)) else (size, size)
        yield (), {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), *sizes)}
        return
    inputs = dict(model.dummy_inputs)
    if name == "input_ids" and getattr(config, "is_encoder_decoder", False):
        inputs.setdefault("decoder_input_ids", inputs["input_ids"].clone())
    yield (), {**inputs, **extra}
    yield (), inputs


def _inputs_for(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields inputs for the first module that has weights: token ids, features, images, sound or video."""
    module: Any
    ids = torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH)
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if not own:
            continue
        if type(getattr(module, "num_embeddings", None)) is int:  # whatever its forward
            yield ids % module.num_embeddings
        elif isinstance(module, _CONVOLUTIONS):
            kernel = module.kernel_size
            for times in (1, 2, 3, 4, 5, 6, 7, 8, 14, 16, 28):
                yield torch.randn(_BATCH, module.in_channels, *(k * times for k in kernel))
            for size in (224, 32, 28, 64, 256, 384) if len(kernel) == 2 else ():
                yield torch.randn(_BATCH, module.in_channels, size, size)
        elif features := _features(module):
            yield torch.randn(_BATCH, _LENGTH, features)
            yield torch.randn(_BATCH, features)
        else:  # its own embedding, perhaps
            yield from (ids % param.shape[0] for param in own if param.dim() == 2 and param.numel())


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _features(module: Any) -> int | None:
    """Returns the last dim that the input of a linear layer, norm or attention must have; else None."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    if isinstance(module, nn.Linear):
        return module.in_features
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return int(shape[0])
    return int(module.nx) if hasattr(module, "nx") else None


def describe(example: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Returns shapes and dtypes of an example's tensors, and its other values or their types."""

    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(show, value))})"
        shown = isinstance(value, (int, float, str, type(None)))
        return repr(value) if shown else type(value).__name__

    args, kwargs = example
    return ", ".join([*map(show, args), *(f"{k}={show(v)}" for k, v in kwargs.items())])
