"""step_in_backward: updates each parameter, and frees its gradient, as soon as the gradient is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d._torch.autograd import backward_id
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import Bucket, StepGuard, Unit, guard_of, refuse_torch_units, units_of
from parallel3d.optim.grad_scaler import is_scaled

_by_parameter: weakref.WeakValueDictionary[int, StepInBackward] = weakref.WeakValueDictionary()


def step_in_backward(
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *,
    params: Iterable[Any] | None = None,
    **kwargs: Any,
) -> StepInBackward:
    """Makes every backward of ``model`` update the parameters, each unit's when its gradients are reduced.

    Only the gradients of about two units exist at a time. The update is that of
    ``optimizer_class(params, **kwargs)`` after the backward, for every optimizer that treats parameters one
    by one. There is no step to call::

        optimizer = p3d.optim.step_in_backward(model, torch.optim.AdamW, lr=3e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        for tokens in data:
            loss_of(model, tokens).backward()  # updates
            scheduler.step()

    What needs all gradients at once, or several backwards for a step, raises StateError: gradient
    accumulation, ``clip_grad_norm_``, a GradScaler. So does a backward in which a parameter may be used after
    its update: see ``fsdp/options/checks.py``. torch's own ``clip_grad_norm_`` finds no gradient, and torch's
    own ``GradScaler`` is refused in its ``step``, after the update.

    Args:
        model: a model that ``parallelize`` or ``fully_shard`` was applied to.
        optimizer_class: makes the optimizer; not LBFGS, which needs several backwards for a step.
            ``functools.partial(optim.local, torch.optim.AdamW)`` steps on the buckets' plain tensors.
        params: parameters or groups of them, as optimizers take; by default all that require a gradient.
        kwargs: arguments of ``optimizer_class``. Its step, with its hooks, runs once for each bucket.

    Returns:
        An optimizer with ``param_groups``, ``state_dict`` and so on, but without a step to call.

    Raises:
        Parallel3dError: the model has no units, ``optimizer_class`` makes no optimizer, or a parameter
            belongs to no unit.
        StateError: there are gradients, reductions are deferred, or the model is updated in backward
            already.
    """
    if not isinstance(model, nn.Module):
        raise Parallel3dError(
            f"step_in_backward was given a {type(model).__name__}; it needs a module"
        )
    refuse_torch_units(model, "step_in_backward")
    units = list(units_of(model, recurse=True))
    if not units:
        raise Parallel3dError(
            f"step_in_backward: {type(model).__name__} is not parallel; call parallel3d.parallelize first"
        )
    for unit in units:
        _check_unit(unit)
    if not callable(optimizer_class):
        raise Parallel3dError(
            f"optimizer_class is {optimizer_class!r}; it must be a class of optimizers, not an optimizer"
        )
    trainable = [p for p in model.parameters() if p.requires_grad] if params is None else [*params]
    if params is None and not trainable:
        raise Parallel3dError(
            f"step_in_backward: no parameter of {type(model).__name__} requires a gradient"
        )
    optimizer = optimizer_class(trainable, **kwargs)
    if not isinstance(optimizer, Optimizer):
        raise Parallel3dError(
            f"optimizer_class made a {type(optimizer).__name__}; it must make a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Parallel3dError(
            "optimizer_class is LBFGS, which needs several backwards for a step; use another class"
        )
    return StepInBackward(optimizer, units)


def _check_unit(unit: Unit) -> None:
    problem = ""
    if guard_of(unit) is not None:
        problem = (
            f"unit {unit.label} is updated in backward already; give all parameters to one call (params= "
            "takes groups), or remove() the other first"
        )
    elif unit.manual_finalization:
        problem = (
            f"the backwards of {unit.label} end with finalize_backward(), which would come after the "
            "updates; call set_manual_backward_finalization(False) first"
        )
    elif not (unit.sync and unit.all_reduce):
        remedy = "call set_requires_gradient_sync(True) first"
        problem = f"unit {unit.label} defers its reductions; {remedy}"
    else:
        unit.come_to_rest()
        for param in (param for bucket in unit.group.buckets for param in bucket.params):
            if param.sharded.grad is not None:
                owner = f"parameter {param.name} of unit {unit.label}"
                problem = f"{owner} has a gradient already; call zero_grad() first"
    if problem:
        raise StateError(f"step_in_backward: {problem}")


class StepInBackward(Optimizer):
    """The optimizer that ``step_in_backward`` returns, for schedulers and checkpoints.

    Attributes:
        optimizer: the optimizer that updates, bucket by bucket.
        param_groups, state, defaults: those of ``optimizer``.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit]) -> None:
        # The base's __init__ isn't called: everything belongs to ``optimizer``.
        self.optimizer = optimizer
        self._views: dict[int, Optimizer] = {}
        self._before: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._units = [unit.ref for unit in units]
        self._groups = _by_bucket(optimizer, units)
        for unit in units:
            guard = StepGuard(unit, self._update)
            unit.options.append(guard)
            for bucket in unit.group.buckets:
                if id(bucket) in self._groups:
                    bucket.change(on_reduced=guard.update)
        for group in self.param_groups:
            for param in group["params"]:
                _by_parameter[id(param)] = self

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of ``optimizer``, which methods of the base class read."""
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """Raises StateError, for ``copy.deepcopy`` and ``pickle``: a copy would update nothing."""
        raise StateError(
            "an optimizer that steps in backward belongs to the backward of its model and can't be copied or "
            "pickled; save its state_dict(), or copy the model and call step_in_backward for the copy"
        )

    def _update(self, bucket: Bucket) -> None:
        """Steps the parameters of ``bucket`` that have a gradient, and frees the gradients."""
        if is_scaled(backward_id()):
            raise StateError(
                "parameters are updated in backward, but this backward is of a loss that a GradScaler has "
                "scaled, whose gradients must be unscaled first; use a loss that is not scaled (bfloat16 "
                "needs no scaling), or an ordinary optimizer"
            )
        view, members = self._views.get(id(bucket)), self._groups[id(bucket)]
        if view is None or view.state is not self.state:
            # The optimizer with the parameters of the bucket alone: the same state, hooks and options.
            view = self._views[id(bucket)] = object.__new__(type(self.optimizer))
            vars(view).update(vars(self.optimizer))
            groups = self.param_groups
            view.param_groups = [{**groups[i], "params": own} for i, own in members.items()]
        # All buckets begin with the groups as they were before this backward: what a class counts in them, it
        # counts once. A scheduler may have changed them since.
        backward = backward_id()
        if backward == -1 or backward != self._before[0]:
            self._before = backward, [dict(group) for group in self.param_groups]
        for group, index in zip(view.param_groups, members, strict=True):
            _copy_options(group, self._before[1][index])
        view.step()
        for group, index in zip(view.param_groups, members, strict=True):
            _copy_options(self.param_groups[index], group)
            for param in group["params"]:
                param.grad = None
        self._opt_called = True  # for schedulers, which warn where no step came before theirs

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises StateError: the backward has updated already.

        With ``lr`` 0 everywhere and no state yet it makes the state, which is how
        ``torch.distributed.checkpoint.state_dict`` prepares an optimizer for loading.
        """
        groups = self.param_groups
        if not self.state and all("lr" in g and float(g["lr"]) == 0.0 for g in groups):
            self.optimizer.step()
            return
        raise StateError("this optimizer steps in loss.backward(); leave the call of step() out")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raises StateError for ``torch.amp.GradScaler.step``, which reads this attribute first."""
        raise StateError(
            "a GradScaler was given an optimizer that steps in backward, before gradients can be unscaled; "
            "use no scaler (bfloat16 needs none), or an ordinary optimizer"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ``Optimizer.zero_grad``; backwards of the model leave no gradients to zero."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises Parallel3dError: the parameters of each unit are fixed when the optimizer is made."""
        raise Parallel3dError(
            "add_param_group: an optimizer that steps in backward gets all groups at the beginning; call "
            "remove() and then step_in_backward(model, ..., params=groups)"
        )

    def remove(self) -> None:
        """Makes backwards leave gradients in ``.grad`` again. A second call does nothing."""
        units, self._units = self._units, []
        for ref in units:
            unit = ref()
            if unit is not None and (guard := guard_of(unit)) is not None:
                unit.options.remove(guard)
                for bucket in unit.group.buckets:
                    bucket.change(on_reduced=None)
        for group in self.param_groups:
            for param in group["params"]:
                if _by_parameter.get(id(param)) is self:
                    del _by_parameter[id(param)]

    def __repr__(self) -> str:
        return f"StepInBackward({self.optimizer!r})"


def _copy_options(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Copies the options of parameter group ``source`` to ``target``, without the parameters."""
    target.update((key, value) for key, value in source.items() if key != "params")


def refuse_stepped(params: Iterable[torch.Tensor], what: str) -> None:
    """Raises StateError if any of ``params`` is updated in backward."""
    if not _by_parameter:
        return
    for param in params:
        owner = _by_parameter.get(id(param))
        if owner is not None and any(p is param for g in owner.param_groups for p in g["params"]):
            raise StateError(
                f"{what}: a parameter of shape {tuple(param.shape)} is updated in backward, when not all "
                f"gradients are there; leave {what} out, or use an ordinary optimizer"
            )


def _by_bucket(
    optimizer: Optimizer, units: Sequence[Unit]
) -> dict[int, dict[int, list[nn.Parameter]]]:
    """Returns id of a bucket -> index of a parameter group -> the group's parameters in the bucket. Raises
    Parallel3dError for a parameter in no unit."""
    every = [bucket for unit in units for bucket in unit.group.buckets]
    buckets = {id(param.sharded): bucket for bucket in every for param in bucket.params}
    found: dict[int, dict[int, list[nn.Parameter]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            bucket = buckets.get(id(param))
            if bucket is None:
                raise Parallel3dError(
                    f"step_in_backward: a parameter of shape {tuple(param.shape)} belongs to no unit of the "
                    "model (it was ignored, say); leave it out of params=, and give it another optimizer"
                )
            found.setdefault(id(bucket), {}).setdefault(index, []).append(param)
    return found
