"""Parameters that ``fully_shard`` or a tensor-parallel plan has replaced: no optimizer may have them.

It would step on what nobody computes with any more, find no gradients, and leave the model as it is.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parallel3d.errors import StateError

_MARK = "_parallel3d_replaced"  # on the user's Parameter
_alive: dict[int, str] = {}
"""Marks of Parameters that are still there: none, as soon as nobody has one. Then a step costs one look."""
_marked = 0
_CHECKED = "_parallel3d_checked"  # on an optimizer: (marks made, its parameters) when it was looked through


class _Replaced:
    """Where a Parameter was; lives and dies with it. A copy of the Parameter has an empty one."""

    __slots__ = ("__weakref__", "attribute", "grad", "module", "name")

    def __init__(self, param: nn.Parameter, module: nn.Module, attribute: str, name: str) -> None:
        self.module, self.attribute, self.name = weakref.ref(module), attribute, name
        self.grad = weakref.ref(param.grad) if param.grad is not None else None
        _alive[id(self)] = name

    def __del__(self) -> None:
        _alive.pop(id(self), None)

    def __reduce__(self) -> Any:
        return _no_mark, ()

    def is_idle(self, param: nn.Parameter) -> bool:
        """Whether its model has another Parameter in its place, and nobody has computed with it since."""
        module = self.module()
        if module is None or module._parameters.get(self.attribute) is param:
            return False
        return param.grad is None or (self.grad is not None and self.grad() is param.grad)


def _no_mark() -> None:
    return None


def mark_replaced(param: nn.Parameter, module: nn.Module, attribute: str, name: str) -> None:
    """To be called where ``module``'s ``attribute`` gets another Parameter in place of ``param``.

    Args:
        name: of the parameter, for the message.
    """
    global _marked
    if _marked == 0:
        register_optimizer_step_pre_hook(_before_step)
    _marked += 1
    setattr(param, _MARK, _Replaced(param, module, attribute, name))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _alive:
        _check(optimizer)


@torch.compiler.disable
def _check(optimizer: Optimizer) -> None:
    """Raises if a step of ``optimizer`` would be on replaced Parameters; looks at each optimizer once."""
    seen = _marked, sum(len(group["params"]) for group in optimizer.param_groups)
    if getattr(optimizer, _CHECKED, None) == seen:
        return
    has_marked = False
    for param in _params(optimizer):
        mark = getattr(param, _MARK, None)
        if not isinstance(mark, _Replaced):
            continue
        has_marked = True
        if mark.is_idle(param):
            raise StateError(
                f"{type(optimizer).__name__} was made before the model was sharded: it has parameter "
                f"{mark.name} of shape {tuple(param.shape)} as it was then, which parallelize or fully_shard "
                "has replaced, so that its step would change nothing. Make the optimizer after parallelize "
                "or fully_shard, of model.parameters()"
            )
    if not has_marked:  # one that another model computes with too is looked at in each step
        setattr(optimizer, _CHECKED, seen)


@contextmanager
def marking_replaced(model: nn.Module) -> Iterator[None]:
    """Marks the Parameters of ``model`` that the body has put others in place of."""
    before = [
        (param, module, attribute, f"{prefix}.{attribute}" if prefix else attribute)
        for prefix, module in model.named_modules()
        for attribute, param in module._parameters.items()
        if param is not None
    ]
    yield
    for param, module, attribute, name in before:
        if module._parameters.get(attribute) is not param:
            mark_replaced(param, module, attribute, name)


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
