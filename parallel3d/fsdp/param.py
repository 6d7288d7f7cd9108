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
    default_dim,
    padded_shape,
)
from parallel3d.fsdp.placement import DataAxes, ParamAxes, chunk_length


class OwnSetattr:
    """Sets a module's parameters by the class's own ``__setattr__``, as ``nn.LSTM`` needs it; used in place
    of ``module._parameters``."""

    __slots__ = ("module",)
    is_putting = False  # whether the engine is setting one now

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def get(self, name: str) -> Any:
        return (parameters_dict(self) or {}).get(name)

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
    """Returns an object to get and set parameters of ``module`` with: its ``_parameters`` dict, or an
    ``OwnSetattr`` if its class has a ``__setattr__`` of its own."""
    if type(module).__setattr__ is nn.Module.__setattr__ or _hands_on(module):
        return module._parameters
    return OwnSetattr(module)


def _hands_on(module: nn.Module) -> bool:
    """Whether setting an attribute of ``module`` sets it on another module instead, as wrappers may do."""
    probe = "_parallel3d_probe"
    with suppress(Exception):  # it may refuse names
        setattr(module, probe, None)
    found = [each for each in module.modules() if vars(each).pop(probe, each) is None]
    return bool(found) and found[0] is not module


def parameters_dict(holder: Any) -> dict[str, nn.Parameter | None] | None:
    """Returns the ``_parameters`` dict behind ``holder`` (of ``holder_of``); None: its module is deleted."""
    if not isinstance(holder, OwnSetattr):
        return holder
    module = holder.module()
    return None if module is None else module._parameters


_TAKEN = "_parallel3d_taken_by"  # attribute of a user's Parameter that a unit has replaced
_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
# Keys: id of a ``module._parameters``, name.
_places: weakref.WeakValueDictionary[tuple[int, str], ShardedParam] = weakref.WeakValueDictionary()


class _TakenBy:
    """A weak reference to a ShardedParam that can be copied and pickled; the copy then refers to nothing."""

    __slots__ = ("owner",)

    def __init__(self, owner: ShardedParam | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return type(self), ()


def owner_of(param: torch.Tensor) -> ShardedParam | None:
    """Returns the ShardedParam whose sharded Parameter ``param`` is, or whose sharded Parameter has replaced
    the user's ``param``. None if ``param`` belongs to no unit, or the model was deleted."""
    owner = _owners.get(id(param))
    if owner is not None and owner.sharded is param:
        return owner
    taken = getattr(param, _TAKEN, None)
    return taken.owner() if taken is not None else None


def owner_at(module: nn.Module, name: str) -> ShardedParam | None:
    """Returns the ShardedParam of the attribute ``module.name``, whatever is registered there now."""
    owner = _places.get((id(module._parameters), name))
    if owner is None:
        return None
    places = ((parameters_dict(holder), attribute) for holder, attribute in owner.module_infos)
    return owner if any(d is module._parameters and a == name for d, a in places) else None


def named(owner: ShardedParam) -> str:
    """Returns a name for messages, such as ``parameter weight of unit layers.0``."""
    unit = owner.unit()
    return f"parameter {owner.name}" + ("" if unit is None else f" of unit {unit.label}")


def mark_taken(param: nn.Parameter, owner: ShardedParam) -> None:
    """Makes ``owner_of(param)`` return ``owner``: its sharded Parameter has replaced the user's ``param``."""
    setattr(param, _TAKEN, _TakenBy(owner))


# What a forward writes to unsharded parameters would be lost, as they are freed when their unit is resharded.
# Their version counters tell of it, see ``bucket.Versions``, and ``watch`` of ``.data``.

_UNSHARDED = "_parallel3d_unsharded"  # attribute of an unsharded parameter: an ``_Unsharded``


class _Unsharded(_TakenBy):
    """The mark of an unsharded parameter: its ShardedParam, and whether its memory is freed by resharding."""

    __slots__ = ("is_freed",)

    def __init__(self, owner: ShardedParam | None = None, is_freed: bool = False) -> None:
        super().__init__(owner)
        self.is_freed = is_freed


def mark_unsharded(param: torch.Tensor, owner: ShardedParam, *, is_freed: bool) -> None:
    """Marks ``param`` as the unsharded parameter of ``owner``; ``is_freed``: whether resharding frees it."""
    vars(param)[_UNSHARDED] = _Unsharded(owner, is_freed)


def unsharded_mark(param: torch.Tensor) -> _Unsharded | None:
    return vars(param).get(_UNSHARDED)


def lost_write(unit: Any, names: Sequence[str]) -> StateError:
    """Returns the error for a change of unsharded parameters, named ``names``, that resharding would lose."""
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
    """The shapes of one parameter, and functions that return views of the engine's buffers in these shapes.

    A *segment* is the parameter's part of one rank's buffer, a *region* that of all ranks together.
    """

    dim: int | None  # that the engine shards; None: replicated on the shard axis
    num_shards: int  # number of ranks that it is sharded over
    multiple: int  # each chunk but the last has a multiple of so many rows of ``dim``
    global_shape: torch.Size
    compute_shape: tuple[int, ...]
    local_shape: tuple[int, ...]  # of the sharded Parameter's local tensor
    chunk_shape: tuple[int, ...]  # the same with padding
    region_shape: tuple[int, ...]  # of all ranks' chunks together, with padding
    padded_numel: int  # elements of its segment in each rank's buffer
    fills_segment: bool  # whether chunks are equal on all tp ranks
    even: bool  # whether no rank's segment has padding
    lies_as_sent: (
        bool  # whether all ranks' segments, one after another, are the unsharded parameter
    )
    padded_inside: bool  # whether padding would lie between the rows, and not behind them

    @classmethod
    def of(cls, on: ParamAxes, shape: torch.Size, dim: int | None, multiple: int = 1) -> Geometry:
        """Returns the geometry of a parameter of global ``shape`` on axes ``on`` whose ``dim`` is sharded."""
        n = 1 if dim is None else on.data.num_shards
        largest = on.largest(shape)
        padded = padded_shape(largest, dim, n, multiple)
        compute = on.mine(shape)  # sizes may be SymInts under simulated ranks
        local, chunk, region = list(compute), list(compute), list(compute)
        padded_numel = prod(padded)
        if dim is not None:
            padded_numel //= n
            local[dim] = chunk_length(compute[dim], n, on.data.part_index, multiple)
            chunk[dim], region[dim] = padded[dim] // n, padded[dim]
        fills = on.are_even(shape)
        return cls(
            dim,
            n,
            multiple,
            shape,
            tuple(compute),
            tuple(local),
            tuple(chunk),
            tuple(region),
            padded_numel,
            fills_segment=fills,
            even=fills and padded == largest,
            lies_as_sent=fills and dim in (None, 0),
            padded_inside=dim not in (None, 0) and padded[dim] * on.ways(dim) != shape[dim],
        )

    def local_view(self, segment: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``segment``, (padded_numel,), with this rank's rows, of ``local_shape``.

        Uneven chunks of a dim other than the first are stored with that dim first. Padding then comes after
        the rows and not between them, as fused optimizers need contiguous memory.
        """
        if self.padded_inside:
            assert self.dim is not None
            rows = self.shaped(segment, self._outermost(self.chunk_shape))
            return rows.narrow(0, 0, self.local_shape[self.dim]).movedim(0, self.dim)
        return self._trim(self.shaped(segment, self.chunk_shape), self.local_shape)

    def compute_view(self, region: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``region``, (num_shards * padded_numel,), without padding: ``compute_shape``."""
        return self._trim(self.shaped(region, self.region_shape), self.compute_shape)

    def contiguous_view(self, region: torch.Tensor) -> torch.Tensor:
        """Returns the unsharded parameter in ``region``, of ``compute_shape`` and contiguous: its padding is
        at the end of the region."""
        if not self.padded_inside:
            return self.compute_view(region)
        return region.narrow(0, 0, prod(self.compute_shape)).view(self.compute_shape)

    def copy_pairs(
        self, region: torch.Tensor, columns: torch.Tensor, first: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (target, source) pairs of views of equal shapes, to copy gathered segments to ``region``.

        Args:
            region: (num_shards * padded_numel,): the parameter's part of the unsharded buffer.
            columns: (rows, padded_numel) of a gathered buffer: segments of shard ranks from ``first`` on.
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
        """Returns a view of ``region`` of shape (num_shards, *chunk_shape): entry i is shard rank i's chunk.
        Where the chunks lie one after another they may be flat: (num_shards, padded_numel)."""
        return self._split(self.shaped(region, self.region_shape))

    def segments_by_rank(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``columns``, (ranks, padded_numel), shaped as by ``by_rank``."""
        if self.even and self.dim in (None, 0):
            return columns
        if not self.even:
            columns = columns.narrow(1, 0, prod(self.chunk_shape))
        if self.padded_inside:
            assert self.dim is not None
            return columns.unflatten(1, self._outermost(self.chunk_shape)).movedim(1, 1 + self.dim)
        return columns.unflatten(1, self.chunk_shape)

    def _outermost(self, shape: Sequence[int]) -> tuple[int, ...]:
        assert self.dim is not None
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def grad_by_rank(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns ``grad``, of ``compute_shape``, padded with zeros if need be, shaped as by ``by_rank``."""
        return self._split(self.padded(grad))

    def padded(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns ``grad``, of ``compute_shape``, padded with zeros to ``region_shape`` if need be."""
        if self.even:
            return grad
        padded = torch.zeros(self.region_shape, dtype=grad.dtype, device=grad.device)
        self._trim(padded, self.compute_shape).copy_(grad)
        return padded

    def shaped(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Returns the first ``prod(shape)`` elements of ``flat`` in ``shape``; the rest is padding."""
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
        """Returns ``tensor`` with the sharded dim cut to its size in ``shape``: without padding."""
        if self.even or self.dim is None:
            return tensor
        return tensor.narrow(self.dim, 0, shape[self.dim])


class ShardedParam:
    """One parameter of a unit: how it is sharded, and its sharded Parameter.

    The constructor's ``dim`` is the dim to shard; None: that of ``layout.default_dim``, or with ``block``
    that of ``layout.block_dim``. *Own axes* are the parameter's axes other than the engine's (tp, ep).

    Attributes:
        name: name within the unit's modules, for messages.
        module_infos: (``module._parameters`` or an ``OwnSetattr``, attribute) of each place that holds it,
            several if it is tied. They do not refer to the modules, to avoid a reference cycle.
        module: weak reference to the first module that holds it.
        unit: weak reference to its unit; before there is one, a function that returns None.
        axes: the data axes that the engine shards and replicates it over.
        layout: the ``ParamLayout`` that tensor parallelism has attached to it.
        on: all axes that it lies on, own axes included.
        tp_mesh: the mesh of its own axis if it has exactly one, which is tp; else None.
        tp_size: number of ranks on ``on.summed``; 1 if there is none.
        may_be_partial: whether autograd may return a gradient that is partial over tp, as torch's own
            parallel styles make for a replicated DTensor; its bucket then sums it.
        geometry: its shapes.
        keeps_dtype: whether it is computed and reduced in its own dtype, by ``full_precision_modules`` or
            ``param_dtype_override_fn`` of the policy.
        grad_dtype: the user's setting, see ``grad_dtype_of``.
        initial: this rank's tensor before sharding; None once the bucket has copied its shard from it.
        sharded: the sharded Parameter; the same object for the model's life.
        spec: the DTensor spec of ``sharded``.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        axes: DataAxes,
        dim: int | None = None,
        block: int | None = None,
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
        whole = param.detach()
        local = get_local_tensor(whole) if isinstance(whole, DTensor) else whole
        works, rows = self.on.dims(param.shape), 1
        if dim is None and hasattr(local, "fsdp_pre_all_gather"):  # which is given rows
            dim = next(iter(works), None)
        elif dim is None and block is not None:
            dim, rows = self.on.in_blocks(param.shape, block)
        elif dim is None:
            cut = {d for _, d in self.on.cuts}
            dim = default_dim(self.on.largest(param.shape), works, cut, axes.num_shards)
        elif dim not in works:
            raise self._not_on(dim, param.shape, works)
        self.geometry = Geometry.of(self.on, param.shape, dim, rows)
        self.initial: torch.Tensor | None = local
        placements = self.on.placements(dim, param.shape, rows)
        self.spec = make_spec(self.on.mesh, placements, param.shape, param.dtype)
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
        """The dim that the engine shards; None if it shards none."""
        return self.geometry.dim

    @property
    def num_shards(self) -> int:
        return self.geometry.num_shards

    @property
    def global_shape(self) -> torch.Size:
        """The parameter's shape in the plain model."""
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
        """Returns the DTensor spec of an accumulated gradient that is not fully reduced.

        Args:
            over_shard: True: it is not reduced at all; False: only the all-reduce over replicate is missing.
            tp_partial: whether the sum over tp is missing too, even if the layout doesn't say so.
        """
        placements, unreduced = list(self.spec.placements), [*self.axes.replicas]
        if self.axes.shard is not None and (over_shard or self.dim is None):
            unreduced.append(self.axes.shard)
        for axis in unreduced:
            placements[axis] = Partial("avg" if over_shard else "sum")
        tp_partial = tp_partial or self.layout.tp_grad == "partial"
        if over_shard and tp_partial and self.on.summed is not None:
            placements[self.on.summed[1]] = Partial()
        return make_spec(self.spec.mesh, placements, self.global_shape, dtype)

    def reduced_spec(self, dtype: torch.dtype) -> DTensorSpec:
        return make_spec(self.spec.mesh, self.spec.placements, self.global_shape, dtype)

    # -- the Parameter at rest ---------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """The sharded Parameter's local tensor, the same object each time."""
        return get_local_tensor(self.sharded)

    def attributes(self) -> dict[str, object]:
        """Returns attributes that the user has set on the Parameter, which a module's forward may read."""
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
        """Returns a copy of the sharded Parameter, also under simulated ranks, which deepcopy can't copy."""
        local = own_copy(self.local.detach())
        new = nn.Parameter(make_dtensor(local, self.spec), self.sharded.requires_grad)
        set_local_tensor(new, local)
        set_grad_dtype(new, self.grad_dtype)
        vars(new).update({k: v for k, v in vars(self.sharded).items() if k != _TAKEN})
        return new

    def _shares_memory(self, given: torch.Tensor) -> bool:
        shares = isinstance(given, DTensor) and not (given.is_meta or self.sharded.is_meta)
        return shares and get_local_tensor(given).is_set_to(self.local)

    def take_values(self, given: nn.Parameter) -> None:
        """Copies the values, gradient and ``requires_grad`` of ``given``, a Parameter that has replaced the
        sharded one in a module, to the sharded one.

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
        """Implements ``sharded.data = value`` for a whole tensor or a DTensor on any placements: this rank's
        shard of it becomes the local tensor. Raises Parallel3dError for another shape, dtype or device."""
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
        with torch.no_grad():
            local = self.local_part(value)
            if not local.is_set_to(self.local):  # as ``param.data += ...`` gives it
                set_local_tensor(self.sharded, local)
                torch.autograd.graph.increment_version(self.sharded)

    def take(self, parameter: nn.Parameter) -> None:
        """Sets ``sharded`` to ``parameter``, in a copied model whose Parameters were copied already."""
        self.sharded = parameter
        _owners[id(parameter)] = self

    def set_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            self.dtype, self.spec = dtype, self.reduced_spec(dtype)

    # -- values ------------------------------------------------------------------------------------

    def shard_of(self, whole: torch.Tensor, *, tp_local: bool) -> torch.Tensor:
        """Returns this rank's shard of ``whole``, of the compute shape if ``tp_local``, else global."""
        if not tp_local:
            whole = self.on.part_of(whole)
        if self.dim is None or self.num_shards == 1:
            return whole
        index, multiple = self.axes.part_index, self.geometry.multiple
        return local_chunk(whole, self.dim, self.num_shards, index, multiple)

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
        """Returns ``local`` as forward sees it: itself, or if the layout says so a DTensor on own axes."""
        mesh = self.on.compute_mesh
        if mesh is None or self.layout.compute == "local":
            return local
        return make_dtensor(
            local, make_spec(mesh, self.on.compute_placements, self.global_shape, local.dtype)
        )

    def local_grad(self, grad: DTensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """Returns (local tensor of the DTensor ``grad``, whether the bucket must still sum it over tp).

        A gradient that is partial in another way is summed here, in ``dtype``, the reduce dtype.
        """
        placements, wanted = grad.placements, self.on.gradient_placements(grad.placements)
        if placements == wanted:
            return grad.to_local(), False
        if self.may_be_partial and self.on.lacks_sum(placements, wanted):
            return grad.to_local(), True
        cast = grad.to(dtype)
        assert isinstance(cast, DTensor)
        return cast.redistribute(placements=wanted).to_local(), False


class OptimizerSteps:
    """Record of one optimizer's steps, by which ``bucket.Versions`` notices that weights have changed."""

    total: ClassVar[int] = 0  # of all optimizers so far
    # The records of all optimizers that have stepped. More deleted ones than these are hardly between a
    # forward and its backward.
    of_alive: ClassVar[weakref.WeakKeyDictionary] = weakref.WeakKeyDictionary()
    of_deleted: ClassVar[deque[OptimizerSteps]] = deque(maxlen=8)

    def __init__(self) -> None:
        self.last = -1  # number of its last step, as counted by ``total``
        self.params: set[int] = set()  # ids of those that it optimizes
        # Whether some are DTensors of no unit: it may copy these to a unit's parameters.
        self.copies = False


def segment_of(param: ShardedParam) -> Segment:
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
    """Returns the size in bytes of the unsharded parameter from which on it is zero-copy."""
    return ACCELERATOR_BYTES if has_streams(device_type) else CPU_BYTES
