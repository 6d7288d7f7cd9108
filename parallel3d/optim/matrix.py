"""MatrixSteps: an optimizer that needs whole parameters, on parameters that ranks share.

Parameters of one shape and placement are dealt out to the ranks that share them, one each: an all-to-all
brings the parts of a parameter, its gradient and its state to the one rank that steps on it, another takes
what it has made of them back. So a rank sends and receives as many bytes as the parts it holds, and computes
on one parameter of n; gathering would bring all n to every rank. Replicas do the same work side by side.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d import _dry_run
from parallel3d._compat import get_local_tensor
from parallel3d._compat_simulated import combine_ranks, simulation_off, tensors_by_rank
from parallel3d.optim.owners import Owners
from parallel3d.optim.pieces import State, local_of, part_of, placed_as, reduced

__all__ = ["MatrixSteps"]


class MatrixSteps:
    """What one optimizer needs to step on whole parameters."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, Owners] = {}

    def step(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        """Calls ``step(optimizer)`` for one group and some whole parameters at a time."""
        counted = Counted(optimizer, step)
        for group in optimizer.param_groups:
            batches: defaultdict[Hashable, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    batches[self._kind(param, optimizer.state.get(param, {}))].append(param)
            # What a class counts in its groups, it counts once a step.
            options, params = dict(group), group["params"]
            try:
                for kind, members in batches.items():
                    owners = self._owners.get(kind[0])  # type: ignore[index]
                    size = len(members) if owners is None else owners.size
                    for start in range(0, len(members), size):
                        group.update(options)
                        _step_on(
                            optimizer, counted.step, group, members[start : start + size], owners
                        )
            finally:
                group["params"] = params
        optimizer.state.update(counted.after)

    def _kind(self, param: nn.Parameter, state: State) -> Hashable:
        """Parameters with an equal one are stepped on together."""
        return self._sharing(param), tuple((k, _kind(v, param)) for k, v in state.items())

    def _sharing(self, param: nn.Parameter) -> Hashable:
        """What tells who shares ``param``; None where each rank has it whole."""
        if not isinstance(param, DTensor):
            return None
        mesh, placements = param.device_mesh, param.placements
        axes = [
            axis
            for axis, placement in enumerate(placements)
            if not placement.is_replicate() and mesh.size(axis) > 1
        ]
        if not axes:
            return None
        key = (mesh, placements, param.shape, param.dtype)
        if key not in self._owners:
            self._owners[key] = Owners(mesh, placements, param.shape, axes)
        return key


class Counted:
    """What a class counts in attributes, or in ``state`` under keys of no parameter: once a step too."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        self._step = step
        self._numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
        self._before = self.after = _of_no_parameter(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """One of several calls for a step: begins with the counts from before it."""
        vars(optimizer).update(self._numbers)
        optimizer.state.update(copy.deepcopy(self._before))
        self._step(optimizer)
        self.after = _of_no_parameter(optimizer)


def _of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _kind(value: Any, param: nn.Parameter) -> Hashable:
    """What a state's entry must have in common with that of another parameter stepped on with it."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if _is_counter(value, param):
        return None if _dry_run.active() else value.item()
    return tuple(value.shape) == tuple(param.shape) or tuple(value.shape), value.dtype


def _is_counter(value: torch.Tensor, param: nn.Parameter) -> bool:
    """Counts of steps are kept on the CPU beside parameters on an accelerator: every rank counts alike."""
    return value.dim() == 0 and value.device.type != param.device.type


def _is_like(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether an entry has the whole parameter's shape: those lie sharded as it does."""
    return len(shape) > 0 and tuple(value.shape) == tuple(shape)


def _step_on(
    optimizer: Optimizer,
    step: Callable[[Any], Any],
    group: dict[str, Any],
    params: list[nn.Parameter],
    owners: Owners | None,
) -> None:
    """One step on ``params``, which every rank has whole, or the ``owners`` share."""
    locals_ = [local_of(param) for param in params]
    grads = [_grad_of(param) for param in params]
    states = [optimizer.state.get(param, {}) for param in params]
    if owners is None:
        wholes = [nn.Parameter(local) for local in locals_]
        given = [_local_state(p, state) for p, state in zip(params, states, strict=True)]
    else:
        wholes, grads = [nn.Parameter(owners.deal(locals_))], [owners.deal(grads)]
        given = [_deal_state(owners, params, states)]
    for whole, grad in zip(wholes, grads, strict=True):
        whole.grad = grad
    made = _called(optimizer, step, group, wholes, given)
    if owners is None:
        for param, state in zip(params, made, strict=True):
            _show(optimizer, param, state, like=param.shape)
        return
    for local, part in zip(locals_, owners.collect(wholes[0].detach(), locals_), strict=True):
        local.copy_(part)
    collected = {key: _collect(owners, value, params) for key, value in made[0].items()}
    for index, param in enumerate(params):
        state = {key: values[index] for key, values in collected.items()}
        _show(optimizer, param, state, like=None)


def _called(
    optimizer: Optimizer,
    step: Callable[[Any], Any],
    group: dict[str, Any],
    wholes: list[nn.Parameter],
    given: list[State],
) -> list[State]:
    """The states after a step on ``wholes`` alone.

    Simulated ranks step one by one: each has other numbers, and a class may look at them (``item``).
    """
    if tensors_by_rank(wholes[0]) is None:
        return _called_once(optimizer, step, group, wholes, given)
    options, made = dict(group), {}
    with simulation_off():
        for rank in tensors_by_rank(wholes[0]) or {}:
            group.update(options)
            mine = [nn.Parameter(_of_rank(whole, rank)) for whole in wholes]
            for param, whole in zip(mine, wholes, strict=True):
                param.grad = _of_rank(whole.grad, rank)
            states = [{key: _of_rank(value, rank) for key, value in s.items()} for s in given]
            made[rank] = _called_once(optimizer, step, group, mine, states)
        first = next(iter(made.values()))
        return [
            {key: _combined(made, index, key) for key in state} for index, state in enumerate(first)
        ]


def _of_rank(value: Any, rank: int) -> Any:
    by_rank = tensors_by_rank(value) if isinstance(value, torch.Tensor) else None
    return value if by_rank is None else by_rank[rank].detach()


def _combined(made: dict[int, list[State]], index: int, key: str) -> Any:
    by_rank = {rank: states[index][key] for rank, states in made.items()}
    value = next(iter(by_rank.values()))
    return combine_ranks(by_rank) if isinstance(value, torch.Tensor) else value


def _called_once(
    optimizer: Optimizer,
    step: Callable[[Any], Any],
    group: dict[str, Any],
    wholes: list[nn.Parameter],
    given: list[State],
) -> list[State]:
    groups, shown = optimizer.param_groups, optimizer.state
    state: defaultdict[Any, State] = defaultdict(dict)
    state.update({whole: each for whole, each in zip(wholes, given, strict=True) if each})
    group["params"] = wholes
    optimizer.param_groups, optimizer.state = [group], state
    try:
        step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups, shown
    return [state.get(whole, {}) for whole in wholes]


def _grad_of(param: nn.Parameter) -> torch.Tensor:
    grad = param.grad
    assert grad is not None
    return local_of(reduced(grad)).to(param.dtype)


# The state, from what the user sees to what the optimizer does, and back.


def _local_state(param: nn.Parameter, state: State) -> State:
    """Of a parameter that every rank has whole."""
    return {
        key: part_of(param, value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _deal_state(owners: Owners, params: list[nn.Parameter], states: list[State]) -> State:
    """Of the parameter that this rank steps on."""
    dealt: State = {}
    for key, example in states[0].items():
        values = [state[key] for state in states]
        if not isinstance(example, torch.Tensor):
            dealt[key] = example
        elif _is_counter(example, params[0]):
            dealt[key] = example.clone()
        elif _is_like(example, owners.shape):
            parts = [part_of(p, value) for p, value in zip(params, values, strict=True)]
            dealt[key] = owners.deal(parts)
        else:
            dealt[key] = owners.deal_small([_whole(value) for value in values])
    return dealt


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _collect(owners: Owners, value: Any, params: list[nn.Parameter]) -> list[Any]:
    """An entry of the state this rank has made -> that of each of ``params``, as the user sees it."""
    if not isinstance(value, torch.Tensor):
        return [value] * len(params)
    if _is_counter(value, params[0]):
        return [value.clone() for _ in params]
    if not _is_like(value, owners.shape):
        return owners.collect_small(value, len(params))
    parts = owners.collect(value, [local_of(param) for param in params])
    return [placed_as(param, part.clone()) for param, part in zip(params, parts, strict=True)]


def _show(
    optimizer: Optimizer, param: nn.Parameter, state: State, like: Sequence[int] | None
) -> None:
    """Puts ``state`` into the optimizer's; with ``like`` entries of that shape as DTensors placed as the
    parameter. DTensors that are there keep their memory: others may refer to it."""
    if not state:
        return
    before = optimizer.state[param]
    for key, value in state.items():
        if like is not None and isinstance(value, torch.Tensor) and _is_like(value, like):
            value = placed_as(param, value)
        known = before.get(key)
        if (
            isinstance(known, DTensor)
            and isinstance(value, DTensor)
            and known.placements == value.placements
            and known.dtype == value.dtype
        ):
            if get_local_tensor(known) is not get_local_tensor(value):
                get_local_tensor(known).copy_(get_local_tensor(value))
        else:
            before[key] = value
