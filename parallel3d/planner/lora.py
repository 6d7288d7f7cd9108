"""with_lora: adds a ``Lora``'s adapters to a ``ModelSpec`` and freezes everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parallel3d.errors import PlanningError
from parallel3d.planner.model_spec import (
    ALL,
    BYTES,
    Activation,
    Elementwise,
    Lora,
    Matmul,
    ModelSpec,
    Parameter,
    UnitSpec,
)


def with_lora(model: ModelSpec, lora: Lora | None) -> ModelSpec:
    """Returns ``model`` with all parameters frozen but ``lora``'s adapters, which are added. Returns
    ``model`` itself if ``lora`` is None or it has these adapters already.

    Raises:
        PlanningError: a target is no linear layer of the blocks, or ``model`` was read from a module by
            ``spec_from_module``: add the adapters to the module instead, because the spec doesn't tell which
            activations are kept only for gradients of weights.
    """
    if lora is None or model.lora == lora:
        return model
    if model.lora is not None or model.trained_numel < model.numel:
        raise PlanningError(f"lora is {lora}, and {model.name} has frozen parameters already")
    if not any(each.only_for for unit in model.units for each in unit.activations):
        raise PlanningError(
            f"lora is {lora}, and {model.name} was read of a module: give its adapters to the module "
            "(peft.get_peft_model) before spec_from_module reads it"
        )
    known = {
        matmul.name: matmul
        for unit in model.units
        if unit.kind == "block"
        for matmul in unit.matmuls
        if matmul.split and not matmul.experts
    }
    adapted = _named(lora, known)
    units: list[UnitSpec] = []
    before = True
    for unit in model.units:
        frozen = _frozen(unit, lora, adapted)
        if unit.kind != "block":
            units.append(_without_backward(frozen) if before else frozen)
            continue
        every = _with_adapters(frozen, lora, adapted)
        if before:
            units.append(replace(_first(every), count=1))
            every = replace(every, count=unit.count - 1)
        if every.count:
            units.append(every)
        before = False
    return replace(model, units=tuple(units), lora=lora)


def _named(lora: Lora, known: Mapping[str, Matmul]) -> frozenset[str]:
    """Returns the names of the matmuls that get adapters: those of ``known`` that the targets name."""
    if lora.targets == ALL:
        return frozenset(known)
    found: set[str] = set()
    for target in lora.targets:
        short = target.removesuffix("_proj")
        own = {name for name in known if name == short or name.endswith(f".{short}")}
        if not own:
            names = dict.fromkeys(name.rpartition(".")[2] for name in known)
            raise PlanningError(
                f"lora's targets have {target!r}; the linear layers of a block are {', '.join(names)}"
            )
        found |= own
    return frozenset(found)


def _frozen(unit: UnitSpec, lora: Lora, adapted: frozenset[str]) -> UnitSpec:
    """Returns ``unit`` with all parameters frozen: no weight gradients, and no activations that are kept only
    for them. The inputs of the ``adapted`` layers stay, because their adapters need them."""
    size = BYTES[lora.base_dtype]
    return replace(
        unit,
        parameters=tuple(replace(p, trainable=False, itemsize=size) for p in unit.parameters),
        matmuls=tuple(replace(matmul, weight_gradient=False) for matmul in unit.matmuls),
        elementwise=tuple(_norm(e) for e in unit.elementwise if e.name != "bias gradients"),
        activations=tuple(
            # Of an eager norm half of this: what is multiplied by its weight isn't kept.
            replace(each, itemsize=2) if each.name.endswith(" in fp32") else each
            for each in unit.activations
            if not each.only_for or adapted & {*each.only_for}
        ),
    )


def _norm(each: Elementwise) -> Elementwise:
    """Returns the work of an eager norm with a frozen weight: its backward moves 42 elements a feature
    instead of 46, as recorded."""
    if not each.norm or each.eager == each.fused:
        return each
    forward, backward = each.eager
    return replace(each, eager=(forward, backward * 42 / 46), kernels=(8, 14))


def _without_backward(unit: UnitSpec) -> UnitSpec:
    """Returns ``unit`` without backward work, as for units before the first adapter."""
    work = (_forward_only(each) for each in unit.elementwise)
    return replace(unit, elementwise=tuple(work), activations=())


def _forward_only(each: Elementwise) -> Elementwise:
    eager, fused = (each.eager[0], 0.0), (each.fused[0], 0.0)
    return replace(each, eager=eager, fused=fused, kernels=(each.kernels[0], 0))


def _without_sums(each: Elementwise, count: int, features: int) -> Elementwise:
    """Without ``count`` of the sums of gradients of ``features``."""
    forward, backward = each.eager
    moved = forward, max(backward - 3 * count * features, 0)
    kernels = each.kernels[0], max(each.kernels[1] - count, 0)
    return replace(each, eager=moved, fused=moved, kernels=kernels) if count else each


def _first(unit: UnitSpec) -> UnitSpec:
    """Returns ``unit`` as the first block: its input needs no gradient, so its first norm and the layers that
    read the norm's result compute no input gradients."""
    side_by_side = not any(each.name.startswith("norm2") for each in unit.elementwise)
    start = ("attn.", "mlp.") if side_by_side else ("attn.",)
    reads = {
        m.name
        for m in unit.matmuls
        if m.name.startswith(start) and m.split == "n" and not m.is_adapter
    }
    hidden = unit.tp_inputs[0]
    downs = {f"{name}.lora_A" for name in reads}
    matmuls = (
        replace(m, input_gradient=False) if m.name in reads | downs else m for m in unit.matmuls
    )
    left = {f"norm1 {what}" for what in ("input", "in fp32")}
    # Sums of gradients in the block: of the residual's, and of the layers' that read the norm's result.
    fewer = {"residuals": 1, "gradient sums": len(reads) - 1}
    return replace(
        unit,
        matmuls=tuple(matmuls),
        elementwise=tuple(
            _forward_only(e)
            if e.name == "norm1"
            else _without_sums(e, fewer.get(e.name, 0), hidden)
            for e in unit.elementwise
            if e.name not in {f"sum into {name}'s input" for name in reads}
        ),
        activations=tuple(a for a in unit.activations if a.name not in left),
    )


def _with_adapters(unit: UnitSpec, lora: Lora, adapted: frozenset[str]) -> UnitSpec:
    """Returns a block with ``lora_B(lora_A(x)) * scaling`` added to each layer of ``adapted``."""
    rank, matmuls, parameters = lora.rank, [], []
    elementwise, activations = [*unit.elementwise], [*unit.activations]
    summed, shared = [*unit.tp_outputs], [*unit.tp_inputs]
    for base in unit.matmuls:
        matmuls.append(base)
        if base.name in adapted:
            matmuls += _adapter_matmuls(base, rank)
            elementwise += _adapter_work(base)
            split = "gathered" if base.split == "n" else "sequence"
            activations.append(
                Activation(f"{base.name}.lora_A output", rank, None, split, "matmul")
            )
            (summed if base.split == "k" else shared).append(rank)
    for parameter in unit.parameters:
        parameters.append(parameter)
        name = parameter.name.removesuffix(".weight")
        if name in adapted and parameter.name != name:
            parameters += _adapter_parameters(parameter, name, rank)
    return replace(
        unit,
        parameters=tuple(parameters),
        matmuls=tuple(matmuls),
        elementwise=tuple(elementwise),
        activations=tuple(activations),
        tp_inputs=tuple(shared),
        tp_outputs=tuple(summed),
    )


def _adapter_matmuls(base: Matmul, rank: int) -> list[Matmul]:
    """Returns the matmuls lora_A and lora_B. Of a colwise layer ``tp`` divides lora_B as the layer, of a
    rowwise one lora_A."""
    own = {"heads": base.heads, "kv": base.kv}
    first, second = (own, {}) if base.split == "k" else ({}, own)
    down, up = ("k", None) if base.split == "k" else (None, "n")
    return [
        Matmul(f"{base.name}.lora_A", rank, base.k, down, **first),  # type: ignore[arg-type]
        Matmul(f"{base.name}.lora_B", base.n, rank, up, **second),  # type: ignore[arg-type]
    ]


def _adapter_parameters(base: Parameter, name: str, rank: int) -> list[Parameter]:
    (n, k), own = base.shape, {"heads": base.heads, "kv": base.kv}
    first, second = (own, {}) if base.tp_dim == 1 else ({}, own)
    down, up = (1, None) if base.tp_dim == 1 else (None, 0)
    return [
        Parameter(f"{name}.lora_A.weight", (rank, k), down, **first),  # type: ignore[arg-type]
        Parameter(f"{name}.lora_B.weight", (n, rank), up, **second),  # type: ignore[arg-type]
    ]


def _adapter_work(base: Matmul) -> Iterator[Elementwise]:
    """Yields an adapter's elementwise work: its result is scaled and added to the layer's; backward adds the
    two gradients of their common input."""
    inside = "tp" if base.heads is None else "kv" if base.kv else "heads"
    before, after = ("gathered", inside) if base.split == "n" else (inside, "sequence")
    n, k = base.n, base.k
    yield Elementwise(f"sum into {base.name}", (5 * n, 2 * n), (3 * n, 2 * n), (2, 1), after)
    yield Elementwise(f"sum into {base.name}'s input", (0, 3 * k), (0, 3 * k), (0, 1), before)
