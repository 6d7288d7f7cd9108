"""audit: the relations, a table of their results on several engines, and what is said of one that fails."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from parallel3d.audit.findings import Gap, gap_between, named
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout
from parallel3d.testing.gloo_pool import GlooPool
from parallel3d.testing.parity import ShardBatch, default_shard_batch
from parallel3d.testing.relations.engines import (
    ENGINES,
    MICRO_BATCHES,
    Engine,
    Plain,
    Program,
    Result,
    Step,
    Variant,
    sgd,
)
from parallel3d.testing.samples import LossFn, Samples

BOUND = 1e-9
"""The largest difference that rounding explains in float64, as ``assert_parity`` has it; of weights after
some steps ten times that."""
_FLOOR = 1e-4  # of the model's largest gradient: what smaller ones are compared relative to


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "fails"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """The result of one relation on one engine.

    Attributes:
        relation, engine: their names.
        verdict: whether it holds.
        what: if it fails: ``loss``, ``gradient``, ``norm``, ``weight``, ``exported weight`` or an error; if
            it was not run: why.
        group: names of the parameters that differ, with ``*`` for numbers.
        factor: the number by which the correct values are multiplied; None: they are no multiple.
        axes: the factor as a formula of sizes of axes, such as ``1 / tp``.
        step: the first step that differs, from 0.
        ranks: the ranks on which it differs.
        difference: the largest difference, divided by the largest correct value.
    """

    relation: str
    engine: str
    verdict: Verdict
    what: str = ""
    group: str = ""
    factor: float | None = None
    axes: str = ""
    step: int = 0
    ranks: tuple[int, ...] = ()
    difference: float = 0.0

    def __str__(self) -> str:
        if self.verdict is not Verdict.FAILS:
            return f"{self.verdict}{f': {self.what}' if self.what else ''}"
        if self.what not in _KINDS:
            return f"fails: {self.what}"
        of = f" of {self.group}" if self.group else ""
        by = f"off by {self.difference:.2g}"
        if self.factor is not None:
            by = f"{self.factor:.4g} times the right one{f' ({self.axes})' if self.axes else ''}"
        ranks = f", ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"fails: {self.what}{of} is {by}, from step {self.step}{ranks}"


@dataclass(frozen=True)
class AuditTable:
    """The results of ``audit``.

    Attributes:
        layout: the mesh.
        outcomes: the outcomes, ordered by relation and then by engine.
        seconds: seconds that the audit took.
        made: description of the inputs that were made, if none were given.
    """

    layout: MeshLayout
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    made: str = ""

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes of relations that fail."""
        return [outcome for outcome in self.outcomes if outcome.verdict is Verdict.FAILS]

    def as_dict(self) -> dict[str, Any]:
        """Returns the table for JSON."""
        rows = []
        for outcome in self.outcomes:
            row = asdict(outcome)
            if not math.isfinite(outcome.difference):
                row["difference"] = None
            rows.append(row)
        return {
            "layout": self.layout.as_dict(views=True),
            "outcomes": rows,
            "seconds": self.seconds,
            "inputs": self.made or None,
        }

    def __str__(self) -> str:
        width = max((len(o.relation) for o in self.outcomes), default=0)
        engines = max((len(o.engine) for o in self.outcomes), default=0)
        lines = [f"{o.relation:{width}}  {o.engine:{engines}}  {o}" for o in self.outcomes]
        return "\n".join(lines)


_BASE = Variant()


@dataclass(frozen=True)
class Relation:
    """Two trainings whose results must be the same."""

    says: str  # the relation as a sentence
    left: Variant | None  # what counts as correct
    right: Variant = _BASE  # what is compared with it
    exact: bool = False  # whether results must be equal bit for bit


_ACCUMULATED = Variant(micro_batches=MICRO_BATCHES)

RELATIONS: dict[str, Relation] = {
    "plain": Relation("n processes = one", Variant(plain=True)),
    "accumulation": Relation(f"{MICRO_BATCHES} micro-batches = 1", _BASE, _ACCUMULATED),
    "rotated": Relation("the data ranks' samples change places", _BASE, Variant(rotated=True)),
    "frozen": Relation(
        "frozen, then thawed, = one process", Variant(plain=True, frozen=True), Variant(frozen=True)
    ),
    "resumed": Relation("resumed = uninterrupted", _BASE, Variant(resumed=True)),
    "norm": Relation("the gradient norm is that of the gradients, on each rank", None),
    "exported": Relation("what is exported = what is held", None),
    "recomputed": Relation("recomputed = kept", _BASE, Variant(recomputed=True)),
    "repeated": Relation("a second run = the first", _BASE, Variant(again=True), exact=True),
    "compiled": Relation("compiled = eager", _BASE, Variant(compiled=True)),
}
"""Name -> relation. ``compiled`` takes long and is run where it is asked for."""
DEFAULT = tuple(name for name in RELATIONS if name != "compiled")


def audit(
    build: Callable[[], nn.Module],
    batch: Any = None,
    *,
    loss: LossFn | None = None,
    layout: MeshLayout | None = None,
    engines: Sequence[str | type[Engine]] = ("parallel3d",),
    relations: Sequence[str] = DEFAULT,
    step: Step | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    tp_plan: Any = None,
    shard_batch: ShardBatch | None = None,
    seed: int = 0,
    pool: GlooPool | None = None,
    **options: Any,
) -> AuditTable:
    """Trains a model several times on each engine, and checks relations that must hold between the trainings.

    Everything is computed in float64, so that differences are not rounding. The relations are metamorphic
    (Chen et al., "Metamorphic testing", 1998) and need no engine that is known to be right; only ``plain``
    compares with a training in one process.

    Without a process group the ranks are processes of a ``GlooPool``, and all arguments must be picklable,
    such as functions of a module. With a process group every rank must call this.

    Args:
        build: makes the plain model.
        batch, loss: as in ``assert_parity``. Each data rank gets two samples a step, concatenated along dim 0
            in relations that give it both in one forward.
        layout: the mesh; (1, 2, 1) by default.
        engines: names of ``ENGINES`` (parallel3d, torch, accelerate, transformers, megatron_fsdp), or
            subclasses of ``Engine``.
        relations: names of ``RELATIONS``.
        step: ``step(model, optimizer, micro_batches)`` -> loss, or (loss, gradient norm): the training's own
            step with accumulation and clipping, to be checked instead of an engine's usual one. ``plain`` and
            ``frozen`` call it with the plain model too. Gradients are compared as the optimizer gets them.
        optimizer: makes the optimizer of the parameters; SGD with momentum by default.
        steps: optimizer steps, at least 2.
        tp_plan, options: for ``parallelize``.
        shard_batch: as in ``assert_parity``.
        seed: seed of the weights.
        pool: the pool of processes to use; a new one by default.

    Returns:
        An ``AuditTable``, the same on every rank. ``table.failed`` is empty if all relations hold.

    Raises:
        Parallel3dError: an argument is out of range, or unknown.
    """
    layout = (layout or MeshLayout(shard=2)).resolve((layout or MeshLayout(shard=2)).world_size)
    if steps < 2:
        raise Parallel3dError(f"steps={steps}: at least 2 are needed, one to resume after")
    for kind, names, known in (("relation", relations, RELATIONS), ("engine", engines, ENGINES)):
        for name in names:
            if isinstance(name, str) and name not in known:
                raise Parallel3dError(f"{name!r} is no {kind}; there are {', '.join(known)}")
    began = time.perf_counter()
    samples = Samples(batch, build, layout.data_size * MICRO_BATCHES)
    program = Program(
        build,
        samples,
        samples.loss_of(loss),
        layout,
        tp_plan,
        options,
        step,
        optimizer,
        steps,
        seed,
        shard_batch or default_shard_batch(layout, None),
    )
    chosen = [ENGINES[name] if isinstance(name, str) else name for name in engines]
    if dist.is_initialized():
        outcomes = _on_rank(program, chosen, relations)
    else:
        given = {
            **options,
            "loss": loss,
            "layout": layout,
            "engines": engines,
            "relations": relations,
            "step": step,
            "optimizer": optimizer,
            "steps": steps,
            "tp_plan": tp_plan,
            "shard_batch": shard_batch,
            "seed": seed,
        }
        with GlooPool(layout.world_size) if pool is None else nullcontext(pool) as ranks:
            outcomes = ranks.run(_in_pool, build, batch, given, world_size=layout.world_size)[0]
    return AuditTable(layout, outcomes, time.perf_counter() - began, samples.made)


def _in_pool(build: Any, batch: Any, given: dict[str, Any]) -> list[Outcome]:
    """Runs ``audit`` as a rank in a process of the pool."""
    return audit(build, batch, **given).outcomes


# -- on a rank -----------------------------------------------------------------------------------------


def _on_rank(
    program: Program, engines: Iterable[type[Engine]], relations: Sequence[str]
) -> list[Outcome]:
    plain: dict[Variant, Result | str] = {}
    found: dict[tuple[str, str], Outcome] = {}
    for engine in engines:
        trained: dict[Variant, Result | str] = plain.copy()
        for name in relations:
            found[name, engine.name] = _outcome(program, engine, name, trained)
        plain |= {variant: result for variant, result in trained.items() if variant.plain}
    return [found[name, engine.name] for name in relations for engine in engines]


def _outcome(
    program: Program, engine: type[Engine], name: str, trained: dict[Variant, Result | str]
) -> Outcome:
    relation = RELATIONS[name]
    changed = next(
        (f.name for f in fields(Variant) if getattr(relation.right, f.name) != f.default), ""
    )
    why = engine.unable(program, changed)
    if not why and name == "rotated" and program.layout.data_size == 1:
        why = "there is one data rank"
    tell = partial(Outcome, name, engine.name)
    if why:
        return tell(Verdict.NOT_RUN, why)
    results = []
    for variant in (relation.left, relation.right):
        if variant is None:
            continue
        if variant not in trained:
            trained[variant] = _train(Plain if variant.plain else engine, program, variant)
        result = trained[variant]
        if isinstance(result, str):
            if variant.plain:
                raise Parallel3dError(f"the plain model's training in one process raised {result}")
            if variant == _BASE and name != "plain":
                return tell(Verdict.NOT_RUN, "the training without it fails")
            return tell(Verdict.FAILS, result)
        results.append(result)
    sizes = {"micro_batches": relation.right.micro_batches} | program.layout.as_dict(views=True)
    if relation.left is not None:
        differences = _differences(*results, exact=relation.exact)
    elif name == "norm":
        differences = _norms(results[0], clipped=program.step is not None)
        if results[0].no_norm:
            return tell(Verdict.FAILS, results[0].no_norm)
        if not results[0].norms:
            return tell(Verdict.NOT_RUN, "the step returns no norm")
    else:
        differences = _exported(results[0])
    return _told(tell, differences, sizes)


def _train(engine: type[Engine], program: Program, variant: Variant) -> Result | str:
    """Trains on all ranks; returns the result or, if any rank raised, the text of the first one's error."""
    result: Result | None = None
    told = ""
    try:
        torch.manual_seed(program.seed)
        result = engine(program, variant).train()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        told = f"{type(error).__name__}: {lines[0][:200]}"
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, told)
    first = next((error for error in errors if error), "")
    return first if first or result is None else result


_KINDS = ("loss", "gradient", "norm", "weight", "exported weight")
_Differing = tuple[int, str, str, Gap]  # step, kind, name, gap


def _differences(right: Result, other: Result, *, exact: bool) -> Iterator[_Differing]:
    """Yields the difference of each loss, gradient and weight of two trainings, step by step."""
    bound = 0.0 if exact else BOUND
    for step, (a, b) in enumerate(zip(right.grads, other.grads, strict=True)):
        floats = torch.tensor([right.losses[step], other.losses[step]], dtype=torch.float64)
        yield step, "loss", "", _gap(floats[0], floats[1], bound)
        largest = max(
            (float(g.abs().max()) for g in a.values() if g is not None and g.numel()), default=0.0
        )
        for name, want in a.items():
            got = b.get(name)
            if want is None and got is None:
                continue
            if want is None or got is None:  # a gradient of zeros is as none
                some = got if want is None else want
                assert some is not None
                if name in b and not some.any():
                    continue
                want = torch.zeros_like(some) if want is None else want
                got = torch.zeros_like(some) if got is None else got
            yield step, "gradient", name, _gap(want, got, bound, _FLOOR * largest)
    last = len(right.grads) - 1
    weights = [(last, right.weights, other.weights)]
    if right.before_last and other.before_last:
        weights.append((last - 1, right.before_last, other.before_last))
    for step, wanted, held in weights:
        for name, weight in wanted.items():
            gap = _gap(weight, held[name], 10 * bound) if name in held else Gap(math.inf)
            yield step, "weight", name, gap


def _gap(want: Tensor, got: Tensor, bound: float, floor: float = 0.0) -> Gap:
    """Returns how far ``got`` is from ``want``, with 0 as the difference where that is within ``bound``."""
    gap = gap_between(want, got, bound, floor)
    return gap if not gap.difference <= bound else Gap(0.0)


def _norms(result: Result, *, clipped: bool) -> Iterator[_Differing]:
    """Yields how far each gradient norm is from that of the recorded gradients. ``clipped``: these may be
    smaller by now, so that a larger norm need only be the same on all ranks."""
    firsts = [result.norms]
    dist.broadcast_object_list(firsts)
    for step, (want, got) in enumerate(zip(result.own_norms, result.norms, strict=True)):
        if clipped and got > want:
            want = firsts[0][step]
        a, b = torch.tensor([want, got], dtype=torch.float64)
        # Some libraries keep the norm in float32.
        yield step, "norm", "", _gap(a, b, 1e-6)


def _exported(result: Result) -> Iterator[_Differing]:
    if not result.exported and dist.get_rank() != 0:
        return  # libraries gather on the first rank
    for name, weight in result.weights.items():
        got = result.exported.get(name)
        gap = Gap(math.inf) if got is None else _gap(weight, got, 0.0)
        yield len(result.grads) - 1, "exported weight", name, gap


def _told(
    tell: Callable[..., Outcome], differences: Iterable[_Differing], sizes: Mapping[str, int]
) -> Outcome:
    """Returns the outcome for the differences of all ranks: of the first step and kind that differs, the
    names of parameters, the factor, the ranks."""
    own = [each for each in differences if each[3].difference > 0]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    ranks = tuple(rank for rank, found in enumerate(everywhere) if found)
    if not ranks:
        return tell(Verdict.HOLDS)
    found = [each for of_rank in everywhere for each in of_rank]
    # A gradient says more than the loss, and both more than what comes of them.
    first = min((step, _RANK[kind]) for step, kind, _, _ in found)
    here = [(n, gap) for step, kind, n, gap in found if (step, _RANK[kind]) == first]
    kind = next(kind for kind, rank in _RANK.items() if rank == first[1])
    factors = [gap.factor for _, gap in here]
    factor = factors[0]
    if factor is None or any(f is None or abs(f - factor) > 1e-3 * abs(factor) for f in factors):
        factor = None
    axes = "" if factor is None else named(factor, sizes).removeprefix(" = ")
    if kind in ("loss", "norm") and not axes:
        factor = None  # any number is a multiple of any other
    worst = max(gap.difference for _, gap in here)
    group = _group([name for name, _ in here if name])
    return tell(Verdict.FAILS, kind, group, factor, axes, first[0], ranks, worst)


_RANK = {"gradient": 0, "loss": 1, "norm": 2, "weight": 3, "exported weight": 4}


def _group(names: Sequence[str]) -> str:
    """Returns the names with ``*`` for numbers, each once; the first three of them."""
    patterns = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))
    more = f" and {len(patterns) - 3} more" if len(patterns) > 3 else ""
    return ", ".join(patterns[:3]) + more
