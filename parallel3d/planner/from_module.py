"""Makes a ModelSpec of any nn.Module, from a forward and backward on the meta device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d._util.units import Units, find_units
from parallel3d.ep.experts import experts_of, find_experts
from parallel3d.errors import Parallel3dError, PlanningError
from parallel3d.planner.hf_config import longest
from parallel3d.planner.model_spec import (
    Activation,
    AttentionSpec,
    Elementwise,
    Matmul,
    ModelSpec,
    Parameter,
    UnitSpec,
    loss_work,
    mask_work,
)
from parallel3d.planner.op_recorder import (
    BEFORE,
    MetaParams,
    OpRecorder,
    RecordedOp,
    UnitCall,
    record,
    record_root,
)
from parallel3d.tp import ResolvedPlan, auto_plan, resolve_plan
from parallel3d.tp.auto.heads import find_attention
from parallel3d.tp.resolve import RuledModule, numberless
from parallel3d.tp.styles import Colwise, LocalSizes, Rowwise, SequenceParallel, VocabParallel

_TP_SIZES = (2, 3, 5, 7)
_OF_SEQUENCE = (SequenceParallel, Colwise, Rowwise, VocabParallel)


@dataclass
class ModulePlan:
    """What a tensor-parallel plan does to each parameter, by the parameter's name.

    Attributes:
        dims: name -> the dim that is sharded over tp.
        heads, kv, partial: name -> the field of ``Parameter``: ``heads``, ``kv`` (a set of names),
            ``tp_partial``.
        unplanned: ``tp_partial`` of all parameters that aren't in ``partial``.
        divisible: name of a size -> the size, which the number of tp ranks must divide.
        problem: why there is no plan; "": there is one.
    """

    dims: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv: set[str] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)
    unplanned: str = "sequence"
    divisible: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def _plan_of(model: nn.Module, tp_plan: Any) -> ModulePlan:
    """Reads ``tp_plan`` (as for ``parallelize``), resolved for the fewest tp ranks that it allows."""
    if tp_plan is None:
        return ModulePlan(problem="tp_plan is None")
    problem, strict = "", tp_plan != "auto"
    for size in _TP_SIZES:
        try:
            rules = tp_plan if strict else auto_plan(model, size)
            resolved = resolve_plan(model, rules, size, strict=strict)
            # As the plan says it, before attention is fitted to so many ranks.
            return _read_plan(model, resolve_plan(model, rules, 1, strict=False), resolved)
        except Parallel3dError as error:
            problem = problem or str(error)
    return ModulePlan(problem=problem)


def _read_plan(model: nn.Module, plain: ResolvedPlan, fitted: ResolvedPlan) -> ModulePlan:
    names = {id(p): name for name, p in model.named_parameters()}
    plan, ruled = ModulePlan(), {}
    for planned in plain.modules:
        module = model.get_submodule(planned.name)
        ruled[id(module)] = RuledModule(planned.name, planned.pattern, planned.style, module)
        for param in planned.params:
            name = names[id(module._parameters[param.name])]
            if isinstance(param.rule.placement, Shard):
                plan.dims[name] = param.rule.placement.dim
            elif param.rule.tp_grad == "partial":
                sequence = isinstance(planned.style, _OF_SEQUENCE)
                plan.partial[name] = "sequence" if sequence else "always"
                if sequence:  # the plan names all parameters that see a part of the tokens
                    plan.unplanned = "never"
    for layer in find_attention(ruled, dict(model.named_modules(remove_duplicate=False))):
        if layer.heads is None or layer.kv_heads is None:
            continue
        fused = any(projection.role == "fused" for projection in layer.projections)
        heads = (layer.kv_heads if fused else layer.heads, layer.kv_heads)
        for projection in layer.projections:
            for parameter in projection.ruled.module.parameters(recurse=False):
                name = names[id(parameter)]
                if name in plan.dims:
                    plan.heads[name] = heads
                    if projection.role in ("key", "value"):
                        plan.kv.add(name)
    for planned in fitted.modules:
        if isinstance(planned.style, LocalSizes):
            module = model.get_submodule(planned.name)
            for name in planned.style.names:
                plan.divisible[f"{numberless(planned.name)}.{name}"] = getattr(module, name)
    return plan


# The work of a unit, from the recording of its module.

_WIDTH = 2  # bytes of the compute dtype of a recording, bf16


class _UnitWork:
    """Converts the recorded operations of a unit into the fields of a ``UnitSpec``, for one token.

    Args:
        tokens: number of tokens in the recorded run.
        label: takes only operations with this label, from the root's recording; None: all operations.

    Attributes:
        ways: (operations of forward, operations of backward).
        groups: for each pass, the groups of elementwise operations that one fused kernel could do, as
            indices.
        inside: saved storage -> the group of forward operations that made it, if besides backward only this
            group reads it, so that a compiler would compute it again in backward instead of saving it.
        splits: storage -> "heads" or "kv", if tp divides it between query heads, or key and value heads.
    """

    def __init__(
        self, recording: OpRecorder, plan: ModulePlan, tokens: int, label: str | None = None
    ) -> None:
        self.recording, self.plan, self.tokens, self.label = recording, plan, tokens, label
        self.ways = (recording.forward_ops, recording.backward_ops)
        self.groups = [_groups(ops) for ops in self.ways]
        self.inside = self._find_inside()
        self.splits: dict[int, str] = {}

    def fields(self, batch: int, kv_heads: int | None, prefix: str) -> dict[str, Any]:
        """Returns the fields of ``UnitSpec`` that describe work.

        Args:
            batch: sequences of the recorded run.
            kv_heads: key and value heads by the model's config; counts if keys were repeated before
                attention.
            prefix: what the names of the unit's parameters begin with, to be removed.
        """
        recording, is_main = self.recording, self.label in (None, "")
        matmuls = self._matmuls(prefix)
        fused = any(m.heads is not None and m.heads[0] == m.heads[1] for m in matmuls)
        attention = self._attention(batch, kv_heads, fused) if is_main else ()
        if attention:
            self.splits = self._head_splits()
        is_first = self.label in (None, BEFORE)
        looked_up = recording.looked_up if is_first else ()
        return {
            "matmuls": matmuls,
            "attention": attention,
            "elementwise": (*self._elementwise(), *map(mask_work, looked_up)),
            "activations": tuple(self._activations()),
            "tp_inputs": tuple(recording.gathered.values()) if is_main else (),
            "tp_outputs": tuple(recording.summed) if is_first else (),
        }

    def _matmuls(self, prefix: str) -> tuple[Matmul, ...]:
        """Returns the forward's matmuls. If one's rows aren't the tokens, its n is scaled instead."""
        matmuls = []
        for op in self.ways[0]:
            rows, n, k = op.sizes
            if op.kind == "matmul" and rows and self.label in (None, op.label):
                name = op.weight.removesuffix(".weight").removeprefix(prefix) or op.name
                scaled = n if op.experts else max(1, round(n * rows / self.tokens))
                chosen = max(1, round(rows / self.tokens))
                experts = (op.experts, chosen) if op.experts else None
                heads, kv = self.plan.heads.get(op.weight), op.weight in self.plan.kv
                gradient = op.input_gradient
                made = Matmul(name, scaled, k, op.way, gradient, heads, kv, experts)
                matmuls.append(replace(made, weight_gradient=op.weight_gradient))
        return tuple(matmuls)

    def _attention(
        self, batch: int, kv_heads: int | None, fused: bool
    ) -> tuple[AttentionSpec, ...]:
        attention = []
        for all_heads, all_kv, dim, causal in self.recording.attentions:
            kv, heads = max(1, all_kv // batch), max(1, all_heads // batch)
            if kv_heads and kv == heads and heads % kv_heads == 0:
                kv = kv_heads
            attention.append(AttentionSpec(heads, kv, dim, causal, fused))
        return tuple(attention)

    def _head_splits(self) -> dict[int, str]:
        splits: dict[int, str] = {}
        for op in chain(*self.ways):
            read = {splits[key] for key, *_ in op.reads if key in splits}
            if op.weight:
                way = "kv" if op.weight in self.plan.kv else "heads"
                read = {way} if op.weight in self.plan.heads else set()
            if read and op.split:
                splits.update((key, "kv" if read == {"kv"} else "heads") for key, _ in op.writes)
        return splits

    def _elementwise(self) -> Iterator[Elementwise]:
        """Yields the elementwise work: each norm, and the rest summed by how tp divides it."""
        sums: dict[tuple[str, bool, str], list[float]] = defaultdict(lambda: [0.0] * 6)
        for way, ops in enumerate(self.ways):
            for group in self.groups[way]:
                first = ops[group[0]]
                if self.label not in (None, first.label):
                    continue
                norm = self._is_norm(first)
                name = first.label if norm and self.label is None else ""
                total = sums[name, norm, self._split_of(first)]
                moved, whole = (
                    sum(getattr(ops[i], what) for i in group) for what in ("moved", "read_whole")
                )
                if first.split:
                    sums[name, norm, "gathered"][way] += whole
                total[way] += moved - whole * first.split
                total[2 + way] += self._fused_bytes(way, group)
                total[4 + way] += len(group)
        per = self.tokens * _WIDTH
        for (name, norm, split), (f, b, fused_f, fused_b, kernels_f, kernels_b) in sums.items():
            yield Elementwise(
                name or ("norm" if norm else "elementwise"),
                (f / per, b / per),
                (min(f, fused_f) / per, min(b, fused_b) / per),
                (int(kernels_f), int(kernels_b)),
                split,
                norm,
            )

    def _activations(self) -> Iterator[Activation]:
        """Yields what forward keeps. A compiler keeps a group's inputs instead of tensors inside it, if they
        are smaller."""
        recording, ops = self.recording, self.ways[0]
        kept: dict[tuple[str, int | None, str], float] = defaultdict(float)
        inside: dict[tuple[int, ...], int] = defaultdict(int)
        for key, saved in recording.saved.items():
            op = ops[recording.origin[key]] if key in recording.origin else None
            scores = recording.scores.get(key)
            if op is not None and (op.kind == "score" or (scores and scores.kind == "attention")):
                continue
            if self.label not in (None, saved.label):
                continue
            if key in self.inside:
                inside[self.inside[key]] += saved.nbytes
                continue
            of = "norm" if (saved.label if op is None else op.label) else "elementwise"
            if op is not None and op.kind in ("matmul", "attention", "norm"):
                of = op.kind
            itemsize = None if saved.itemsize == _WIDTH else saved.itemsize
            split = "gathered" if key in recording.gathered.keys() | recording.whole else "sequence"
            if key in recording.split_in_forward:
                split = self.splits.get(key, "tp")
            kept[of, itemsize, split] += saved.nbytes / saved.itemsize
        for (of, itemsize, split), size in kept.items():
            yield Activation(f"of {of}", size / self.tokens, itemsize, split, of)
        for group, nbytes in inside.items():
            first = ops[group[0]]
            of = "norm" if self._is_norm(first) else "elementwise"
            split, name = self._split_of(first), first.label or first.name
            needed = min(nbytes, self._unsaved_inputs(group))
            if needed:
                elements = needed / self.tokens / _WIDTH
                yield Activation(f"{name} input", elements, None, split, of)
            if nbytes > needed:
                rest = (nbytes - needed) / self.tokens
                yield Activation(f"{name} inside", rest, 1, split, of, eager_only=True)

    def _is_norm(self, op: RecordedOp) -> bool:
        """Whether ``op`` belongs to a norm; in the root only norms that are one kernel are recognised."""
        return op.kind == "norm" or (self.label is None and op.label != "")

    def _split_of(self, op: RecordedOp) -> str:
        if not op.split:
            return "gathered" if op.whole else "sequence"
        return next((self.splits[key] for key, _ in op.writes if key in self.splits), "tp")

    def _fused_bytes(self, way: int, group: tuple[int, ...]) -> float:
        """Returns the bytes that ``group``, fused to one kernel, reads and writes. A backward group reads the
        inputs of a forward group instead of tensors ``inside`` it, because it computes these again."""
        ops, members = self.ways[way], set(group)
        reads: dict[Any, int] = {}
        again: dict[tuple[int, ...], int] = defaultdict(int)
        for i in group:
            for key, writer, size in ops[i].reads:
                if writer in members or (key, writer) in reads:
                    continue
                made_inside = way == 1 and writer is None and key in self.inside
                reads[key, writer] = 0 if made_inside else size
                if made_inside:
                    again[self.inside[key]] += size
        total = float(sum(reads.values()))
        total += sum(min(size, self._unsaved_inputs(source)) for source, size in again.items())
        for i in group:
            readers = ops[i].read_by
            outside = not readers or any(r not in members and r >= 0 for r in readers)
            written = ops[i].writes
            total += sum(n for key, n in written if outside or key in self.recording.outputs)
        return total

    def _find_inside(self) -> dict[int, tuple[int, ...]]:
        inside: dict[int, tuple[int, ...]] = {}
        kept = self.recording.saved.keys() - self.recording.outputs
        for group in self.groups[0]:
            for op in (self.ways[0][i] for i in group):
                readers = {r for r in op.read_by if r >= 0}
                if op.kind != "norm" and readers and readers <= set(group):
                    inside.update((key, group) for key, _ in op.writes if key in kept)
        return inside

    def _unsaved_inputs(self, group: tuple[int, ...]) -> int:
        """Returns the bytes of a forward group's inputs that are not saved anyway."""
        members, known = set(group), self.recording.saved.keys() | self.recording.constant
        inputs = {
            key: size
            for i in group
            for key, writer, size in self.ways[0][i].reads
            if writer not in members and key not in known
        }
        return sum(inputs.values())


def _groups(ops: list[RecordedOp]) -> list[tuple[int, ...]]:
    """Returns groups of elementwise operations that one kernel could do: connected, with no matmul between
    them, and divided alike by tp."""
    groups: dict[int | None, set[int]] = {}
    for i, op in enumerate(ops):
        if op.kind in ("elementwise", "norm"):
            groups[i] = {i}
        for _, writer, _ in op.reads if op.kind == "elementwise" else ():
            if writer is not None and writer in groups and ops[writer].fuses_with(op):
                groups[i] |= groups[writer]
                groups.update(dict.fromkeys(groups[i], groups[i]))
    return sorted({tuple(sorted(group)) for group in groups.values()})


# The run: inputs, recordings, units.

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
    """Returns the spec of a module: its units, what each computes and keeps, and what the plan shards.

    One unit of each kind runs forward and backward on the meta device, in bf16 and training mode: no weight
    is allocated, nothing of the model changes, and no process group is needed. (To derive a plan for a model
    that brings none, ``tp.auto_plan`` computes one block with real numbers, on the CPU; give a plan to avoid
    that.)

    Args:
        model: a plain model, on any device.
        example: ``(args, kwargs)`` of its forward, as for ``tp.auto_plan``, or one tensor: (batch, sequence)
            token ids, or (batch, sequence, features). None: one sequence of token ids.
        tp_plan: as for ``parallelize``; None: no tensor parallelism.
        units: patterns of the blocks' names, as for ``parallelize``; units inside blocks count as parts of
            these.
        seq_len: tokens of the sequence that is run; by default the longest up to 2,048 that the model takes.
            Without an ``example`` only.
        name: the spec's name; by default the class's.

    Returns:
        The spec; ``tp_ready`` is False, and ``source`` says why, where no plan can be resolved.

    Raises:
        PlanningError: the model doesn't run so: its forward needs other inputs (give ``example``), or depends
            on values of activations.
    """
    if not isinstance(model, nn.Module):
        raise PlanningError(f"model is {model!r}; it must be an nn.Module")
    if not any(True for _ in model.parameters()):
        raise PlanningError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    found = find_units(model, units)
    plan = _plan_of(model, tp_plan)
    builder = _run(model, example, seq_len, found, plan)
    made = builder.units()
    attention = next((a for u in made for a in u.attention), AttentionSpec(0, 0, 0))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    source = f"nn.Module {type(model).__name__}"
    return ModelSpec(
        name=name or type(model).__name__,
        units=tuple(made),
        hidden=builder.hidden(made),
        vocab=builder.vocab,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        divisible=plan.divisible,
        tied=any(id(m.weight) in tables for m in linears),
        tp_ready=not plan.problem,
        source=f"{source}; no tensor parallelism: {plan.problem}" if plan.problem else source,
        seq_len=longest(vars(getattr(model, "config", plan))) or builder.seq_len,
    )


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns a key that is equal for units of the same classes, parameters and sizes."""
    params = tuple(
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    )
    return (params, *((n, type(m)) for n, m in module.named_modules()))


def _work_of(module: nn.Module, call: UnitCall) -> tuple[Any, ...]:
    """Returns a key that is equal for units that do the same work: of the same ``_kind_of``, and both with or
    both without inputs that need a gradient."""
    given = tensors_in((call.args, call.kwargs))
    return _kind_of(module), any(t.requires_grad for t in given)


def _run(
    model: nn.Module, example: Any, seq_len: int | None, found: Units, plan: ModulePlan
) -> _Builder:
    params = MetaParams(model, plan.dims, torch.bfloat16)
    blocks = [name for name, _ in found.blocks]
    members = [*found.embeddings, *found.blocks, *found.final_norm_and_head]
    problem: Exception | None = None
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(patch.object(module, "training", True))
        for args, kwargs, batch, length in _inputs(model, example, seq_len):
            try:
                call = UnitCall(args, kwargs)
                root, calls, out = record_root(
                    model, params, members, blocks, call, length, _kind_of
                )
                vocab = _vocab(out, args, kwargs)
                run = _Builder(model, found, plan, batch, length, root, calls, vocab)
                for name, module in members:
                    kind = _work_of(module, calls[name]) if name in calls else None
                    if kind is not None and kind not in run.recordings:
                        run.recordings[kind] = made = record(module, params, calls[name], length)
                        made.arrived = [n.removeprefix(f"{name}.") for n in made.arrived]
                return run
            except Exception as error:  # whatever the model's code raises
                problem = problem or error
    raise PlanningError(
        f"{type(model).__name__} doesn't run on the meta device: {problem}. Give example=(args, kwargs) "
        "of its forward; code that depends on values of activations can't be run so"
    ) from problem


def _inputs(
    model: nn.Module, example: Any, seq_len: int | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], int, int]]:
    """Yields candidates (args, kwargs, number of sequences, tokens of each) for the model's forward; ids are
    real zeros, float inputs are on meta."""
    if example is not None:
        args, kwargs = _placed(example)
        main = next(tensors_in((args, kwargs)), None)
        if main is None:
            raise PlanningError("example holds no tensor; it must be (args, kwargs) or a tensor")
        shape = main.shape[:-1] if main.is_floating_point() else main.shape
        batch, length = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        yield args, kwargs, batch, length
        return
    first = next(m for m in model.modules() if any(True for _ in m.parameters(recurse=False)))
    if isinstance(first, nn.Linear):
        length = seq_len or _LENGTHS[0]
        features = torch.empty(length, first.in_features, device="meta")
        for example in (features[None], features):
            yield (example,), {}, 1, length
        return
    hugging_face = hasattr(model, "config") and hasattr(model, "dummy_inputs")
    if not hugging_face and not any(isinstance(m, nn.Embedding) for m in model.modules()):
        raise PlanningError(
            "the model has no nn.Embedding and doesn't begin with a linear layer: what it takes isn't known; "
            "give example=((tensor,), {}) with the inputs of its forward"
        )
    for length in _LENGTHS if seq_len is None else (seq_len,):
        ids = torch.zeros(1, length, dtype=torch.long)
        if not hugging_face:
            yield (ids,), {}, 1, length
            continue
        decodes = getattr(model.config, "is_encoder_decoder", False)
        for more in [{"decoder_input_ids": ids}] * decodes + [{"use_cache": False}, {}]:
            yield (), {"input_ids": ids, **more}, 1, length


def _placed(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the user's example with float tensors on meta in bf16, and all other tensors on the CPU."""
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


def _vocab(out: Any, args: Any, kwargs: Any) -> int:
    """Returns the logits per token of a language model; 0 if there are no token ids or no logits."""
    ids = next(tensors_in((args, kwargs)), None)
    if ids is None or ids.is_floating_point():
        return 0
    logits = (t for t in tensors_in(out) if t.ndim == ids.ndim + 1 and t.shape[:-1] == ids.shape)
    return next((t.shape[-1] for t in logits), 0)


_WORK = ("matmuls", "attention", "elementwise", "activations", "tp_inputs", "tp_outputs")


@dataclass
class _Builder:
    """Builds the units of ``model`` from a run of ``batch`` sequences of ``seq_len`` tokens.

    Attributes:
        root: the recorded operations outside of units.
        recordings: kind of unit (``_work_of``) -> its recorded operations.
        vocab: logits per token; 0: there are none.
        experts: id of a parameter that ep divides -> the number of experts in it.
    """

    model: nn.Module
    found: Units
    plan: ModulePlan
    batch: int
    seq_len: int
    root: OpRecorder
    calls: dict[str, UnitCall]
    vocab: int
    recordings: dict[Any, OpRecorder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.experts = {
            id(param): experts_of(module)
            for module in find_experts(self.model).values()
            for param in module.parameters()
        }

    def units(self) -> list[UnitSpec]:
        """Returns the units in the order of the forward: root and embeddings, blocks, final norm and head."""
        found = self.found
        every = (*found.embeddings, *found.blocks, *found.final_norm_and_head)
        inside = {id(p) for _, module in every for p in module.parameters()}
        own = [p for p in self.model.parameters() if id(p) not in inside]
        before = self._work(self.root, BEFORE)
        units = []
        if own or before["matmuls"] or before["elementwise"]:
            units.append(UnitSpec("root", "root", self._parameters(own, self.root), **before))
        units += [self._unit(name, "embedding", module) for name, module in found.embeddings]
        counted: dict[Any, list[tuple[str, nn.Module]]] = {}
        for name, module in found.blocks:
            call = self.calls.get(name)
            key = (_work_of(module, call), call.times) if call is not None else _kind_of(module)
            counted.setdefault(key, []).append((name, module))
        for members in counted.values():
            name, module = members[0]
            units.append(self._unit(name, "block", module, len(members)))
        called = {name: at for at, name in enumerate(self.calls)}
        last = sorted(found.final_norm_and_head, key=lambda member: called.get(member[0], -1))
        tail = [self._unit(name, "tail", module) for name, module in last]
        tail.append(UnitSpec("root", "tail", (), **self._work(self.root, "")))
        if self.vocab:
            tail.append(UnitSpec("loss", "tail", (), elementwise=(loss_work(self.vocab),)))
        units.append(_joined(tail, "tail"))
        return units

    def _used(self, name: str, recording: OpRecorder | None) -> float:
        """Returns the fraction of the parameter ``name`` that a token uses: below 1 for experts."""
        tokens = self.batch * self.seq_len
        for op in recording.forward_ops if recording is not None else ():
            if op.experts and op.weight == name:
                return min(1.0, round(op.sizes[0] / tokens) / op.experts)
        return 1.0

    def _unit(self, name: str, kind: str, module: nn.Module, count: int = 1) -> UnitSpec:
        call = self.calls.get(name)
        recording = None if call is None else self.recordings.get(_work_of(module, call))
        parameters = self._parameters(list(module.parameters()), recording, f"{name}.")
        if recording is None or call is None:
            return UnitSpec(name, kind, parameters, count)
        unit = UnitSpec(name, kind, parameters, count, **self._work(recording, prefix=f"{name}."))
        return _joined([unit, *[replace(unit, parameters=())] * (call.times - 1)], name)

    def _work(
        self, recording: OpRecorder, label: str | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        kv_heads = getattr(getattr(self.model, "config", None), "num_key_value_heads", None)
        work = _UnitWork(recording, self.plan, self.batch * self.seq_len, label)
        return work.fields(self.batch, kv_heads, prefix)

    def _parameters(
        self, params: list[nn.Parameter], recording: OpRecorder | None, prefix: str = ""
    ) -> tuple[Parameter, ...]:
        """Returns the specs of ``params`` in the order of their use; first those without a gradient."""
        plan = self.plan
        names = {id(p): name for name, p in self.model.named_parameters()}
        parameters = [
            Parameter(
                name.removeprefix(prefix),
                tuple(param.shape),
                plan.dims.get(name),
                param.requires_grad,
                param.element_size(),
                plan.heads.get(name),
                name in plan.kv,
                plan.partial.get(name, plan.unplanned),
                self._used(name, recording),
                self.experts.get(id(param), 0),
            )
            for param in params
            for name in [names[id(param)]]
        ]
        arrived = recording.arrived if recording is not None else []
        used = {name: at for at, name in enumerate(reversed(arrived))}
        return tuple(sorted(parameters, key=lambda each: used.get(each.name, -1)))

    def hidden(self, units: list[UnitSpec]) -> int:
        """Returns the features of the first float tensor that the first block gets."""
        for name, _ in self.found.blocks:
            call = self.calls.get(name)
            for tensor in tensors_in((call.args, call.kwargs)) if call else ():
                if tensor.is_floating_point():
                    return int(tensor.shape[-1])
        return max((m.k for u in units for m in u.matmuls), default=0)


def _joined(units: list[UnitSpec], name: str) -> UnitSpec:
    """Returns one unit with the parameters and work of all, and the other fields of the first."""
    if len(units) == 1:
        return units[0]
    keys = ("parameters", *_WORK)
    joined: dict[str, Any] = {key: sum((getattr(u, key) for u in units), ()) for key in keys}
    return replace(units[0], name=name, **joined)
