"""plan: predicts every layout that is allowed, and ranks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import check_choice, check_number
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.constants import Term, shown
from parallel3d.planner.context import why_not_ulysses
from parallel3d.planner.lora import with_lora
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.prediction import Prediction, predict, why_no_ep
from parallel3d.planner.recompute import OWN
from parallel3d.planner.stacks import OURS, stacks
from parallel3d.planner.uncertainty import count_close
from parallel3d.planner.workload import CHECKPOINTING, Workload

# MeshPlan: what plan has found, and the questions that one asks of it.


@dataclass(frozen=True)
class Refused:
    """A layout that the plan doesn't propose.

    Attributes:
        reason: why, as text.
        prediction: the prediction nearest to fitting, if it was refused for memory; else None.
        part: the memory that this prediction needs, as a fraction of what may be used, on the GPU or the
            host, whichever is fuller; infinite if the layout was refused for another reason.
    """

    layout: MeshLayout
    reason: str
    prediction: Prediction | None = None
    part: float = inf


class Variation(NamedTuple):
    """The result of a prediction with one input changed to ``value``."""

    value: str
    tokens_per_second_per_gpu: float
    fits: bool
    fits_probability: float


@dataclass(frozen=True)
class MeshPlan:
    """The layouts that fit, the best first, and those that were refused.

    They are ranked by ``Prediction.expected``, speed times the probability to fit. Of two equally fast
    layouts the one with more free memory comes first; where memory is no problem, speed decides.

    Attributes:
        candidates: predictions that fit, one for each layout, micro-batch and kind of checkpointing, ranked.
        refused: the other layouts, each with the reason.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    candidates: tuple[Prediction, ...]
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Prediction:
        """The prediction that ranks first.

        Raises:
            PlanningError: no prediction fits; the message says which layout comes closest.
        """
        if self.candidates:
            return self.candidates[0]
        first = self.refused[0]
        closest = min(self.refused, key=lambda r: r.part)
        if closest.prediction is None:
            raise PlanningError(f"no layout is legal: {first.layout}: {first.reason}")
        full = closest.prediction.workload.checkpointing in ("full", "offload")
        other = "" if full else ", or checkpointing='full'"
        raise PlanningError(
            f"nothing fits; {closest.layout} comes closest and {closest.reason}. Take more GPUs or a shorter "
            f"sequence{other}"
        )

    @property
    def fastest(self) -> Prediction:
        """The fastest prediction that fits; faster than ``best`` only if it is less sure to fit.

        Raises:
            PlanningError: as ``best``.
        """
        return max(self.candidates or (self.best,), key=lambda p: p.tokens_per_second_per_gpu)

    def roomier(self, within: float = 0.03) -> Prediction | None:
        """Returns the prediction that needs least memory among those at most ``within`` slower than ``best``.

        Returns:
            The prediction; None if it doesn't save at least a twentieth of the GPU's (or host's) memory.
        """
        least = (1 - within) * self.best.tokens_per_second_per_gpu
        near = [p for p in self.candidates if p.tokens_per_second_per_gpu >= least]
        found = min(near, key=lambda p: p.memory.part())
        return found if found.memory.part() <= self.best.memory.part() - 0.05 else None

    @property
    def layouts(self) -> tuple[Prediction, ...]:
        """The best prediction of each layout, ranked."""
        first: dict[MeshLayout, Prediction] = {}
        for prediction in self.candidates:
            first.setdefault(prediction.layout, prediction)
        return tuple(first.values())

    @property
    def close(self) -> tuple[Prediction, ...]:
        """Those of ``layouts`` whose expected speeds ``count_close`` can't tell from the best."""
        found = self.layouts
        return found[: count_close([each.expected for each in found])]

    def of(self, layout: MeshLayout) -> Prediction:
        """Returns the best prediction of ``layout``, even if it doesn't fit.

        Raises:
            PlanningError: ``layout`` was refused for a reason other than memory.
        """
        for found in (*self.candidates, *(r.prediction for r in self.refused)):
            if found is not None and found.layout == layout:
                return found
        for refused in self.refused:
            if refused.layout == layout:
                raise PlanningError(f"{layout} was refused: {refused.reason}")
        raise PlanningError(
            f"{layout} has no {self.cluster.world_size} ranks, or isn't among those asked for"
        )

    def explain(self, a: Prediction | MeshLayout, b: Prediction | MeshLayout) -> str:
        """Returns why ``a`` and ``b`` differ, as text: their components' differences, largest first."""
        first, second = (self.of(p) if isinstance(p, MeshLayout) else p for p in (a, b))
        ratio = first.tokens_per_second_per_gpu / second.tokens_per_second_per_gpu
        lines = [
            f"{_named(first)}: {first.tokens_per_second_per_gpu:,.0f} tokens/s/GPU "
            f"({first.fits_probability:.0%} to fit), "
            f"{_named(second)}: {second.tokens_per_second_per_gpu:,.0f} "
            f"({second.fits_probability:.0%}); {ratio:.3f} x",
            "microseconds a token and GPU, first - second:",
        ]
        lines += _differences(_per_token(first), _per_token(second), lambda v: f"{v * 1e6:+.3f} us")
        lines.append("memory, first - second:")
        held, other = ({n: t.value for n, t in p.memory.terms.items()} for p in (first, second))
        lines += _differences(
            held, other, lambda v: f"{'+' if v >= 0 else '-'}{shown(abs(v), 'B')}"
        )
        return "\n".join(lines)

    def sensitivity(self, prediction: Prediction | None = None) -> dict[str, list[Variation]]:
        """Returns input -> predictions with this input halved, unchanged and doubled.

        The inputs are the micro-batch (at least 1), the sequence length, and the bandwidths between nodes and
        of the GPU's memory. The base is ``prediction``, by default ``best``.
        """
        base = prediction or self.best
        work, cluster, gpu = base.workload, base.cluster, base.cluster.gpu
        tried: dict[str, list[Variation]] = {}
        for factor in (0.5, 1, 2):
            size = max(int(base.micro_batch * factor), 1)
            whole = size * base.accumulation * base.layout.data_size
            batch = replace(work, micro_batch=size, global_batch=whole)
            length = max(int(work.seq_len * factor), base.layout.tp, 2 * base.layout.cp)
            longer = replace(work, seq_len=length, micro_batch=base.micro_batch)
            nic, bandwidth = cluster.nic * factor, gpu.bandwidth * factor
            wider = replace(cluster, gpu=replace(gpu, bandwidth=bandwidth))
            for name, value, on, what in (
                ("micro_batch", f"{size}", cluster, batch),
                ("seq_len", f"{length}", cluster, longer),
                ("nic", f"{nic:g} GB/s", replace(cluster, nic=nic), work),
                ("memory bandwidth", f"{bandwidth:g} TB/s", wider, work),
            ):
                result = predict(self.model, base.layout, on, what)
                speed, fits = result.tokens_per_second_per_gpu, result.fits
                found = Variation(value, speed, fits, result.fits_probability)
                tried.setdefault(name, []).append(found)
        return tried

    def recomputation(self, prediction: Prediction | None = None) -> tuple[Prediction, ...]:
        """Returns ``prediction`` (by default ``best``) with each kind of checkpointing of ``parallelize``."""
        base = prediction or self.best
        kinds = dict.fromkeys((*OWN, base.workload.checkpointing))
        works = (
            replace(base.workload, micro_batch=base.micro_batch, checkpointing=kind)
            for kind in kinds
        )
        return tuple(predict(self.model, base.layout, base.cluster, work) for work in works)

    def pareto(self) -> tuple[Prediction, ...]:
        """Returns the candidates that no other one beats in both speed and memory, by increasing memory."""
        front: list[Prediction] = []
        in_turn = sorted(
            self.candidates, key=lambda p: (p.memory.needed, -p.tokens_per_second_per_gpu)
        )
        for each in in_turn:
            if not front or each.tokens_per_second_per_gpu > front[-1].tokens_per_second_per_gpu:
                front.append(each)
        return tuple(front)

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """Returns JSON values: the first ``most`` candidates, and all refused layouts."""
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "candidates": [each.as_dict() for each in self.candidates[:most]],
            "close": len(self.close),
            "fastest": self.fastest.as_dict() if self.candidates else None,
            "roomier": found.as_dict() if self.candidates and (found := self.roomier()) else None,
            "refused": [
                {"layout": r.layout.as_dict(views=True), "reason": r.reason} for r in self.refused
            ],
        }


def _named(prediction: Prediction) -> str:
    sizes = f"({sizes_of(prediction.layout, ', ')})"
    return f"{sizes} micro-batch {prediction.micro_batch}, {setting(prediction)}"


def _per_token(prediction: Prediction) -> dict[str, float]:
    tokens = prediction.tokens_per_gpu
    return {name: term.value / tokens for name, term in prediction.time.terms.items()}


def _differences(a: dict[str, float], b: dict[str, float], text: Any) -> Sequence[str]:
    names = dict.fromkeys([*a, *b])
    each = sorted(((a.get(n, 0.0) - b.get(n, 0.0), n) for n in names), key=lambda d: -abs(d[0]))
    return [f"  {name}: {text(difference)}" for difference, name in each if difference]


# Why a layout can't be, or shouldn't be: rules of parallelize and of the hardware.


def refusal(model: ModelSpec, layout: MeshLayout, cluster: Cluster, work: Workload) -> str | None:
    """Returns why ``layout`` can't be used, as text; None if it can.

    ``parallelize`` cuts sizes that tp doesn't divide, too. So sizes refuse a layout in two cases only: the
    plan can't cut them unevenly (``ModelSpec.divisible``), or there are fewer heads than tp ranks, so that
    each rank would compute all attention.
    """
    tp = layout.tp
    if work.sharding != "fsdp" and layout.shard > 1 and layout.ep == 1:
        return f"{work.sharding} shards nothing over shard, which is {layout.shard}; it must be 1"
    if layout.cp > 1 and (why := _context_refusal(model, layout, work)) is not None:
        return why
    if (why := why_no_ep(model, layout.ep)) is not None:
        return why
    if tp == 1:
        return None
    joined = f"the {cluster.domain} GPUs that fast links join"
    if tp > cluster.domain:
        return (
            f"tp {tp} is more than {joined}: every layer would wait for the network between nodes"
        )
    if cluster.domain % tp:
        return f"tp {tp} doesn't divide {joined}: groups would cross nodes"
    if not model.tp_ready:
        return f"tp {tp} needs a plan, and none could be derived for {model.name}"
    if model.heads and model.heads < tp:
        return f"tp {tp} and {model.heads} attention heads: every rank would compute all attention"
    for name, size in model.divisible.items():
        if size % tp:
            return f"tp {tp} doesn't divide {name}, {size}, which its plan can't share otherwise"
    return None


def _context_refusal(model: ModelSpec, layout: MeshLayout, work: Workload) -> str | None:
    """Returns why a ``cp`` above 1 can't be used, as text; None if it can."""
    cp, every = layout.cp, [a for unit in model.units for a in unit.attention]
    if not every:
        return f"cp {cp}: {model.name} has no attention, over whose tokens it would be"
    if work.seq_len < 2 * cp:
        return f"cp {cp} cuts sequences into {2 * cp} parts, and they have {work.seq_len} tokens"
    if work.cp_attention == "ulysses":
        reasons = (why_not_ulysses(a, layout.tp, cp) for a in every)
        return next((f"{why}, which ulysses shares" for why in reasons if why), None)
    return None


_MOST_MICRO = 64
MUCH = 0.15
"""Fraction of the memory that logits and loss must exceed for a chunked loss to be tried."""
_LEAST_TOKENS = 16384
"""Least tokens of a sequence on one rank of cp, if the user names no sizes of cp: with fewer, communication
costs more than it saves."""


def plan(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    *,
    replicate: int | Iterable[int] | None = None,
    shard: int | Iterable[int] | None = None,
    tp: int | Iterable[int] | None = None,
    cp: int | Iterable[int] | None = None,
    ep: int | Iterable[int] | None = None,
    checkpointing: str | Sequence[str] | None = None,
    reshard_after_forward: bool | Sequence[bool] | None = None,
    chunked_loss: bool | None = None,
    shard_optimizer_over_replicate: bool | None = None,
    memory_limit_gib: float | None = None,
) -> MeshPlan:
    """Predicts every allowed layout of ``model`` on ``cluster``, and ranks those that fit: see ``MeshPlan``.

    Args:
        workload: if its ``micro_batch`` is None, powers of two up to what the global batch allows are tried.
        replicate, shard, tp: the sizes that these axes may have; None: any.
        cp: the same; None: 1, and sizes that leave each rank 16,384 or more tokens of a sequence.
        ep: the same, for layouts whose shard x cp x tp it divides; None: 1, and for a mixture of experts also
            the sizes that divide its experts and are whole fast-link domains or divide one.
        checkpointing: kinds to try. None: the workload's own if that isn't "none", else all that
            ``parallelize`` has; ``planner.CHECKPOINTING`` lists all known ones.
        reshard_after_forward: values to try; None: the workload's own.
        chunked_loss, shard_optimizer_over_replicate: whether to use them. None: as the workload says; if it
            says no, a chunked loss is tried where logits and loss take much of the memory, and HFSDP where
            there are several replicas, for predictions that may not fit and for the best of the others.
        memory_limit_gib: GiB of each GPU that the training may use; the probability to fit refers to the
            whole GPU.

    Returns:
        The plan; give ``best.layout`` to ``build_mesh``. If nothing fits, ``best`` raises and ``refused``
        says why.

    Raises:
        PlanningError: no layout has the sizes that are asked for, or neither batch size is given.
    """
    if workload.micro_batch is None and workload.global_batch is None:
        raise PlanningError("micro_batch and global_batch are both None; give one of them")
    if isinstance(checkpointing, str):
        checkpointing = (checkpointing,)
    if isinstance(reshard_after_forward, bool):
        reshard_after_forward = (reshard_after_forward,)
    if memory_limit_gib is not None:
        check_number("memory_limit_gib", memory_limit_gib)
    model = with_lora(model, workload.lora)
    own = OWN if workload.checkpointing == "none" else (workload.checkpointing,)
    if chunked_loss is not None:
        workload = replace(workload, chunked_loss=chunked_loss)
    if (hfsdp := shard_optimizer_over_replicate) is not None:
        workload = replace(workload, shard_optimizer_over_replicate=hfsdp)
    ours = workload.profile.name == OURS or workload.profile.name not in stacks()
    chunks = ours and chunked_loss is None and not workload.chunked_loss and model.vocab > 0
    hybrids = ours and shard_optimizer_over_replicate is None and workload.sharding == "fsdp"
    kinds = tuple(checkpointing or own)
    for kind in kinds:
        check_choice("checkpointing", kind, CHECKPOINTING)
    reshards = tuple(reshard_after_forward or (workload.reshard_after_forward,))
    axes = {"replicate": replicate, "shard": shard, "cp": cp, "tp": tp}
    allowed = {axis: _sizes(axis, sizes) for axis, sizes in axes.items()}
    if cp is None:
        longest = max(workload.seq_len // _LEAST_TOKENS, 1)
        allowed["cp"] = frozenset(range(1, longest + 1 if workload.sharding == "fsdp" else 2))
    sizes_of_ep = sorted(_sizes("ep", ep) or _sizes_of_ep(model, cluster, workload))
    layouts = [
        each
        for layout in _layouts(cluster.world_size, allowed)
        for each in _with_ep(layout, sizes_of_ep)
    ]
    if not layouts:
        names = " x ".join(axis for axis in axes if axis != "cp" or cp is not None)
        names += " with an ep" if ep is not None else ""
        raise PlanningError(
            f"no {names} of the sizes that are asked for has {cluster.world_size} ranks"
        )
    limit = min(cluster.gpu.capacity_gib, memory_limit_gib or float("inf")) * 2**30
    candidates: list[Prediction] = []
    refused: list[Refused] = []
    for layout in layouts:
        why = refusal(model, layout, cluster, workload)
        micro = list(_micro_batches(layout, workload))
        if why is None and not micro:
            by = f" * micro_batch {workload.micro_batch}" if workload.micro_batch else ""
            ranks = f"{layout.data_size} data ranks{by}"
            why = f"global_batch {workload.global_batch} is no multiple of {ranks}"
        if why is not None:
            refused.append(Refused(layout, why))
            continue
        is_sharded = layout.shard * layout.cp > 1
        combined = product(micro, kinds, reshards if is_sharded else reshards[:1])
        works = [
            replace(workload, micro_batch=size, checkpointing=kind, reshard_after_forward=reshard)
            for size, kind, reshard in combined
        ]
        tried = [predict(model, layout, cluster, work) for work in works]
        if hybrids and layout.replicate > 1 and not workload.shard_optimizer_over_replicate:
            tried += _again(tried, limit, shard_optimizer_over_replicate=True)
        if chunks:
            tried += [_with(p, chunked_loss=True) for p in tried if _has_heavy_logits(p)]
        fitting = [p for p in tried if p.memory.part(limit) <= 1]
        candidates += fitting
        if not fitting:
            nearest = min(tried, key=lambda p: p.memory.part(limit))
            why = _too_much(nearest, limit)
            refused.append(Refused(layout, why, nearest, nearest.memory.part(limit)))
    candidates.sort(key=lambda p: -p.expected)
    return MeshPlan(model, cluster, workload, tuple(candidates), tuple(refused))


def _too_much(nearest: Prediction, limit: float) -> str:
    """Returns a text: what memory the nearest prediction needs, and which memory is too small for it."""
    memory = nearest.memory
    why = f"needs {memory.needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
    if memory.host > memory.host_capacity:
        why += (
            f" and {memory.host / 2**30:.0f} GiB of the host's memory, which has "
            f"{memory.host_capacity / 2**30:.0f} for a GPU,"
        )
    return f"{why} with micro-batch {nearest.micro_batch}, checkpointing {setting(nearest)}"


SURE = 0.9
"""Probability to fit below which settings that need less memory are tried too, and doubts are shown."""


def _has_heavy_logits(prediction: Prediction) -> bool:
    """Whether a chunked loss is worth trying: logits and loss take much of the memory, or some of it and the
    prediction may not fit."""
    term = prediction.memory.terms.get("logits and loss")
    much = MUCH if prediction.fits_probability >= SURE else MUCH / 5
    return term is not None and term.value > much * prediction.memory.needed


def _with(prediction: Prediction, **changes: Any) -> Prediction:
    """Predicts the same layout with ``changes`` to the workload."""
    work = replace(prediction.workload, micro_batch=prediction.micro_batch, **changes)
    return predict(prediction.model, prediction.layout, prediction.cluster, work)


def _again(tried: Sequence[Prediction], limit: float, **changes: Any) -> list[Prediction]:
    """Predicts, with ``changes`` to the workload, those of ``tried`` that may not fit and the best other."""
    sure = [p for p in tried if p.memory.part(limit) <= 1 and p.fits_probability >= SURE]
    first = max(sure, key=lambda p: p.expected, default=None)
    return [_with(p, **changes) for p in tried if p is first or p not in sure]


def _sizes(name: str, sizes: int | Iterable[int] | None) -> frozenset[int] | None:
    if sizes is None:
        return None
    allowed = frozenset(sizes if isinstance(sizes, Iterable) else [sizes])
    if not allowed or any(type(size) is not int or size < 1 for size in allowed):
        raise PlanningError(f"{name} is {sizes!r}; it must be sizes of 1 or more")
    return allowed


def _layouts(world: int, allowed: Mapping[str, Set[int] | None]) -> Iterator[MeshLayout]:
    """Yields all layouts of ``world`` ranks with axis sizes in ``allowed`` (axis -> sizes; None: any)."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]

    def of(axis: str, left: int) -> list[int]:
        known = allowed[axis]
        return [n for n in divisors if left % n == 0 and (known is None or n in known)]

    for tp in of("tp", world):
        for cp in of("cp", world // tp):
            for shard in of("shard", world // tp // cp):
                replicate = world // tp // cp // shard
                if allowed["replicate"] is None or replicate in allowed["replicate"]:
                    yield MeshLayout(replicate, shard, tp, cp=cp)


def _sizes_of_ep(model: ModelSpec, cluster: Cluster, work: Workload) -> set[int]:
    """Returns the sizes of ep that divide the experts, and are whole fast-link domains or divide one."""
    if work.sharding != "fsdp" or not model.experts:
        return {1}
    sizes = (n for n in range(1, model.experts + 1) if model.experts % n == 0)
    return {n for n in sizes if cluster.domain % n == 0 or n % cluster.domain == 0}


def _with_ep(layout: MeshLayout, sizes: Iterable[int]) -> Iterator[MeshLayout]:
    for ep in sizes:
        if layout.ranks_of_a_copy % ep == 0:
            yield replace(layout, ep=ep)


def _micro_batches(layout: MeshLayout, work: Workload) -> Iterator[int]:
    """Yields the micro-batches to try: the workload's own, or powers of two, that divide a data rank's
    sequences of a step."""
    if work.global_batch is None:
        assert work.micro_batch is not None
        yield work.micro_batch
    elif work.global_batch % layout.data_size == 0:
        each = work.global_batch // layout.data_size
        powers = [2**i for i in range(_MOST_MICRO.bit_length())]
        sizes = powers if work.micro_batch is None else [work.micro_batch]
        yield from (size for size in sizes if each % size == 0)


# group -> beginnings of the components' names; what no group has goes into "other"
MEMORY = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "unsharded, buffers": ("unsharded", "gather and reduce"),
    "activations": ("activations",),
    "logits, loss": ("logits",),
    "framework": ("fragmentation", "workspace", "context"),
}
TIME = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "elementwise": ("elementwise",),
    "recompute": ("recompute",),
    "tensor parallel": ("tensor parallel",),
    "pipeline": ("bubble", "stage sends"),
    "context parallel": ("context parallel",),
    "expert parallel": ("expert parallel",),
    "exposed gather, reduce": ("exposed gather", "exposed reduce"),
    "exposed all-reduce": ("exposed all_reduce",),
    "exposed offload": ("exposed offload",),
    "stragglers": ("stragglers",),
    "slowdown": ("slowdown",),
    "copies": ("copies", "accumulate"),
    "optimizer": ("optimizer",),
    "host": ("host",),
}


def grouped(terms: Mapping[str, Term], groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Returns group -> sum of its terms' values, in the order of ``groups``; "other" is last."""
    sums = dict.fromkeys(groups, 0.0)
    for name, term in terms.items():
        group = next((g for g, begin in groups.items() if name.startswith(begin)), "other")
        sums[group] = sums.get(group, 0.0) + term.value
    return sums


def memory_groups(prediction: Prediction) -> dict[str, float]:
    """Returns component -> bytes; they add up to ``memory.needed``."""
    memory = prediction.memory
    return grouped({**memory.terms, **{term.name: term for term in memory.beyond}}, MEMORY)


def time_groups(prediction: Prediction) -> dict[str, float]:
    """Returns component -> seconds of a step; they add up to ``step_seconds``."""
    return grouped(prediction.time.terms, TIME)


def short(prediction: Prediction) -> str:
    """Returns the layout's sizes as text, "4 x 8 x 8" or "4 x 8 x cp 2 x 8, ep 8": see ``sizes_of``."""
    return sizes_of(prediction.layout, " \N{MULTIPLICATION SIGN} ")


def sizes_of(layout: MeshLayout, between: str) -> str:
    """Returns the sizes of the layout's axes as text, joined by ``between``; cp and ep appear if above 1.

    Such as "1 x 2 x cp 8 x 4, ep 8"; if ``between`` has no spaces "1x2xcp8x4 ep8".
    """
    gap, comma = (" ", ",") if " " in between else ("", "")
    each = layout.as_dict().items()
    text = between.join(f"cp{gap}{size}" if axis == "cp" else str(size) for axis, size in each)
    return text if layout.ep == 1 else f"{text}{comma} ep{gap}{layout.ep}"


def setting(prediction: Prediction) -> str:
    """Returns as text: checkpointing, "keep" (no reshard after forward), "chunked loss", "HFSDP"."""
    work, layout = prediction.workload, prediction.layout
    said = {
        "keep": not work.reshard_after_forward and layout.shard * layout.cp > 1,
        "chunked loss": work.chunked_loss,
        "HFSDP": work.is_hybrid(layout.replicate),
    }
    kind = work.checkpointing.replace("_", " ")
    return ", ".join([kind, *(word for word, is_so in said.items() if is_so)])


@dataclass(frozen=True)
class Reason:
    """Refused layouts whose reasons differ only in numbers.

    Attributes:
        text: the reason for the layout that comes nearest to fitting.
        count: number of these layouts.
        examples: the sizes of the first few of them.
    """

    text: str
    count: int
    examples: str


def reasons(refused: Iterable[Refused], most: int = 3) -> list[Reason]:
    """Groups the refused layouts by reason, the most frequent first; each has up to ``most`` examples."""
    kinds: dict[str, list[Refused]] = {}
    for each in refused:
        kind = "memory" if each.prediction is not None else each.reason
        kinds.setdefault(re.sub(r"[\d.]+", "N", kind), []).append(each)
    counted = []
    for same in sorted(kinds.values(), key=len, reverse=True):
        near = sorted(same, key=lambda r: r.part)
        names = [sizes_of(r.layout, "\N{MULTIPLICATION SIGN}") for r in near]
        text = ", ".join(names[:most]) + (" \N{HORIZONTAL ELLIPSIS}" if len(names) > most else "")
        counted.append(Reason(near[0].reason, len(same), text))
    return counted
