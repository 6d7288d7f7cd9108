"""Batches of whole sequences, cut for the ranks of ``cp``, and what was computed from them, joined again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d._torch.simulated import inner_tensors, ranks_are_simulated
from parallel3d._util.arguments import as_bool
from parallel3d._util.dry_run import note_obstacle
from parallel3d._util.trees import tensors_in
from parallel3d.cp.collectives import gather_positions
from parallel3d.cp.sequence import CpAxis, Sequence
from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.mesh.axes import Role, names_of
from parallel3d.mesh.joined import kept_with
from parallel3d.tp.same_batch import check_first_cut

BatchT = TypeVar("BatchT")

_ATTRIBUTE = "_parallel3d_cp_batch"
IGNORED = -100
"""The label that ``F.cross_entropy`` leaves out."""

# Names of Hugging Face's inputs that have the sequence as dim 1 -> the value of padding.
_KNOWN: dict[str, Any] = {
    "input_ids": 0,
    "inputs_embeds": 0.0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
    "position_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "loss_mask": 0,
}
_LENGTHS = ("seq_lens", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_DROPPED = (*_LENGTHS, "max_length_q", "max_length_k", "max_seqlen", "seq_idx")


@dataclass(frozen=True, eq=False)
class Batch:
    """What ``shard_batch`` attaches to the tensors that it has cut.

    Attributes:
        sequence: how the sequences lie on the ranks; None: every rank has the whole batch.
        key_mask: (batch, rows) bool, which of this rank's tokens may be attended to; None: all.
        left_padded: whether some sequences begin with padding.
    """

    sequence: Sequence | None
    key_mask: Tensor | None = None
    left_padded: bool = False


WHOLE = Batch(None)
"""A batch of which every rank has all."""


def cp_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the cp axis of ``mesh`` as a mesh of one dim; None if there is none or it has one rank."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh is {mesh!r}; it must be a DeviceMesh, as build_mesh makes")
    names = mesh.mesh_dim_names or ()
    name = next((name for name in names if name in names_of(Role.CONTEXT)), None)
    if name is None or mesh.size(names.index(name)) == 1:
        return None
    # Kept: simulated ranks take a new mesh in the memory of one that was freed for that.
    return mesh if mesh.ndim == 1 else kept_with(mesh, ("axis", mesh, name), lambda: mesh[name])


def batch_of(value: Any) -> Batch | None:
    """Returns the ``Batch`` that ``shard_batch`` attached to the tensors in ``value``; None if it made none
    of them, StateError if they are from several calls."""
    found: Batch | None = None
    for tensor in tensors_in(value):
        batch = vars(tensor).get(_ATTRIBUTE) if hasattr(tensor, "__dict__") else None
        if batch is not None and found is not None and batch is not found:
            raise StateError(
                "the inputs are parts of several batches: give one call of p3d.cp.shard_batch all the "
                "tensors of a batch"
            )
        found = batch or found
    return found


@note_obstacle
def _cut_outside(model: nn.Module, batch: Any) -> str | None:
    if batch_of(batch) is None:
        return None
    return "the batch was cut by p3d.cp.shard_batch; give the step whole ones, and cut them in it"


def shard_batch(
    batch: BatchT,
    mesh: DeviceMesh,
    *,
    dims: int | Mapping[str, int | None] | tuple[int | None, ...] | None = None,
    pad: Any = None,
    seq_lens: Any = None,
    documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    balanced: bool = True,
    shift: bool = True,
    check_same_batch: bool = True,
) -> BatchT:
    """Returns this rank's part of every sequence in ``batch``.

    Call it on the device where the model runs, on every rank, with the whole sequences of its data rank:
    they are the same on all ranks of cp. Any length is possible: padding is put at the end, which no token
    attends to. On a mesh without cp the batch is returned as it is (but for ``seq_lens``, see
    below), so that one program runs on every mesh.

    A dict has Hugging Face's names: ``input_ids``, ``inputs_embeds``, ``position_ids`` (made if absent),
    ``attention_mask`` (of padding, (batch, length)), ``labels``, ``token_type_ids``. Labels are shifted
    before they are cut: the result has ``shift_labels``, of which the padded ones are -100, and
    ``num_items_in_batch``, by which the average over cp of the ranks' losses is the mean over all tokens of
    the batch, however many of them each rank has. Other keys need an entry in ``dims``. Values that are no
    tensors, and tensors of one number, stay.

    A tuple or a tensor is cut along dim 1 of each tensor, and neither shifted nor normalized: see
    ``optim.global_mean``.

    Args:
        batch: a dict, tuple, list or tensor.
        mesh: from ``build_mesh``.
        dims: the dim of the sequence: a number for all tensors, one for each, or by key; None for those that
            stay whole. In a dict it adds to the known names.
        pad: what a padded position has, by key or place. Needed where 2 x cp doesn't divide the length and
            ``batch`` is no dict (targets must be ignored there).
        seq_lens: packed documents: their lengths, for one row a list of numbers or a tensor, for several rows
            a list of these; or their cumulated lengths from 0, ``cu_seqlens``. Keys ``seq_lens`` and
            ``cu_seqlens`` of a dict are the same. Tokens attend to their own document only, and positions
            begin at 0 in each. Without them ``position_ids`` that begin anew say it, unless there is an
            ``attention_mask``, as in transformers.
        documents: (batch, length) integers in their place: the document of each token.
        key_mask: (batch, length) bool: which tokens may be attended to; in a dict ``attention_mask``.
        balanced: whether each rank gets a chunk from the head and one from the tail, which gives all ranks
            the same work under a causal mask; otherwise a contiguous part.
        shift: whether ``labels`` are those of a causal model, to be shifted by one.
        check_same_batch: whether the ranks of cp compare a digest of the first batch on this mesh: those that
            read other samples would train, silently, on a mixture.

    Raises:
        AgreementError: they have other batches; on every rank, with the first difference.
        Parallel3dError: a tensor has another length, a key is not known, or a padding value is missing.
        MeshError: ``mesh`` is no mesh.
    """
    axis_mesh = cp_axis(mesh)
    balanced = as_bool("balanced", balanced)
    if not isinstance(batch, (Mapping, tuple, list, Tensor)):
        raise Parallel3dError(
            f"batch is {type(batch).__name__}; shard_batch takes a dict, a tuple, a list or a tensor"
        )
    is_dict = isinstance(batch, Mapping)
    items, rebuild = _items(batch)
    if axis_mesh is not None and as_bool("check_same_batch", check_same_batch):
        beside = {"seq_lens": seq_lens, "documents": documents, "key_mask": key_mask}
        named = {str(name): value for name, value in (items | beside).items()}
        check_first_cut(mesh, (axis_mesh.mesh_dim_names or ("",))[0], (), named)
    if is_dict:
        for name in _LENGTHS:
            seq_lens = items.get(name, seq_lens) if seq_lens is None else seq_lens
        items = {k: v for k, v in items.items() if k not in _DROPPED}
    whole = _Uncut(items, _dims_of(items, dims, is_dict), documents, key_mask)
    if seq_lens is not None:
        whole.set_documents(seq_lens)
        if is_dict and items.get("position_ids") is None:
            whole.add("position_ids", restarting(whole.documents))
    if axis_mesh is None:
        return cast("BatchT", rebuild(items)) if is_dict else batch

    size = axis_mesh.size()
    if is_dict:
        whole.add_for_transformers(shift, size)
    chunks = 2 * size if balanced else size
    pads = _pads(whole, pad, is_dict, chunks)
    sequence = Sequence(whole.length, size, balanced, whole.padded_documents(chunks))
    axis = CpAxis(axis_mesh)
    left, key_mask = False, whole.key_mask
    if key_mask is not None:
        key_mask = key_mask.to(torch.bool)
        left = not all(bool(mask[:, 0].all()) for mask in inner_tensors(key_mask))
        key_mask = sequence.cut(key_mask, 1, axis, False)
    made = Batch(sequence, key_mask, left)
    result = {}
    for name, value in items.items():
        dim = whole.where.get(name)
        if dim is not None:
            value = sequence.cut(value, dim, axis, pads[name]).contiguous()
            setattr(value, _ATTRIBUTE, made)
        result[name] = value
    if is_dict and result.get("attention_mask") is not None:
        # The model sees no padding: it would count it on its part. Attention has the mask from ``made``.
        ones = torch.ones_like(result["attention_mask"])
        setattr(ones, _ATTRIBUTE, made)
        result["attention_mask"] = ones
    return cast("BatchT", rebuild(result))


def gather(x: Tensor, mesh: DeviceMesh, *, like: Any, dim: int = 1) -> Tensor:
    """Returns ``x`` of all ranks of cp in the sequence's order, without padding or a gradient; for metrics.

    Args:
        x: this rank's part along ``dim``, such as ``logits.argmax(-1)``.
        mesh: from ``build_mesh``; without cp, ``x`` is returned.
        like: the batch that ``shard_batch`` has returned, or a tensor of it.
        dim: the dim of the sequence.

    Raises:
        StateError: ``like`` is not from ``shard_batch``.
    """
    axis_mesh = cp_axis(mesh)
    if axis_mesh is None:
        return x
    batch = batch_of(like)
    if batch is None or batch.sequence is None:
        raise StateError(
            "gather: `like` must be what p3d.cp.shard_batch has returned for this batch"
        )
    return join(x, dim, batch.sequence, CpAxis(axis_mesh))


def join(x: Tensor, dim: int, sequence: Sequence, axis: CpAxis) -> Tensor:
    """All-gathers ``x`` along ``dim``, in the sequence's order, without padding and without a gradient."""
    first = x.detach().movedim(dim, 0)
    rows = first.reshape(1, 1, first.shape[0], -1)
    (whole,) = gather_positions((rows,), sequence, axis)
    whole = whole[0, 0, : sequence.length]
    return whole.reshape(sequence.length, *first.shape[1:]).movedim(0, dim).contiguous()


# ---- the parts of a batch ----


def _items(batch: Any) -> tuple[dict[Any, Any], Any]:
    """Returns the batch as a dict, and a function that makes the original type of such a dict."""
    if isinstance(batch, Mapping):
        return dict(batch), lambda items: items
    if isinstance(batch, Tensor):
        return {0: batch}, lambda items: items[0]
    kind = type(batch)

    def rebuild(items: dict[Any, Any]) -> Any:
        values = [items[i] for i in range(len(items))]
        return kind(*values) if hasattr(kind, "_fields") else kind(values)

    return dict(enumerate(batch)), rebuild


def _dims_of(items: dict[Any, Any], dims: Any, is_dict: bool) -> dict[Any, int | None]:
    """Returns item -> its sequence dim; None for one that isn't cut. Parallel3dError for unknown keys."""
    found: dict[Any, int | None] = {}
    for place, (name, value) in enumerate(items.items()):
        if not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() < 2):
            found[name] = None
            continue
        dim: int | None = 1
        if isinstance(dims, Mapping) and name in dims:
            dim = dims[name]
        elif isinstance(dims, (tuple, list)) and not is_dict:
            if len(dims) != len(items):
                raise Parallel3dError(f"dims has {len(dims)} entries for {len(items)} tensors")
            dim = dims[place]
        elif isinstance(dims, int) and not isinstance(dims, bool):
            dim = dims
        elif is_dict and name not in _KNOWN:
            raise Parallel3dError(
                f"shard_batch doesn't know which dim of {name!r}, of shape {tuple(value.shape)}, is the "
                f"sequence; say it: dims={{{name!r}: 1}}, or None if it is to stay whole"
            )
        if dim is not None:
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise Parallel3dError(
                    f"dims: {name!r} has {value.dim()} dims, and no dim {dim!r}; give one of them, or None"
                )
            dim %= value.dim()
        found[name] = dim
    return found


def _pads(whole: _Uncut, pad: Any, is_dict: bool, chunks: int) -> dict[Any, Any]:
    """Returns item -> its padding value; Parallel3dError if one is needed and not known."""
    found: dict[Any, Any] = {}
    for place, (name, dim) in enumerate(whole.where.items()):
        if dim is None:
            continue
        if isinstance(pad, Mapping) and name in pad:
            found[name] = pad[name]
        elif isinstance(pad, (tuple, list)) and not is_dict:
            found[name] = pad[place]
        elif pad is not None and not isinstance(pad, (tuple, list, Mapping)):
            found[name] = pad
        elif is_dict or whole.length % chunks == 0:
            found[name] = _KNOWN.get(name, 0)
        else:
            raise Parallel3dError(
                f"the length {whole.length} is not divisible by {chunks}, and shard_batch doesn't know what "
                f"the padding of tensor {place} is to be (targets must be ignored there): give "
                f"pad=(0, {IGNORED}), a value for each tensor, or sequences of "
                f"{-(-whole.length // chunks) * chunks} tokens"
            )
    return found


class _Uncut:
    """A batch of whole sequences, ``rows`` of ``length`` tokens, before it is cut.

    Attributes:
        items: name -> value.
        where: name -> the value's sequence dim; None: it is not cut.
    """

    def __init__(
        self, items: dict[Any, Any], where: dict[Any, int | None], documents: Any, key_mask: Any
    ) -> None:
        self.items, self.where, self.documents, self.key_mask = items, where, documents, key_mask
        cut = {name: dim for name, dim in where.items() if dim is not None}
        lengths = {name: items[name].shape[dim] for name, dim in cut.items()}
        if not lengths:
            raise Parallel3dError("shard_batch: no tensor of the batch has a sequence to cut")
        if len(set(lengths.values())) > 1:
            raise Parallel3dError(
                f"the tensors of the batch have other lengths: {lengths}; all must have the sequence's, or "
                "None in dims="
            )
        *_, (last, self.length) = lengths.items()
        self.device = items[last].device
        others = ((items[name], 0 if dim else 1) for name, dim in cut.items())
        self.rows = max([1, *(x.shape[dim] for x, dim in others if x.dim() > 1)])

    def add(self, name: str, value: Tensor) -> None:
        """Adds a tensor whose dim 1 is the sequence to the batch's items."""
        self.items[name], self.where[name] = value, 1

    def set_documents(self, seq_lens: Any) -> None:
        """Sets ``documents``, (rows, length), from each row's lengths of documents, or cumulated lengths."""
        rows, length = self.rows, self.length
        lists = seq_lens.tolist() if isinstance(seq_lens, Tensor) else list(seq_lens)
        if not lists or not isinstance(lists[0], (list, tuple, Tensor)):
            lists = [lists]
        lists = [x.tolist() if isinstance(x, Tensor) else list(x) for x in lists]
        if len(lists) not in (1, rows):
            raise Parallel3dError(f"seq_lens has {len(lists)} rows, the batch {rows}")
        out = []
        for lengths in lists:
            if lengths and lengths[0] == 0:  # cumulated
                lengths = [b - a for a, b in pairwise(lengths)]
            if any(n < 0 for n in lengths) or sum(lengths) > length:
                raise Parallel3dError(
                    f"seq_lens {lengths} add up to {sum(lengths)}; the sequence has {length} tokens"
                )
            rest = length - sum(lengths)
            lengths = [*lengths, rest] if rest else lengths
            out.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
        self.documents = torch.stack(out).expand(rows, -1).to(self.device)

    def padded_documents(self, chunks: int) -> Tensor | None:
        """Returns ``documents`` padded to a multiple of ``chunks`` tokens, with the document number -1 for
        padding; None if there are none."""
        documents, shape = self.documents, (self.rows, self.length)
        if documents is None:
            return None
        if documents.shape != shape or documents.is_floating_point():
            raise Parallel3dError(
                f"documents has shape {tuple(documents.shape)} and {documents.dtype}; it must be integers, "
                f"(batch, length) = {shape}"
            )
        missing = -self.length % chunks
        last = documents.new_full((self.rows, missing), -1)
        return torch.cat([documents, last], 1) if missing else documents

    def add_for_transformers(self, shift: bool, size: int) -> None:
        """Adds the items that a Hugging Face model would otherwise compute from its part of the sequence:
        ``position_ids``, ``attention_mask``, and with labels ``shift_labels`` and ``num_items_in_batch``.
        ``shift``: as in ``shard_batch``; ``size``: ranks of cp."""
        items, shape = self.items, (self.rows, self.length)
        mask = items.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise Parallel3dError(
                f"attention_mask has shape {tuple(mask.shape)}; with context parallelism it must be that of "
                "padding, (batch, length); give packed documents as seq_lens or position_ids"
            )
        positions = items.get("position_ids")
        if positions is None:
            self.add("position_ids", torch.arange(self.length, device=self.device).expand(shape))
        elif self.documents is None and mask is None and positions.dim() == 2:
            self.documents = _from_positions(positions.expand(self.rows, -1))
        if isinstance(mask, Tensor):
            given = self.key_mask
            self.key_mask = mask if given is None else given.bool() & mask.bool()
        else:  # so that the model doesn't look for documents in its part of the positions
            ones = torch.ones(shape, dtype=torch.int64, device=self.device)
            self.add("attention_mask", ones)
        labels = items.get("labels")
        if labels is not None and self.where.get("labels") is not None:
            counted = labels
            if shift and items.get("shift_labels") is None:
                ends = labels.new_full((labels.shape[0], 1), IGNORED)
                counted = torch.cat([labels[:, 1:], ends], 1)
                self.add("shift_labels", counted)
            count = items.get("num_items_in_batch")
            count = (counted != IGNORED).sum() if count is None else count
            items["num_items_in_batch"], self.where["num_items_in_batch"] = count / size, None


def restarting(documents: Tensor) -> Tensor:
    """Returns positions, (rows, length), that begin at 0 in each document of ``documents``, (rows, length)
    document numbers."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.cat([torch.ones_like(documents[:, :1]), documents.diff(dim=1)], 1) != 0
    return places - torch.where(begins, places, 0).cummax(1).values


def _from_positions(positions: Tensor) -> Tensor | None:
    """Returns document numbers, (rows, length): a new document begins wherever ``positions`` don't increase
    by 1. None if there is only one document."""
    begins = positions.diff(dim=1) != 1
    known = not ranks_are_simulated() and begins.device.type == "cpu"  # without a wait
    if known and not bool(begins.any()):
        return None
    return torch.cat([torch.zeros_like(positions[:, :1]), begins.cumsum(1)], 1)
