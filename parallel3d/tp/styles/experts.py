"""Experts: a mixture-of-experts layer whose experts' weights are each split over ``tp``."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError, StateError
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.collectives import SequenceLength, TpAxis, reduce_from_tp
from parallel3d.tp.forwards import TpState, bind_forward, take_input
from parallel3d.tp.local_attributes import reads_of
from parallel3d.tp.styles.base import Style, Traffic, entered, summed
from parallel3d.tp.styles.linear import cut_features


@dataclass(frozen=True)
class Experts(Style):
    """A module that holds experts as parameters of three dims, each expert split over ``tp``: every rank
    computes all experts with its part of each, and the parts are summed.

    Every floating-point tensor among the arguments (hidden states, routing weights) is whole and used as a
    copy: its gradient is summed. Everything else, such as the chosen experts, passes through.

    Attributes:
        params: the parameters' rules, (name, style); a plan gives them by the parameters' paths.
    """

    params: tuple[tuple[str, Style], ...] = ()

    def with_params(self, params: dict[str, Style]) -> Style:
        return replace(self, params=(*self.params, *params.items()))

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        given = dict(self.params)
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if own and not given:
            raise PlanError(
                f"{type(module).__name__} has the parameters {', '.join(own)}; give them rules, such as "
                '"...experts.gate_up_proj": "packed_colwise", "...experts.down_proj": "rowwise"'
            )
        inside = any(True for child in module.children() for _ in child.parameters())
        if inside or getattr(module, "has_post_expert_norm", False):
            raise PlanError(
                f"{type(module).__name__} has modules with parameters inside, or a norm on each expert's "
                "output; only experts that are parameters of their own, and whose outputs are summed as they "
                "are, can be split"
            )
        weights = {name: p for name, p in own.items() if _weight_of(name) not in own}
        for name, param in weights.items():
            if name not in given:
                raise PlanError(
                    f"{name} {tuple(param.shape)} of {type(module).__name__} has no rule"
                )
        rules = {name: given[name].param_rule(p, tp) for name, p in weights.items()}
        for name, rule in rules.items():
            if not isinstance(rule.placement, Shard):
                raise PlanError(
                    f"{name} as {given[name]} is whole on every rank, which then all compute what it gives, "
                    "and the sum counts it again and again; every weight of experts must be split"
                )
        if rules:
            rules = _cut_alike(module, rules, given, tp)
        for name in own.keys() - weights.keys():
            weight = _weight_of(name)
            rules[name] = _bias_rule(module, own[name], own[weight], rules[weight])
        return fit_rules(module, **rules)

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        rules = self.plan(module, tp)
        sizes = _split_sizes(module, rules)
        kept = {n for p in module._parameters.values() if p is not None for n in p.shape}
        kept -= {size for _, size in sizes.values()}
        features = min((size for _, size in sizes.values()), default=0)
        rule = next((rules[name] for name, (_, n) in sizes.items() if n == features), None)
        if rule is None:
            return {}
        per_rank = _lengths(rule, features, tp)
        reads = reads_of(module)
        found = {}
        for name, value in vars(module).items():
            if type(value) is not int or not value or (reads is not None and name not in reads):
                continue
            if value not in {size for _, size in sizes.values()} or "num" in name.split("_"):
                continue
            if value in kept and not set(name.split("_")) & _OF_EXPERTS:
                continue
            found[name] = tuple(n * (value // features) for n in per_rank)
        return found

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        state = TpState(self, axis, sequence)
        state.once = tuple(_output_biases(module))
        bind_forward(module, experts, state)

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        # The routing weights' gradients, a few numbers a token, are not counted.
        size = _hidden_size(self.plan(module, tp), module)
        return *summed("replicate", size), *entered("replicate", size)

    @property
    def random_before(self) -> bool:
        return True

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return "whole"


@dataclass(frozen=True)
class IdentityExpert(Style):
    """An expert that gives back its input, inside :class:`Experts`: its output is divided by the number of
    ranks, so that the sum over them is right."""

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if any(True for _ in module.parameters()):
            raise PlanError(f"{type(module).__name__} has parameters: it is no identity")
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, identity_expert, TpState(self, axis, sequence))


def experts(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The experts on copies of what they read; the ranks' parts summed."""
    tp: TpState = self._parallel3d_tp
    args = tuple(_copy(value, tp) for value in args)
    kwargs = {name: _copy(value, tp) for name, value in kwargs.items()}
    # Shadows the parameter, whose gradient comes from the one rank that adds it.
    for name in tp.once:
        self.__dict__[name] = _only_first(self._parameters[name], tp.axis)
    try:
        y = tp.inner(self, *args, **kwargs)
    finally:
        for name in tp.once:
            del self.__dict__[name]
    if not isinstance(y, Tensor):
        raise StateError(
            f"{type(self).__name__} as {tp.style} gave a {type(y).__name__}; the ranks' parts of one "
            "tensor can be summed"
        )
    return reduce_from_tp(y, tp.axis)


def identity_expert(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's output over the number of ranks, which all add it."""
    tp: TpState = self._parallel3d_tp
    return tp.inner(self, *args, **kwargs) / tp.axis.size


def _copy(value: Any, tp: TpState) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return take_input(value, "replicate", 0, tp)
    return value


# Words in the names of attributes that hold an expert's width, where the model's is the same number.
_OF_EXPERTS = {"intermediate", "ffn", "expert", "inner"}


def _weight_of(name: str) -> str:
    """The parameter whose bias ``name`` is, as transformers names them; ``""``: it is no bias."""
    return name.removesuffix("_bias") if name.endswith("_bias") else ""


def _split_sizes(module: nn.Module, rules: dict[str, ParamRule]) -> dict[str, tuple[int, int]]:
    """The (dim, size) along which each split parameter is split."""
    sizes = {}
    for name, rule in rules.items():
        param = module._parameters[name]
        if isinstance(rule.placement, Shard) and param is not None:
            sizes[name] = rule.placement.dim, param.shape[rule.placement.dim]
    return sizes


def _lengths(rule: ParamRule, size: int, tp: int) -> tuple[int, ...]:
    """How many features each rank holds."""
    if rule.packing is not None:
        return rule.packing.lengths
    chunk = -(-size // tp)
    return tuple(max(min(chunk, size - rank * chunk), 0) for rank in range(tp))


def _cut_alike(
    module: nn.Module, rules: dict[str, ParamRule], given: dict[str, Style], tp: int
) -> dict[str, ParamRule]:
    """``rules`` with every weight cut so that a rank holds the same intermediate features of each.

    A weight with ``k`` times as many features holds gate and up: one after the other or taking turns.
    """
    split = _split_sizes(module, rules)
    features = min(size for _, size in split.values())
    result = dict(rules)
    for name, (dim, size) in split.items():
        times, packed = size // features, getattr(given[name], "packed", 1)
        if size % features:
            raise PlanError(
                f"{name} is split along {size} features and another parameter along {features}: no rank "
                "would hold the same of both"
            )
        if isinstance(packed, int):
            result[name] = _cut_weight(module, name, dim, size, times, packed, tp)
    return result


def _cut_weight(
    module: Any, name: str, dim: int, size: int, times: int, packed: int, tp: int
) -> ParamRule:
    in_turn = not getattr(module, "is_concatenated", True)
    if times > 1 and in_turn:  # as transformers marks modules whose gate and up take turns
        chunk = -(-size // times // tp) * times
        firsts = [min(rank * chunk, size) for rank in range(tp + 1)]
        held = [(a, b - a) for a, b in pairwise(firsts)]
        rows = tuple((interval,) if interval[1] else () for interval in held)
        return ParamRule(Shard(dim), packing=Packing(dim, rows))
    if times > 1 and packed == 1 and not hasattr(module, "is_concatenated"):
        raise PlanError(
            f"{name} has {times} times the features of the other weights; if they are {times} sections "
            "one after the other, its style is 'packed_colwise'"
        )
    if packed not in (1, times):
        raise PlanError(f"{name} as {packed} sections: it has {times} times the others' features")
    return cut_features(f"dim {dim}", size, dim, times, 1, tp)


def _bias_rule(module: Any, bias: Tensor, weight: Tensor, rule: ParamRule) -> ParamRule:
    """Split as its weight's output features are; or whole, and then one rank adds it."""
    like = [dim for dim in (1, 2) if dim < weight.dim() and weight.shape[dim] == bias.shape[-1]]
    out_dim = weight.dim() - (1 if getattr(module, "is_transposed", False) else 2)
    if len(like) == 1:
        (out_dim,) = like
    if not isinstance(rule.placement, Shard) or rule.placement.dim != out_dim:
        return ParamRule(Replicate(), "partial")
    dim = bias.dim() - 1
    packing = None if rule.packing is None else replace(rule.packing, dim=dim)
    return ParamRule(Shard(dim), packing=packing)


def _output_biases(module: nn.Module) -> list[str]:
    """The biases that every rank holds whole, and one adds."""
    whole = []
    for name, param in module._parameters.items():
        if param is not None and name.endswith("bias") and isinstance(param, DTensor):
            (placement,) = param.placements
            whole += [name] * isinstance(placement, Replicate)
    return whole


def _hidden_size(rules: dict[str, ParamRule], module: nn.Module) -> int | None:
    """Features of the experts' input and output: the dim of their weights that isn't split."""
    for name, rule in rules.items():
        shape = module._parameters[name].shape  # type: ignore[union-attr]
        if isinstance(rule.placement, Shard) and len(shape) == 3:
            return int(shape[3 - rule.placement.dim])
    return None


def _only_first(bias: Tensor, axis: TpAxis) -> Tensor:
    """``bias`` on the first rank, zeros on the others."""
    return bias * (1 - torch.sym_min(axis.rank, 1))
