"""Copies of a model, with other tensors in the places of its parameters."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallel3d._torch.fake import FakeTensor
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import PlanError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NotCopied(PlanError):
    """Raised by ``copy_with`` if the model can't be copied; the message names the attribute and the cause."""


def copy_with(module: ModuleT, make: Callable[[nn.Parameter], nn.Parameter]) -> ModuleT:
    """Returns a copy of ``module`` on the CPU with ``make(p)`` in the place of each parameter ``p``; tied
    parameters stay tied. Buffers and tensors in attributes are copied by ``with_values``. Raises NotCopied.
    """
    memo: dict[int, object] = {id(param): make(param) for param in module.parameters()}
    for _, owner, name in left_by_forward(module):  # which torch can't copy
        memo |= {id(t): t.detach().cpu() for t in tensors_in(vars(owner)[name]) if t.grad_fn}
    generator = torch.Generator().manual_seed(0)
    for each in module.modules():
        others = tensors_in([v for v in vars(each).values() if v is not each._parameters])
        for tensor in (*each._buffers.values(), *filter(_is_without_values, others)):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = with_values(tensor, generator)
    before = dict(memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotCopied(_why_not_copied(module, before, error)) from error


def _why_not_copied(module: nn.Module, memo: dict[int, object], error: Exception) -> str:
    """Returns a message that names the attribute that ``deepcopy`` can't copy, and why."""
    first = (str(error).strip().splitlines() or [""])[0]
    why = f"{type(error).__name__}: {first}"
    if "graph leaves" in first:
        why = (
            "it has a tensor that was computed from weights, with its graph, which torch can't copy; keep it "
            "detached, or delete it before parallelize"
        )
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            try:
                if name != "_modules":
                    copy.deepcopy(value, dict(memo))
            except Exception:
                return f"{f'{path}.{name}'.lstrip('.')} of {type(module).__name__} can't be copied: {why}"
    return f"{type(module).__name__} can't be copied: {why}"


def _is_without_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on the meta device, or was made in a dry run."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def with_values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a copy of ``tensor`` on the CPU. If it has no values it gets random ones, or ones."""
    tensor = next(inner_tensors(tensor))  # of simulated ranks the first one's
    if not _is_without_values(tensor):
        return tensor.detach().to("cpu", copy=True)
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def random_like(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns a random float64 tensor to stand for a parameter, scaled to keep activations near 1."""
    made = torch.empty(shape, dtype=torch.float64)
    if len(shape) < 2:
        return made.uniform_(0.5, 1.5, generator=generator)
    bound = (3.0 / max(shape[-1], 1)) ** 0.5
    return made.uniform_(-bound, bound, generator=generator)


def map_once(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Like ``map_tensors``, but calls ``fn`` once for each tensor: what shares a tensor still shares one."""
    once: dict[int, Tensor] = {}

    def made(tensor: Tensor) -> Tensor:
        if id(tensor) not in once:
            once[id(tensor)] = fn(tensor)
        return once[id(tensor)]

    return map_tensors(made, tree)


def meta_copy(model: ModuleT) -> ModuleT:
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, memo)


_BARE = vars(nn.Module())


def left_by_forward(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (module's path, module, attribute) for attributes that hold tensors with an autograd graph."""
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in _BARE or name.startswith("_parallel3d") or isinstance(value, nn.Module):
                continue
            if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                yield path, module, name
