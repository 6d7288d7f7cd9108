"""Offload: tensors that a block saves for backward are in the CPU's memory until its backward begins.

A block's forward copies the tensors that autograd saves to a pool, overlapped with the computation; they are
freed when the next block's forward ends. The copy back is issued when the engine issues the all-gather of the
block's parameters for backward. Values and gradients do not change. Tensors of the last block, whose backward
comes at once, stay on the device.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel3d._torch.autograd import functorch_is_active
from parallel3d._torch.saved import same_version_counter, version_of
from parallel3d._util import dry_run
from parallel3d._util.forwards import Forward, as_if
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


# ---- the pool ----

ALIGNMENT = 512
"""Bytes of which every piece has a whole number, so that it begins where any dtype may."""


class PoolPiece:
    """A range of bytes in a :class:`HostPool`, which becomes free again when this object is
    garbage-collected.

    Attributes:
        start, size: first byte in the pool, and number of bytes.
    """

    __slots__ = ("_pool", "size", "start")

    def __init__(self, pool: HostPool, start: int, size: int) -> None:
        self._pool, self.start, self.size = pool, start, size

    def __del__(self) -> None:
        self._pool.give_back(self.start, self.size)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns its first ``numel`` elements of ``dtype`` as a tensor on the pool's memory."""
        words = self._pool.words[self.start // 4 : (self.start + self.size) // 4]
        return words.view(dtype)[:numel]


class HostPool:
    """Memory of ``size`` bytes on ``device``, the CPU, for tensors that are moved off the accelerator;
    allocated with the first piece.

    A piece gets the first gap that is large enough. Every step allocates and frees the same pieces, the last
    one first, so the pool doesn't fragment over time.

    Attributes:
        used, most_used: bytes that are allocated now, and the largest number so far.
    """

    def __init__(self, size: int, device: torch.device, *, pin: bool) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used = self.most_used = 0
        self._device, self._pin = device, pin
        self._free = [(0, self.size)] if self.size else []  # (start, size), in order
        self._words: torch.Tensor | None = None

    @property
    def words(self) -> torch.Tensor:
        """The pool's memory as a float32 tensor, allocated at the first use."""
        if self._words is None:
            with torch.inference_mode(False):
                self._words = torch.empty(
                    self.size // 4, dtype=torch.float32, device=self._device, pin_memory=self._pin
                )
        return self._words

    def take(self, size: int) -> PoolPiece | None:
        """Returns a piece of at least ``size`` bytes; None if there is no room."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        for at, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(start + size, room - size)] if room > size else []
                self.used += size
                self.most_used = max(self.most_used, self.used)
                return PoolPiece(self, start, size)
        return None

    def give_back(self, start: int, size: int) -> None:
        """Marks the bytes of a piece as free, when the piece was garbage-collected."""
        self.used -= size
        insort(self._free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, room in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((begin, room))
        self._free = joined


# ---- copies ----


class _Copies:
    """Copies between the device and the pool on a stream of their own, beside the computation. Works on any
    accelerator with CUDA's stream interface; without a ``device_module`` copies are synchronous.

    - copies (normal priority): those to the pool and those back. One stream for both, so that a piece of the
      pool may be given to another tensor while a copy still reads it: the copy to it comes after. It is not
      the engine's copy_in, where an all-gather would queue behind a block's activations.

    The source of a copy to the pool is held until the compute stream has waited for the copy. The target of a
    copy back is memory of the compute stream's allocator, so ``copies`` waits for the compute stream before
    it writes, and that one for the copy before it reads or frees.
    """

    def __init__(self, device_module: Any = None) -> None:
        self.device = device_module
        self.copies = None if device_module is None else device_module.Stream()

    def issue(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Starts copies for (target, source) pairs; one of the two is in the pool."""
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
        """Returns an event for the end of the copies issued so far; None if they are synchronous."""
        return None if self.copies is None else self.copies.record_event()

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for ``event``, one of ``issued``."""
        if event is not None:
            self.device.current_stream().wait_event(event)


# ---- what is saved ----


class _Moved:
    """The contents of one storage, which were copied to the pool.

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
        """Drops ``source``, as the compute stream has waited for the copy to the pool."""
        if self.source is not None:
            self.torn = self.source._version != self.version
            self.source = None

    def take(self) -> Tensor:
        """Returns the storage's contents on the device, flat; StateError if they were changed."""
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


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Returns ``tensor``, which a block's forward has saved and which has stayed on the device; StateError if
    its version isn't ``version``. Autograd does not check that for tensors that saved-tensor hooks have
    packed."""
    if tensor._version != version:
        raise _changed(tensor)
    return tensor


def _changed(tensor: Tensor) -> StateError:
    return StateError(
        f"a tensor that backward needs, {tuple(tensor.shape)} {tensor.dtype}, has been modified by an "
        "inplace operation since the block's forward saved it; change a copy (x = x + y, not x += y)"
    )


class _Offloaded:
    """The storages that one forward of a block has moved to the pool; the autograd graph keeps it alive."""

    def __init__(self, counts: OffloadCounts, copies: _Copies) -> None:
        self._counts, self._copies = counts, copies
        self.moved: list[weakref.ref[_Moved]] = []
        self.event: Any = None

    def fetch(self, wanted: _Moved | None = None) -> None:
        """Starts the copies back to the device of all that are in the pool only, and of ``wanted``."""
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

    def restored(self, moved: _Moved, dtype: torch.dtype, *place: Any) -> Tensor:
        """Returns a saved tensor that was moved, on the device again. ``place``: its shape, strides and
        storage offset."""
        if moved.source is None and moved.fetched is None:
            self.fetch(moved)
        with torch.no_grad():
            return moved.take().view(dtype).as_strided(*place)


class Offload:
    """Moves the tensors that one model's blocks save: it has the pool on the CPU, and issues the copies.

    Attributes:
        settings: see ``ActivationOffload``.
        counts: see ``OffloadCounts``.
    """

    def __init__(self, settings: ActivationOffload) -> None:
        self.settings = settings
        self.counts = OffloadCounts()
        self.pool: HostPool | None = None
        self.copies: _Copies | None = None
        # (event, what is copied out until then), the oldest first.
        self._leaving: deque[tuple[Any, list[_Moved]]] = deque()
        self._known = weakref.WeakValueDictionary[tuple[int, int], _Moved]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        return self  # a copy of the model uses the same pool

    def __reduce__(self) -> Any:
        return Offload, (self.settings,)

    def _prepare(self, device: torch.device) -> tuple[HostPool, _Copies]:
        if self.pool is None or self.copies is None:
            played, real = dry_run.played, device.type != "cpu"
            module = torch.get_device_module(device.type) if real else None
            self.copies = _Copies(played or module)
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

        def pack(x: Tensor) -> Callable[[], Tensor]:
            with torch.no_grad():
                found = self._move(x, moved) if self._moves(x, own) else None
            if found is None:
                # Detached, as an output's own graph would hold it.
                return partial(_unchanged, x.detach(), x._version)
            if not made:
                assert self.copies is not None
                made.append(_Offloaded(self.counts, self.copies))
                record(made[0])
            made[0].moved.append(weakref.ref(found))
            place = x.shape, x.stride(), x.storage_offset()
            return partial(made[0].restored, found, x.dtype, *place)

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
        """Whether ``x`` is to be moved to the pool: a plain tensor that is most of its storage, which is
        large and not in ``own``."""
        if hasattr(x, "__tensor_flatten__") or x.layout is not torch.strided or x.is_meta:
            return False
        if x.is_conj() or x.is_neg() or x.is_inference() or not x.numel():
            return False
        size, whole = x.numel() * x.element_size(), x.untyped_storage().nbytes()
        if whole < self.settings.min_kib * 1024 or whole > _WHOLE * size:
            return False
        return whole % x.element_size() == 0 and id(x.untyped_storage()) not in own

    def _move(self, x: Tensor, moved: list[_Moved]) -> _Moved | None:
        """Starts the copy of the storage of ``x`` to the pool, unless it is there already, and returns it;
        None if the pool is full. Adds a new one to ``moved``."""
        storage = x.untyped_storage()
        key = id(storage), x._version
        known = self._known.get(key)
        if known and known.origin() is storage and same_version_counter(x, known.counter):
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
        """Makes the compute stream wait for copies to the pool, oldest first, but not for the last
        ``all_but``, and frees their sources."""
        while len(self._leaving) > all_but:
            event, moved = self._leaving.popleft()
            assert self.copies is not None
            self.copies.wait(event)
            for each in moved:
                each.release()


_WHOLE = 4  # a view of less than a fourth of its storage stays: who holds the rest keeps the memory anyway


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


# ---- blocks ----


class BlockOffload(Option):
    """Moves the tensors that one block saves. As an option of the block's unit it is called by the engine
    when the unit is gathered for backward, and copies them back.

    Attributes:
        shared: the pool and the copies that all blocks share.
        stays: whether the block's tensors stay on the device, as its backward comes at once.
        records: weak references to the records of its forwards; the latest is last.
    """

    def __init__(self, shared: Offload, stays: bool) -> None:
        self.shared, self.stays = shared, stays
        self.records: list[weakref.ref[_Offloaded]] = []

    def __reduce__(self) -> Any:  # for copies of the block too
        return BlockOffload, (self.shared, self.stays)

    def run(self, inner: Forward, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls the block's forward ``inner``; the tensors that it saves for backward are moved."""
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


def _memory_of(block: nn.Module) -> list[Any]:
    """Returns the storages of the parameters that the block's forward computes with, and of its buffers."""
    tensors = [*block.parameters(), *block.buffers()]
    for unit in units_of(block, recurse=True):
        for bucket in unit.group.buckets:
            tensors += bucket.precision.compute_params
    plain = (getattr(each, "_local_tensor", each) for each in tensors)
    return [t.untyped_storage() for t in plain if not hasattr(t, "__tensor_flatten__")]


def moved_to_host(inner: Forward) -> Forward:
    """Wraps a block's forward: the tensors that it saves for backward are moved to the CPU's memory."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        offload = vars(self).get(ATTRIBUTE)
        if offload is None or not torch.is_grad_enabled() or functorch_is_active():
            return inner(self, *args, **kwargs)
        return offload.run(inner, self, args, kwargs)

    return as_if(forward, inner)


def attach(blocks: Sequence[nn.Module], settings: ActivationOffload) -> None:
    """Turns the offload on for ``blocks``: units whose forwards ``moved_to_host`` has wrapped."""
    shared = Offload(settings)
    for block in blocks:
        found = BlockOffload(shared, stays=block is blocks[-1])
        setattr(block, ATTRIBUTE, found)
        unit = unit_of(block)
        assert unit is not None
        unit.options.append(found)


def counts_of(model: nn.Module) -> OffloadCounts | None:
    """Returns the :class:`OffloadCounts` of ``model``; None if it doesn't offload activations."""
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
