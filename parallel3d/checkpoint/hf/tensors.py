"""hf_tensors and hf_shards: a parallel model's weights in Hugging Face's form, for an inference engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.groups import all_gather_single
from parallel3d._util.arguments import is_positive, without_gloo
from parallel3d.checkpoint.hf import conversion as hf
from parallel3d.checkpoint.hf.layout import Patch
from parallel3d.checkpoint.pieces import Boxed
from parallel3d.checkpoint.ranks import Ranks, check_same, ranks_of
from parallel3d.checkpoint.state import bring_to_rest
from parallel3d.errors import CheckpointError, Parallel3dError, PeerFailureError, WrongTypeError
from parallel3d.guards.session import current_session, is_of_communication
from parallel3d.mesh.agreement import name_ranks

_ALIGNED = 16  # bytes; of the largest dtype
_MIN_SLOT = 4 << 10  # bytes that a rank sends at once, at least
_MAX_CPU_SLOT = 4 << 20
"""And at most on a CPU, where more takes twice as long: pages and caches (measured)."""
_MIN_BLOCKS = 1 << 20  # bytes of a tensor that is gathered in place; smaller ones are sent together

Memories = dict[torch.device, Tensor | None]
"""Memory for messages, by device; all batches use the same."""


class TensorMeta(NamedTuple):
    """A tensor that ``hf_tensors`` yields: its name, dtype and whole shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def hf_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    to: Literal["all"] | int = "all",
    buffer_mib: float = 256,
    names: hf.Names = None,
) -> HFTensors:
    """Returns an iterable of ``model``'s weights in Hugging Face's form: (name, whole tensor), one after
    another, which all ranks assemble together. They are what ``save_hf`` writes, bit for bit.

    Every rank must call this, and iterate to the end each time that one does. It may be iterated again after
    the next step, and is a ``WeightSource`` as vLLM's trainer engines take one::

        for name, tensor in p3d.checkpoint.hf_tensors(model, dtype=torch.bfloat16, to=0):
            send(name, tensor)  # on rank 0; the loop of the others has no iteration

    Each tensor is new memory on the device of the model's parameters, and the caller's own. Beside its shards
    a rank that receives has at most ``buffer_mib``, or the largest tensor and half of ``buffer_mib``; one
    that only sends has less than half of ``buffer_mib``. What the loop keeps is not counted.

    Args:
        model: plain or parallel, at rest, with values. LoRA's adapters are not merged: they are tensors of
            their own, as in ``save_hf``.
        dtype: cast floating-point tensors to it, before they are sent; None: keep their dtypes.
        to: ``"all"``: every rank gets every tensor; or the one rank, of the default group, that gets them.
            The others take part in the same loop, which ends for them without an iteration.
        buffer_mib: small tensors are sent together, up to half of this; the rest is for messages. In MiB. A
            larger tensor is sent alone: whoever receives it has it whole.
        names: for models that are not transformers': as in ``save_hf``.

    Raises:
        WrongTypeError: if ``model`` is not a module.
        CheckpointError: on every rank, if an argument is invalid or differs between ranks, if the model is on
            meta, or, in the loop, if it is changed before the last tensor has been sent.
        PeerFailureError: in the loop, if another rank failed, or left its loop, before the last tensor was
            sent. Where all leave at the same tensor, none is raised.
    """
    _check_module(model, "hf_tensors")
    ranks = ranks_of(model, "hf_tensors")

    def check() -> dict[str, object]:
        hf.check_dtype(dtype, "hf_tensors")
        if not is_positive(buffer_mib):
            raise CheckpointError(f"hf_tensors: buffer_mib is {buffer_mib!r}; give MiB, above 0")
        number = isinstance(to, int) and not isinstance(to, bool)
        if not (isinstance(to, str) and to == "all") and not (number and to in ranks.ranks):
            raise CheckpointError(
                f"hf_tensors: to is {to!r}; give 'all', or the number of a rank that holds a part of the "
                f"model: {name_ranks(ranks.ranks)}"
            )
        bring_to_rest(model, "hf_tensors", meta_ok=True)
        return {"dtype": dtype, "to": to, "buffer_mib": buffer_mib}

    check_same("hf_tensors", ranks.all(check))
    export = hf.plan_export(model, ranks, names, dtype, "hf_tensors")
    receiver = None if to == "all" else ranks.ranks.index(to)
    return HFTensors(model, export, receiver, int(buffer_mib * 2**20))


def hf_shards(
    model: nn.Module, *, dtype: torch.dtype | None = None, names: hf.Names = None
) -> Iterator[tuple[str, Boxed, Tensor]]:
    """Returns an iterator of what this rank holds of the tensors of ``hf_tensors``: (name, box, values).

    ``box.offsets`` and ``box.sizes`` say, by dim, which part of the whole tensor the values are, so
    ``whole[box.slices] = values`` on all ranks makes it. A tensor may come in several parts, and a part may
    be held by several ranks (replicas): boxes of two ranks are the same or have nothing in common. There is
    no communication; each rank may go through it alone, for an engine that pulls what it needs.

    The values are views of the model's shards, on their device, as long as ``dtype`` makes no copy.

    Args:
        model, dtype, names: as in ``hf_tensors``.

    Raises:
        WrongTypeError: if ``model`` is not a module.
        CheckpointError: if ``dtype`` is not a floating-point one, or the model is on meta.
        StateError: if the model is not at rest.
    """
    _check_module(model, "hf_shards")
    hf.check_dtype(dtype, "hf_shards")
    bring_to_rest(model, "hf_shards", meta_ok=True)
    tensors, outputs = hf.outputs_of(model, names, dtype, "hf_shards")
    held = hf.HeldParts(tensors)
    return (
        (output.name, box, held.of(part).to(output.dtype))
        for output in outputs
        for patch in held.parts(output)
        for part, box in _boxes_in(patch)
    )


def _check_module(model: object, call: str) -> None:
    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"{call}: model is {type(model).__name__}; give an nn.Module")


def _boxes_in(patch: Patch) -> Iterator[tuple[Patch, Boxed]]:
    """Divides a patch into parts without gaps between indices; yields each with its box in the tensor."""
    for dim, run in enumerate(patch.runs):
        if run.step != 1 and run.size > 1:
            for index in range(run.size):
                yield from _boxes_in(patch.part(dim, index, 1))
            return
    yield patch, Boxed(tuple(run.start for run in patch.runs), patch.counts)


class HFTensors:
    """The iterable that ``hf_tensors`` returns."""

    def __init__(
        self, model: nn.Module, export: hf.Export, receiver: int | None, buffer: int
    ) -> None:
        self._model = model
        self._export = export
        self._receiver = receiver  # number among the Ranks; None: all
        self._half = max(1, buffer // 2)  # bytes for tensors, and for messages
        self._described = self._describe()

    def metadata(self) -> list[TensorMeta]:
        """Returns name, dtype and shape of each tensor, in the order of iteration, without communication."""
        return [TensorMeta(out.name, out.dtype, out.layout.shape) for out in self._export.outputs]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        ranks = ranks_of(self._model, "hf_tensors")
        held = ranks.on_each(self._hold)
        changes = _Changes(self._export.tensors)
        batches = deque(self._batches())
        memories: Memories = {}
        values: deque[tuple[str, Tensor]] = deque()

        def prepare() -> Assembly:
            """Allocates, on every rank and before anything is sent, what the next batch needs."""
            changes.check()
            outputs, receiver = batches[0], self._receiver
            receivers = None if receiver is None else [receiver] * len(outputs)
            device, half = self._device(outputs[0]), self._half
            return Assembly(self._export, outputs, receivers, held, ranks, device, memories, half)

        try:
            while batches:
                batch = ranks.on_each(prepare)
                batch.exchange()
                ranks.all(batch.finish)
                names = [output.name for output in batches.popleft()]
                values.extend((names[number], value) for number, value in batch.values.items())
                del batch  # each tensor lives as long as the caller keeps it
                while values:
                    yield values.popleft()
        except Parallel3dError:  # on all ranks
            raise
        except BaseException as error:
            if batches:
                ranks.give_up()  # wakes those that wait for this rank
            if not is_of_communication(error) or current_session() is not None:
                raise  # the caller left the loop, or guards.watch will say which rank failed first
            raise PeerFailureError(
                "hf_tensors: another rank failed, or left the loop before the last tensor was sent "
                f"({without_gloo(str(error))}); all ranks must iterate to the end"
            ) from error
        finally:
            changes.end()

    def _hold(self) -> hf.HeldParts:
        bring_to_rest(self._model, "hf_tensors", meta_ok=True)
        now, before = self._describe(), self._described
        if now != before:
            changed = next((name for name in now if now[name] != before.get(name)), None)
            raise CheckpointError(
                f"hf_tensors: {changed or next(iter(before.keys() - now.keys()))!r} was replaced since the "
                "call of hf_tensors; call it again"
            )
        return hf.HeldParts(self._export.tensors)

    def _describe(self) -> dict[str, object]:
        """Returns name -> names, id, shape and dtype of the model's tensors, to notice later changes."""
        return {
            entry.name: (
                entry.names,
                id(entry.tensor),  # not freed meanwhile: the export keeps it
                tuple(entry.tensor.shape),
                entry.tensor.dtype,
                entry.tensor.is_meta,
            )
            for entry in hf.entries_of(self._model)
        }

    def _batches(self) -> Iterator[list[hf.OutTensor]]:
        """Yields the tensors to send together: on one device, at most half of the buffer or one tensor."""
        batch: list[hf.OutTensor] = []
        size = 0
        for output in self._export.outputs:
            other = batch and self._device(output) != self._device(batch[0])
            if batch and (other or size + output.nbytes > self._half):
                yield batch
                batch, size = [], 0
            batch.append(output)
            size += output.nbytes
        yield batch

    def _device(self, output: hf.OutTensor) -> torch.device:
        patches = output.layout.patches
        sources = self._export.tensors
        tensor = sources[patches[0].source] if patches else next(iter(sources.values()))
        return _local(tensor).device


class _Changes:
    """Notices that one of ``tensors`` is written to, by an optimizer's step or by an in-place operation."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._versions = self._count()
        self._stepped: str | None = None
        # Fused and foreach optimizers write to the shards of DTensors without a new version.
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        for param in params:
            self._stepped = self._stepped or self._names.get(id(param))

    def _count(self) -> dict[str, int]:
        """Returns each tensor's version counter, which grows when it is written to."""
        return {
            name: tensor._version + _local(tensor)._version
            for name, tensor in self._tensors.items()
            if not tensor.is_inference() and not _local(tensor).is_inference()
        }

    def check(self) -> None:
        """Raises CheckpointError if a tensor was changed since this object was made."""
        now = self._count()
        changed = self._stepped or next((n for n in now if now[n] != self._versions[n]), None)
        if changed is not None:
            raise CheckpointError(
                f"hf_tensors: {changed!r} was changed before the last tensor was sent; iterate to the end "
                "before the next optimizer step"
            )

    def end(self) -> None:
        self._hook.remove()


def _local(tensor: Tensor) -> Tensor:
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


class _Message(NamedTuple):
    """A part of a tensor that a rank which holds it sends to ``receiver``; None: to all."""

    number: int  # of the tensor in the batch
    patch: Patch
    receiver: int | None


class Assembly:
    """A batch of tensors, assembled from the parts that ranks hold; they send them in rounds of one
    collective each.

    Args:
        receivers: for each of ``outputs`` the rank (its number among ``ranks``) that gets it; None: all get
            all of them.
        device: of the assembled tensors and of the messages.
        half: bytes that the messages of one round may take, half of the buffer.

    Attributes:
        values: the tensors that this rank receives, by number in ``outputs``; complete after ``exchange``.
    """

    def __init__(
        self,
        export: hf.Export,
        outputs: Sequence[hf.OutTensor],
        receivers: Sequence[int] | None,
        held: hf.HeldParts,
        ranks: Ranks,
        device: torch.device,
        memories: Memories,
        half: int,
    ) -> None:
        self._held = held
        self._ranks = ranks
        self._receivers = receivers
        self._outputs = outputs
        self._problem: Exception | None = None
        self._here: list[tuple[int, Patch]] = []  # copied without a message
        self._rounds: list[list[list[_Message]]] = []  # by round and sender
        # An all-gather fills a slot of each rank, and gloo's, on a CPU, a copy of them.
        on_cpu = device.type == "cpu"
        slots = 4 if receivers is not None else ranks.size * (2 if on_cpu else 1) + 1
        most = min(half // slots, _MAX_CPU_SLOT) if on_cpu else half // slots
        slot = max(_MIN_SLOT, most // _ALIGNED * _ALIGNED)
        self._step = slot if on_cpu else None  # bytes that are gathered in place at once; None: all
        self._in_place: list[tuple[int, Tensor]] = []  # with this rank's block
        sent, received = self._schedule(export, slot, half)
        empty = partial(torch.empty, device=device)
        self._group = _group_of(ranks, device) if self._rounds or self._in_place else None
        memory = memories.get(device)
        if memory is None or memory.numel() < sent + received:
            memory = memories[device] = None  # freed before there is more
            memory = memories[device] = empty(sent + received, dtype=torch.uint8)
        self._sent, self._received = memory[:sent], memory[sent : sent + received]
        self.values = {
            number: empty(out.layout.shape, dtype=out.dtype)
            for number, out in enumerate(outputs)
            if receivers is None or receivers[number] == ranks.rank
        }

    def _schedule(self, export: hf.Export, slot: int, half: int) -> tuple[int, int]:
        """Assigns each part a sender and a round, in which a rank sends at most ``slot`` bytes; returns the
        most bytes that this rank sends in a round, and the most that it receives."""
        ranks, me = self._ranks, self._ranks.rank
        # By rank as a sender and as a receiver: its last round, and the bytes in it.
        out, into = ([(0, 0)] * ranks.size for _ in range(2))
        most_out, most_in = 0, 0
        for number, output in enumerate(self._outputs):
            # A cast of this rank's block takes no more than messages do.
            fits = _MIN_BLOCKS <= output.nbytes <= half * ranks.size
            if self._receivers is None and fits:
                parts = list(export.parts(output, output.nbytes))
                if _are_blocks(parts, output, ranks.size):
                    self._in_place.append((number, self._held.of(parts[me][0])))
                    continue
            receiver = None if self._receivers is None else self._receivers[number]
            needed_by = range(ranks.size) if receiver is None else [receiver]
            for patch, holders in export.parts(output, slot // 4):
                if all(rank in holders for rank in needed_by):
                    if me in needed_by:
                        self._here.append((number, patch))
                    continue
                message = _Message(number, patch, receiver)
                size = self._room(message)
                sender = min(holders, key=out.__getitem__)
                turn, sent = out[sender]
                if sent + size > slot:
                    turn, sent = turn + 1, 0
                if receiver is not None:
                    last, received = into[receiver]
                    if received + size > max(slot, half // 2):
                        last, received = last + 1, 0
                    if last < turn:
                        last, received = turn, 0
                    elif last > turn:
                        turn, sent = last, 0
                    into[receiver] = last, received + size
                    most_in = max(most_in, received + size) if receiver == me else most_in
                out[sender] = turn, sent + size
                if receiver is None or sender == me:
                    most_out = max(most_out, sent + size)
                while turn >= len(self._rounds):
                    self._rounds.append([[] for _ in range(ranks.size)])
                self._rounds[turn][sender].append(message)
        return most_out, most_out * ranks.size if self._receivers is None else most_in

    def _room(self, message: _Message) -> int:
        """Returns the bytes that a message takes in a round, rounded up to the alignment."""
        nbytes = prod(message.patch.counts) * self._outputs[message.number].dtype.itemsize
        return -(-nbytes // _ALIGNED) * _ALIGNED

    @torch.no_grad()
    def exchange(self) -> None:
        """Assembles the tensors; all ranks must call it. An error of this rank is not raised here but stored
        for ``finish``, because the other ranks need its messages."""
        self.guarded(self._copy_here)
        for number, own in self._in_place:
            self._gather_in_place(self.values[number], own.reshape(-1))
        me = self._ranks.rank
        for by_sender in self._rounds:
            if self._receivers is None:
                self.guarded(partial(self._pack, by_sender[me]))
                all_gather_single(self._received, self._sent, group=self._group)
                slots = self._received.view(self._ranks.size, -1)
                for slot, messages in zip(slots, by_sender, strict=True):
                    self.guarded(partial(self._unpack, slot, messages))
                continue
            # What goes to one rank, and what comes from one, lies together.
            sends = [[m for m in by_sender[me] if m.receiver == to] for to in range(len(by_sender))]
            comes = [[m for m in messages if m.receiver == me] for messages in by_sender]
            self.guarded(partial(self._pack, list(chain.from_iterable(sends))))
            out, into = ([sum(map(self._room, each)) for each in of] for of in (sends, comes))
            received, sent = self._received[: sum(into)], self._sent[: sum(out)]
            dist.all_to_all_single(received, sent, into, out, group=self._group)
            self.guarded(partial(self._unpack, received, list(chain.from_iterable(comes))))

    def _gather_in_place(self, values: Tensor, own: Tensor) -> None:
        """All-gathers a tensor of which each rank holds an equal block; ``own`` is this rank's block."""
        blocks = values.view(-1).chunk(self._ranks.size)
        if self._step is None:
            all_gather_single(values.view(-1), own.to(values.dtype), group=self._group)
            return
        for pieces in zip(
            *(b.split(self._step // values.itemsize) for b in (own, *blocks)), strict=True
        ):
            dist.all_gather(list(pieces[1:]), pieces[0].to(values.dtype), group=self._group)

    def _copy_here(self) -> None:
        for number, patch in self._here:
            self.values[number][patch.slices()].copy_(self._held.of(patch))

    def _pack(self, messages: list[_Message]) -> None:
        for message, place in self._places(self._sent, messages):
            place.copy_(self._held.of(message.patch))

    def _unpack(self, slot: Tensor, messages: list[_Message]) -> None:
        for message, place in self._places(slot, messages):
            self.values[message.number][message.patch.slices()].copy_(place)

    def _places(self, slot: Tensor, messages: list[_Message]) -> Iterator[tuple[_Message, Tensor]]:
        """Yields each message with its view of ``slot``, in which the messages lie one after another."""
        at = 0
        for message in messages:
            dtype, counts = self._outputs[message.number].dtype, message.patch.counts
            yield message, slot[at : at + prod(counts) * dtype.itemsize].view(dtype).view(counts)
            at += self._room(message)

    def guarded(self, action: Callable[[], object]) -> None:
        """Calls ``action``, keeping its error for ``finish``; after an error no further action is called."""
        if self._problem is None:
            try:
                action()
            except Exception as error:
                self._problem = error

    def finish(self) -> None:
        """Raises the error that ``guarded`` has kept, if there is one."""
        if self._problem is not None:
            raise self._problem


def _are_blocks(parts: list[tuple[Patch, list[int]]], output: hf.OutTensor, size: int) -> bool:
    """Returns whether each rank holds one of ``size`` equal blocks of the tensor's rows, in rank order."""
    rows, rest = divmod(output.layout.shape[0] if output.layout.shape else 1, size)
    if rest or len(parts) != size:
        return False
    others = [slice(0, n, 1) for n in output.layout.shape[1:]]
    return all(
        holders == [rank]
        and [*patch.slices()] == [slice(rank * rows, (rank + 1) * rows, 1), *others]
        for rank, (patch, holders) in enumerate(parts)
    )


_groups: dict[tuple[int, ...], tuple[ProcessGroup, ProcessGroup]] = {}
"""Ranks, some of all -> (the default group at that time, a group of these ranks for an accelerator)."""


def _group_of(ranks: Ranks, device: torch.device) -> ProcessGroup | None:
    """Returns the process group of ``ranks`` for tensors on ``device``; the first call is collective."""
    if device.type == "cpu":
        return ranks.group
    world = dist.group.WORLD
    assert world is not None
    if ranks.size == world.size():
        return world
    known = _groups.get(ranks.ranks)
    if known is None or known[0] is not world:
        group = dist.new_group(list(ranks.ranks), use_local_synchronization=True)
        known = _groups[ranks.ranks] = world, group
    return known[1]
