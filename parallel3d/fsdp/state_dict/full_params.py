"""full_params: modules show whole, plain Parameters for a while, and what is done to them is kept."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.gradients import waits_for_reduction
from parallel3d.fsdp.group import Retain
from parallel3d.fsdp.members import check_module, units_of
from parallel3d.fsdp.options.gather_extension import as_plain
from parallel3d.fsdp.param import of
from parallel3d.fsdp.placement import ParamAxes

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.unit import Unit


# The first rank of a model's meshes: what ``rank0_only`` keeps and ``broadcast_from_rank0`` gives.


def meshes_of(units: Iterable[Unit]) -> list[DeviceMesh]:
    """The meshes that the units' parameters lie on at rest, each once, in an order all ranks share."""
    meshes: list[DeviceMesh] = []
    for unit in units:
        for bucket in unit.group.buckets:
            for param in bucket.params:
                if all(param.on.mesh is not mesh and param.on.mesh != mesh for mesh in meshes):
                    meshes.append(param.on.mesh)
    return meshes


def is_first(meshes: Iterable[DeviceMesh]) -> bool:
    """Whether this rank is the first of each of ``meshes``: rank 0, where they have all ranks.

    Simulated ranks are one process, which counts as the first.
    """
    if ranks_are_simulated():
        return True
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def _groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Gives ``tensor`` of the mesh's first rank to all, in place, axis by axis.

    After axis i all ranks have it whose coordinates on later axes are 0; what others send is overwritten.
    """
    if not tensor.numel():
        return
    for group in _groups(mesh):
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=0)


def sent_by_first(value: Any, meshes: Iterable[DeviceMesh]) -> Any:
    """``value`` of the first rank of ``meshes``, on all of them; pickled, so for small things.

    Raises:
        Parallel3dError: it is a ``refusal``; on every rank, others would wait for one that raises alone.
    """
    for mesh in meshes:
        value = _broadcast_object(value, mesh)
    if isinstance(value, str):
        raise Parallel3dError(value)
    return value


def refusal(values: Mapping[str, Any]) -> str | None:
    """What is wrong with ``values``, which the first rank is to send; None if nothing is."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta):
            what = "on the meta device" if value.is_meta else "a DTensor"
            return (
                f"broadcast_from_rank0=True: {name} is {what} on the first rank, which has to give whole "
                "tensors with values, as model_state_dict and optim_state_dict return them for "
                "StateDictType.FULL_STATE_DICT"
            )
    return None


def _broadcast_object(value: Any, mesh: DeviceMesh) -> Any:
    if ranks_are_simulated():
        return value
    box = [value]
    for group in _groups(mesh):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


# Whole tensors: from what the ranks hold of a bucket's parameters to tensors of the plain model's
# shapes.
#
# One all-gather over the shard axis for all that is asked for of a bucket, and one over each own
# axis (tp) for what it cuts. Values keep their dtype, unlike those that an unshard makes for
# computing.


def check_has_values(bucket: Bucket) -> None:
    """Raises StateError for parameters on the meta device, which have nothing to gather."""
    if bucket.flat.is_meta:
        raise StateError(
            f"parameters of unit {bucket.unit} ({bucket.params[0].name} is the first) are on the meta "
            "device and have no values yet; call parallel3d.materialize or to_empty first"
        )


def gather_rows(bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
    """What every shard rank has in ``flat``.

    Args:
        flat: (k,), of the same k on every rank: slots of some or all of the bucket's parameters.

    Returns:
        (parts, k) on the device that the bucket computes on. Without a shard axis a view of ``flat``.
    """
    flat = flat.to(bucket.device)
    numel = flat.numel()
    for group in bucket.gather_groups:
        if numel:
            size = group.size() * flat.numel()
            gathered = torch.empty(size, dtype=flat.dtype, device=flat.device)
            _gather(gathered, flat, group, bucket.unit)
            flat = gathered
    return (
        flat.view(bucket.num_shards, numel)
        if numel
        else flat.view(1, 0).expand(bucket.num_shards, 0)
    )


def whole_tensors(
    bucket: Bucket, indices: Sequence[int], locals_: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Gathers tensors that lie on the ranks as the bucket's parameters do: values, gradients, moments.

    Args:
        indices: which parameters' they are.
        locals_: this rank's parts, plain tensors of one dtype; None counts as zeros.

    Returns:
        Tensors of the parameters' global shapes, each with memory of its own.
    """
    params = [bucket.params[i] for i in indices]
    if not params:
        return []
    with torch.inference_mode(False), torch.no_grad():
        rows = gather_rows(bucket, _packed(bucket, params, locals_))
        columns = rows.split([p.slot_numel for p in params], dim=1)
        parts = [_compute_part(p, c) for p, c in zip(params, columns, strict=True)]
        del rows, columns
        return _joined_over_own_axes(bucket.unit, params, parts)


def _packed(
    bucket: Bucket, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """``locals_`` in the parameters' slots, one after another; padding is zero."""
    views = bucket.local_views
    one_buffer = bucket.joinable  # not where each parameter has memory of its own
    if one_buffer and len(locals_) == len(views) and all(map(operator.is_, locals_, views)):
        return bucket.flat
    dtype = next((x.dtype for x in locals_ if x is not None), bucket.dtype)
    sizes = [p.slot_numel for p in params]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=bucket.storage_device)
    for param, slot, local in zip(params, flat.split(sizes), locals_, strict=True):
        if local is not None:
            param.local_view(slot).copy_(local)
    return flat


def _compute_part(param: ShardedParam, column: torch.Tensor) -> torch.Tensor:
    """(parts, slot_numel) of one parameter -> what the own axes leave of it on this rank."""
    region = torch.empty(
        param.num_shards * param.slot_numel, dtype=column.dtype, device=column.device
    )
    for part, held in param.copy_pairs(region, column):
        part.copy_(held)
    view = param.contiguous_view(region)
    return view if param.even else view.clone(memory_format=torch.contiguous_format)


# -- own axes ----------------------------------------------------------------------------------------


def _joined_over_own_axes(
    unit: str, params: Sequence[ShardedParam], parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Undoes the own axes' cuts, the last first."""
    for level in reversed(range(max(len(p.on.cuts) for p in params))):
        members: dict[str, list[int]] = {}
        groups: dict[str, ProcessGroup] = {}
        for index, param in enumerate(params):
            if level < len(param.on.cuts) and _ways(param.on, level) > 1:
                group = _group(param.on, level)
                groups[group.group_name] = group
                members.setdefault(group.group_name, []).append(index)
        for name, indices in members.items():
            _join(unit, groups[name], level, params, parts, indices)
    return parts


def _join(
    unit: str,
    group: ProcessGroup,
    level: int,
    params: Sequence[ShardedParam],
    parts: list[torch.Tensor],
    indices: list[int],
) -> None:
    """Replaces ``parts[i]``, cut by ``group`` as their ``level``-th cut, by what they were before it."""
    cells = [_Cut(params[i], level) for i in indices]
    sizes = [prod(cell.largest) for cell in cells]
    packed = torch.cat([cell.padded(parts[i]) for cell, i in zip(cells, indices, strict=True)])
    if not packed.numel():
        rows = packed.new_empty(group.size(), 0)
    else:
        gathered = torch.empty(
            group.size() * packed.numel(), dtype=packed.dtype, device=packed.device
        )
        _gather(gathered, packed, group, unit)
        rows = gathered.view(group.size(), packed.numel())
    columns = rows.split(sizes, dim=1)
    for cell, index, column in zip(cells, indices, columns, strict=True):
        parts[index] = cell.joined(column)


class _Cut:
    """One cut of one parameter by an own axis.

    Attributes:
        dim: what is cut.
        largest: the largest shape after the cut.
        before: this rank's shape before it; SymInts under simulated ranks.
    """

    def __init__(self, param: ShardedParam, level: int) -> None:
        on, shape = param.on, param.global_shape
        self.on = on
        self.axis, self.dim = on.cuts[level]
        self.largest, self.before = list(shape), list(shape)
        for each, (axis, dim) in enumerate(on.cuts[: level + 1]):
            self.largest[dim] = on.largest_length(axis, self.largest[dim])
            if each < level:
                assert on.compute_mesh is not None
                rank = on.compute_mesh.get_local_rank(axis)
                self.before[dim] = on.length(axis, self.before[dim], rank)
        self.even = on.are_even(shape)

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """``part`` with zeros up to the largest shape, flat."""
        if self.even:
            return part.reshape(-1)
        padded = torch.zeros(self.largest, dtype=part.dtype, device=part.device)
        target = padded
        for dim, size in enumerate(part.shape):
            target = target.narrow(dim, 0, size)
        target.copy_(part)
        return padded.view(-1)

    def joined(self, column: torch.Tensor) -> torch.Tensor:
        """(ways, elements) of the ranks along the axis -> the tensor before the cut."""
        pieces = []
        for rank, row in enumerate(column):
            piece = row.view(self.largest)
            if not self.even:
                for dim, size in enumerate(self.before):
                    length = self.on.length(self.axis, size, rank) if dim == self.dim else size
                    piece = piece.narrow(dim, 0, length)
            pieces.append(piece)
        return self.on.joined(self.axis, self.dim, pieces)


def _ways(on: ParamAxes, level: int) -> int:
    assert on.compute_mesh is not None
    return on.compute_mesh.size(on.cuts[level][0])


def _group(on: ParamAxes, level: int) -> ProcessGroup:
    assert on.compute_mesh is not None
    return on.compute_mesh.get_group(on.cuts[level][0])


def _gather(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup, unit: str) -> None:
    work = all_gather(output, part.contiguous(), group, unit=unit)
    if work is not None:
        work.wait()


# -- replicas ----------------------------------------------------------------------------------------


def make_replicas_agree(
    bucket: Bucket, indices: Sequence[int], locals_: Sequence[torch.Tensor]
) -> None:
    """Ranks that hold the same part of a parameter take what the first of them has, in place.

    One broadcast per axis that replicates: what users write to whole tensors may differ by rank, as
    random numbers do, and replicas that differ stay so without a sign.
    """
    params = [bucket.params[i] for i in indices]
    with torch.inference_mode(False), torch.no_grad():
        for group in bucket.replicate_groups:
            _take_first(group, bucket.device, locals_)
        members: dict[str, list[torch.Tensor]] = {}
        groups: dict[str, ProcessGroup] = {}
        for param, local in zip(params, locals_, strict=True):
            for group in param.on.replicating_groups():
                groups[group.group_name] = group
                members.setdefault(group.group_name, []).append(local)
        for name, group in groups.items():
            _take_first(group, bucket.device, members[name])


def _take_first(group: ProcessGroup, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcasts ``tensors``, of one dtype and the same shapes on every rank of ``group``, in one call."""
    if not tensors:
        return
    plain = [as_plain(tensor.detach()) for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1) for tensor in plain]).to(device)
    dist.broadcast(packed.view(torch.uint8), group=group, group_src=0)  # bytes: of any dtype
    values = packed.split([tensor.numel() for tensor in plain])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))


# OtherForm: other Parameters in place of a unit's sharded ones, for a while between steps.
#
# ``full_params`` shows whole ones, ``state_dict`` whole or local ones while it is made. The
# sharded Parameter objects stay what the optimizer and the unit have; they come back into the
# modules on any way out.

Chosen = list[tuple["Bucket", list[int]]]
"""Parameters of a unit: by bucket their indices, in an order that all ranks share."""


def check_not_shown(unit: Unit, what: str) -> None:
    """Raises StateError while the unit shows other Parameters than its own."""
    if unit.group.is_in_other_form:
        raise StateError(
            f"{what}: unit {unit.label} shows its parameters in another form already; leave that "
            "full_params (or state_dict) first"
        )


def check_at_rest(unit: Unit, what: str) -> None:
    """Raises StateError if the unit shows other Parameters already, or is in a forward or backward."""
    check_not_shown(unit, what)
    unit.come_to_rest()
    context = unit.context
    running = context is not None and (context.running or context.in_backward)
    if unit.depth or unit.backward_begun or running:
        raise StateError(
            f"{what}: unit {unit.label} is in a forward or backward; call it between steps, or after "
            "reset_iter_state() if an exception has ended one"
        )


def to_rest(unit: Unit) -> None:
    """Brings the shards back into the modules, nothing gathered, with what ordinary calls have put there."""
    group = unit.group
    if unit.context is not None:
        group.register_sharded()
        group.reshard(unit.context.comm)
    group.adopt()
    for bucket in group.buckets:
        check_has_values(bucket)


def whole_params(
    chosen: Chosen, *, keep: bool = True, to_cpu: bool = False
) -> dict[ShardedParam, nn.Parameter]:
    """Gathers ``chosen`` bucket by bucket.

    Args:
        keep: False takes part in the gathers only, and drops each bucket's result at once.
        to_cpu: copies each bucket to the CPU before the next one is gathered.

    Returns:
        Whole Parameters of the parameters' own dtypes, each with memory of its own.
    """
    found: dict[ShardedParam, nn.Parameter] = {}
    for bucket, indices in chosen:
        found.update(_whole_bucket(bucket, indices, keep=keep, to_cpu=to_cpu))
    return found


def _whole_bucket(
    bucket: Bucket, indices: list[int], *, keep: bool, to_cpu: bool
) -> dict[ShardedParam, nn.Parameter]:
    params = [bucket.params[i] for i in indices]
    with torch.inference_mode(False):
        wholes = whole_tensors(bucket, indices, [param.local for param in params])
        if not keep:
            return {}
        return {
            param: nn.Parameter(whole.cpu() if to_cpu else whole, param.sharded.requires_grad)
            for param, whole in zip(params, wholes, strict=True)
        }


@contextmanager
def shown_instead(
    unit: Unit, chosen: Chosen, shown: Callable[[ShardedParam], nn.Parameter | None]
) -> Iterator[None]:
    """The modules have ``shown(param)`` instead of the sharded Parameters; None leaves one as it is."""
    slots: list[tuple[Any, str, nn.Parameter]] = []
    unit.group.show_other()
    try:
        for bucket, indices in chosen:
            for index in indices:
                param = bucket.params[index]
                other = shown(param)
                if other is None:
                    continue
                for holder, name in param.slots:
                    if holder.get(name) is not None:  # the user may have removed one
                        slots.append((holder, name, param.sharded))
                        holder[name] = other
        yield
    finally:
        unit.group.hide_other()
        for holder, name, sharded in slots:
            holder[name] = sharded


def chosen_of(unit: Unit, module: nn.Module | None = None) -> Chosen:
    """The unit's parameters; with ``module``, one of several that make up the unit, those that it holds."""
    inside = None
    if module is not None and len(unit.modules) > 1:
        inside = {id(each._parameters) for each in module.modules()}
    result: Chosen = []
    for bucket in unit.group.buckets:
        indices = [
            index
            for index, param in enumerate(bucket.params)
            if inside is None or inside & places_of(param)
        ]
        if indices:
            result.append((bucket, indices))
    return result


def places_of(param: ShardedParam) -> set[int]:
    """Ids of the ``_parameters`` of the modules that hold ``param``."""
    return {id(of(holder)) for holder, _ in param.slots}


_WHAT = "full_params"


@contextmanager
def full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within it the modules have plain Parameters of the plain model's shapes, to read or to edit.

    They are gathered over shard and tp in the parameters' own dtypes, one all-gather per bucket and axis.
    On leaving, each rank keeps its shard of what its Parameters then hold (also of one that was put in
    place of another); ranks that hold the same shard take that of the first of them. The sharded Parameter
    objects, which the optimizer has, stay the same. If the body raises, its edits are dropped: a rank
    that raises alone could not communicate. Ignored parameters are as ever.

    Every rank of the mesh must enter it. No forward, backward, optimizer step or conversion goes inside.
    Replaces ``FullyShardedDataParallel.summon_full_params``.

    Args:
        module: a unit, or a module with units inside.
        recurse: False shows the parameters of ``module``'s own unit only.
        writeback: whether edits are kept; False drops them.
        rank0_only: whole Parameters on the first rank of the mesh only; others show their shards.
        offload_to_cpu: whole Parameters on the CPU; one bucket at a time is whole on the device.
        with_grads: ``.grad`` too is whole where there is one, and its edits are kept: setting it to
            None, or to a tensor, does so to the sharded Parameter's.

    Raises:
        Parallel3dError: ``rank0_only`` with ``writeback``, or an option that is no bool; on leaving, a
            Parameter was replaced by one of another shape. Nothing is written then.
        StateError: in a forward or backward, in another ``full_params`` of the same unit, parameters on
            the meta device; with ``with_grads``, gradients that wait for their reduction.
    """
    check_module(module)
    _check_options(
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    units = list(units_of(module, recurse))
    for unit in units:
        check_at_rest(unit, _WHAT)
        if with_grads:
            _check_reduced(unit)
    keep = not rank0_only or is_first(meshes_of(units))
    kept = [unit for unit in units if unit.group.is_registered and unit.group.retain is Retain.USER]
    views: list[_View] = []
    with ExitStack() as stack:
        for unit in units:
            view = _View(unit, keep=keep, to_cpu=offload_to_cpu, grads=with_grads)
            stack.enter_context(shown_instead(unit, view.chosen, view.wholes.get))
            views.append(view)
        yield
        if writeback:
            edits = [view.edits() for view in views]
            for view, edited in zip(views, edits, strict=True):
                view.write(edited)
        views.clear()
    for unit in kept:  # by the user's ``unshard()``
        context = unit.ready_context()
        unit.issue_unshard(context)
        unit.group.retain = Retain.USER
        unit.group.unshard(context.comm)
        unit.group.register_unsharded()


def _check_options(**options: bool) -> None:
    for name, value in options.items():
        as_bool(name, value)
    if options["writeback"] and options["rank0_only"]:
        raise Parallel3dError(
            "full_params: writeback=True with rank0_only=True would write what the other ranks don't "
            "have; give writeback=False to read on the first rank, or rank0_only=False to edit"
        )


def _check_reduced(unit: Unit) -> None:
    for bucket in unit.group.buckets:
        for param in bucket.params:
            grad = param.sharded.grad
            if waits_for_reduction(grad):
                raise StateError(
                    f"full_params(with_grads=True): the gradient of {param.name} in unit {unit.label} "
                    "waits for its reduction; call it after the backward of the last micro-batch"
                )


class _View:
    """One unit's parameters as whole ones.

    Attributes:
        wholes: by parameter what to show; empty on ranks that show nothing.
    """

    def __init__(self, unit: Unit, *, keep: bool, to_cpu: bool, grads: bool) -> None:
        to_rest(unit)
        self.unit = unit
        self.grads = grads
        self.chosen: Chosen = chosen_of(unit)
        self.wholes = whole_params(self.chosen, keep=keep, to_cpu=to_cpu)
        if grads:
            for bucket, indices in self.chosen:
                self._gather_grads(bucket, indices, keep=keep)

    def _gather_grads(self, bucket: Bucket, indices: list[int], *, keep: bool) -> None:
        """Also where this rank has no gradient: another may."""
        if not _may_have_grads(bucket):
            return
        locals_ = [_local_grad(bucket.params[i]) for i in indices]
        wide = [
            torch.zeros((), dtype=bucket.sum_dtype, device=bucket.storage_device).expand(
                p.local.shape
            )
            if local is None
            else local.to(bucket.sum_dtype)
            for p, local in zip([bucket.params[i] for i in indices], locals_, strict=True)
        ]
        wholes = whole_tensors(bucket, indices, wide)
        for index, local, grad in zip(indices, locals_, wholes, strict=True):
            shown = self.wholes.get(bucket.params[index])
            if keep and shown is not None and local is not None:
                set_grad(shown, grad.to(shown.device, local.dtype))

    def edits(self) -> dict[ShardedParam, nn.Parameter]:
        """What the modules have now; checked."""
        found: dict[ShardedParam, nn.Parameter] = {}
        for param, shown in self.wholes.items():
            now = [holder.get(name) for holder, name in param.slots]
            others = [each for each in now if each is not None and each is not shown]
            for other in others:  # maybe several, of a tied parameter
                if other.shape != param.global_shape:
                    raise Parallel3dError(
                        f"full_params: parameter {param.name} of unit {self.unit.label} was replaced by one "
                        f"of shape {tuple(other.shape)}; its shape must stay {tuple(param.global_shape)}"
                    )
            found[param] = others[0] if others else shown
        return found

    def write(self, edited: dict[ShardedParam, nn.Parameter]) -> None:
        """Keeps this rank's shards of ``edited``."""
        with torch.inference_mode(False), torch.no_grad():
            for bucket, indices in self.chosen:
                params = [bucket.params[i] for i in indices]
                for param in params:
                    param.local.copy_(param.local_part(edited[param].detach()))
                    param.sharded.requires_grad_(edited[param].requires_grad)
                make_replicas_agree(bucket, indices, [p.local for p in params])
                if self.grads and _may_have_grads(bucket):
                    _write_grads(bucket, indices, [edited[p].grad for p in params])


def _may_have_grads(bucket: Bucket) -> bool:
    """The same answer on every rank, whatever gradients it has."""
    return bucket.dtype.is_floating_point or bucket.dtype.is_complex


def _local_grad(param: ShardedParam) -> torch.Tensor | None:
    grad = param.sharded.grad
    return get_local_tensor(grad) if isinstance(grad, DTensor) else grad


def _write_grads(bucket: Bucket, indices: list[int], grads: list[torch.Tensor | None]) -> None:
    params = [bucket.params[i] for i in indices]
    locals_ = []
    for param, whole in zip(params, grads, strict=True):
        dtype = bucket.sum_dtype if whole is None else whole.dtype
        local = torch.zeros_like(param.local, dtype=dtype)
        if whole is not None:
            local.copy_(param.local_part(whole.detach()))
        locals_.append(local)
    wide = [local.to(bucket.sum_dtype) for local in locals_]
    make_replicas_agree(bucket, indices, wide)
    for param, whole, local, agreed in zip(params, grads, locals_, wide, strict=True):
        before = param.sharded.grad
        if whole is None:
            param.sharded.grad = None
        elif isinstance(before, DTensor) and before.dtype == whole.dtype:
            get_local_tensor(before).copy_(agreed)
        else:
            grad = make_dtensor(local.copy_(agreed), param.reduced_spec(whole.dtype))
            set_grad(param.sharded, grad)
