"""ModelSpec of any nn.Module, found by running it on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._tree import map_tensors, tensors_in
from parallel3d._units import Units, find_units
from parallel3d.errors import PlanningError
from parallel3d.planner.decoder import loss_work
from parallel3d.planner.model_spec import ModelSpec, Parameter, Unit
from parallel3d.planner.module_plan import ModulePlan, plan_of
from parallel3d.planner.op_cost import (
    activations_in,
    attention_in,
    elementwise_in,
    head_splits,
    matmuls_in,
)
from parallel3d.planner.unit_run import BEFORE, Call, MetaParams, Recording, record, record_root

__all__ = ["spec_from_module"]

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
    members = [*found.embeddings, *found.blocks, *found.tail]
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
            for _, m in [*found.embeddings, *found.blocks, *found.tail]
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
            found.tail, key=lambda each: called.index(each[0]) if each[0] in called else -1
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
