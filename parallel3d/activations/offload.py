"""Offload: tensors that a block saves for backward are in the CPU's memory until its backward begins.

A block's forward copies the tensors that autograd saves to a pool, overlapped with the computation; they are
freed when the next block's forward ends. The copy back is issued when the engine issues the all-gather of the
block's parameters for backward. Values and gradients do not change. Tensors of the last block, whose backward
comes at once, stay on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel3d._torch.autograd import functorch_is_active, same_version_counter, version_of
from parallel3d._util import dry_run
from parallel3d._util.forwards import Forward, as_if
from parallel3d.activations.pool import HostPool, PoolPiece
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import Option, unit_of, units_of

ATTRIBUTE = "_parallel3d_offload"  # of a block: its ``BlockOffload``


@dataclass(frozen=True)
class ActivationOffload:
    """Settings of ``activation_checkpointing="offload"``.

    Attributes:
        pool_gib: size of the pool in the CPU's memory, GiB per rank; it is pinned if there is an accelerator,
            and allocated in the first forward. Tensors that don't fit stay on the device, see
            ``offload_counts``.
        min_kib: tensors in a storage of less than so many KiB stay on the device.

    Raises:
        Parallel3dError: a size is negative.
    """

    pool_gib: float = 16.0
    min_kib: float = 256.0

    def __post_init__(self) -> None:
        for name in ("pool_gib", "min_kib"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise Parallel3dError(
                    f"ActivationOffload: {name} is {value!r}; it must be 0 or more"
                )


@dataclass
class OffloadCounts:
    """Bytes that offload has moved on this rank since the model was made parallel.

    Attributes:
        copied_out: bytes copied to the CPU.
        copied_back: bytes copied back.
        no_room: bytes that stayed on the device because the pool was full.
        pool, pool_used: size of the pool, and the largest part of it that was used.
    """

    copied_out: int = 0
    copied_back: int = 0
    no_room: int = 0
    pool: int = 0
    pool_used: int = 0


# ---- copies ----


class _Copies:
    """Copies beside the computation, on any accelerator with CUDA's stream interface; without a
    ``device_module`` a copy has ended when its call returns.

    - copies (normal priority): those to the pool and those back. One stream for both, so that a piece of the
      pool may be given to another tensor while a copy still reads it: the copy to it comes after. It is not
      the engine's copy_in, where an all-gather would queue behind a block's activations.

    What is copied out is held until compute has waited for the copy. What is copied back is memory of
    compute's pool, so ``copies`` waits for compute before it writes, and compute for it before it reads or
    frees.
    """

    def __init__(self, device_module: Any = None) -> None:
        self.device = device_module
        self.copies = None if device_module is None else device_module.Stream()

    def issue(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Issues copies, (to, from), one of the two in the pool."""
        if self.copies is None:
            for target, source in pairs:
                target.copy_(source)
            return
        # Compute has written what is copied out; in memory that is copied back to its kernels may still run.
        self.copies.wait_stream(self.device.current_stream())
        with self.device.stream(self.copies):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def issued(self) -> Any:
        """Returns the event of the copies so far."""
        return None if self.copies is None else self.copies.record_event()

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after ``event``."""
        if event is not None:
            self.device.current_stream().wait_event(event)


# ---- what is saved ----


class _Moved:
    """The memory of one storage, in the pool.

    Attributes:
        piece: its part of the pool.
        origin: weak reference to the storage; its memory is copied once for all tensors in it.
        source: a tensor on the storage, until the compute stream has waited for the copy to the pool.
        version: version of ``source`` when the copy was issued.
        counter: a tensor with the version counter of ``source`` and without memory.
        torn: whether the program has written to the storage before the copy ended.
        fetched: the copy on the device.
        event: the event of the copy back.
    """

    __slots__ = (
        *("__weakref__", "copies", "counter", "device", "dtype", "event", "fetched", "numel"),
        *("origin", "piece", "source", "torn", "version"),
    )

    def __init__(self, x: Tensor, piece: PoolPiece, copies: _Copies) -> None:
        storage = x.untyped_storage()
        self.piece, self.copies = piece, copies
        self.dtype, self.device = x.dtype, x.device
        self.numel = storage.nbytes() // x.element_size()
        self.origin = weakref.ref(storage)
        self.source: Tensor | None = x.as_strided((self.numel,), (1,), 0)
        self.version, self.counter = x._version, version_of(x)
        self.torn = False
        self.fetched: Tensor | None = None
        self.event: Any = None
        copies.issue([(piece.tensor(self.numel, self.dtype), self.source)])

    def release(self) -> None:
        """Compute has waited for the copy to the pool: the source may be freed."""
        if self.source is not None:
            self.torn = self.source._version != self.version
            self.source = None

    def take(self) -> Tensor:
        """Returns the memory on the device, flat; ``fetched`` or ``source`` is there."""
        memory = self.source if self.source is not None else self.fetched
        assert memory is not None
        if self.torn or (memory is self.source and memory._version != self.version):
            raise _changed(memory)
        if memory is self.fetched:
            self.copies.wait(self.event)
        return memory

    def __del__(self) -> None:
        if self.fetched is not None:  # and perhaps nobody has waited for it
            self.copies.wait(self.event)


class _Handle:
    """What autograd keeps of a tensor that was moved."""

    __slots__ = ("_as", "dtype", "moved", "record")

    def __init__(self, x: Tensor, moved: _Moved, record: _Offloaded) -> None:
        self.moved, self.record, self.dtype = moved, record, x.dtype
        self._as = x.shape, x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        """Returns the tensor, on the device."""
        if self.moved.source is None and self.moved.fetched is None:
            self.record.fetch(self.moved)
        with torch.no_grad():
            return self.moved.take().view(self.dtype).as_strided(*self._as)


class _Stays:
    """Holds a saved tensor that stays on the device, and its version. Autograd does not check the version of
    tensors that saved-tensor hooks have packed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, x: Tensor) -> None:
        self._tensor = x.detach()  # an output's own graph would hold it
        self._version = x._version

    def tensor(self) -> Tensor:
        """Returns the tensor."""
        if self._tensor._version != self._version:
            raise _changed(self._tensor)
        return self._tensor


def _changed(tensor: Tensor) -> StateError:
    return StateError(
        f"a tensor that backward needs, {tuple(tensor.shape)} {tensor.dtype}, has been modified by an "
        "inplace operation since the block's forward saved it; change a copy (x = x + y, not x += y)"
    )


class _Offloaded:
    """What one forward of a block has moved; the graph holds it."""

    def __init__(self, counts: OffloadCounts, copies: _Copies) -> None:
        self._counts, self._copies = counts, copies
        self.moved: list[weakref.ref[_Moved]] = []
        self.event: Any = None

    def fetch(self, wanted: _Moved | None = None) -> None:
        """Issues the copies back of what is in the pool alone, ``wanted`` among it."""
        alive = dict.fromkeys(m for ref in self.moved if (m := ref()) is not None)
        away = [m for m in alive if m.source is None and m.fetched is None]
        if wanted is not None and wanted not in away:
            away.append(wanted)  # another forward has moved it
        if not away:
            return
        pairs = []
        with torch.no_grad(), torch.inference_mode(False):
            for moved in away:
                target = torch.empty(moved.numel, dtype=moved.dtype, device=moved.device)
                pairs.append((target, moved.piece.tensor(moved.numel, moved.dtype)))
                self._counts.copied_back += target.numel() * target.element_size()
            self._copies.issue(pairs)
            event = self._copies.issued()
        for moved, (target, _) in zip(away, pairs, strict=True):
            moved.event, moved.fetched = event, target


class Offload:
    """The pool and the copies of one model.

    Attributes:
        settings: see ``ActivationOffload``.
        counts: see ``OffloadCounts``.
    """

    def __init__(self, settings: ActivationOffload) -> None:
        self.settings = settings
        self.counts = OffloadCounts()
        self.pool: HostPool | None = None
        self.copies: _Copies | None = None
        self._leaving: deque[tuple[Any, list[_Moved]]] = (
            deque()
        )  # (event, what is copied out until then)
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Moved] = (
            weakref.WeakValueDictionary()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        return self  # a copy of the model uses the same pool

    def __reduce__(self) -> Any:
        return Offload, (self.settings,)

    def _prepare(self, device: torch.device) -> tuple[HostPool, _Copies]:
        if self.pool is None or self.copies is None:
            played, real = dry_run.accelerator(), device.type != "cpu"
            self.copies = _Copies(
                played or (torch.get_device_module(device.type) if real else None)
            )
            host = torch.device("cpu") if played is None else dry_run.HOST_DEVICE
            size = int(self.settings.pool_gib * 2**30)
            self.pool = HostPool(size, host, pin=real and played is None)
            self.counts.pool = self.pool.size
        return self.pool, self.copies

    @contextmanager
    def saving(self, own: set[int], record: Callable[[_Offloaded], None]) -> Iterator[None]:
        """A context for the forward of a block: tensors that autograd saves are moved to the host's memory.

        Args:
            own: ids of the storages that are not moved: those of parameters and buffers.
            record: called with the record of the moved tensors when the first one is moved.
        """
        moved: list[_Moved] = []
        made: list[_Offloaded] = []

        def pack(x: Tensor) -> _Handle | _Stays:
            if not self._moves(x, own):
                return _Stays(x)
            with torch.no_grad():
                found = self._move(x, moved)
            if found is None:
                return _Stays(x)
            if not made:
                assert self.copies is not None
                made.append(_Offloaded(self.counts, self.copies))
                record(made[0])
            made[0].moved.append(weakref.ref(found))
            return _Handle(x, found, made[0])

        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        except BaseException:
            self._leave(moved)
            self.settle()
            raise
        self._leave(moved)
        self.settle(all_but=1)

    def _moves(self, x: Tensor, own: set[int]) -> bool:
        """Whether ``x`` is to be moved: a plain tensor, in a large storage of which it is no small part."""
        if hasattr(x, "__tensor_flatten__") or x.layout is not torch.strided or x.is_meta:
            return False
        if x.is_conj() or x.is_neg() or x.is_inference() or not x.numel():
            return False
        size, whole = x.numel() * x.element_size(), x.untyped_storage().nbytes()
        if whole < self.settings.min_kib * 1024 or whole > _WHOLE * size:
            return False
        return whole % x.element_size() == 0 and id(x.untyped_storage()) not in own

    def _move(self, x: Tensor, moved: list[_Moved]) -> _Moved | None:
        """Issues the copy of the storage of ``x``, unless it is in the pool already; None: no room."""
        storage = x.untyped_storage()
        key = id(storage), x._version
        known = self._known.get(key)
        if (
            known is not None
            and known.origin() is storage
            and same_version_counter(x, known.counter)
        ):
            return known
        pool, copies = self._prepare(x.device)
        piece = pool.take(storage.nbytes())
        self.counts.pool_used = pool.most_used
        if piece is None:
            self.counts.no_room += storage.nbytes()
            return None
        found = self._known[key] = _Moved(x.detach(), piece, copies)
        self.counts.copied_out += storage.nbytes()
        moved.append(found)
        return found

    def _leave(self, moved: list[_Moved]) -> None:
        if moved:
            assert self.copies is not None
            self._leaving.append((self.copies.issued(), moved))

    def settle(self, *, all_but: int = 0) -> None:
        """Lets compute wait for copies to the pool, the oldest first, and frees what they have read."""
        while len(self._leaving) > all_but:
            event, moved = self._leaving.popleft()
            assert self.copies is not None
            self.copies.wait(event)
            for each in moved:
                each.release()


_WHOLE = 4  # a view of less than a fourth of its storage stays: who holds the rest keeps the memory anyway


def _unpack(packed: _Handle | _Stays) -> Tensor:
    return packed.tensor()


# ---- blocks ----


class BlockOffload(Option):
    """Moves the tensors that one block saves. An option of the block's unit: see ``gather_in_backward``.

    Attributes:
        shared: the pool and the copies that all blocks share.
        stays: whether the block's tensors stay on the device, as its backward comes at once.
        records: weak references to the records of its forwards; the latest is last.
    """

    def __init__(self, shared: Offload, *, stays: bool) -> None:
        self.shared, self.stays = shared, stays
        self.records: list[weakref.ref[_Offloaded]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockOffload:
        return BlockOffload(self.shared, stays=self.stays)

    def __reduce__(self) -> Any:
        return _restored, (self.shared, self.stays)

    def run(self, inner: Forward, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns ``inner(block, ...)``, with what it saves moved."""
        if self.stays:
            output = inner(block, *args, **kwargs)
            self.shared.settle()
            return output
        kept = _memory_of(block)  # held, so that their ids are theirs
        with self.shared.saving(set(map(id, kept)), self._note):
            return inner(block, *args, **kwargs)

    def _note(self, record: _Offloaded) -> None:
        self.records = [ref for ref in self.records if ref() is not None]
        self.records.append(weakref.ref(record))

    def _fetch(self) -> None:
        self.shared.settle()
        for ref in reversed(self.records):
            record = ref()
            if record is not None:  # later ones have had their backward, and are gone
                record.fetch()
                return

    def gather_in_backward(self, unit: Any) -> None:
        self._fetch()

    def begin_backward(self, unit: Any) -> None:
        self._fetch()  # if nothing has asked for the unit before

    def abandon(self, unit: Any) -> None:
        self.shared.settle()


def _restored(shared: Offload, stays: bool) -> BlockOffload:
    return BlockOffload(shared, stays=stays)


def _memory_of(block: nn.Module) -> list[Any]:
    """The storages of the parameters that the block's forward computes with, and of its buffers."""
    tensors = [*block.parameters(), *block.buffers()]
    for unit in units_of(block, recurse=True):
        for bucket in unit.group.buckets:
            tensors += bucket.precision.compute_params
    plain = (getattr(each, "_local_tensor", each) for each in tensors)
    return [t.untyped_storage() for t in plain if not hasattr(t, "__tensor_flatten__")]


def moved_to_host(inner: Forward) -> Forward:
    """The wrapper of a block's forward: what it saves is moved."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        offload = vars(self).get(ATTRIBUTE)
        if offload is None or not torch.is_grad_enabled() or functorch_is_active():
            return inner(self, *args, **kwargs)
        return offload.run(inner, self, args, kwargs)

    return as_if(forward, inner)


def attach(blocks: Sequence[nn.Module], settings: ActivationOffload) -> None:
    """Moves what ``blocks`` save from now on; their forwards are wrapped, and each is a unit."""
    shared = Offload(settings)
    for block in blocks:
        found = BlockOffload(shared, stays=block is blocks[-1])
        setattr(block, ATTRIBUTE, found)
        unit = unit_of(block)
        assert unit is not None
        unit.options.append(found)


def counts_of(model: nn.Module) -> OffloadCounts | None:
    """Returns the counts of ``model``; None: it offloads nothing."""
    blocks = (vars(module).get(ATTRIBUTE) for module in model.modules())
    found = next(filter(None, blocks), None)
    return None if found is None else found.shared.counts


def offload_counts(model: nn.Module) -> OffloadCounts:
    """Returns what offload has moved in ``model``, on this rank, so far.

    Raises:
        StateError: the model was not made with ``activation_checkpointing="offload"``.
    """
    counts = counts_of(model)
    if counts is None:
        raise StateError(
            f"offload_counts: {type(model).__name__} moves no activations; it needs "
            'parallelize(..., activation_checkpointing="offload")'
        )
    return counts
