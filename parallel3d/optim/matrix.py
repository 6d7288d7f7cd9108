"""MatrixSteps: an optimizer that needs whole parameters, on parameters that ranks share.

Parameters of one shape and placement are dealt out to the ranks that share them, one each: an all-to-all
brings the parts of a parameter, its gradient and its state to the one rank that steps on it, another takes
what it has made of them back. So a rank sends and receives as many bytes as the parts it holds, and computes
on one parameter of n; gathering would bring all n to every rank. Replicas do the same work side by side.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from parallel3d._layout.packed import PackedShard, packed_boxes
from parallel3d._torch.dtensor import dtensor_shard_box, flatten_axes, get_local_tensor
from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.simulated import (
    combine_ranks,
    inner_tensors,
    simulation_off,
    tensors_by_rank,
)
from parallel3d._util import dry_run
from parallel3d._util.trace import issuing
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.optim.pieces import State, local_of, part_of, placed_as, reduced

# Owners: the ranks that share parameters, and how whole ones are dealt out to them.


@dataclass(frozen=True)
class Part:
    """What a rank holds of a whole tensor.

    Attributes:
        shape: of its local tensor.
        boxes: (where in the whole, which rows of the local tensor), of a packed parameter several.
    """

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[slice, ...], tuple[slice, ...]]]

    @classmethod
    def at(
        cls,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        coordinate: Sequence[int],
        placements: Sequence[Placement],
    ) -> Part:
        """That of the rank at ``coordinate``."""
        if any(isinstance(p, PackedShard) for p in placements):
            local, packed = packed_boxes(shape, mesh_shape, coordinate, placements)
            return cls(local, [(box.slices, box.local_slices) for box in packed])
        local, start = dtensor_shard_box(shape, mesh_shape, coordinate, placements)
        box = tuple(slice(o, o + s) for o, s in zip(start, local, strict=True))
        return cls(tuple(local), [(box, (slice(None),) * len(local))])

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)

    def write(self, whole: torch.Tensor, row: torch.Tensor) -> None:
        """Puts the local tensor at the front of ``row`` into ``whole``."""
        local = row[: self.numel].view(self.shape)
        for box, rows in self.boxes:
            whole[box].copy_(local[rows])

    def read(self, whole: torch.Tensor, row: torch.Tensor) -> None:
        """The other way."""
        local = row[: self.numel].view(self.shape)
        for box, rows in self.boxes:
            local[rows].copy_(whole[box])


class Owners:
    """The ranks that share parameters of one shape and placement.

    Attributes:
        group: their process group, of ``size`` ranks; ``coordinate`` is this rank's place in it.
        shape: of the whole parameter.
        parts: by place, which part of the whole a rank holds.
        slot: elements of the largest part.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, axes: list[int]
    ) -> None:
        names = mesh.mesh_dim_names
        if len(axes) == 1:
            self.group, self.coordinate = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0])
        else:
            if names is None:
                raise MeshError(
                    f"optim.local: a parameter of shape {tuple(shape)} is shared over several axes of "
                    f"{mesh}, which have no names; name them, as parallel3d.build_mesh does"
                )
            flat = flatten_axes(mesh, tuple(names[axis] for axis in axes))
            self.group, self.coordinate = flat.get_group(), flat.get_local_rank()
        self.size = self.group.size()
        self.shape = tuple(shape)
        self.parts: list[Part] = []
        sizes = [mesh.size(axis) for axis in axes]
        for place in range(self.size):
            at = [0] * mesh.ndim
            for axis, size in reversed(list(zip(axes, sizes, strict=True))):
                place, at[axis] = divmod(place, size)
            self.parts.append(Part.at(shape, mesh.shape, at, placements))
        self.slot = max(part.numel for part in self.parts)

    def deal(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part of each of at most ``size`` tensors -> of one of them, the whole.

        Where there are fewer than ranks, some get the same one.
        """
        send = parts[0].new_zeros(self.size, self.slot)
        for place in range(self.size):
            part = parts[place % len(parts)]
            send[place].narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        received = self._exchange(send)
        whole = parts[0].new_empty(self.shape)
        for row, held in zip(received, self.parts, strict=True):
            held.write(whole, row)
        return whole

    def collect(self, whole: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """The other way: this rank's parts of the tensors that the first ranks have, shaped as ``like``."""
        send = whole.new_zeros(self.size, self.slot)
        for row, part in zip(send, self.parts, strict=True):
            part.read(whole, row)
        received = self._exchange(send)
        return [
            row.narrow(0, 0, part.numel()).view(part.shape)
            for row, part in zip(received.unbind(), like, strict=False)
        ]

    def deal_small(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Of tensors that every rank has, one per parameter: that of the one this rank steps on."""
        rows = [values[place % len(values)] for place in range(self.size)]
        # By an index that is a tensor: what a plain checkpoint brought knows of no simulated ranks.
        mine = torch.full((1,), self.coordinate, dtype=torch.int64, device=values[0].device)
        return torch.stack(rows).index_select(0, mine)[0]

    def collect_small(self, value: torch.Tensor, number: int) -> list[torch.Tensor]:
        """The other way: what the first ``number`` ranks have made of theirs."""
        rows = value.new_empty((self.size * value.numel(),))
        all_gather_single(rows, value.reshape(-1).contiguous(), group=self.group)
        return [row.view(value.shape).clone() for row in rows.view(self.size, -1)[:number]]

    def _exchange(self, send: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(send)
        with issuing.as_unit("optimizer"):
            dist.all_to_all_single(received, send, group=self.group)
        return received


class MatrixSteps:
    """What one optimizer needs to step on whole parameters.

    Args:
        at_once: of how many, where every rank has them whole; by default of all that are alike.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._owners: dict[Hashable, Owners] = {}
        self._at_once = at_once

    def step(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        """Calls ``step(optimizer)`` for one group and some whole parameters at a time."""
        counted = Counted(optimizer, step)
        for group in optimizer.param_groups:
            options, params = GroupOptions(group), group["params"]
            try:
                batches = self._batches(optimizer, params)
                if params and not batches:  # a class may count the calls all the same
                    idle = nn.Parameter(torch.zeros_like(local_of(params[0])))
                    _called(optimizer, counted.step, group, [idle], [{}])
                for members, owners in batches:
                    options.restore(group)
                    _step_on(optimizer, counted.step, group, members, owners)
                    options.check_like_first(group, optimizer)
            finally:
                group["params"] = params
        optimizer.state.update(counted.after)

    def _batches(
        self, optimizer: Optimizer, params: list[nn.Parameter]
    ) -> list[tuple[list[nn.Parameter], Owners | None]]:
        """Parameters of a group that one call steps on, and who shares them."""
        alike: defaultdict[Hashable, list[nn.Parameter]] = defaultdict(list)
        for param in params:
            if param.grad is not None:
                alike[self._kind(param, optimizer.state.get(param, {}))].append(param)
        batches: list[tuple[list[nn.Parameter], Owners | None]] = []
        for kind, members in alike.items():
            owners = self._owners.get(kind[0])  # type: ignore[index]
            size = (self._at_once or len(members)) if owners is None else owners.size
            batches += [
                (members[start : start + size], owners) for start in range(0, len(members), size)
            ]
        return batches

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


class GroupOptions:
    """What a group has but for its parameters: each of several calls for a step begins with it.

    So what a class counts there it counts once a step, also where the first call makes the entry.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._before = dict(group)
        self._copies = {
            k: copy.deepcopy(v)
            for k, v in group.items()
            if isinstance(v, _CHANGEABLE) and k not in _OF_PARAMETERS
        }
        self._first: dict[str, Any] | None = None

    def restore(self, group: dict[str, Any]) -> None:
        """Makes ``group`` what it was."""
        group.clear()
        group.update(self._before)
        for key, value in self._copies.items():
            if isinstance(value, torch.Tensor):  # may be the user's: the same object
                with torch.no_grad():
                    group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)

    def check_like_first(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        """Raises if this call has made other numbers in the group than the first one."""
        numbers = {k: v for k, v in group.items() if isinstance(v, (int, float)) and v == v}
        if self._first is None:
            self._first = numbers
        elif numbers != self._first:
            keys = [k for k in numbers | self._first if numbers.get(k) != self._first.get(k)]
            raise Parallel3dError(
                f"optim.local: {type(optimizer).__name__} has made {keys[0]} of a parameter group "
                f"{self._first.get(keys[0])!r} of some parameters and {numbers.get(keys[0])!r} of others: it "
                "looks at parameters together, which the ranks don't have; use the class itself"
            )


_CHANGEABLE = (torch.Tensor, list, dict, set, deque)
_OF_PARAMETERS = ("params", "param_names")


class Counted:
    """What a class counts in attributes, or in ``state`` under keys of no parameter: once a step too."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        self._step = step
        self._numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
        self._before = self.after = of_no_parameter(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """One of several calls for a step: begins with the counts from before it."""
        vars(optimizer).update(self._numbers)
        optimizer.state.update(copy.deepcopy(self._before))
        self._step(optimizer)
        self.after = of_no_parameter(optimizer)


def of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    """Entries of its state under keys that are no parameters."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _kind(value: Any, param: nn.Parameter) -> Any:
    """What a state's entry must have in common with that of another parameter stepped on with it."""
    if isinstance(value, (int, float)):
        return type(value)  # each parameter has its own
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if _is_counter(value, param):
        return None if dry_run.active() else value.item()
    return tuple(value.shape) == tuple(param.shape) or tuple(value.shape), value.dtype


def _is_counter(value: torch.Tensor, param: nn.Parameter) -> bool:
    """Counts of steps are kept on the CPU beside parameters on an accelerator: every rank counts alike."""
    return value.dim() == 0 and value.device.type != param.device.type


def can_be_shared(value: Any) -> bool:
    """Whether ranks can hand on an entry of a state: a tensor, a number, or what says nothing of values."""
    return value is None or isinstance(
        value, (torch.Tensor, int, float, str, torch.dtype, torch.device, torch.Size)
    )


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
    _check_can_be_shared(made[0], optimizer)
    if owners is None:
        for param, state in zip(params, made, strict=True):
            numbers = {key: _as_number(value) for key, value in state.items()}
            _show(optimizer, param, numbers, like=param.shape)
        return
    for local, part in zip(locals_, owners.collect(wholes[0].detach(), locals_), strict=True):
        local.copy_(part)
    collected = _collect_all(owners, made[0], params)
    for index, param in enumerate(params):
        state = {key: values[index] for key, values in collected.items()}
        _show(optimizer, param, state, like=None)


def _check_can_be_shared(state: State, optimizer: Optimizer) -> None:
    for key, value in state.items():
        if not isinstance(value, Number) and not can_be_shared(value):
            raise Parallel3dError(
                f"optim.local: {type(optimizer).__name__} keeps a {type(value).__name__} in the entry "
                f"{key!r} of a parameter's state, which ranks can't hand on; use the class itself"
            )


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
    options, made = GroupOptions(group), {}
    with simulation_off():
        for rank in tensors_by_rank(wholes[0]) or {}:
            options.restore(group)
            mine = [nn.Parameter(_of_rank(whole, rank)) for whole in wholes]
            for param, whole in zip(mine, wholes, strict=True):
                param.grad = _of_rank(whole.grad, rank)
            states = [{key: _of_rank(value, rank) for key, value in s.items()} for s in given]
            made[rank] = _called_once(optimizer, step, group, mine, states)
        first = next(iter(made.values()))
        return [
            {key: _combined(made, index, key) for key in state} for index, state in enumerate(first)
        ]


@dataclass(frozen=True)
class Number:
    """An int, float or bool of a state, while it may differ by simulated rank: a tensor on the CPU."""

    value: torch.Tensor
    kind: type

    @classmethod
    def of(cls, number: float) -> Number:
        return cls(torch.tensor(float(number), dtype=torch.float64), type(number))


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, Number):
        return Number(_of_rank(value.value, rank), value.kind)
    by_rank = tensors_by_rank(value) if isinstance(value, torch.Tensor) else None
    return value if by_rank is None else by_rank[rank].detach()


def _combined(made: dict[int, list[State]], index: int, key: str) -> Any:
    by_rank = {rank: states[index][key] for rank, states in made.items()}
    value = next(iter(by_rank.values()))
    if isinstance(value, Number):
        return Number(combine_ranks({r: n.value for r, n in by_rank.items()}), value.kind)
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
    for whole, each in zip(wholes, given, strict=True):
        if each:
            state[whole] = {key: _as_number(value) for key, value in each.items()}
    group["params"] = wholes
    optimizer.param_groups, optimizer.state = [group], state
    try:
        step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups, shown
    made = [state.get(whole, {}) for whole in wholes]
    if dry_run.active():  # nobody counts
        return made
    return [
        {k: Number.of(v) if isinstance(v, (int, float)) else v for k, v in each.items()}
        for each in made
    ]


def _as_tensor(number: Number | float) -> torch.Tensor:
    return (number if isinstance(number, Number) else Number.of(number)).value


def _as_number(value: Any) -> Any:
    return value.kind(value.value.item()) if isinstance(value, Number) else value


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
        if isinstance(example, (int, float)) and not dry_run.active():
            numbers = [Number.of(value).value for value in values]
            dealt[key] = Number(owners.deal_small(numbers), type(example))
        elif not isinstance(example, torch.Tensor):
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


def _collect_all(owners: Owners, state: State, params: list[nn.Parameter]) -> dict[str, list[Any]]:
    """The state this rank has made -> entry by entry that of each of ``params``; numbers all at once."""
    numbers = {k: v for k, v in state.items() if isinstance(v, (Number, int, float))}
    collected = {
        key: [value] * len(params) if key in numbers else _collect(owners, value, params)
        for key, value in state.items()
    }
    if numbers:
        mine = torch.stack([_as_tensor(number) for number in numbers.values()])
        rows = owners.collect_small(mine.to(local_of(params[0]).device), len(params))
        if not dry_run.active():  # where nobody has counted
            of_each = [next(inner_tensors(row)).tolist() for row in rows]  # alike on all ranks
            for index, (key, number) in enumerate(numbers.items()):
                kind = number.kind if isinstance(number, Number) else type(number)
                collected[key] = [kind(row[index]) for row in of_each]
    return collected


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
