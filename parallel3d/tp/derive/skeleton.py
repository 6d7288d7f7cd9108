"""Copies of a module with other parameters: without weights to trace it, with random ones to prove a plan."""

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from parallel3d._compat import inner_tensors

__all__ = ["copy_with", "random_like", "weightless"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_with(module: ModuleT, make: Callable[[nn.Parameter], nn.Parameter]) -> ModuleT:
    """A copy of ``module`` on the CPU with ``make(p)`` in the place of each parameter, ties kept. Buffers
    are copied; those on the meta device, which have no values, are random, and alike in all copies."""
    memo: dict[int, object] = {}
    for param in module.parameters():
        memo[id(param)] = make(param)
    generator = torch.Generator().manual_seed(0)
    for buffer in module.buffers():
        memo[id(buffer)] = _cpu(buffer, generator)
    return copy.deepcopy(module, memo)


def weightless(param: nn.Parameter) -> nn.Parameter:
    """A float32 parameter of the same shape that takes no memory: one number, seen everywhere."""
    made = torch.full((), 0.01).expand(param.shape)
    return nn.Parameter(made, requires_grad=param.requires_grad)


def random_like(param: nn.Parameter, generator: torch.Generator) -> Tensor:
    """A float64 tensor with the parameter's shape, of a size that keeps activations near 1."""
    made = torch.empty(param.shape, dtype=torch.float64)
    if param.dim() < 2:
        return made.uniform_(0.5, 1.5, generator=generator)
    bound = (3.0 / max(param.shape[-1], 1)) ** 0.5
    return made.uniform_(-bound, bound, generator=generator)


def _cpu(buffer: Tensor, generator: torch.Generator) -> Tensor:
    buffer = next(inner_tensors(buffer))  # of simulated ranks the first one's
    if not buffer.is_meta:
        return buffer.detach().to("cpu", copy=True)
    if buffer.is_floating_point():
        return torch.rand(buffer.shape, dtype=buffer.dtype, generator=generator)
    return torch.ones(buffer.shape, dtype=buffer.dtype)
