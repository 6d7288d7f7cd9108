"""Where memory lies, beside the default: shards in the CPU's memory, and buffers at fixed addresses.

``CpuOffload`` keeps a bucket's shards, their gradients and so the optimizer's state in CPU memory.

``StaticMemory`` allocates the buffers of gathers and reductions once, at the root's first forward. Units that
are gathered one after another share the buffers of their unsharded parameters in turn: unit i has slot i
modulo k, where k is how many the schedule has in flight, in forward and in backward. (The views that autograd
has saved in forward then see the same values again in backward, as the unit gathers into the same slot.)
A slot is given to the next unit when the one before is freed, and the all-gather waits for the computation
up to there. Nothing is gathered ahead into a slot that is in use. A unit that must be gathered takes it: the
one that has it, which waits for a backward to come back to it, is gathered again then.

What a user may hold lies apart: parameters of units that stay gathered after a forward or by ``unshard()``,
of the root and of units of several modules, and gradients. Version counters tell autograd what a slot holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d._torch.autograd import functorch_left
from parallel3d._util import dry_run
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option
from parallel3d.fsdp.group import Registered, Retain, ShardedState
from parallel3d.fsdp.layout import BufferPool, in_ring
from parallel3d.fsdp.members import unit_of
from parallel3d.fsdp.options.comm_hooks import CustomReduce
from parallel3d.fsdp.options.gather_extension import ExtensionBucket, LateExtensions
from parallel3d.fsdp.reduction import BucketMemory, Comm, Reduction, Stage
from parallel3d.fsdp.schedule import Prefetch
from parallel3d.fsdp.unit import Call, Unit


class CpuOffload:
    """Implements ``CPUOffloadPolicy`` for a bucket."""

    def __init__(self, policy: CPUOffloadPolicy) -> None:
        self.policy = policy
        self.stages: Sequence[Stage] = [CopyToHost()]

    def places(
        self, given: torch.device, mesh: DeviceMesh
    ) -> tuple[torch.device, torch.device, bool]:
        """Returns (device to compute on, device of shards, whether to pin the shards' memory). ``given``:
        where the parameters are. On a CPU mesh nothing is offloaded or pinned.

        A dry run of GPUs has a CPU mesh; there the offloaded memory has a device of its own.
        """
        if given.type == "meta":
            return given, given, False
        device = given if given.type == mesh.device_type else torch.device(mesh.device_type)
        if dry_run.played is not None:
            return torch.device("cpu"), dry_run.HOST_DEVICE, self.policy.pin_memory
        if device.type == "cpu":
            return device, device, False
        return device, torch.device("cpu"), self.policy.pin_memory


class CopyToHost(Stage):
    """Copies a reduction's result to CPU memory, in the dtype of ``.grad`` or of accumulated sums."""

    def finish(self, job: Reduction, work: Any) -> None:
        bucket: Any = job.bucket
        dtype = bucket.precision.grad_dtype if job.final else bucket.precision.sum_dtype
        shape = job.tensor.shape
        host = torch.empty(shape, dtype=dtype, device=bucket.storage_device, pin_memory=bucket.pin)
        # Cast first: a copy that also casts goes through pageable memory and blocks.
        job.tensor = host.copy_(job.tensor.to(dtype), non_blocking=bucket.pin)
        job.on_host = True


class RingSlot:
    """A set of buffers that several units use, one unit at a time.

    Attributes:
        holder: weak reference to the unit that was gathered into the buffers last.
        buffers: key -> a buffer of the largest size that was requested.
    """

    def __init__(self) -> None:
        self.holder: weakref.ref[Unit] | None = None
        self.buffers: dict[Any, torch.Tensor] = {}

    def other(self, unit: Unit | None) -> Unit | None:
        """Returns the holder if it is another unit than ``unit``; else None."""
        holder = None if self.holder is None else self.holder()
        return None if holder is unit else holder

    def buffer(self, key: Any, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the first ``size`` elements of the buffer for ``key``; makes or enlarges it."""
        key = key, dtype, device
        found = self.buffers.get(key)
        with functorch_left(), torch.inference_mode(False), torch.no_grad():
            if found is None or found.numel() < size:
                found = self.buffers[key] = torch.empty(size, dtype=dtype, device=device)
            return found if found.numel() == size else found.narrow(0, 0, size)


class LentInputs:
    """Lends buffers for the inputs of reduce-scatters, at the same addresses in each step.

    Attributes:
        largest: dtype -> the most elements that any bucket needs for casts of zero-copy gradients.
    """

    def __init__(self, largest: Mapping[torch.dtype, int]) -> None:
        self.largest = largest
        self.pool = BufferPool()
        self.tensors: list[torch.Tensor] = []
        self.index: dict[int, int] = {}  # id of what was lent -> of its buffer
        self.out: list[torch.Tensor] = []  # what was lent: keeps those ids

    def lend(self, kind: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        largest = self.largest.get(dtype, 0) if kind == "cast" else 0
        index = self.pool.lend((kind, dtype, device), size, largest)
        if index == len(self.tensors):
            elements = self.pool.buffers[index][1]
            self.tensors.append(torch.empty(elements, dtype=dtype, device=device))
        lent = self.tensors[index][:size]
        self.index[id(lent)] = index
        self.out.append(lent)
        return lent

    def give_back(self, lent: Iterable[torch.Tensor]) -> None:
        ids = {id(tensor) for tensor in lent}
        self.pool.give_back([self.index.pop(each) for each in ids])
        self.out = [tensor for tensor in self.out if id(tensor) not in ids]


class RingPlace:
    """The memory of one unit's buffers, part of it shared with other units.

    Attributes:
        slot: holds the unsharded parameters.
        scratch: holds what is needed while gathering: the all-gather's input and output.
        lent: lends the buffers that gradients are packed into.
    """

    def __init__(self, unit: Unit, slot: RingSlot, scratch: RingSlot, lent: LentInputs) -> None:
        self.unit = unit.ref
        self.slot, self.scratch, self.lent = slot, scratch, lent

    def has_room(self) -> bool:
        """Whether no other unit is unsharded in the slot, or gathering in the scratch."""
        unit = self.unit()
        other, gathering = self.slot.other(unit), self.scratch.other(unit)
        return (other is None or other.group.is_sharded) and not _is_gathering(gathering)

    def take(self, comm: Comm) -> None:
        """Makes the unit the holder: reshards the other unit in the slot, finishes the other's all-gather.

        Raises:
            StateError: the unit in the slot is in its forward.
        """
        unit = self.unit()
        assert unit is not None
        gathering = self.scratch.other(unit)
        if gathering is not None and _is_gathering(gathering):
            gathering.group.unshard(comm)
        other = self.slot.other(unit)
        if other is not None and not other.group.is_sharded:
            _free(other, unit, comm)
        self.slot.holder = self.scratch.holder = self.unit


def _is_gathering(unit: Unit | None) -> bool:
    return unit is not None and unit.group.state is ShardedState.GATHERING


def _free(unit: Unit, for_unit: Unit, comm: Comm) -> None:
    """Reshards ``unit`` for ``for_unit``; if its backward goes on, the next gradient gathers it again."""
    if unit.forward is not None:
        raise StateError(
            f"unit {for_unit.label} runs within the forward of unit {unit.label}, with which it shares "
            'memory (memory="static"); give it reshard_after_forward=False, or leave memory= out'
        )
    unit.group.register_sharded()
    unit.group.check_unwritten()
    unit.group.reshard(comm)
    if unit.backward is not None:
        unit.backward.has_begun = False


class FixedMemory(BucketMemory):
    """The memory of bucket number ``index`` of a unit, at the unit's ``RingPlace``."""

    is_fixed = True

    def __init__(self, place: RingPlace, index: int) -> None:
        self.place, self.index = place, index

    def make(self, kind: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        slot = self.place.slot if kind == "unsharded" else self.place.scratch
        return slot.buffer((kind, self.index), size, dtype, device)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Does nothing: fixed buffers always have storage."""

    def release(self, tensor: torch.Tensor) -> None:
        """Does nothing: fixed buffers keep their storage."""

    def copy(
        self,
        kind: str,
        source: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        made = self.make(kind, source.numel(), dtype, device)
        return made.copy_(source, non_blocking=non_blocking)

    def lend(self, kind: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.place.lent.lend(kind, size, dtype, device)

    def give_back(self, lent: list[torch.Tensor]) -> None:
        self.place.lent.give_back(lent)


class FixedUnit(Option):
    """The option of a unit whose buffers are to lie at fixed addresses (``set_static_memory``).

    Attributes:
        is_alone: whether ``unshard()`` was called on the unit: it then shares memory with no other.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # whose backward may come

    def note_call(self, call: Call) -> None:
        self._calls.add(call)

    def reach_call(self, call: Call, context: RunContext) -> None:
        self._calls.discard(call)

    def unshard(self, unit: Unit) -> None:
        """Gives the unit memory of its own, as the user may hold its unsharded parameters from now on.

        Raises:
            StateError: the unit is between forward and backward: autograd has saved views.
        """
        place = unit.group.place
        apart = self.is_alone or not self.shares(unit)
        self.is_alone = True
        if place is not None and apart:
            return
        if place is None:  # before the root's first forward
            put(unit, RingPlace(unit, RingSlot(), RingSlot(), LentInputs(_casts([unit]))))
            return
        if self._calls or unit.forward is not None or unit.backward is not None:
            raise StateError(
                f"unshard() of unit {unit.label} between forward and backward is not possible with "
                'memory="static": others use its memory then; call it before the forward, name units to '
                "gather ahead by set_modules_to_backward_prefetch, or give it reshard_after_forward=False"
            )
        assert isinstance(place, RingPlace)
        put(unit, RingPlace(unit, RingSlot(), RingSlot(), place.lent))

    def shares(self, unit: Unit) -> bool:
        """Whether the unit's settings let it share memory: it is resharded after forward and backward."""
        return (
            not self.is_alone
            and not unit.is_root
            and unit.reshards() is not False
            and unit.reshard_after_backward
            and len(unit.members.tops) == 1
        )


def put(unit: Unit, place: RingPlace) -> None:
    """Reshards ``unit``, and makes its buffers anew in the memory of ``place``."""
    group = unit.group
    if group.registered is Registered.UNSHARDED or not group.is_sharded:
        group.register_sharded()
        group.reshard(unit.ready_context().comm)
    group.place = place
    for index, bucket in enumerate(group.buckets):
        bucket.change(memory=FixedMemory(place, index))
    with functorch_left(), torch.inference_mode(False), torch.no_grad():
        group.renew_buffers()


class StaticMemory(Option):
    """The option of a root that gives each ``FixedUnit`` its place at the root's forward."""

    def __init__(self) -> None:
        self.lent = LentInputs({})
        self._placed: Any = None  # what the places were made from

    @classmethod
    def of_root(cls, context: RunContext) -> StaticMemory | None:
        return cls() if any(map(_mark_of, context.units)) else None

    def before_root_forward(self, context: RunContext) -> None:
        units: list[Any] = [u for u in context.units if u.context is context and _mark_of(u)]
        slots = _slots(context)
        # A unit that the user has unsharded before has no place yet.
        waiting = [unit.group.place is None and _is_held(unit) for unit in units]
        wanted = slots, waiting, [(unit.ref, _shares(unit), _kinds(unit)) for unit in units]
        if wanted != self._placed:
            self._place(units, slots)
            self._placed = wanted

    def _place(self, units: list[Unit], slots: int) -> None:
        """Gives each unit memory for its buffers; those that share it use ``slots`` sets in turn."""
        self.lent = LentInputs(_casts(units))
        depths = _depths(units)
        for depth in sorted(set(depths.values())):
            level = [unit for unit in units if depths[unit] == depth]
            scratch = [RingSlot() for _ in range(max(1, slots - 1))]
            ring = [RingSlot() for _ in range(slots)]
            candidates = [unit for unit in level if _shares(unit)]
            chosen = in_ring([_bytes(unit) for unit in candidates], slots)
            shared = [unit for unit, shares in zip(candidates, chosen, strict=True) if shares]
            slot_of = {unit: ring[number % slots] for number, unit in enumerate(shared)}
            for number, unit in enumerate(level):
                _check(unit)
                if _is_held(unit):
                    continue  # it has a place of its own, or gets one when it is resharded
                slot = slot_of.get(unit) or RingSlot()
                place = RingPlace(unit, slot, scratch[number % len(scratch)], self.lent)
                _reserve(unit, place, shared if unit in slot_of else [unit], level)
                put(unit, place)

    def end_root_backward(self, context: RunContext) -> None:
        """Takes back lent buffers that a failed backward has not given back."""
        inputs = (bucket.grads.input for unit in context.units for bucket in unit.group.buckets)
        jobs = (running.job for running in context.comm.holding)
        used = {id(t) for each in (*inputs, *jobs) if each is not None for t in each.lent}
        self.lent.give_back([tensor for tensor in self.lent.out if id(tensor) not in used])


def set_static_memory(units: Iterable[Unit], static: bool) -> None:
    units = list(units)
    for unit in units:
        if unit.context is not None and unit.context.iteration:
            raise StateError(
                f"unit {unit.label} has run already; call set_static_memory before the first forward"
            )
        if static:
            _check(unit)
    for unit in units:
        mark = _mark_of(unit)
        gathers = any(b.precision.has_own_unsharded or b.offload for b in unit.group.buckets)
        if static and mark is None and gathers:
            unit.options.append(FixedUnit())
        elif not static and mark is not None:
            unit.options.remove(mark)
    contexts = {unit.context for unit in units if unit.context is not None}
    for context in contexts:  # which a reshard() has made
        context.options = [each for each in context.options if not isinstance(each, StaticMemory)]
        if (made := StaticMemory.of_root(context)) is not None:
            first = sum(isinstance(each, LateExtensions) for each in context.options)
            context.options.insert(first, made)


def _mark_of(unit: Any) -> FixedUnit | None:
    return next((option for option in unit.options if isinstance(option, FixedUnit)), None)


def _shares(unit: Unit) -> bool:
    mark = _mark_of(unit)
    return mark is not None and mark.shares(unit)


def _check(unit: Unit) -> None:
    """Raises Parallel3dError if buffers of ``unit`` are allocated by an extension or a custom collective."""
    for bucket in unit.group.buckets:
        settings, start = bucket.settings, f'memory="static": unit {unit.label} has '
        if isinstance(bucket, ExtensionBucket):
            raise Parallel3dError(
                f"{start}parameters with an all-gather extension ({bucket.params[0].name} is the first), "
                "which make their own buffers; leave memory= out, or shard plain parameters"
            )
        if settings.gather_comm is not None or isinstance(settings.reducer, CustomReduce):
            raise Parallel3dError(
                f"{start}a collective that allocates its buffers; leave memory= out, or call "
                "set_custom_all_gather(None) and set_custom_reduce_scatter(None)"
            )


def _slots(context: RunContext) -> int:
    """Returns how many units at one depth of nesting the schedule has unsharded at a time."""
    settings = context.schedule.settings
    ahead = int(settings.forward or settings.backward is Prefetch.BEFORE)
    for unit in context.units:
        named = unit.forward_prefetch, unit.backward_prefetch  # type: ignore[attr-defined]
        ahead = max(ahead, *(len(units) for units in named if units is not None), 0)
    return 1 + (ahead if settings.limit is None else min(ahead, settings.limit))


def _is_held(unit: Unit) -> bool:
    return unit.group.retain is Retain.USER and not unit.group.is_sharded


def _kinds(unit: Unit) -> Sequence[Any]:
    """Returns the properties of a unit that its buffers depend on; if they change, places are made anew."""
    return [(b.dtype, b.device, b.layout.numel, b.versions.number) for b in unit.group.buckets]


def _bytes(unit: Unit) -> int:
    buckets = (b for b in unit.group.buckets if b.precision.has_own_unsharded)
    return sum(b.num_shards * b.layout.numel * b.precision.compute_dtype.itemsize for b in buckets)


def _casts(units: Iterable[Unit]) -> dict[torch.dtype, int]:
    """Returns {reduce dtype: the most elements of zero-copy gradients of any bucket}."""
    most: dict[torch.dtype, int] = {}
    for bucket in (bucket for unit in units for bucket in unit.group.buckets):
        size = bucket.num_shards * sum(bucket.layout.segment_sizes[: bucket.layout.zero_copy])
        dtype = bucket.precision.reduce_dtype
        if any(param.sharded.requires_grad for param in bucket.params):
            most[dtype] = max(size, most.get(dtype, 0))
    return most


def _depths(units: Sequence[Unit]) -> dict[Unit, int]:
    """Returns for each of ``units`` how many others it is inside."""
    around: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for unit in units:
        for module in unit.modules:
            for inner in map(unit_of, module.modules()):
                if inner is not unit and inner in around:
                    around[inner].add(unit)
    return {unit: len(outer) for unit, outer in around.items()}


def _reserve(unit: Unit, place: RingPlace, in_slot: Sequence[Unit], level: Sequence[Unit]) -> None:
    """Makes the buffers of ``place`` large enough for units in its slot and (``level``) its scratch."""
    for index, bucket in enumerate(unit.group.buckets):
        for kind, (size, dtype) in _needs(bucket).items():
            units, slot = (in_slot, place.slot) if kind == "unsharded" else (level, place.scratch)
            alike = [b for each in units for b in each.group.buckets[index : index + 1]]
            others = (needs[kind] for needs in map(_needs, alike) if kind in needs)
            most = max([size, *(other for other, its_dtype in others if its_dtype == dtype)])
            slot.buffer((kind, index), most, dtype, bucket.device)


def _needs(bucket: Bucket) -> dict[str, tuple[int, torch.dtype]]:
    """Returns {kind of buffer: (elements, dtype)} for the buffers of ``bucket``."""
    n, layout, dtype = bucket.num_shards, bucket.layout, bucket.precision.compute_dtype
    needs: dict[str, tuple[int, torch.dtype]] = {}
    if bucket.precision.has_own_unsharded:
        needs["unsharded"] = n * layout.numel, dtype
        if n > 1:
            needs["gathered"] = n * layout.packed, dtype
            if bucket.reads_host:
                needs["fetched"] = layout.numel, bucket.dtype
            if dtype != bucket.dtype and not bucket.gathers_copy:
                needs["cast"] = layout.numel, dtype
    return needs
