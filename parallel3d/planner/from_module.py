"""ModelSpec of any nn.Module, found by running it on the meta device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import Parallel3dError, PlanningError
from parallel3d.parallelize import Units, find_units
from parallel3d.planner.model_spec import (
    Activation,
    Attention,
    Elementwise,
    Matmul,
    ModelSpec,
    Parameter,
    Unit,
    loss_work,
)
from parallel3d.planner.op_recorder import (
    BEFORE,
    Call,
    MetaParams,
    Op,
    Recording,
    record,
    record_root,
)
from parallel3d.tp import ResolvedPlan, auto_plan, resolve_plan
from parallel3d.tp.auto.heads import Attention as AttentionLayer
from parallel3d.tp.auto.heads import find_attention
from parallel3d.tp.resolve import RuledModule, numberless
from parallel3d.tp.styles import Colwise, LocalSizes, Rowwise, SequenceParallel, VocabParallel

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


_TP_SIZES = (2, 3, 5, 7)


_OF_SEQUENCE = (SequenceParallel, Colwise, Rowwise, VocabParallel)


@dataclass
class ModulePlan:
    """By the parameters' names in the model.

    Attributes:
        dims: the dim that is sharded. heads, kv, partial: as ``Parameter``'s ``heads``, ``kv``,
            ``tp_partial``.
        unplanned: ``tp_partial`` of those that aren't in ``partial``.
        divisible: sizes that only a number of ranks that divides them can share.
        problem: why there is no plan.
    """

    dims: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv: set[str] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)
    unplanned: str = "sequence"
    divisible: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def ready(self) -> bool:
        """Whether there is a plan."""
        return not self.problem


def plan_of(model: nn.Module, tp_plan: Any) -> ModulePlan:
    """Of ``tp_plan``, as ``parallelize`` takes it, for the smallest tensor parallelism that it allows.

    Where none does, the first problem is told.
    """
    if tp_plan is None:
        return ModulePlan(problem="tp_plan is None")
    problem = ""
    for size in _TP_SIZES:
        try:
            rules, strict = tp_plan, tp_plan != "auto"
            if not strict:
                rules = auto_plan(model, size)
            resolved = resolve_plan(model, rules, size, strict=strict)
            # As the plan says it, before attention is fitted to so many ranks.
            return _read(model, resolve_plan(model, rules, 1, strict=False), resolved)
        except Parallel3dError as error:
            problem = problem or str(error)
    return ModulePlan(problem=problem)


def _read(model: nn.Module, plain: ResolvedPlan, fitted: ResolvedPlan) -> ModulePlan:
    first = {id(p): name for name, p in model.named_parameters()}
    found, by_sequence = ModulePlan(), False
    for planned in plain.modules:
        module = model.get_submodule(planned.name)
        for param in planned.params:
            name = first[id(module._parameters[param.name])]
            if isinstance(param.rule.placement, Shard):
                found.dims[name] = param.rule.placement.dim
            elif param.rule.tp_grad == "partial":
                sequence = isinstance(planned.style, _OF_SEQUENCE)
                by_sequence |= sequence
                found.partial[name] = "sequence" if sequence else "always"
    if by_sequence:  # the plan says of which parameters each rank sees a part of the tokens only
        found.unplanned = "never"
    ruled = {}
    for planned in plain.modules:
        module = model.get_submodule(planned.name)
        ruled[id(module)] = RuledModule(planned.name, planned.pattern, planned.style, module)
    for layer in find_attention(ruled, dict(model.named_modules(remove_duplicate=False))):
        _note_heads(found, layer, first)
    for planned in fitted.modules:
        if isinstance(planned.style, LocalSizes):
            module = model.get_submodule(planned.name)
            for name in planned.style.names:
                size = getattr(module, name)
                found.divisible[f"{numberless(planned.name)}.{name}"] = size
    return found


def _note_heads(found: ModulePlan, layer: AttentionLayer, first: dict[int, str]) -> None:
    """Of the parameters of an attention layer's projections that are cut between heads."""
    if layer.heads is None or layer.kv_heads is None:
        return
    fused = any(p.role == "fused" for p in layer.projections)
    heads = (layer.kv_heads if fused else layer.heads, layer.kv_heads)
    for projection in layer.projections:
        for param in projection.ruled.module._parameters.values():
            name = first[id(param)] if param is not None else ""
            if name in found.dims:
                found.heads[name] = heads
                if projection.role in ("key", "value"):
                    found.kv.add(name)


_LENGTHS = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4)


def spec_from_module(
    model: nn.Module,
    example: Any = None,
    *,
    tp_plan: Any = "auto",
    units: Sequence[str] | None = None,
    seq_len: int | None = None,
    name: str | None = None,
) -> ModelSpec:
    """The model as the engine would see it: units, what each computes and keeps, what the plan shards.

    One unit of each kind runs forward and backward on the meta device, in bf16 and training mode: no weight
    is allocated, nothing of the model changes, and no process group is needed. (To derive a plan for a model
    that brings none, ``tp.auto_plan`` computes one block with real numbers, on the CPU; give a plan to avoid
    that.)

    Args:
        model: a plain model, on any device.
        example: ``(args, kwargs)`` of its forward, as for ``tp.auto_plan``, or one tensor: (batch, sequence)
            token ids, or (batch, sequence, features). None: one sequence of token ids.
        tp_plan: as for ``parallelize``; None: no tensor parallelism.
        units: patterns of the blocks' names, as for ``parallelize``.
        seq_len: of the sequence that stands for the example; otherwise the longest up to 2,048 that the
            model takes.

    Returns:
        The spec; ``tp_ready`` is False, and ``source`` says why, where no plan can be resolved.

    Raises:
        PlanningError: the model doesn't run so: its forward needs other inputs (give ``example``), or
            depends on values of activations.
    """
    if not isinstance(model, nn.Module):
        raise PlanningError(f"model is {model!r}; it must be an nn.Module")
    if not any(True for _ in model.parameters()):
        raise PlanningError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    found = find_units(model, units)
    plan = plan_of(model, tp_plan)
    params = MetaParams(model, plan.dims, torch.bfloat16)
    run = _run(model, example, seq_len, found, params)
    builder = _Builder(model, found, params, plan, run)
    made = builder.units()
    attention = next((a for u in made for a in u.attention), None)
    source = f"nn.Module {type(model).__name__}"
    return ModelSpec(
        name=name or type(model).__name__,
        units=tuple(made),
        hidden=builder.hidden(made),
        vocab=run.vocab,
        heads=attention.heads if attention else 0,
        kv_heads=attention.kv_heads if attention else 0,
        head_dim=attention.head_dim if attention else 0,
        divisible=plan.divisible,
        tied=_tied(model),
        tp_ready=plan.ready,
        source=source if plan.ready else f"{source}; no tensor parallelism: {plan.problem}",
    )


@dataclass
class _Run:
    """Recordings of the root and of one unit of each kind."""

    batch: int
    seq_len: int
    root: Recording
    calls: dict[str, Call]
    vocab: int
    recordings: dict[Any, Recording] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def _tied(model: nn.Module) -> bool:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return any(isinstance(m, nn.Linear) and id(m.weight) in tables for m in model.modules())


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for units that do the same: the same classes, parameters and sizes."""
    params = tuple(
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    )
    return (params, *((n, type(m)) for n, m in module.named_modules()))


def _run(
    model: nn.Module, example: Any, seq_len: int | None, found: Units, params: MetaParams
) -> _Run:
    members = [*found.embeddings, *found.blocks, *found.final_norm_and_head]
    blocks = [name for name, _ in found.blocks]
    problem: Exception | None = None
    with _training(model):
        for args, kwargs, batch, length in _inputs(model, example, seq_len):
            try:
                root, calls, out = record_root(
                    model, params, members, blocks, args, kwargs, length, _kind_of
                )
                run = _Run(batch, length, root, calls, _vocab(out, args, kwargs))
                for name, module in members:
                    kind = _kind_of(module)
                    if name in calls and kind not in run.recordings:
                        run.recordings[kind] = made = record(module, params, calls[name], length)
                        made.arrived = [n.removeprefix(f"{name}.") for n in made.arrived]
                return run
            except Exception as error:  # whatever the model's code raises
                problem = problem or error
    raise PlanningError(
        f"{type(model).__name__} doesn't run on the meta device: {problem}. Give example=(args, kwargs) "
        "of its forward; code that depends on values of activations can't be run so"
    ) from problem


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _inputs(
    model: nn.Module, example: Any, seq_len: int | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], int, int]]:
    """(args, kwargs, sequences, tokens of each); ids are real zeros, floats are on meta."""
    if example is not None:
        args, kwargs = _given(example)
        main = next(tensors_in((args, kwargs)), None)
        if main is None:
            raise PlanningError("example holds no tensor; it must be (args, kwargs) or a tensor")
        shape = main.shape[:-1] if main.is_floating_point() else main.shape
        batch, length = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        yield args, kwargs, batch, length
        return
    features = _first_features(model)
    if features:
        length = seq_len or _LENGTHS[0]
        yield (torch.empty(1, length, features, device="meta"),), {}, 1, length
        yield (torch.empty(length, features, device="meta"),), {}, 1, length
        return
    hugging_face = hasattr(model, "config") and hasattr(model, "dummy_inputs")
    if not hugging_face and not any(isinstance(m, nn.Embedding) for m in model.modules()):
        raise PlanningError(
            "the model has no nn.Embedding and doesn't begin with a linear layer: what it takes isn't known; "
            "give example=((tensor,), {}) with the inputs of its forward"
        )
    for length in _LENGTHS if seq_len is None else (seq_len,):
        ids = torch.zeros(1, length, dtype=torch.long)
        if hugging_face:
            if getattr(model.config, "is_encoder_decoder", False):
                yield (), {"input_ids": ids, "decoder_input_ids": ids}, 1, length
            yield (), {"input_ids": ids, "use_cache": False}, 1, length
            yield (), {"input_ids": ids}, 1, length
        else:
            yield (ids,), {}, 1, length


def _given(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Tensor):
        example = ((example,), {})
    fits = isinstance(example, tuple) and len(example) == 2
    if not fits or not isinstance(example[0], tuple) or not isinstance(example[1], dict):
        raise PlanningError(
            f"example is a {type(example).__name__}; it must be (args, kwargs) for the model's forward, such "
            "as ((input_ids,), {}), or a tensor"
        )

    def placed(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().cpu()

    return map_tensors(placed, example)


def _first_features(model: nn.Module) -> int:
    """Input features of a model that begins with a linear layer; 0: it begins otherwise."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            return module.in_features if isinstance(module, nn.Linear) else 0
    return 0


def _vocab(out: Any, args: Any, kwargs: Any) -> int:
    """Logits a token of a language model; 0: it has no token ids, or puts out something else."""
    ids = next(tensors_in((args, kwargs)), None)
    if ids is None or ids.is_floating_point():
        return 0
    fits = (t for t in tensors_in(out) if t.ndim == ids.ndim + 1 and t.shape[:-1] == ids.shape)
    return next((t.shape[-1] for t in fits), 0)


class _Builder:
    def __init__(
        self, model: nn.Module, found: Units, params: MetaParams, plan: ModulePlan, run: _Run
    ) -> None:
        self.model, self.found, self.params, self.plan, self.run = model, found, params, plan, run
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.config = getattr(model, "config", None)

    def units(self) -> list[Unit]:
        """In the order of the forward: root and embeddings, blocks, tail."""
        found, run = self.found, self.run
        inside = {
            id(p)
            for _, m in [*found.embeddings, *found.blocks, *found.final_norm_and_head]
            for p in m.parameters()
        }
        own = [p for p in self.model.parameters() if id(p) not in inside]
        before = self._work(run.root, BEFORE)
        units = []
        if own or any(before[k] for k in ("matmuls", "elementwise")):
            units.append(Unit("root", "root", self._parameters(own, run.root), **before))
        for name, module in found.embeddings:
            units.append(self._unit(name, "embedding", module))
        units += self._blocks()
        called = list(run.calls)
        tails = sorted(
            found.final_norm_and_head,
            key=lambda each: called.index(each[0]) if each[0] in called else -1,
        )
        tail = [self._unit(name, "tail", module) for name, module in tails]
        after = Unit("root", "tail", (), **self._work(run.root, ""))
        if run.vocab:
            after = _joined([after, Unit("loss", "tail", (), elementwise=(loss_work(run.vocab),))])
        units.append(_joined([*tail, after]))
        return units

    def _blocks(self) -> list[Unit]:
        counted: dict[Any, list[tuple[str, nn.Module]]] = {}
        for name, module in self.found.blocks:
            call = self.run.calls.get(name)
            counted.setdefault((_kind_of(module), call.times if call else 0), []).append(
                (name, module)
            )
        return [
            self._unit(members[0][0], "block", members[0][1], len(members))
            for members in counted.values()
        ]

    def _unit(self, name: str, kind: str, module: nn.Module, count: int = 1) -> Unit:
        recording = self.run.recordings.get(_kind_of(module))
        parameters = self._parameters(list(module.parameters()), recording, f"{name}.")
        call = self.run.calls.get(name)
        if recording is None or call is None:
            return Unit(name, kind, parameters, count)
        unit = Unit(name, kind, parameters, count, **self._work(recording, prefix=f"{name}."))
        return _joined([unit, *[_without_parameters(unit)] * (call.times - 1)])

    def _work(
        self, recording: Recording, label: str | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        run = self.run
        kv_heads = getattr(self.config, "num_key_value_heads", None)
        ours = label in (None, "")
        recorder = recording.recorder
        plan = self.plan
        matmuls = matmuls_in(recording, run.tokens, label, prefix, plan.heads, plan.kv)
        fused = any(m.heads is not None and m.heads[0] == m.heads[1] for m in matmuls)
        attention = attention_in(recording, run.batch, kv_heads) if ours else ()
        splits = head_splits(recording, plan.heads, plan.kv) if attention else {}
        return {
            "matmuls": matmuls,
            "attention": tuple(replace(a, fused=fused) for a in attention),
            "elementwise": elementwise_in(recording, run.tokens, label, splits),
            "activations": activations_in(recording, run.tokens, label, splits),
            "tp_inputs": tuple(recorder.gathered.values()) if ours else (),
            "tp_outputs": tuple(recorder.summed) if label in (None, BEFORE) else (),
        }

    def _parameters(
        self, params: list[nn.Parameter], recording: Recording | None, prefix: str = ""
    ) -> tuple[Parameter, ...]:
        """In the order of their use; those without a gradient first."""
        found = []
        for param in params:
            name, plan = self.names[id(param)], self.plan
            found.append(
                Parameter(
                    name.removeprefix(prefix),
                    tuple(param.shape),
                    plan.dims.get(name),
                    param.requires_grad,
                    param.element_size(),
                    plan.heads.get(name),
                    name in plan.kv,
                    plan.partial.get(name, plan.unplanned),
                )
            )
        arrived = recording.arrived if recording is not None else []
        used = {name: at for at, name in enumerate(reversed(arrived))}
        return tuple(sorted(found, key=lambda each: used.get(each.name, -1)))

    def hidden(self, units: list[Unit]) -> int:
        """Features of the first tensor that the first block gets."""
        for name, _ in self.found.blocks:
            call = self.run.calls.get(name)
            for tensor in tensors_in((call.args, call.kwargs)) if call else ():
                if tensor.is_floating_point():
                    return int(tensor.shape[-1])
        return max((m.k for u in units for m in u.matmuls), default=0)


def _without_parameters(unit: Unit) -> Unit:
    return Unit(unit.name, unit.kind, (), **_work_of(unit))


_WORK = ("matmuls", "attention", "elementwise", "activations", "tp_inputs", "tp_outputs")


def _work_of(unit: Unit) -> dict[str, Any]:
    return {key: getattr(unit, key) for key in _WORK}


def _joined(units: list[Unit]) -> Unit:
    """One unit with the parameters and the work of all."""
    if len(units) == 1:
        return units[0]
    first = units[0]
    work = {key: sum((getattr(u, key) for u in units), ()) for key in _WORK}
    parameters = sum((u.parameters for u in units), ())
    name = "tail" if first.kind == "tail" else first.name
    return Unit(name, first.kind, parameters, first.count, **work)
