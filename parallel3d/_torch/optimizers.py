"""Private names of torch's optimizers."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from parallel3d.errors import StateError

_EXPLAINED = "_parallel3d_explained"  # of a class's ``step``


def wrap_steps(explain: Callable[[Optimizer, RuntimeError], str | None]) -> None:
    """Makes a RuntimeError in an optimizer's step a StateError with the text ``explain(optimizer, error)``;
    if that is None the error stays. It wraps the classes of optimizers that are made from now on."""
    patch = Optimizer._patch_step_function

    def patched(self: Optimizer) -> None:
        patch(self)
        cls = type(self)
        if not getattr(cls.step, _EXPLAINED, False):
            cls.step = _explained(cls.step)  # type: ignore[method-assign]

    def _explained(step: Callable[..., Any]) -> Any:
        @wraps(step)
        def explained(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(self, *args, **kwargs)
            except RuntimeError as error:
                message = explain(self, error)
                if message is None:
                    raise
                raise StateError(message) from error

        setattr(explained, _EXPLAINED, True)
        # Who wants the step without the hooks that torch has put around it asks for ``__wrapped__``.
        explained.__wrapped__ = step.__wrapped__  # type: ignore[attr-defined]
        return explained

    Optimizer._patch_step_function = patched  # type: ignore[method-assign]


def convert_loaded(convert: Callable[[torch.Tensor, Any], Any]) -> None:
    """Makes ``Optimizer.load_state_dict`` load ``convert(param, value)`` for each state tensor."""
    process: Callable[..., Any] = Optimizer._process_value_according_to_param_policy

    def processed(param: torch.Tensor, value: Any, *args: Any, **kwargs: Any) -> Any:
        return process(param, convert(param, value), *args, **kwargs)

    Optimizer._process_value_according_to_param_policy = staticmethod(processed)  # type: ignore[method-assign]


def step_dtensors_apart() -> None:
    """Makes foreach and fused steps call once for DTensors and once for plain tensors."""
    grouped: Callable[..., Any] = Optimizer._group_tensors_by_device_and_dtype

    def group(tensors: Any, with_indices: bool = False) -> Any:
        found = grouped(tensors, with_indices)
        if torch.compiler.is_compiling():
            return found
        apart = {}
        for (device, dtype), (lists, indices) in found.items():
            kinds = [isinstance(each, DTensor) for each in lists[0]]
            if all(kinds) or not any(kinds):
                apart[device, dtype] = lists, indices
                continue
            for wanted in (True, False):
                places = [i for i, each in enumerate(kinds) if each is wanted]
                pick = lambda values, at=places: [values[i] for i in at] if values else values  # noqa: E731
                apart[device, (dtype, wanted)] = [pick(v) for v in lists], pick(indices)
        return apart

    Optimizer._group_tensors_by_device_and_dtype = staticmethod(group)  # type: ignore[method-assign, assignment]


CAPTURABLE = "_get_capturable_supported_devices"
"""Function, of modules with optimizers, that returns the types of devices for ``capturable=True``."""


def optimizer_modules() -> list[Any]:
    """Returns the modules of torch that have the function named ``CAPTURABLE``."""
    names = [name for name in sys.modules if name.startswith("torch.optim.")]
    return [sys.modules[name] for name in names if hasattr(sys.modules[name], CAPTURABLE)]
