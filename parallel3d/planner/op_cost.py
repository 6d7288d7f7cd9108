"""What a recording says of a unit: its matmuls, attention, elementwise work and activations, per token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from parallel3d.planner.model_spec import Activation, Attention, Elementwise, Matmul
from parallel3d.planner.op_recorder import Op
from parallel3d.planner.unit_run import Recording

__all__ = ["activations_in", "attention_in", "elementwise_in", "head_splits", "matmuls_in"]

Splits = Mapping[int, str]
NONE: Splits = MappingProxyType({})
_WIDTH = 2  # bytes of the compute dtype of a recording, bf16


def matmuls_in(
    recording: Recording,
    tokens: int,
    label: str | None = None,
    prefix: str = "",
    heads: dict[str, tuple[int, int]] | None = None,
    kv: Set[str] = frozenset(),
) -> tuple[Matmul, ...]:
    """Those of the forward (with ``label``), for every token; one on fewer or more rows has its n scaled.

    Args:
        heads, kv: of weights: as in ``Matmul``.
    """
    found = []
    for op in recording.recorder.forward_ops:
        rows, n, k = op.sizes
        if op.kind == "matmul" and rows and (label is None or op.label == label):
            name = op.weight.removesuffix(".weight").removeprefix(prefix) or op.name
            scaled = max(1, round(n * rows / tokens))
            of = (heads or {}).get(op.weight)
            found.append(Matmul(name, scaled, k, op.way, op.input_gradient, of, op.weight in kv))
    return tuple(found)


def attention_in(recording: Recording, batch: int, kv_heads: int | None) -> tuple[Attention, ...]:
    """Each attention; ``kv_heads``: what the model says of them, where keys were repeated before."""
    found = []
    for heads, pairs, dim, causal in recording.recorder.attentions:
        kv = max(1, pairs // batch)
        mine = max(1, heads // batch)
        if kv_heads and kv == mine and mine % kv_heads == 0:
            kv = kv_heads
        found.append(Attention(mine, kv, dim, causal))
    return tuple(found)


def head_splits(
    recording: Recording, heads: dict[str, tuple[int, int]], kv: Set[str]
) -> dict[int, str]:
    """Storage -> "heads" or "kv", of those that are divided in whole heads of queries, or of keys and values.

    Args:
        heads, kv: of weights: as in ``Matmul``.
    """
    found: dict[int, str] = {}
    for ops in (recording.recorder.forward_ops, recording.recorder.backward_ops):
        for op in ops:
            read = {found[key] for key, *_ in op.reads if key in found}
            if op.weight:
                read = {"kv" if op.weight in kv else "heads"} if op.weight in heads else set()
            for key, _ in op.writes:
                if read and op.split:
                    found[key] = "kv" if read == {"kv"} else "heads"
    return found


def elementwise_in(
    recording: Recording, tokens: int, label: str | None = None, splits: Splits = NONE
) -> tuple[Elementwise, ...]:
    """Everything else: norms one by one, the rest by how tensor parallelism divides it."""
    sums: dict[tuple[str, bool, str], list[float]] = defaultdict(lambda: [0.0] * 6)
    ways = (recording.recorder.forward_ops, recording.recorder.backward_ops)
    inside = _inside(recording)
    for way, ops in enumerate(ways):
        for group in _groups(ops):
            first = ops[group[0]]
            if label is not None and first.label != label:
                continue
            norm = _norm(first, label)
            total = sums[first.label if norm and label is None else "", norm, _way(first, splits)]
            total[way] += sum(ops[i].moved for i in group)
            total[2 + way] += _fused(ops, group, recording, inside)
            total[4 + way] += len(group)
    found = []
    for (name, norm, split), (f, b, ff, fb, kf, kb) in sums.items():
        per = tokens * _WIDTH
        found.append(
            Elementwise(
                name or ("norm" if norm else "elementwise"),
                (f / per, b / per),
                (min(f, ff) / per, min(b, fb) / per),
                (int(kf), int(kb)),
                split,
                norm,
            )
        )
    return tuple(found)


def activations_in(
    recording: Recording, tokens: int, label: str | None = None, splits: Splits = NONE
) -> tuple[Activation, ...]:
    """What forward keeps. A compiler keeps a group's inputs rather than what is in it, if smaller."""
    ops = recording.recorder.forward_ops
    stays = _inside(recording)
    kept: dict[tuple[str, int | None, str], float] = defaultdict(float)
    inside: dict[tuple[int, ...], int] = defaultdict(int)
    for key, saved in recording.saved.items():
        at = recording.origin.get(key)
        op = ops[at] if at is not None else None
        if op is not None and (op.kind == "score" or _is_scores(recording, key)):
            continue
        if label is not None and saved.label != label:
            continue
        if key in stays:
            inside[stays[key]] += saved.nbytes
            continue
        of = _made_by(op) if op is not None else "norm" if saved.label else "elementwise"
        itemsize = None if saved.itemsize == _WIDTH else saved.itemsize
        kept[of, itemsize, _split(key, recording, splits)] += saved.nbytes / saved.itemsize
    found = [
        Activation(f"of {of}", size / tokens, itemsize, split, of)
        for (of, itemsize, split), size in kept.items()
    ]
    for group, nbytes in inside.items():
        first = ops[group[0]]
        of = "norm" if _norm(first, label) else "elementwise"
        split = _way(first, splits)
        needed = min(nbytes, _unsaved_inputs(ops, group, recording))
        name = first.label or first.name
        if needed:
            found.append(Activation(f"{name} input", needed / tokens / _WIDTH, None, split, of))
        if nbytes > needed:
            rest = (nbytes - needed) / tokens
            found.append(Activation(f"{name} inside", rest, 1, split, of, eager_only=True))
    return tuple(found)


def _norm(op: Op, label: str | None) -> bool:
    """Whether it is of a norm; with ``label`` (the root's) only kernels of norms are known."""
    return op.kind == "norm" or (label is None and op.label != "")


def _groups(ops: list[Op]) -> list[list[int]]:
    """Elementwise operations that one kernel could do: connected, with no matmul between, divided alike."""
    parent: dict[int, int] = {}

    def top(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, op in enumerate(ops):
        if op.kind not in ("elementwise", "norm"):
            continue
        parent[i] = i
        if op.kind == "norm":
            continue
        for _, writer, _ in op.reads:
            if writer is None or writer not in parent or ops[writer].kind == "norm":
                continue
            other = ops[writer]
            if (other.label, other.split, other.depth) == (op.label, op.split, op.depth):
                parent[top(i)] = top(writer)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in parent:
        groups[top(i)].append(i)
    return list(groups.values())


def _fused(
    ops: list[Op], group: list[int], recording: Recording, inside: dict[int, tuple[int, ...]]
) -> float:
    """Bytes of ``group`` as one kernel: read from outside, and what others read. Backward makes again what is
    ``inside`` a kernel of the forward, from that one's inputs."""
    members = set(group)
    backward = ops is recording.recorder.backward_ops
    reads: dict[Any, int] = {}
    again: dict[tuple[int, ...], int] = defaultdict(int)
    for i in group:
        for key, writer, size in ops[i].reads:
            if writer in members or (key, writer) in reads:
                continue
            made_inside = backward and writer is None and key in inside
            reads[key, writer] = 0 if made_inside else size
            if made_inside:
                again[inside[key]] += size
    total = float(sum(reads.values()))
    forward = recording.recorder.forward_ops
    for source, size in again.items():
        total += min(size, _unsaved_inputs(forward, source, recording))
    for i in group:
        outside = not ops[i].read_by or any(r not in members and r >= 0 for r in ops[i].read_by)
        for key, size in ops[i].writes:
            if outside or key in recording.outputs:
                total += size
    return total


def _inside(recording: Recording) -> dict[int, tuple[int, ...]]:
    """Saved storages that only one group of the forward reads, and backward: a compiler makes them again."""
    ops = recording.recorder.forward_ops
    found = {}
    for group in map(tuple, _groups(ops)):
        for i in group:
            readers = [r for r in ops[i].read_by if r >= 0]
            if ops[i].kind == "norm" or not readers or not set(readers) <= set(group):
                continue
            for key, _ in ops[i].writes:
                if key in recording.saved and key not in recording.outputs:
                    found[key] = group
    return found


def _unsaved_inputs(ops: list[Op], group: tuple[int, ...], recording: Recording) -> int:
    members = set(group)
    found = {
        key: size
        for i in group
        for key, writer, size in ops[i].reads
        if writer not in members and key not in recording.saved and key not in recording.constant
    }
    return sum(found.values())


def _is_scores(recording: Recording, key: int) -> bool:
    origin = recording.recorder.scores.get(key)
    return origin is not None and origin.kind == "attention"


def _made_by(op: Op) -> str:
    if op.kind in ("matmul", "attention"):
        return op.kind
    return "norm" if op.kind == "norm" or op.label else "elementwise"


def _way(op: Op, splits: Splits) -> str:
    if not op.split:
        return "sequence"
    return next((splits[key] for key, _ in op.writes if key in splits), "tp")


def _split(key: int, recording: Recording, splits: Splits) -> str:
    if key in recording.split:
        return splits.get(key, "tp")
    return "gathered" if key in recording.recorder.gathered else "sequence"
