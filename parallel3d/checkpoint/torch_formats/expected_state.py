"""What an optimizer's state must be like: by a step that its class takes on a tensor of a few elements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel3d._compat_simulated import simulation_off
from parallel3d.errors import CheckpointError
from parallel3d.optim.step_in_backward import StepInBackward

__all__ = ["PLAIN", "ExpectedState", "Kind", "category", "stepping_class", "wrapped"]

_SIZES = (2, 3, 4, 5, 6)  # of the trial's tensor: each its own, to be known again in its state
_NOT_TRIED = ("LBFGS", "SparseAdam")  # state of all parameters in one; gradients of another layout
PLAIN = ("foreach", "fused", "capturable", "differentiable")  # how it is computed, not what


@dataclass(frozen=True)
class Kind:
    """One entry of a parameter's state.

    Attributes:
        dims: of a tensor: for each of its dims the parameter's that it is as long as, or None for 1.
            None: a number, or a tensor of no dims.
        category: of its dtype.
    """

    dims: tuple[int | None, ...] | None
    category: str

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """For ``param``."""
        return tuple(1 if d is None else param.shape[d] for d in self.dims or ())


class ExpectedState:
    """What the classes of ``torch.optim`` keep for a parameter once they have stepped on it.

    Of other classes nothing is known: what they do is found by running them alone, and only the user does.
    """

    def __init__(self, optimizer: Any) -> None:
        self._class = stepping_class(optimizer)
        self.name = self._class.__name__ if self._class else type(optimizer).__name__
        self._known: dict[tuple[int, int, bool], dict[str, Kind] | None] = {}

    def of(self, number: int, options: Mapping[str, Any], param: Tensor) -> dict[str, Kind] | None:
        """By key, for a parameter of the group ``number``; None where it isn't known.

        Args:
            options: the group's.

        Raises:
            CheckpointError: the class doesn't take these.
        """
        if self._class is None:
            return None
        key = number, param.dim(), param.is_complex()
        if key not in self._known:
            self._known[key] = self._tried(*key, options)
        return self._known[key]

    def _tried(
        self, number: int, ndim: int, is_complex: bool, options: Mapping[str, Any]
    ) -> dict[str, Kind] | None:
        assert self._class is not None
        given = {k: v for k, v in options.items() if k not in ("params", "param_names", *PLAIN)}
        given = {k: v.item() if _is_number(v) else v for k, v in given.items()}
        named = inspect.signature(self._class.__init__).parameters
        if ndim > len(_SIZES):
            return None
        dtype = torch.complex64 if is_complex else torch.float32
        with simulation_off(), torch.inference_mode(False), torch.no_grad():
            param = nn.Parameter(torch.ones(_SIZES[:ndim], dtype=dtype, device="cpu"))
            param.grad = torch.ones_like(param)
            plain: dict[str, Any] = {k: False for k in PLAIN if k in named}
            try:
                trial = self._class(
                    [{**given, "params": [param]}],
                    **{k: v for k, v in given.items() if k in named},
                    **plain,
                )
            except (ValueError, TypeError, RuntimeError) as error:
                raise CheckpointError(
                    f"the saved optimizer's group {number} has options that {self._class.__name__} doesn't "
                    f"take: {error}"
                ) from error
            try:
                _step_of(self._class)(trial)
            except Exception:  # on sizes and a device that are not the user's
                return None
            return {str(key): _kind(value) for key, value in trial.state[param].items()}


def category(dtype: torch.dtype) -> str:
    """What kind of numbers it has; what can't become one another by a cast."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def wrapped(optimizer: Any) -> Any:
    """What has the state: itself, or what ``step_in_backward``'s stands for."""
    while isinstance(optimizer, StepInBackward):
        optimizer = optimizer.optimizer
    return optimizer


def stepping_class(optimizer: Any) -> type[Optimizer] | None:
    """The class of ``torch.optim`` whose ``step`` it takes; None if it is another's."""
    found = type(wrapped(optimizer))
    base = getattr(found, "local_base", found)
    for each in base.__mro__:
        if each.__module__.startswith("torch.optim") and each is not Optimizer:
            same = _step_of(each) is _step_of(base) and issubclass(each, Optimizer)
            return each if same and each.__name__ not in _NOT_TRIED else None
    return None


def _step_of(of: Any) -> Callable[..., Any]:
    """Without the hooks that torch puts around it."""
    step = of.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _kind(value: Any) -> Kind:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return Kind(None, "number")
    dims = tuple(_SIZES.index(n) if n in _SIZES else None for n in value.shape)
    return Kind(dims, category(value.dtype))
