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
    """Mark on a replaced Parameter: where it was in the model. It is not copied with the Parameter."""

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
        """Whether the model holds another Parameter there, and ``param`` has got no gradient since."""
        module = self.module()
        if module is None or module._parameters.get(self.attribute) is param:
            return False
        return param.grad is None or (self.grad is not None and self.grad() is param.grad)


def mark_replaced(
    param: nn.Parameter, module: nn.Module, attribute: str, name: str, *, assigned: bool = False
) -> None:
    """Marks ``param``, which was ``attribute`` of ``module`` and is being replaced. With ``assigned`` it was
    assigned to a sharded model, which has copied its values and kept its own. ``name``: for messages."""
    global _marked
    if _marked == 0:
        register_optimizer_step_pre_hook(_check)
    _marked += 1
    setattr(param, _MARK, _Replaced(param, module, attribute, name, assigned))


@untraced
def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook before steps: raises StateError if ``optimizer`` has replaced Parameters; looks once at each."""
    if not _alive:
        return
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    state = _marked, len(params)
    if getattr(optimizer, _CHECKED, None) == state:
        return
    marks = [(param, getattr(param, _MARK, None)) for param in params]
    for param, mark in marks:
        if isinstance(mark, _Replaced) and mark.is_unused(param):
            name, shape = type(optimizer).__name__, tuple(param.shape)
            if mark.assigned:
                raise StateError(
                    f"{name} has a Parameter of shape {shape} that was assigned as {mark.name} after the "
                    "model was sharded. The model has taken its values and kept its own Parameter, so that "
                    "the step would change nothing. Make the optimizer of model.parameters()"
                )
            raise StateError(
                f"{name} was made before the model was sharded: it has parameter {mark.name} of shape "
                f"{shape} as it was then, which parallelize or fully_shard has replaced, so that its step "
                "would change nothing. Make the optimizer after parallelize or fully_shard, of "
                "model.parameters()"
            )
    if not any(isinstance(mark, _Replaced) for _, mark in marks):
        setattr(optimizer, _CHECKED, state)  # else another model may use them: look in each step


@contextmanager
def marking_replaced(model: nn.Module) -> Iterator[None]:
    """Context manager that marks the Parameters of ``model`` that its body has replaced."""
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
