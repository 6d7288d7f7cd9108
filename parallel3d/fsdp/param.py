"""ShardedParam: how one parameter is sharded, and its views of the engine's buffers.

The *global* shape is the plain model's; the *compute* shape is what forward sees: this rank's part after the
parameter's own axes (tp) have sharded it. In a buffer every rank has a *segment* of ``padded_numel`` elements
for the parameter, enough for the largest chunk of any rank, so that collectives have equal sizes. A rank
whose chunk is smaller leaves the end of its segment unused as padding. Padding exists in the engine's
buffers only: a sharded Parameter's local tensor has its real rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallel3d._layout.packed import packing_of
from parallel3d._layout.param_layout import ParamLayout, get_param_layout, local_chunk
from parallel3d._torch.autograd import grad_dtype_of, set_grad_dtype
from parallel3d._torch.dtensor import (
    DTensorSpec,
    get_local_tensor,
    make_dtensor,
    make_spec,
    set_local_tensor,
)
from parallel3d._util.replaced_params import mark_replaced
from parallel3d._util.storage import own_copy
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.collectives import has_streams
from parallel3d.fsdp.layout import (
    ACCELERATOR_BYTES,
    CPU_BYTES,
    PartialGrad,
    Segment,
    padded_shape,
)
from parallel3d.fsdp.placement import DataAxes, ParamAxes, chunk_length


class OwnSetattr:
    """Used like ``module._parameters``, but sets by the class's own ``__setattr__``, as ``nn.LSTM`` needs."""

    __slots__ = ("module",)
    is_putting = False  # whether the engine is setting one now

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def get(self, name: str) -> Any:
        module = self.module()
        return None if module is None else module._parameters.get(name)

    def __setitem__(self, name: str, value: nn.Parameter) -> None:
        module = self.module()
        if module is not None:
            OwnSetattr.is_putting = True
            try:
                setattr(module, name, value)
            finally:
                OwnSetattr.is_putting = False

    def update(self, values: dict[str, nn.Parameter]) -> None:
        for name, value in values.items():
            self[name] = value


def holder_of(module: nn.Module) -> Any:
    """Returns the ``_parameters`` of ``module``, or an ``OwnSetattr``, to get and set its parameters."""
    if type(module).__setattr__ is nn.Module.__setattr__ or _hands_on(module):
        return module._parameters
    return OwnSetattr(module)


def _hands_on(module: nn.Module) -> bool:
    """Whether the ``__setattr__`` of ``module`` sets another module's attributes, as a wrapper's may."""
    probe = "_parallel3d_probe"
    with suppress(Exception):  # it may refuse names
        setattr(module, probe, None)
    found = [each for each in module.modules() if vars(each).pop(probe, each) is None]
    return bool(found) and found[0] is not module


def parameters_dict(holder: Any) -> dict[str, nn.Parameter | None] | None:
    """Returns the ``_parameters`` dict of ``holder``, from ``holder_of``; None if its module is deleted."""
    if not isinstance(holder, OwnSetattr):
        return holder
    module = holder.module()
    return None if module is None else module._parameters


_TAKEN = "_parallel3d_taken_by"  # attribute of a user's Parameter that a unit has replaced
_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
_places: weakref.WeakValueDictionary[tuple[int, str], ShardedParam] = (
    weakref.WeakValueDictionary()  # keys: id of a ``module._parameters``, name
)


class _TakenBy:
    """A weak reference to a ShardedParam; copies and pickles of it refer to nothing."""

    __slots__ = ("owner",)

    def __init__(self, owner: ShardedParam | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return _TakenBy, ()


def owner_of(param: torch.Tensor) -> ShardedParam | None:
    """Returns the ShardedParam of ``param``, a sharded Parameter or the user's Parameter that it replaced;
    None if ``param`` belongs to no unit, or the model is deleted."""
    owner = _owners.get(id(param))
    if owner is not None and owner.sharded is param:
        return owner
    taken = getattr(param, _TAKEN, None)
    return taken.owner() if taken is not None else None


def owner_at(module: nn.Module, name: str) -> ShardedParam | None:
    """Returns the ShardedParam that belongs at ``module.name``, whatever is registered there now."""
    owner = _places.get((id(module._parameters), name))
    if owner is None:
        return None
    places = ((parameters_dict(holder), attribute) for holder, attribute in owner.module_infos)
    return owner if any(d is module._parameters and a == name for d, a in places) else None


def named(owner: ShardedParam) -> str:
    """Returns ``parameter weight of unit layers.0``."""
    unit = owner.unit()
    return f"parameter {owner.name}" + ("" if unit is None else f" of unit {unit.label}")


def mark_taken(param: nn.Parameter, owner: ShardedParam) -> None:
    """Makes ``owner_of`` return ``owner`` for ``param``, the user's Parameter that it replaces."""
    setattr(param, _TAKEN, _TakenBy(owner))


# Writes that would be lost.
#
# Forward sees unsharded parameters, which are freed when their unit is resharded: what a forward writes to
# them would be lost. Their version counters tell of it, see ``bucket.Versions``, and ``watch`` of ``.data``.

_UNSHARDED = "_parallel3d_unsharded"  # attribute of an unsharded parameter: an ``_Unsharded``


class _Unsharded(_TakenBy):
    """Whose unsharded parameter a parameter is, and whether it has its own storage, which is freed."""

    __slots__ = ("is_freed",)

    def __init__(self, owner: ShardedParam | None = None, is_freed: bool = False) -> None:
        super().__init__(owner)
        self.is_freed = is_freed

    def __reduce__(self) -> Any:
        return _Unsharded, ()


def mark_unsharded(param: torch.Tensor, owner: ShardedParam, *, is_freed: bool) -> None:
    """Notes that ``param`` is the unsharded parameter of ``owner``; ``is_freed``: whether its memory is freed
    when the unit is resharded."""
    vars(param)[_UNSHARDED] = _Unsharded(owner, is_freed)


def unsharded_mark(param: torch.Tensor) -> _Unsharded | None:
    """Returns what ``mark_unsharded`` has noted."""
    return vars(param).get(_UNSHARDED)


def lost_write(unit: Any, names: Sequence[str]) -> StateError:
    """The error of a write to the unsharded parameters ``names`` of ``unit``."""
    label = "" if unit is None else unit.label
    return StateError(
        f"unit {label}: {', '.join(names)} was changed in the unit's forward or backward, or after "
        "unshard(), in place, by .data, or by nn.Embedding(max_norm=...), which renormalises the rows that "
        "it looks up. What the module has there is the unsharded parameter, with which the change would be "
        "lost. Change the sharded one, between steps (after optimizer.step(), under no_grad(): "
        "module.weight.clamp_(...)), or its whole value within parallel3d.fsdp.full_params(model); or "
        "compute with a changed tensor (F.linear(x, normalize(weight))) and leave the parameter as it is; "
        "or hold the value in a buffer"
    )


@dataclass(frozen=True)
class Geometry:
    """Shapes of one parameter, and its views of the engine's buffers.

    Attributes:
        dim: the dim that the engine shards; None if the parameter is replicated on the shard axis.
        num_shards: number of ranks that it is sharded over.
        global_shape, compute_shape: see the module's docstring.
        local_shape: shape of the sharded Parameter's local tensor; chunk_shape: the same with padding.
        region_shape: shape of all ranks' chunks together, with padding.
        padded_numel: elements of its segment in each rank's buffer.
        fills_segment: whether chunks are equal on all tp ranks.
        even: whether no rank's segment has padding.
        lies_as_sent: whether the segments of all shard ranks, one after another, are the unsharded parameter.
        padded_inside: whether padding would lie between the rows, and not behind them.
    """

    dim: int | None
    num_shards: int
    global_shape: torch.Size
    compute_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    region_shape: tuple[int, ...]
    padded_numel: int
    fills_segment: bool
    even: bool
    lies_as_sent: bool
    padded_inside: bool

    @classmethod
    def of(cls, on: ParamAxes, shape: torch.Size, dim: int | None) -> Geometry:
        """Returns that of a parameter of ``shape`` on the axes ``on``, whose ``dim`` is sharded."""
        n = 1 if dim is None else on.data.num_shards
        largest = on.largest(shape)
        padded = padded_shape(largest, dim, n)
        compute = on.mine(shape)  # sizes may be SymInts under simulated ranks
        local, chunk, region = list(compute), list(compute), list(compute)
        padded_numel = prod(padded)
        if dim is not None:
            padded_numel //= n
            local[dim] = chunk_length(compute[dim], n, on.data.part_index)
            chunk[dim], region[dim] = padded[dim] // n, padded[dim]
        fills = on.are_even(shape)
        on_first = dim in (None, 0)
        return cls(
            dim,
            n,
            shape,
            tuple(compute),
            tuple(local),
            tuple(chunk),
            tuple(region),
            padded_numel,
            fills_segment=fills,
            even=fills and padded == largest,
            lies_as_sent=fills and on_first,
            padded_inside=dim not in (None, 0) and padded[dim] * on.ways(dim) != shape[dim],
        )

    def local_view(self, segment: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows, a view of ``local_shape``, in its ``segment``, (padded_numel,).

        Uneven chunks of a dim other than the first are stored with that dim outermost. Padding is then behind
        the rows and not between them, as fused optimizers need a parameter in contiguous memory.
        """
        if self.padded_inside:
            assert self.dim is not None
            rows = self.shaped(segment, self._outermost(self.chunk_shape))
            return rows.narrow(0, 0, self.local_shape[self.dim]).movedim(0, self.dim)
        return self._trim(self.shaped(segment, self.chunk_shape), self.local_shape)

    def compute_view(self, region: torch.Tensor) -> torch.Tensor:
        """Returns ``region``, (num_shards * padded_numel,), as a view of ``compute_shape``."""
        return self._trim(self.shaped(region, self.region_shape), self.compute_shape)

    def contiguous_view(self, region: torch.Tensor) -> torch.Tensor:
        """Returns the same without padding between rows: what forward sees of the unsharded buffer."""
        if not self.padded_inside:
            return self.compute_view(region)
        return region.narrow(0, 0, prod(self.compute_shape)).view(self.compute_shape)

    def copy_pairs(
        self, region: torch.Tensor, columns: torch.Tensor, first: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (target, source) views of equal shapes that copy gathered segments to an unsharded region.

        Args:
            region: (num_shards * padded_numel,), of the unsharded buffer.
            columns: (rows, padded_numel), of a gathered buffer: the segments of shard rank ``first`` and the
                following ones.
        """
        rows, sources = columns.shape[0], self.segments_by_rank(columns)
        if not self.padded_inside:
            targets = self.by_rank(region)
            if rows != self.num_shards:
                targets = targets.narrow(0, first, rows)
            return [(targets, sources)]
        assert self.dim is not None
        unsharded = self.contiguous_view(region)
        size, chunk = self.compute_shape[self.dim], self.chunk_shape[self.dim]
        pairs = []
        for row in range(rows):
            start = torch.sym_min((first + row) * chunk, size)
            length = torch.sym_min(size - start, chunk)
            source = sources[row].narrow(self.dim, 0, length)
            pairs.append((unsharded.narrow(self.dim, start, length), source))
        return pairs

    def by_rank(self, region: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``region`` whose entry i is the chunk of shard rank i, (num_shards, ...)."""
        return self._split(self.shaped(region, self.region_shape))

    def segments_by_rank(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns ``columns``, (ranks, padded_numel) of a gathered buffer, shaped as by ``by_rank``."""
        if self.even and self.dim in (None, 0):
            return columns
        if not self.even:
            columns = columns.narrow(1, 0, prod(self.chunk_shape))
        if self.padded_inside:
            assert self.dim is not None
            return columns.unflatten(1, self._outermost(self.chunk_shape)).movedim(1, 1 + self.dim)
        return columns.unflatten(1, self.chunk_shape)

    def _outermost(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns ``shape`` with the sharded dim moved to the front."""
        assert self.dim is not None
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def grad_by_rank(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a gradient of compute_shape, padded with zeros if needed, shaped as by ``by_rank``."""
        if not self.even:
            padded = torch.zeros(self.region_shape, dtype=grad.dtype, device=grad.device)
            self._trim(padded, self.compute_shape).copy_(grad)
            grad = padded
        return self._split(grad)

    def shaped(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Returns the first elements of ``flat`` in ``shape``; a tp rank with fewer rows leaves some over."""
        if not self.even:
            flat = flat.narrow(0, 0, prod(shape))
        return flat.view(tuple(shape))

    def _split(self, region: torch.Tensor) -> torch.Tensor:
        if self.even and self.dim in (None, 0):
            return region.reshape(self.num_shards, self.padded_numel)
        if self.dim is None:
            return region.unsqueeze(0)
        return region.unflatten(self.dim, (self.num_shards, -1)).movedim(self.dim, 0)

    def _trim(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Returns ``tensor`` without the rows that pad the sharded dim."""
        if self.even or self.dim is None:
            return tensor
        return tensor.narrow(self.dim, 0, shape[self.dim])


class ShardedParam:
    """One parameter of a unit. Its constructor shards ``dim``; None: the first possible one, in torch 0.

    Attributes:
        name: name within the unit's modules, for messages.
        module_infos: (``module._parameters`` or an ``OwnSetattr``, name there) of each place that holds it,
            several if it is tied. They do not refer to the modules, to avoid a reference cycle.
        module: weak reference to the first module that holds it.
        unit: weak reference to its unit; before there is one, a function that returns None.
        axes: the engine's axes for it.
        layout: what tensor parallelism says about it.
        on: all axes that it lies on.
        tp_mesh: the mesh of its only own axis, tensor parallelism's, if it has one.
        tp_size: number of ranks on ``on.summed``: that axis, or with ``dp_mesh_dims`` the only one with
            several ranks beside the data axes; 1 if there is none.
        may_be_partial: whether autograd may return a gradient that is partial over tp, as torch's own
            parallel styles make for a replicated DTensor; its bucket then sums it.
        geometry: its shapes.
        keeps_dtype: whether it is computed and reduced in its own dtype, by ``full_precision_modules`` or
            ``param_dtype_override_fn`` of the policy.
        grad_dtype: the user's setting, see ``grad_dtype_of``.
        initial: this rank's part on the own axes, until the bucket has copied it.
        sharded: the Parameter that the user sees at rest; the same object for the model's life.
        spec: its DTensor spec.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        axes: DataAxes,
        dim: int | None = None,
    ) -> None:
        self.name = name
        self.module_infos: list[tuple[Any, str]] = []
        self.put_at((holder_of(module), attribute) for module, attribute in places)
        self.module = weakref.ref(places[0][0])
        self.unit: Callable[[], Any] = lambda: None
        self.axes = axes
        self.layout: ParamLayout = get_param_layout(param)
        self.on = ParamAxes(name, param, axes)
        own = self.on.compute_mesh if axes.spmd is None else None
        self.tp_mesh: DeviceMesh | None = own if own is not None and own.ndim == 1 else None
        summed = self.on.summed
        self.tp_size = 1 if summed is None else self.on.summed_group.size()
        self.may_be_partial = (
            summed is not None
            and self.layout.compute == "dtensor"
            and self.layout.tp_grad == "whole"
            and isinstance(self.on.compute_placements[summed[0]], Replicate)
        )
        self.dtype = param.dtype
        self.requires_grad = param.requires_grad
        works = self.on.dims(param.shape)
        if dim is None:
            dim = next(iter(works), None)
        elif dim not in works:
            raise self._not_on(dim, param.shape, works)
        self.geometry = Geometry.of(self.on, param.shape, dim)
        whole = param.detach()
        self.initial: torch.Tensor | None = (
            get_local_tensor(whole) if isinstance(whole, DTensor) else whole
        )
        self.spec = make_spec(self.on.mesh, self.on.placements(self.dim), param.shape, param.dtype)
        self.sharded: nn.Parameter = param  # the user's Parameter until ``place`` is called
        self.placed = False
        self.keeps_dtype = False
        self.grad_dtype = grad_dtype_of(param)

    def put_at(self, module_infos: Iterable[tuple[Any, str]]) -> None:
        for holder, attribute in module_infos:
            self.module_infos.append((holder, attribute))
            _places[id(parameters_dict(holder)), attribute] = self

    # -- shapes ------------------------------------------------------------------------------------

    @property
    def dim(self) -> int | None:
        """The dim that the engine shards; None if the parameter is replicated on the shard axis."""
        return self.geometry.dim

    @property
    def num_shards(self) -> int:
        """Number of ranks that it is sharded over."""
        return self.geometry.num_shards

    @property
    def global_shape(self) -> torch.Size:
        """The plain model's."""
        return self.geometry.global_shape

    def _not_on(self, dim: int, shape: torch.Size, works: Iterable[int]) -> Parallel3dError:
        return Parallel3dError(
            f"parameter {self.name} of shape {tuple(shape)} can't be sharded on dim {dim} "
            f"over {self.axes.num_shards} ranks: it is {self.on.compute_placements} on "
            f"{self.on.compute_mesh}, and no DTensor placement expresses such shards. "
            f"Dims that work: {', '.join(map(str, works)) or 'none (return None: it stays whole)'}"
        )

    def unreduced_spec(
        self, dtype: torch.dtype, *, over_shard: bool, tp_partial: bool = False
    ) -> DTensorSpec:
        """Returns the DTensor spec of an unreduced gradient.

        Args:
            over_shard: whether the sum over shard, and not only that over replicate, is still to be made.
            tp_partial: whether the sum over tp is, also if the layout doesn't say so.
        """
        placements = list(self.spec.placements)
        for axis in self.axes.replicas:
            placements[axis] = Partial("avg" if over_shard else "sum")
        if self.axes.shard is not None and (over_shard or self.dim is None):
            placements[self.axes.shard] = Partial("avg" if over_shard else "sum")
        tp_partial = tp_partial or self.layout.tp_grad == "partial"
        if over_shard and tp_partial and self.on.summed is not None:
            placements[self.on.summed[1]] = Partial()
        return make_spec(self.spec.mesh, placements, self.global_shape, dtype)

    def reduced_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the DTensor spec of a reduced gradient of ``dtype``."""
        return make_spec(self.spec.mesh, self.spec.placements, self.global_shape, dtype)

    # -- the Parameter at rest ---------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """The sharded Parameter's local tensor, the same object each time."""
        return get_local_tensor(self.sharded)

    def attributes(self) -> dict[str, object]:
        """Returns what the user's Parameter carries, which a module's forward may read."""
        return {key: value for key, value in vars(self.sharded).items() if key[0] != "_"}

    def place(self, local: torch.Tensor) -> None:
        """Makes ``local``, a view of the bucket's buffer, the sharded Parameter's local tensor.

        The first call creates the Parameter and registers it in the modules; later ones keep the object.
        """
        placed = nn.Parameter(make_dtensor(local, self.spec), requires_grad=self.requires_grad)
        set_local_tensor(placed, local)  # nn.Parameter has made an alias of it
        set_grad_dtype(placed, self.grad_dtype)
        if not self.placed:
            vars(placed).update(vars(self.sharded))
            self.sharded = placed
            self.placed = True
            _owners[id(placed)] = self
            for holder, attribute in self.module_infos:
                holder[attribute] = placed
            return
        old = self.local
        if (old.device, old.dtype) == (local.device, local.dtype):
            set_local_tensor(self.sharded, local)
            return
        attributes = dict(vars(self.sharded))
        torch.utils.swap_tensors(self.sharded, placed)  # device and dtype are fixed at construction
        vars(self.sharded).update(attributes)

    def copy_of_sharded(self) -> nn.Parameter:
        """Returns a copy of the sharded Parameter; deepcopy can't copy simulated ranks."""
        local = own_copy(self.local.detach())
        new = nn.Parameter(make_dtensor(local, self.spec), self.sharded.requires_grad)
        set_local_tensor(new, local)
        set_grad_dtype(new, self.grad_dtype)
        vars(new).update({k: v for k, v in vars(self.sharded).items() if k != _TAKEN})
        return new

    def take_values(self, given: nn.Parameter) -> None:
        """Copies the values, gradient and ``requires_grad`` of ``given``, which has replaced it in a module.

        Raises:
            Parallel3dError: ``given`` is no Parameter, or has another shape.
        """
        if not (isinstance(given, nn.Parameter) or self._shares_memory(given)):
            raise Parallel3dError(
                f"parameter {self.name} was replaced by a tensor that is not a Parameter, as "
                "torch.func.functional_call does; its values would become the model's for good. Call "
                "it with the model's own parameters (or .detach() of them), or before fully_shard"
            )
        if given.shape != self.global_shape:
            raise Parallel3dError(
                f"parameter {self.name} of shape {tuple(self.global_shape)} was replaced by one of shape "
                f"{tuple(given.shape)}; give one of the same shape, or replace it before fully_shard"
            )
        with torch.no_grad():
            if self.sharded.is_meta and not given.is_meta:
                self.place(self.local_part(given))  # its bucket is moved to that device later
            elif isinstance(given, DTensor):
                self.sharded.copy_(given)
            else:
                self.local.copy_(self.shard_of(given, tp_local=False))
            grad, dtype = given.grad, self.sharded.dtype
            if grad is not None and not isinstance(grad, DTensor):
                grad = make_dtensor(
                    self.shard_of(grad, tp_local=False).to(dtype, copy=True), self.spec
                )
            self.sharded.grad = None if grad is None else grad.to(dtype)
        self.sharded.requires_grad_(given.requires_grad)
        module = self.module()
        if isinstance(given, nn.Parameter) and owner_of(given) is None and module is not None:
            mark_taken(given, self)
            where = f"{self.name} of unit {getattr(self.unit(), 'label', '')}"
            mark_replaced(given, module, self.module_infos[0][1], where, assigned=True)

    def set_data(self, value: torch.Tensor) -> None:
        """Does ``sharded.data = value``: the shard of ``value`` is the local tensor, which the bucket adopts.

        Args:
            value: a DTensor on any placements, or a whole tensor.

        Raises:
            Parallel3dError: ``value`` has another shape, dtype or device.
        """
        with torch.no_grad():
            kind, own = (
                (tuple(t.shape), t.dtype, t.device) if isinstance(t, torch.Tensor) else t
                for t in (value, self.sharded)
            )
            if kind != own:
                raise Parallel3dError(
                    f"parameter {self.name} of (shape, dtype, device) {own} was given .data = {kind}; give a "
                    "DTensor or a whole tensor of the same, convert the whole model by model.to(...), or "
                    "load values by model.load_state_dict(state, assign=True)"
                )
            local = self.local_part(value)
            if not local.is_set_to(self.local):  # as ``param.data += ...`` gives it
                set_local_tensor(self.sharded, local)
                torch.autograd.graph.increment_version(self.sharded)

    def _shares_memory(self, given: torch.Tensor) -> bool:
        if not isinstance(given, DTensor) or given.is_meta or self.sharded.is_meta:
            return False
        return get_local_tensor(given).is_set_to(self.local)

    def take(self, parameter: nn.Parameter) -> None:
        """Makes ``parameter``, a copy of the sharded Parameter, its sharded Parameter."""
        self.sharded = parameter
        _owners[id(parameter)] = self

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Updates dtype and spec after a change of the sharded Parameter's dtype."""
        if dtype != self.dtype:
            self.dtype, self.spec = dtype, self.reduced_spec(dtype)

    # -- values ------------------------------------------------------------------------------------

    def shard_of(self, whole: torch.Tensor, *, tp_local: bool) -> torch.Tensor:
        """Returns this rank's shard of ``whole``, of the compute shape (``tp_local``) or the global one."""
        if not tp_local:
            whole = self.on.part_of(whole)
        if self.dim is None or self.num_shards == 1:
            return whole
        return local_chunk(whole, self.dim, self.num_shards, self.axes.part_index)

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of ``whole``, a full tensor or a DTensor on any placements."""
        if isinstance(whole, DTensor):
            wanted = self.spec.placements
            packed = packing_of(self.sharded) or packing_of(whole)
            if packed is None or whole.placements == wanted:
                return get_local_tensor(whole.redistribute(self.spec.mesh, wanted))
            whole = whole.full_tensor()
        return self.shard_of(whole, tp_local=False)

    def as_compute(self, local: torch.Tensor) -> torch.Tensor:
        """Returns ``local`` as forward sees it: itself, or wrapped in a DTensor as the parameter was one."""
        mesh = self.on.compute_mesh
        if mesh is None or self.layout.compute == "local":
            return local
        return make_dtensor(
            local, make_spec(mesh, self.on.compute_placements, self.global_shape, local.dtype)
        )

    def local_grad(self, grad: DTensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """Returns (the local tensor of a DTensor gradient, whether its bucket must sum it over tp).

        Gradients that are partial in another way are summed here, in ``dtype``, that of the reductions.
        """
        placements, wanted = grad.placements, self.on.gradient_placements(grad.placements)
        if placements == wanted:
            return grad.to_local(), False
        if self.may_be_partial and self.on.lacks_sum(placements, wanted):
            return grad.to_local(), True
        cast = grad.to(dtype)
        assert isinstance(cast, DTensor)
        return cast.redistribute(placements=wanted).to_local(), False


# Steps of optimizers: which parameters were changed by them. See ``bucket.Versions``.


class OptimizerSteps:
    """The steps of one optimizer, which ``watch`` counts.

    Attributes:
        total: number of steps of all optimizers so far.
        of_alive, of_deleted: the records of all optimizers that have stepped; of deleted ones the last few.
        last: number of its last step, as counted by ``total``.
        params: ids of the parameters that it optimizes.
        copies: whether some of them are DTensors of no unit: it may copy these to a unit's parameters.
    """

    total: ClassVar[int] = 0
    of_alive: ClassVar[weakref.WeakKeyDictionary] = weakref.WeakKeyDictionary()
    # More than these are hardly deleted between a forward and its backward.
    of_deleted: ClassVar[deque[OptimizerSteps]] = deque(maxlen=8)

    def __init__(self) -> None:
        self.last = -1
        self.params: set[int] = set()
        self.copies = False


def segment_of(param: ShardedParam) -> Segment:
    """``param`` as the arithmetic of ``layout`` takes it."""
    partial = PartialGrad.MAYBE if param.may_be_partial else PartialGrad.NEVER
    return Segment(
        ndim=len(param.geometry.compute_shape),
        dim=param.dim,
        num_shards=param.num_shards,
        numel=param.geometry.padded_numel,
        even=param.geometry.even,
        fills=param.geometry.fills_segment,
        partial=PartialGrad.ALWAYS if param.layout.tp_grad == "partial" else partial,
        is_cut=tuple(
            size > 1 and not isinstance(placement, Replicate)
            for size, placement in zip(param.spec.mesh.shape, param.spec.placements, strict=True)
        ),
    )


def zero_copy_bytes(device_type: str) -> int:
    """From how many unsharded bytes on a parameter is zero-copy."""
    return ACCELERATOR_BYTES if has_streams(device_type) else CPU_BYTES
