"""Private names of torch's optimizers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from parallel3d.errors import StateError

_EXPLAINED = "_parallel3d_explained"  # of a class's ``step``


def wrap_steps(explain: Callable[[Optimizer, RuntimeError], str | None]) -> None:
    """Raises StateError with what ``explain`` returns, unless None, where a step ends in a RuntimeError.

    Of the classes of which an optimizer is made from now on.
    """
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
    """From now on ``load_state_dict`` takes ``convert(param, value)`` for each tensor of a param's state."""
    process: Callable[..., Any] = Optimizer._process_value_according_to_param_policy

    def processed(param: torch.Tensor, value: Any, *args: Any, **kwargs: Any) -> Any:
        return process(param, convert(param, value), *args, **kwargs)

    Optimizer._process_value_according_to_param_policy = staticmethod(processed)  # type: ignore[method-assign]


def step_dtensors_apart() -> None:
    """Makes foreach and fused steps one call for parameters that are DTensors, and one for others."""
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
