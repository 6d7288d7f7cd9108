"""Linear layers whose own forward casts the weight: ``F.linear(x, self.weight.to(x.dtype))``."""

import functools
import types
from itertools import chain, product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d._torch.simulated import simulation_off
from parallel3d._util import dry_run


def casts_weight(module: nn.Module) -> bool:
    """Whether ``module`` is of a subclass of ``nn.Linear`` whose forward computes ``F.linear`` with weight
    and bias cast to the input's dtype. It must read no other attribute; that results and gradients are equal
    is tried on a small layer."""
    cls, own = type(module), getattr(type(module), "forward", None)
    if not isinstance(module, nn.Linear) or own is nn.Linear.forward or "forward" in vars(module):
        return False
    if not isinstance(own, types.FunctionType) or own.__code__.co_freevars:
        return False
    inherited = map(vars, cls.__mro__[: cls.__mro__.index(nn.Linear)])
    held = chain(module._parameters, module._buffers, module._modules, vars(module), *inherited)
    if not (set(own.__code__.co_names) - {"weight", "bias"}).isdisjoint(held):
        return False
    return _computes_cast_product(cls, module.bias is not None)  # type: ignore[arg-type]  # classes are hashable


def cast_to(x: Tensor, *params: Tensor | None) -> list[Tensor | None]:
    """Returns ``params`` cast to the dtype of ``x``; None stays None."""
    return [None if param is None else param.to(x.dtype) for param in params]


@functools.cache
def _computes_cast_product(cls: type[nn.Linear], bias: bool) -> bool:
    """Whether a small layer of class ``cls`` computes ``F.linear`` with cast parameters, and its
    gradients."""
    with (
        simulation_off(),
        dry_run.real(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        return all(
            _is_cast_product(cls, bias, *dtypes, training=training)
            for dtypes, training in product(_DTYPES, (True, False))
        )


_DTYPES = (
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
"""(dtype of the input, dtype of the weight)."""


def _is_cast_product(
    cls: type[nn.Linear], bias: bool, dtype: torch.dtype, stored: torch.dtype, *, training: bool
) -> bool:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(6, 8, bias, dtype=stored).train(training)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    layer.__class__ = cls
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    inputs = (x, *layer.parameters())
    try:
        got = layer.forward(x)
        want = F.linear(x, *cast_to(x, layer.weight, layer.bias))  # type: ignore[arg-type]
        if type(got) is not Tensor or got.dtype != want.dtype or not torch.equal(got, want):
            return False
        of_got, of_want = (torch.autograd.grad(y.square().sum(), inputs) for y in (got, want))
    except Exception:  # it is the user's code
        return False
    return all(map(torch.equal, of_got, of_want))
