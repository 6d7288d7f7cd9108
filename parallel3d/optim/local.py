"""optim.local: an optimizer that steps on plain local tensors and shows DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d.errors import Parallel3dError
from parallel3d.optim.classes import ELEMENTWISE, is_known_elementwise, step_of
from parallel3d.optim.local_state import LocalState
from parallel3d.optim.matrix import MatrixSteps
from parallel3d.optim.pieces import State
from parallel3d.optim.trial import check_elementwise, check_one_by_one

__all__ = ["local"]

_REFUSED = {
    "LBFGS": "it needs inner products over the whole model; use it on a plain model",
    "SparseAdam": "gradients of sharded parameters are dense; use Adam",
}
_MATRIX = ("Muon", "Adafactor")  # torch's


def local(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Any],
    *,
    matrix: bool | None = None,
    elementwise: bool = False,
    **options: Any,
) -> Optimizer:
    """Makes an ``optimizer_class`` that steps on this rank's plain tensors, not on DTensors::

        optimizer = p3d.optim.local(torch.optim.AdamW, model, lr=1e-3)

    Everything else sees what it would see of the class itself: it is one (a subclass's object), its
    ``param_groups`` have the DTensor Parameters, ``state`` and ``state_dict()`` DTensors placed as they are.
    So schedulers, ``torch.distributed.checkpoint`` and its ``get_optimizer_state_dict`` take it like any
    other, and what it saved loads on other meshes.

    An elementwise class steps on a bucket's whole flat buffer where one group has all of it: a few tensors
    per unit. Its state is then flat as well; those of ``state`` are views. torch's ASGD, Adadelta, Adagrad,
    Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop and SGD are known to be elementwise (these classes
    themselves: a subclass may do anything). Of any other class you must say so, by ``elementwise=True``.

    One that is not (Muon, Adafactor, or what is said to be by ``matrix``) is given whole parameters, so that
    it does what it does to the plain model: parameters of one shape are dealt out to the ranks that share
    them, each steps on its own, and the parts go back, by all-to-alls. State shaped as the parameter stays
    sharded between steps, other tensors (Adafactor's factors) are kept by every rank. All ranks must have
    gradients of the same parameters. A class that looks at all parameters together works in neither way;
    use it itself on the model's DTensors, which is right or an error of DTensor's.

    What you say is tried on a few small parameters, and refused if that shows otherwise. The trial proves
    nothing: a class that clips at a norm which the trial doesn't reach passes.

    Args:
        params: a module, or what the class itself takes: tensors, (name, tensor) pairs, groups as dicts.
        matrix: True asserts that a step on a parameter depends on this parameter, its gradient and its
            state, all whole, and on no other parameter; nor on random numbers. None: as the class says
            (attribute ``whole_matrix``), True for torch's Muon and Adafactor.
        elementwise: True asserts that what a step does to a number depends on this number, its gradient, its
            state, the group's options and the count of steps, and on no other number: no norm, mean, maximum,
            sort or projection over a tensor or several, no random numbers, no blocks (as 8-bit states have);
            and that state is tensors of the parameter's shape and single numbers.
        options: for the class.

    Returns:
        The optimizer.

    Raises:
        Parallel3dError: no optimizer class, one of which nothing is known or said, one that the trial has
            found to work in neither way, or ``differentiable=True``.
    """
    _check(optimizer_class, matrix, elementwise, options)
    given = list(params.parameters() if isinstance(params, nn.Module) else params)
    for entry in given:
        # Read here and by the class: ``model.parameters()`` would be empty the second time.
        if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
            entry["params"] = list(entry["params"])
    if matrix is None:
        matrix = not elementwise and _needs_whole(optimizer_class)
    first = given[0] if given and isinstance(given[0], dict) else {}
    own = {k: v for k, v in first.items() if k not in ("params", "param_names")}
    if matrix:
        check_one_by_one(optimizer_class, options, own)
    elif not is_known_elementwise(optimizer_class):
        _check_said(optimizer_class, elementwise)
        check_elementwise(optimizer_class, options, own, _device(given))
    made: Any = _local_class(optimizer_class, matrix)
    return made(given, **options)


def _check(optimizer_class: Any, matrix: Any, elementwise: Any, options: dict[str, Any]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise Parallel3dError(
            f"optim.local was given {optimizer_class!r}; it needs a class of optimizers, such as "
            "torch.optim.AdamW, and makes the object itself: local(torch.optim.AdamW, model, lr=1e-3)"
        )
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, getattr(torch.optim, refused)):
            raise Parallel3dError(
                f"optim.local: {optimizer_class.__name__} can't step on shards: {why}"
            )
    if options.get("differentiable"):
        raise Parallel3dError(
            "optim.local: differentiable=True differentiates the step, which on shards is outside of any "
            "graph; leave it out"
        )
    if matrix is not None and not isinstance(matrix, bool):
        raise Parallel3dError(f"matrix is {matrix!r}; it must be True, False or None")
    if not isinstance(elementwise, bool):
        raise Parallel3dError(f"elementwise is {elementwise!r}; it must be True or False")
    if matrix and elementwise:
        raise Parallel3dError(
            "matrix=True and elementwise=True: an elementwise class needs no whole parameters; give one"
        )


def _check_said(optimizer_class: type[Optimizer], elementwise: bool) -> None:
    """Raises if nobody has said that it is elementwise, which nothing else can show."""
    if elementwise:
        return
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    base = next((b for b in optimizer_class.__mro__[1:] if is_known_elementwise(b)), None)
    inherits = "" if base is None else f" (it is a subclass of {base.__name__}, which may do more)"
    raise Parallel3dError(
        f"optim.local: {name} is not known to be elementwise{inherits}; known are {', '.join(ELEMENTWISE)} "
        "of torch.optim. On shards it would be right only if what it does to a number depends on no other "
        "number: if so, give elementwise=True. If it treats parameters one by one, but each as a whole (by "
        "norms, projections, maxima), give matrix=True. If it looks at all parameters together, or if you "
        "don't know, use the class itself on the model's parameters, which are DTensors"
    )


def _needs_whole(optimizer_class: type[Optimizer]) -> bool:
    known = tuple(getattr(torch.optim, name) for name in _MATRIX if hasattr(torch.optim, name))
    return bool(getattr(optimizer_class, "whole_matrix", issubclass(optimizer_class, known)))


def _device(given: list[Any]) -> torch.device:
    """Where the first parameter is."""
    for entry in given:
        if isinstance(entry, dict):
            tensors = entry.get("params", ())
            return _device([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        tensor = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


class LocalSteps:
    """Mixed into an elementwise optimizer class: its ``step`` sees pieces in place of parameters.

    Attributes:
        local_base: that class.
    """

    local_base: type[Optimizer]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, State]
    _local: LocalState | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the class's, on local tensors."""
        loss = _evaluated(closure)
        if self._local is None or not self._local.is_current(self.param_groups, self.state):
            self._local = LocalState(self.param_groups, self.state)
        with self._local.shown_to(self):
            step_of(self.local_base)(self)
        self._local.publish(self.state)
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_from, (self.local_base, False), self.__getstate__()


class LocalMatrixSteps:
    """Mixed into a class that needs whole parameters.

    Attributes:
        local_base: that class.
    """

    local_base: type[Optimizer]
    _matrices: MatrixSteps | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the class's, on whole parameters, some on each rank."""
        loss = _evaluated(closure)
        optimizer: Any = self
        if self._matrices is None:
            self._matrices = MatrixSteps()
        self._matrices.step(optimizer, step_of(self.local_base))
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_from, (self.local_base, True), self.__getstate__()


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    """Its backward must find the Parameters, so it runs before the step sees others."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


_classes: dict[tuple[type[Optimizer], bool], Any] = {}


def _local_class(base: type[Optimizer], matrix: bool) -> Any:
    """The subclass of ``base`` whose ``step`` is on local tensors; made once."""
    if (base, matrix) not in _classes:
        kind = LocalMatrixSteps if matrix else LocalSteps
        members = {"local_base": base, "__doc__": base.__doc__, "__module__": __name__}
        _classes[base, matrix] = type(f"Local{base.__name__}", (kind, base), members)
    return _classes[base, matrix]


def _made_from(base: type[Optimizer], matrix: bool) -> Any:
    """For copies and pickles, whose state is set next."""
    made = _local_class(base, matrix)
    return made.__new__(made)
