"""Parameters that a sharded or tensor-parallel model has others in place of: optimizers must not have them.

``fully_shard`` or a plan has replaced them, or they were assigned to a sharded model, which keeps its own.
An optimizer would step on parameters that nothing computes with, find no gradients, and leave the model
unchanged.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parallel3d._torch.autograd import untraced
from parallel3d.errors import StateError

_MARK = "_parallel3d_replaced"  # attribute of the user's Parameter
_alive: dict[int, str] = {}
"""The marks of replaced Parameters that still exist; if there are none, a step costs one test."""
_marked = 0
# Attribute of an optimizer that has passed: (marks made until then, number of its parameters).
_CHECKED = "_parallel3d_checked"


class _Replaced:
    """The place of a replaced Parameter in its model. Dies with the Parameter; is not copied with it."""

    __slots__ = ("__weakref__", "assigned", "attribute", "grad", "module", "name")

    def __init__(
        self, param: nn.Parameter, module: nn.Module, attribute: str, name: str, assigned: bool
    ) -> None:
        self.module, self.attribute, self.name = weakref.ref(module), attribute, name
        self.assigned = assigned
        self.grad = weakref.ref(param.grad) if param.grad is not None else None
        _alive[id(self)] = name

    def __del__(self) -> None:
        _alive.pop(id(self), None)

    def __reduce__(self) -> Any:
        return type(None), ()

    def is_unused(self, param: nn.Parameter) -> bool:
        """Whether the model has another Parameter in its place, and it has got no gradient since."""
        module = self.module()
        if module is None or module._parameters.get(self.attribute) is param:
            return False
        return param.grad is None or (self.grad is not None and self.grad() is param.grad)


def mark_replaced(
    param: nn.Parameter, module: nn.Module, attribute: str, name: str, *, assigned: bool = False
) -> None:
    """Marks ``param``, which is being replaced as ``module``'s ``attribute``.

    Args:
        name: for the message.
        assigned: whether it was assigned to the sharded model, which has taken its values only.
    """
    global _marked
    if _marked == 0:
        register_optimizer_step_pre_hook(_before_step)
    _marked += 1
    setattr(param, _MARK, _Replaced(param, module, attribute, name, assigned))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _alive:
        _check(optimizer)


@untraced
def _check(optimizer: Optimizer) -> None:
    """Raises if ``optimizer`` has replaced Parameters; looks at each optimizer once."""
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    state = _marked, len(params)
    if getattr(optimizer, _CHECKED, None) == state:
        return
    marks = [(param, getattr(param, _MARK, None)) for param in params]
    for param, mark in marks:
        if isinstance(mark, _Replaced) and mark.is_unused(param):
            if mark.assigned:
                raise StateError(
                    f"{type(optimizer).__name__} has a Parameter of shape {tuple(param.shape)} that was "
                    f"assigned as {mark.name} after the model was sharded. The model has taken its values "
                    "and kept its own Parameter, so that the step would change nothing. Make the optimizer "
                    "of model.parameters()"
                )
            raise StateError(
                f"{type(optimizer).__name__} was made before the model was sharded: it has parameter "
                f"{mark.name} of shape {tuple(param.shape)} as it was then, which parallelize or fully_shard "
                "has replaced, so that its step would change nothing. Make the optimizer after parallelize "
                "or fully_shard, of model.parameters()"
            )
    if not any(isinstance(mark, _Replaced) for _, mark in marks):
        setattr(optimizer, _CHECKED, state)  # else another model may use them: look in each step


@contextmanager
def marking_replaced(model: nn.Module) -> Iterator[None]:
    """Marks the Parameters of ``model`` that the body replaces."""
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
