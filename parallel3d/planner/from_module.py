"""ModelSpec of any nn.Module, from a run on the meta device."""

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
    """A tensor-parallel plan, by the names of the model's parameters.

    Attributes:
        dims: the dim that is sharded over tp.
        heads, kv, partial: ``Parameter``'s ``heads``, ``kv`` and ``tp_partial``.
        unplanned: ``tp_partial`` of parameters that aren't in ``partial``.
        divisible: sizes that the number of tp ranks must divide.
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
    """``tp_plan``, as ``parallelize`` takes it, for the smallest tensor parallelism that it allows."""
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
    """The operations of a recording as the fields of a ``UnitSpec``, for one token.

    Args:
        tokens: number of tokens in the recorded run.
        label: label of the operations to take from the root's recording; None: all operations.

    Attributes:
        ways: the operations of forward and of backward.
        groups: for each way the elementwise operations that one kernel could do, as indices.
        inside: saved storages that only one group of the forward reads, and backward -> that group: a
            compiler computes them again.
        splits: storage -> "heads" or "kv", if it is divided over tp in whole query heads, or key and value
            heads.
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
        """The fields of ``UnitSpec``.

        Args:
            batch: sequences of the recorded run.
            kv_heads: number of key and value heads by the model's config; used if keys were repeated before
                attention.
            prefix: the unit's name and a dot, with which the names of its parameters begin.
        """
        recording, is_main = self.recording, self.label in (None, "")
        matmuls = self._matmuls(prefix)
        fused = any(m.heads is not None and m.heads[0] == m.heads[1] for m in matmuls)
        attention = self._attention(batch, kv_heads, fused) if is_main else ()
        if attention:
            self.splits = self._head_splits()
        return {
            "matmuls": matmuls,
            "attention": attention,
            "elementwise": tuple(self._elementwise()),
            "activations": tuple(self._activations()),
            "tp_inputs": tuple(recording.gathered.values()) if is_main else (),
            "tp_outputs": tuple(recording.summed) if self.label in (None, BEFORE) else (),
        }

    def _matmuls(self, prefix: str) -> tuple[Matmul, ...]:
        """The forward's. If one runs on fewer or more rows than there are tokens, its n is scaled."""
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
                matmuls.append(Matmul(name, scaled, k, op.way, gradient, heads, kv, experts))
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
        """All but matmuls and attention: norms one by one, the rest by how tensor parallelism divides it."""
        sums: dict[tuple[str, bool, str], list[float]] = defaultdict(lambda: [0.0] * 6)
        for way, ops in enumerate(self.ways):
            for group in self.groups[way]:
                first = ops[group[0]]
                if self.label not in (None, first.label):
                    continue
                norm = self._is_norm(first)
                name = first.label if norm and self.label is None else ""
                total = sums[name, norm, self._split_of(first)]
                total[way] += sum(ops[i].moved for i in group)
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
        """What forward keeps. A compiler keeps a group's inputs rather than what is in it, if smaller."""
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
            split = "gathered" if key in recording.gathered else "sequence"
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
        """Whether ``op`` is of a norm; in the root's recording only kernels of norms are known."""
        return op.kind == "norm" or (self.label is None and op.label != "")

    def _split_of(self, op: RecordedOp) -> str:
        if not op.split:
            return "sequence"
        return next((self.splits[key] for key, _ in op.writes if key in self.splits), "tp")

    def _fused_bytes(self, way: int, group: tuple[int, ...]) -> float:
        """Returns the bytes that ``group``, fused to one kernel, reads and writes in memory.

        For tensors that are ``inside`` a kernel of the forward, the backward reads that kernel's inputs and
        computes them again.
        """
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
        """Bytes of the inputs of a group of the forward that would have to be kept for it."""
        members, known = set(group), self.recording.saved.keys() | self.recording.constant
        inputs = {
            key: size
            for i in group
            for key, writer, size in self.ways[0][i].reads
            if writer not in members and key not in known
        }
        return sum(inputs.values())


def _groups(ops: list[RecordedOp]) -> list[tuple[int, ...]]:
    """Elementwise operations that one kernel could do: connected, with no matmul between, divided alike."""
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
        units: patterns of the blocks' names, as for ``parallelize``; units inside blocks count as parts of
            these.
        seq_len: length of the sequence that stands for the example; by default the longest up to 2,048 that
            the model takes.
        name: the spec's name; by default the class's.

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


def _members(found: Units) -> list[tuple[str, nn.Module]]:
    return [*found.embeddings, *found.blocks, *found.final_norm_and_head]


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for units that do the same: the same classes, parameters and sizes."""
    params = tuple(
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    )
    return (params, *((n, type(m)) for n, m in module.named_modules()))


def _run(
    model: nn.Module, example: Any, seq_len: int | None, found: Units, plan: ModulePlan
) -> _Builder:
    params = MetaParams(model, plan.dims, torch.bfloat16)
    blocks = [name for name, _ in found.blocks]
    problem: Exception | None = None
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(patch.object(module, "training", True))
        for args, kwargs, batch, length in _inputs(model, example, seq_len):
            try:
                call, members = UnitCall(args, kwargs), _members(found)
                root, calls, out = record_root(
                    model, params, members, blocks, call, length, _kind_of
                )
                vocab = _vocab(out, args, kwargs)
                run = _Builder(model, found, plan, batch, length, root, calls, vocab)
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


def _inputs(
    model: nn.Module, example: Any, seq_len: int | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], int, int]]:
    """(args, kwargs, sequences, tokens of each) to try; ids are real zeros, floats are on meta."""
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
    """The user's example with floats on meta, in bf16, and all other tensors on the CPU."""
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
    """Logits per token of a language model; 0: it has no token ids, or its output is something else."""
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
        root: the recording of the code outside of units.
        recordings: one recording of each kind of unit.
        calls: unit's name -> its calls.
        vocab: logits per token; 0: there are none.
        experts: of parameters that ep divides, how many experts they have, by their ids.
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
        """In the order of the forward: root and embeddings, blocks, final norm and head."""
        found = self.found
        inside = {id(p) for _, module in _members(found) for p in module.parameters()}
        own = [p for p in self.model.parameters() if id(p) not in inside]
        before = self._work(self.root, BEFORE)
        units = []
        if own or before["matmuls"] or before["elementwise"]:
            units.append(UnitSpec("root", "root", self._parameters(own, self.root), **before))
        units += [self._unit(name, "embedding", module) for name, module in found.embeddings]
        counted: dict[Any, list[tuple[str, nn.Module]]] = {}
        for name, module in found.blocks:
            times = self.calls[name].times if name in self.calls else 0
            counted.setdefault((_kind_of(module), times), []).append((name, module))
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
        """The part of the parameter ``name`` that a token goes through: of experts the chosen ones."""
        tokens = self.batch * self.seq_len
        for op in recording.forward_ops if recording is not None else ():
            if op.experts and op.weight == name:
                return min(1.0, round(op.sizes[0] / tokens) / op.experts)
        return 1.0

    def _unit(self, name: str, kind: str, module: nn.Module, count: int = 1) -> UnitSpec:
        recording = self.recordings.get(_kind_of(module))
        parameters = self._parameters(list(module.parameters()), recording, f"{name}.")
        call = self.calls.get(name)
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
        """In the order of their use; those without a gradient first."""
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
        """Features of the first tensor that the first block gets."""
        for name, _ in self.found.blocks:
            call = self.calls.get(name)
            for tensor in tensors_in((call.args, call.kwargs)) if call else ():
                if tensor.is_floating_point():
                    return int(tensor.shape[-1])
        return max((m.k for u in units for m in u.matmuls), default=0)


def _joined(units: list[UnitSpec], name: str) -> UnitSpec:
    """One unit with the parameters and the work of all; the other fields are the first one's."""
    if len(units) == 1:
        return units[0]
    keys = ("parameters", *_WORK)
    joined: dict[str, Any] = {key: sum((getattr(u, key) for u in units), ()) for key in keys}
    return replace(units[0], name=name, **joined)
