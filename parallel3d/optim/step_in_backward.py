"""step_in_backward: each parameter is updated, and its gradient freed, as soon as it is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d._torch.autograd import backward_id
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import Bucket, StepGuard, Unit, guard_of, units_of
from parallel3d.optim.grad_scaler import is_scaled

_by_parameter: weakref.WeakValueDictionary[int, StepInBackward] = weakref.WeakValueDictionary()


def step_in_backward(
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *,
    params: Iterable[Any] | None = None,
    **kwargs: Any,
) -> StepInBackward:
    """Lets every backward of ``model`` update its parameters, each unit's when it is reduced.

    Gradients never exist all at once: those of about two units do. The update is that of
    ``optimizer_class(params, **kwargs)`` after the backward, for every optimizer that treats parameters one
    by one. There is no step to call::

        optimizer = p3d.optim.step_in_backward(model, torch.optim.AdamW, lr=3e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        for tokens in data:
            loss_of(model, tokens).backward()  # updates
            scheduler.step()

    What needs all gradients at once or several backwards for a step is a StateError: gradient accumulation,
    ``clip_grad_norm_``, a GradScaler. So is a backward in which a parameter may be used after its update: see
    ``fsdp/options/checks.py``. torch's own ``clip_grad_norm_`` can't know, and finds no gradient; torch's
    own ``GradScaler`` is refused at its ``step``, when the backward has updated already.

    Args:
        model: a model that ``parallelize`` or ``fully_shard`` was applied to.
        optimizer_class: makes the optimizer; not LBFGS, which needs several backwards for a step.
            ``functools.partial(optim.local, torch.optim.AdamW)`` steps on the buckets' plain tensors.
        params: parameters or groups of them, as optimizers take; by default all that have a gradient.
        kwargs: for ``optimizer_class``, whose step, and so its hooks, runs once for each bucket.

    Returns:
        What stands for the optimizer: ``param_groups``, ``state_dict`` and the like.

    Raises:
        Parallel3dError: a model without units, no class of optimizers, parameters of no unit.
        StateError: gradients are there or put off already, or the model is updated in backward already.
    """
    units = _checked_units(model)
    _check_class(optimizer_class)
    given = _trainable(model) if params is None else list(params)
    optimizer = optimizer_class(given, **kwargs)
    if not isinstance(optimizer, Optimizer):
        raise Parallel3dError(
            f"optimizer_class made a {type(optimizer).__name__}; it must make a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Parallel3dError(
            "optimizer_class is LBFGS, which needs several backwards for a step; use one that takes one "
            "gradient, such as torch.optim.AdamW"
        )
    return StepInBackward(optimizer, units)


class StepInBackward(Optimizer):
    """What ``step_in_backward`` returns: an optimizer that schedulers and checkpoints take.

    Attributes:
        optimizer: the one that updates, bucket by bucket.
        param_groups, state, defaults: its own, also after it has loaded others.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit]) -> None:
        # Not the base's: nothing here is of its own.
        self.optimizer = optimizer
        self._views: dict[int, Optimizer] = {}
        self._before: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._units = [unit.ref for unit in units]
        self._groups = _by_bucket(optimizer, units)
        for unit in units:
            guard = StepGuard(unit, self._update)
            unit.observers.append(guard)
            for bucket in unit.group.buckets:
                if id(bucket) in self._groups:
                    bucket.on_reduced = guard.update
        for group in self.param_groups:
            for param in group["params"]:
                _by_parameter[id(param)] = self

    def __getattr__(self, name: str) -> Any:
        """What the base's methods (``register_step_post_hook``, say) find in an optimizer, and its groups."""
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """A StateError, from ``copy.deepcopy`` and ``pickle``: a copy would update nothing."""
        raise StateError(
            "an optimizer that steps in backward belongs to the backward of its model and can't be copied or "
            "pickled; save its state_dict(), or copy the model and call step_in_backward for the copy"
        )

    def _update(self, bucket: Bucket) -> None:
        """Steps the parameters of ``bucket`` that have a gradient, and frees it."""
        if is_scaled(backward_id()):
            raise StateError(
                "parameters are updated in backward, but this backward is of a loss that a GradScaler has "
                "scaled, whose gradients must be unscaled and checked first; use a loss that is not scaled "
                "(bfloat16 needs no scaling), or an ordinary optimizer"
            )
        view = self._views.get(id(bucket))
        if view is None or view.state is not self.state:
            view = self._views[id(bucket)] = self._view_of(bucket)
        options = self._options()
        pairs = []
        for group, (index, _) in zip(view.param_groups, self._groups[id(bucket)], strict=True):
            _copy_options(group, options[index])  # a scheduler may have changed them
            pairs.append((group, self.param_groups[index]))
        view.step()
        for group, whole in pairs:
            _copy_options(whole, group)
            for param in group["params"]:
                param.grad = None
        self._opt_called = True  # for schedulers, which warn where no step came before theirs

    def _options(self) -> list[dict[str, Any]]:
        """The groups as before this backward: what a class counts in them, it counts once for all buckets."""
        backward = backward_id()
        if backward == -1 or backward != self._before[0]:
            self._before = backward, [dict(group) for group in self.param_groups]
        return self._before[1]

    def _view_of(self, bucket: Bucket) -> Optimizer:
        """The optimizer again, with the parameters of ``bucket`` alone: the same state, hooks and options."""
        view = object.__new__(type(self.optimizer))
        vars(view).update(vars(self.optimizer))
        groups = self.param_groups
        view.param_groups = [
            {**groups[index], "params": mine} for index, mine in self._groups[id(bucket)]
        ]
        return view

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A StateError: the backward has updated already.

        With ``lr`` 0 everywhere and no state yet it makes the state, which is how
        ``torch.distributed.checkpoint.state_dict`` prepares an optimizer for loading.
        """
        groups = self.param_groups
        if not self.state and all("lr" in g and float(g["lr"]) == 0.0 for g in groups):
            self.optimizer.step()
            return
        raise StateError(
            "step() of an optimizer whose parameters are updated in backward: loss.backward() has done it; "
            "leave the call out"
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks first."""
        raise StateError(
            "a GradScaler was given an optimizer whose parameters are updated in backward, before gradients "
            "can be unscaled and checked; use neither scaler nor scaled loss (bfloat16 needs none), or an "
            "ordinary optimizer"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``Optimizer.zero_grad``; only gradients that came from elsewhere are there."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As ``Optimizer.state_dict``, of the optimizer that updates."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``, into the optimizer that updates."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A Parallel3dError: which unit updates what is settled at the beginning."""
        raise Parallel3dError(
            "add_param_group: groups of an optimizer that steps in backward are given at the beginning; "
            "call remove() and then step_in_backward(model, ..., params=groups)"
        )

    def remove(self) -> None:
        """Backwards leave gradients in ``.grad`` again. Once more, it does nothing."""
        units, self._units = self._units, []
        for ref in units:
            unit = ref()
            if unit is not None and (guard := guard_of(unit)) is not None:
                unit.observers.remove(guard)
                for bucket in unit.group.buckets:
                    bucket.on_reduced = None
        for group in self.param_groups:
            for param in group["params"]:
                if _by_parameter.get(id(param)) is self:
                    del _by_parameter[id(param)]

    def __repr__(self) -> str:
        """Names the optimizer that updates."""
        return f"StepInBackward({self.optimizer!r})"


def _copy_options(target: dict[str, Any], source: dict[str, Any]) -> None:
    """All of a group but its parameters."""
    for key, value in source.items():
        if key != "params":
            target[key] = value


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


# -- checks ----------------------------------------------------------------------------------------


def _checked_units(model: nn.Module) -> list[Unit]:
    if not isinstance(model, nn.Module):
        raise Parallel3dError(
            f"step_in_backward was given a {type(model).__name__}; it needs a module"
        )
    units = list(units_of(model, recurse=True))
    if not units:
        raise Parallel3dError(
            f"step_in_backward: {type(model).__name__} is not parallel; call parallel3d.parallelize first"
        )
    for unit in units:
        if guard_of(unit) is not None:
            raise StateError(
                f"step_in_backward: unit {unit.label} is updated in backward already; give all parameters to "
                "one call (params= takes groups), or remove() the other first"
            )
        if unit.manual_finalization:
            raise StateError(
                f"step_in_backward: the backwards of {unit.label} end with finalize_backward(), which would "
                "come after the updates; call set_manual_backward_finalization(False) first"
            )
        if not (unit.sync and unit.all_reduce):
            raise StateError(
                f"step_in_backward: unit {unit.label} puts its reductions off; call "
                "set_requires_gradient_sync(True) first"
            )
        unit.come_to_rest()
        for bucket in unit.group.buckets:
            for param in bucket.params:
                if param.sharded.grad is not None:
                    raise StateError(
                        f"step_in_backward: parameter {param.name} of unit {unit.label} has a gradient "
                        "already; call zero_grad() first"
                    )
    return units


def _check_class(optimizer_class: Any) -> None:
    if not callable(optimizer_class):
        raise Parallel3dError(
            f"optimizer_class is {optimizer_class!r}; it must be a class of optimizers, such as "
            "torch.optim.AdamW, and not an optimizer"
        )


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise Parallel3dError(
            f"step_in_backward: no parameter of {type(model).__name__} requires a gradient"
        )
    return params


def _by_bucket(
    optimizer: Optimizer, units: Sequence[Unit]
) -> dict[int, list[tuple[int, list[nn.Parameter]]]]:
    """For each bucket, by id: the indices of the groups that have some of its parameters, and which."""
    buckets = {
        id(param.sharded): bucket
        for unit in units
        for bucket in unit.group.buckets
        for param in bucket.params
    }
    found: dict[int, dict[int, list[nn.Parameter]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            bucket = buckets.get(id(param))
            if bucket is None:
                raise Parallel3dError(
                    f"step_in_backward: a parameter of shape {tuple(param.shape)} belongs to no unit of the "
                    "model (it was ignored, say), and nothing reduces its gradient; give params= without "
                    "it, and it an optimizer of its own"
                )
            found.setdefault(id(bucket), {}).setdefault(index, []).append(param)
    return {key: list(groups.items()) for key, groups in found.items()}
