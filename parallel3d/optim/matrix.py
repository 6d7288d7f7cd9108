"""MatrixSteps: steps of an optimizer that needs whole parameters, on parameters that are sharded.

Parameters of one shape and placement are distributed over the ranks that shard them, one each: an all-to-all
brings the parts of a parameter, its gradient and its state to the one rank that steps on it, and another one
brings the results back. A rank sends and receives as many bytes as the parts it holds, and computes on one
parameter of n; all-gathers would bring all n to every rank. Replicas do the same work side by side.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from zlib import crc32

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from parallel3d._layout.packed import PackedShard, packed_boxes
from parallel3d._torch import simulated
from parallel3d._torch.dtensor import flatten_axes, get_local_tensor
from parallel3d._torch.groups import all_gather_single
from parallel3d._util import dry_run
from parallel3d._util.trace import issuing
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.optim.pieces import State, local_of, part_of, placed_as, reduced_grad

Step = Callable[[Any], Any]  # of the optimizer


class Owners:
    """The ranks that shard parameters of one shape and placement, and how they exchange them.

    Attributes:
        group: their process group, of ``size`` ranks; ``rank`` is this rank's in it.
        shape: shape of the whole parameter.
        parts: for each rank of the group (local shape, boxes of the whole tensor).
        padded_numel: number of elements of the largest part.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, axes: list[int]
    ) -> None:
        if len(axes) == 1:
            self.group, self.rank = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0])
        elif mesh.mesh_dim_names is None:
            raise MeshError(
                f"optim.local: a parameter of shape {tuple(shape)} is shared over several axes of "
                f"{mesh}, which have no names; name them, as parallel3d.build_mesh does"
            )
        else:
            flat = flatten_axes(mesh, tuple(mesh.mesh_dim_names[axis] for axis in axes))
            self.group, self.rank = flat.get_group(), flat.get_local_rank()
        self.size = self.group.size()
        self.shape = tuple(shape)
        ranks = [range(size if axis in axes else 1) for axis, size in enumerate(mesh.shape)]
        self.parts = [packed_boxes(shape, mesh.shape, at, placements) for at in product(*ranks)]
        self.padded_numel = max(math.prod(local) for local, _ in self.parts)

    def to_owner(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Exchanges parts for a whole tensor: takes this rank's part of each of at most ``size`` tensors, and
        returns the tensor that belongs to this rank, whole. If there are fewer tensors than ranks, several
        ranks get the same one."""
        send = parts[0].new_zeros(self.size, self.padded_numel)
        for index in range(self.size):
            part = parts[index % len(parts)]
            send[index].narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        whole = parts[0].new_empty(self.shape)
        for box, rows in self._views(whole, self._exchange(send)):
            box.copy_(rows)
        return whole

    def from_owners(self, whole: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inverse of ``to_owner``: takes this rank's whole tensor, and returns its part of each rank's
        tensor, shaped as ``like``."""
        send = whole.new_zeros(self.size, self.padded_numel)
        for box, rows in self._views(whole, send):
            rows.copy_(box)
        return [
            row.narrow(0, 0, part.numel()).view(part.shape)
            for row, part in zip(self._exchange(send).unbind(), like, strict=False)
        ]

    def _views(
        self, whole: torch.Tensor, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each box of each rank's part as views of ``whole`` and ``buffer``, (ranks, padded_numel)."""
        for (shape, boxes), row in zip(self.parts, buffer, strict=True):
            local = row[: math.prod(shape)].view(shape)
            for box in boxes:
                yield whole[box.slices], box.of(local)

    def small_to_owner(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Returns the one of ``values``, which every rank has whole, that belongs to this rank's parameter;
        no communication."""
        rows = [values[index % len(values)] for index in range(self.size)]
        # By a tensor index: a value from a plain checkpoint has no simulated ranks.
        own = torch.full((1,), self.rank, dtype=torch.int64, device=values[0].device)
        return torch.stack(rows).index_select(0, own)[0]

    def small_from_owners(self, value: torch.Tensor, number: int) -> list[torch.Tensor]:
        """All-gathers ``value``, and returns those of the first ``number`` ranks."""
        rows = value.new_empty((self.size * value.numel(),))
        all_gather_single(rows, value.reshape(-1).contiguous(), group=self.group)
        return [row.view(value.shape).clone() for row in rows.view(self.size, -1)[:number]]

    def _exchange(self, send: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(send)
        with issuing.as_unit("optimizer"):
            dist.all_to_all_single(received, send, group=self.group)
        return received


class MatrixSteps:
    """Steps of one optimizer on whole parameters.

    Args:
        known: whether the class is known to make states whose shapes don't depend on values. If not, ranks
            compare them at the first step of a parameter.
        stacked: whether a parameter of three dims is a stack of matrices, each of which is stepped on alone.
    """

    def __init__(self, known: bool, stacked: bool = False) -> None:
        self._owners: dict[Hashable, Owners | None] = {}
        self._known, self._stacked = known, stacked

    def step(self, optimizer: Optimizer, step: Step) -> None:
        """Calls ``step(optimizer)`` repeatedly, for one group and some whole parameters at a time.

        Counters of the class, in attributes, in a group or in ``state`` under keys that are no parameters,
        advance only once: before each call they are set back to the values from before the step.
        """
        numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
        before = after = of_no_parameter(optimizer)

        def step_once(optimizer: Optimizer) -> None:
            nonlocal after
            vars(optimizer).update(numbers)
            optimizer.state.update(copy.deepcopy(before))
            step(optimizer)
            after = of_no_parameter(optimizer)

        for group in optimizer.param_groups:
            call = _Call(optimizer, step_once, group, self._known, self._stacked)
            options = GroupOptions(group)
            params = group["params"]
            try:
                batches = self._batches(optimizer, params)
                if params and not batches:  # the class may count steps without gradients too
                    idle = nn.Parameter(torch.zeros_like(local_of(params[0])))
                    call.on_whole([idle], [{}])
                for members, owners in batches:
                    options.restore(group)
                    call.on_shared(members, owners)
                    options.check_same_counts(group, optimizer)
            finally:
                group["params"] = params
        optimizer.state.update(after)

    def _batches(
        self, optimizer: Optimizer, params: list[nn.Parameter]
    ) -> list[tuple[list[nn.Parameter], Owners | None]]:
        """Returns [(parameters, ranks that shard them or None)]: the group's parameters with a gradient, as
        one call of the optimizer steps on them."""
        alike: defaultdict[tuple[Owners | None, Any], list[nn.Parameter]] = defaultdict(list)
        for param in params:
            if param.grad is not None:
                state = optimizer.state.get(param, {})
                kind = tuple((key, _kind(value, param)) for key, value in state.items())
                alike[self._owners_of(param), kind].append(param)
        batches: list[tuple[list[nn.Parameter], Owners | None]] = []
        for (owners, _), members in alike.items():
            size = len(members) if owners is None else owners.size
            starts = range(0, len(members), size)
            batches += [(members[start : start + size], owners) for start in starts]
        return batches

    def _owners_of(self, param: nn.Parameter) -> Owners | None:
        """Returns the ranks that shard ``param``; None if it is whole on each rank (or, ``stacked``, if each
        has whole matrices)."""
        if not isinstance(param, DTensor):
            return None
        mesh, placements, shape = param.device_mesh, param.placements, param.shape
        key = (mesh, placements, shape, param.dtype)
        if key not in self._owners:
            axes = [
                a for a, n in enumerate(mesh.shape) if n > 1 and not placements[a].is_replicate()
            ]
            of_stacks = [a for a in axes if getattr(placements[a], "dim", None) == 0]  # strided too
            stacks = math.prod(mesh.size(axis) for axis in of_stacks)
            packed = any(isinstance(each, PackedShard) for each in placements)
            if self._stacked and len(shape) == 3 and shape[0] % stacks == 0 and not packed:
                # Each rank has whole matrices, or parts of the same as its neighbours on other axes.
                placements = tuple(
                    Replicate() if axis in of_stacks else each
                    for axis, each in enumerate(placements)
                )
                axes = [axis for axis in axes if axis not in of_stacks]
                shape = torch.Size((shape[0] // stacks, *shape[1:]))
            self._owners[key] = Owners(mesh, placements, shape, axes) if axes else None
        return self._owners[key]


class GroupOptions:
    """The options of a parameter group before a step, to restore them before each of several calls."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._before = dict(group)
        mutable = (torch.Tensor, list, dict, set, deque)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        self._copies = {k: copy.deepcopy(v) for k, v in options.items() if isinstance(v, mutable)}
        self._first: dict[str, Any] | None = None

    def restore(self, group: dict[str, Any]) -> None:
        """Sets the group's options to the values from before the step."""
        group.clear()
        group.update(self._before)
        for key, value in self._copies.items():
            if isinstance(value, torch.Tensor):  # the user may hold it: keep the object
                with torch.no_grad():
                    group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)

    def check_same_counts(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        """Raises Parallel3dError if this call has set another number in the group than the first call."""
        numbers = {k: v for k, v in group.items() if isinstance(v, (int, float)) and v == v}
        if self._first is None:
            self._first = numbers
        elif numbers != self._first:
            key = next(k for k in numbers | self._first if numbers.get(k) != self._first.get(k))
            raise Parallel3dError(
                f"optim.local: {type(optimizer).__name__} has set {key} of a parameter group to "
                f"{self._first.get(key)!r} for some parameters and {numbers.get(key)!r} for others, as if it "
                "looked at parameters together; use the class itself"
            )


def of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of the optimizer's state whose keys are no parameters."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _kind(value: Any, param: nn.Parameter) -> Any:
    """Returns what two parameters' entries of a state must have in common so that one call steps on both."""
    if isinstance(value, (int, float)):
        return type(value)  # each parameter has its own number
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if _is_counter(value, param):
        return None if dry_run.active() else value.item()
    return tuple(value.shape) == tuple(param.shape) or tuple(value.shape), value.dtype


def _is_counter(value: torch.Tensor, param: nn.Parameter) -> bool:
    """Whether ``value`` is a step count on the CPU (parameter elsewhere), which is equal on all ranks."""
    return value.dim() == 0 and value.device.type != param.device.type


def can_be_shared(value: Any, param: torch.Tensor) -> bool:
    """Whether ranks can exchange ``value``, an entry of the state of ``param``: a number, an ordinary tensor
    (or one of the parameter's class) or another value that is equal on all ranks."""
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, nn.Parameter, type(param))
    alike = (str, torch.dtype, torch.device, torch.Size)
    return value is None or isinstance(value, (int, float, *alike))


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    """Whether ``value`` is a tensor of ``shape``, the whole parameter's: it is then sharded likewise."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and len(shape) > 0 and tuple(value.shape) == tuple(shape)


@dataclass(frozen=True)
class _Call:
    """Calls of ``optimizer`` for some parameters of ``group`` at a time."""

    optimizer: Optimizer
    step: Step
    group: dict[str, Any]
    known: bool
    stacked: bool

    def on_shared(self, params: list[nn.Parameter], owners: Owners | None) -> None:
        """Steps on ``params``, which the ranks ``owners`` shard; None: every rank has them whole."""
        locals_ = [local_of(param) for param in params]
        grads = [reduced_grad(param, "Step") for param in params]
        states = [self.optimizer.state.get(param, {}) for param in params]
        if owners is None:
            wholes = [nn.Parameter(local) for local in locals_]
            inputs = [
                {k: part_of(p, v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
                for p, state in zip(params, states, strict=True)
            ]
        else:
            wholes, grads = [nn.Parameter(owners.to_owner(locals_))], [owners.to_owner(grads)]
            inputs = [_state_to_owner(owners, params, states)]
        for whole, grad in zip(wholes, grads, strict=True):
            whole.grad = grad
        results = self.on_whole(wholes, inputs)
        for key, value in results[0].items():
            if not isinstance(value, Number) and not can_be_shared(value, wholes[0]):
                raise Parallel3dError(
                    f"optim.local: {type(self.optimizer).__name__} keeps a {type(value).__name__} in the "
                    f"entry {key!r} of a parameter's state, which ranks can't exchange; use the class itself"
                )
        if owners is None:
            shown = [
                {k: placed_as(p, v) if _has_shape(v, w.shape) else _unwrap(v) for k, v in s.items()}
                for p, w, s in zip(params, wholes, results, strict=True)
            ]
        else:
            if not (self.known or inputs[0] or dry_run.active()):
                self._check_alike(owners, results[0], locals_[0].device)
            parts = owners.from_owners(wholes[0].detach(), locals_)
            for local, part in zip(locals_, parts, strict=True):
                local.copy_(part)
            shown = _states_from_owners(owners, results[0], params)
        for param, state in zip(params, shown, strict=True):
            _show(self.optimizer, param, state)

    def _check_alike(self, owners: Owners, state: State, device: torch.device) -> None:
        """Raises Parallel3dError on all ranks if their states have different entries, shapes or dtypes."""
        kinds = {
            k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else type(v).__name__
            for k, v in state.items()
        }
        own = torch.full((1,), crc32(repr(kinds).encode()), dtype=torch.int64, device=device)
        rows = owners.small_from_owners(own, owners.size)
        if len({next(simulated.inner_tensors(row)).item() for row in rows}) > 1:
            raise Parallel3dError(
                f"optim.local: the states that {type(self.optimizer).__name__} has made for parameters of "
                f"shape {owners.shape} differ in their entries, here {kinds}: they depend on numbers, and "
                "ranks can't exchange them; use the class itself"
            )

    def on_whole(self, params: list[nn.Parameter], states: list[State]) -> list[State]:
        """Steps on the plain tensors ``params`` with ``states``; returns their new states.

        Simulated ranks step one after another, because their values differ and a class may read values
        (``item``).
        """
        by_rank = simulated.tensors_by_rank(params[0])
        if by_rank is None:
            return self._once(params, states)
        options = GroupOptions(self.group)
        results: dict[int, list[State]] = {}
        with simulated.simulation_off():
            for rank in by_rank:
                options.restore(self.group)
                of_rank = [nn.Parameter(_of_rank(param, rank)) for param in params]
                for inner, param in zip(of_rank, params, strict=True):
                    inner.grad = _of_rank(param.grad, rank)
                inputs = [{k: _of_rank(v, rank) for k, v in state.items()} for state in states]
                results[rank] = self._once(of_rank, inputs)
            first = next(iter(results.values()))
            return [
                {key: _combined({r: s[index][key] for r, s in results.items()}) for key in state}
                for index, state in enumerate(first)
            ]

    def _once(self, params: list[nn.Parameter], states: list[State]) -> list[State]:
        if self.stacked and any(param.dim() == 3 for param in params):
            pairs = zip(params, states, strict=True)
            return [
                self._by_matrix(p, s) if p.dim() == 3 else self._once([p], [s])[0] for p, s in pairs
            ]
        optimizer = self.optimizer
        groups, shown = optimizer.param_groups, optimizer.state
        own_state: defaultdict[Any, State] = defaultdict(dict)
        for param, state in zip(params, states, strict=True):
            if state:
                own_state[param] = {key: _unwrap(value) for key, value in state.items()}
        self.group["params"] = params
        optimizer.param_groups, optimizer.state = [self.group], own_state
        try:
            self.step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, shown
        return [own_state.get(param, {}) for param in params]

    def _by_matrix(self, param: nn.Parameter, state: State) -> State:
        """Steps on each matrix of ``param``, a stack of matrices, by itself; returns the stacked state."""
        matrices = [nn.Parameter(each) for each in param.detach().unbind()]
        for matrix, grad in zip(matrices, param.grad.unbind(), strict=True):  # type: ignore[union-attr]
            matrix.grad = grad
        own = [
            {k: v[at] if _has_shape(v, param.shape) else v for k, v in state.items()}
            for at in range(len(matrices))
        ]
        first, *_ = results = self._once(matrices, own)
        return {
            key: torch.stack([each[key] for each in results])
            if _has_shape(value, param.shape[1:])
            else value
            for key, value in first.items()
        }


@dataclass(frozen=True)
class Number:
    """An int, float or bool of a state as a float64 tensor on the CPU: it may differ by simulated rank."""

    value: torch.Tensor
    kind: type

    @classmethod
    def of(cls, number: float) -> Number:
        return cls(torch.tensor(float(number), dtype=torch.float64), type(number))


def _unwrap(value: Any) -> Any:
    return value.kind(value.value.item()) if isinstance(value, Number) else value


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, Number):
        return Number(_of_rank(value.value, rank), value.kind)
    by_rank = simulated.tensors_by_rank(value) if isinstance(value, torch.Tensor) else None
    return value if by_rank is None else by_rank[rank].detach()


def _combined(by_rank: dict[int, Any]) -> Any:
    value = next(iter(by_rank.values()))
    if isinstance(value, (int, float)):
        numbers = {rank: Number.of(number).value for rank, number in by_rank.items()}
        return Number(simulated.combine_ranks(numbers), type(value))
    return simulated.combine_ranks(by_rank) if isinstance(value, torch.Tensor) else value


def _state_to_owner(owners: Owners, params: list[nn.Parameter], states: list[State]) -> State:
    """Exchanges the states of ``params`` so that this rank gets the whole state of the parameter that it
    steps on, and returns that."""
    owned: State = {}
    for key, example in states[0].items():
        values = [state[key] for state in states]
        if isinstance(example, (int, float)) and not dry_run.active():
            numbers = [Number.of(value).value for value in values]
            owned[key] = Number(owners.small_to_owner(numbers), type(example))
        elif not isinstance(example, torch.Tensor):
            owned[key] = example
        elif _is_counter(example, params[0]):
            owned[key] = example.clone()
        elif _has_shape(example, params[0].shape):
            parts = [part_of(p, value) for p, value in zip(params, values, strict=True)]
            owned[key] = owners.to_owner(parts)
        else:
            wholes = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
            owned[key] = owners.small_to_owner(wholes)
    return owned


def _states_from_owners(owners: Owners, state: State, params: list[nn.Parameter]) -> list[State]:
    """The way back: ``state`` is that of the parameter on which this rank has stepped; returns this rank's
    states of ``params``.

    Entries of the parameter's shape become DTensors. All numbers are exchanged in one collective.
    """
    locals_ = [local_of(param) for param in params]
    collected: dict[str, list[Any]] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            collected[key] = [value] * len(params)
        elif _is_counter(value, params[0]):
            collected[key] = [value.clone() for _ in params]
        elif _has_shape(value, owners.shape):
            parts = zip(params, owners.from_owners(value, locals_), strict=True)
            collected[key] = [placed_as(param, part.clone()) for param, part in parts]
        else:
            collected[key] = owners.small_from_owners(value, len(params))
    numbers = {k: v for k, v in state.items() if isinstance(v, Number)}
    numbers |= {k: Number.of(v) for k, v in state.items() if isinstance(v, (int, float))}
    if numbers:
        own = torch.stack([number.value for number in numbers.values()]).to(locals_[0].device)
        rows = owners.small_from_owners(own, len(params))
        if not dry_run.active():  # numbers are not counted there
            by_param = [
                next(simulated.inner_tensors(row)).tolist() for row in rows
            ]  # alike on all ranks
            for index, (key, number) in enumerate(numbers.items()):
                collected[key] = [number.kind(row[index]) for row in by_param]
    return [{key: values[i] for key, values in collected.items()} for i in range(len(params))]


def _show(optimizer: Optimizer, param: nn.Parameter, state: State) -> None:
    """Puts ``state`` into ``optimizer.state``; values are copied into DTensors that are there already,
    because others may refer to these."""
    if not state:
        return
    before = optimizer.state[param]
    for key, value in state.items():
        known: Any = before.get(key)
        both = isinstance(known, DTensor) and isinstance(value, DTensor)
        if both and known.placements == value.placements and known.dtype == value.dtype:
            if get_local_tensor(known) is not get_local_tensor(value):
                get_local_tensor(known).copy_(get_local_tensor(value))
        else:
            before[key] = value
