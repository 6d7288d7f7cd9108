"""Experts: a mixture-of-experts layer whose experts' weights are each split over ``tp``."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d._layout.packing import cut_sections
from parallel3d.errors import PlanError, StateError
from parallel3d.tp.collectives import SequenceLength, TpAxis, reduce_from_tp
from parallel3d.tp.forwards import TpState, bind_forward, take_input
from parallel3d.tp.local_attributes import reads_of
from parallel3d.tp.styles.base import (
    ParamRule,
    RandomLayout,
    Style,
    StyleTraffic,
    fit_rules,
    input_traffic,
    own_params,
    sum_traffic,
)
from parallel3d.tp.styles.linear import cut_features


@dataclass(frozen=True)
class Experts(Style):
    """Splits a module that holds experts as three-dimensional parameters: every rank has a part of the
    features of each expert, computes all experts with it, and the outputs are summed over tp.

    Every floating-point tensor among the arguments (hidden states, routing weights) must be whole; its
    gradient is summed. Other arguments, such as the selected experts, pass through.

    Attributes:
        params: the rules, (parameter's name, style); a plan gives them by the parameters' paths.
    """

    random_before: ClassVar = True
    random_after: ClassVar[RandomLayout] = "whole"

    params: tuple[tuple[str, Style], ...] = ()

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        styles, own = dict(self.params), own_params(module)
        if own and not styles:
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
        rules = {}
        for name, param in weights.items():
            if name not in styles:
                shape = tuple(param.shape)
                raise PlanError(f"{name} {shape} of {type(module).__name__} has no rule")
            rule = rules[name] = styles[name].param_rule(param, tp)
            if not isinstance(rule.placement, Shard):
                raise PlanError(
                    f"{name} as {styles[name]} is whole on every rank, so each rank would compute all of its "
                    "output, which the sum would count once for each rank; every weight of experts must be "
                    "split"
                )
        if rules:
            rules = _split_alike(module, rules, styles, tp)
        for name in own.keys() - weights.keys():
            weight = _weight_of(name)
            rules[name] = _bias_rule(module, own[name], own[weight], rules[weight])
        return fit_rules(module, **rules)

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        rules = self.plan(module, tp)
        split = _split_sizes(module, rules)
        if not split:
            return {}
        features = min(split.values())
        rule = next(rules[name] for name, size in split.items() if size == features)
        per_rank = (rule.packing or cut_sections(0, (features,), tp, chunked=True)).lengths
        whole = {  # sizes of dims that aren't split, such as the model's width
            size
            for name, param in own_params(module).items()
            for dim, size in enumerate(param.shape)
            if dim and rules[name].placement != Shard(dim)
        }
        reads = reads_of(module)
        found = {}
        for name, value in vars(module).items():
            words = set(name.split("_"))
            if type(value) is not int or not value or value not in split.values() or "num" in words:
                continue
            if (reads is None or name in reads) and (value not in whole or words & _EXPERT_WORDS):
                found[name] = tuple(n * (value // features) for n in per_rank)
        return found

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        held = {n: p for n, p in own_params(module).items() if isinstance(p, DTensor)}
        whole = (n for n, p in held.items() if p.placements[0].is_replicate())
        once = tuple(n for n in whole if n.endswith("bias"))  # which every rank holds
        bind_forward(module, TpState(self, axis, sequence, once=once))

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        # The experts' input and output features are the weights' dim that isn't split. The gradients of the
        # routing weights, a few numbers a token, are not counted.
        size = None
        for name, rule in self.plan(module, tp).items():
            shape = own_params(module)[name].shape
            if size is None and isinstance(rule.placement, Shard) and len(shape) == 3:
                size = int(shape[3 - rule.placement.dim])
        return *sum_traffic("replicate", size), *input_traffic("replicate", size)

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output, summed over the ranks; inputs' gradients are summed too."""

        def taken(value: Any) -> Any:
            is_activation = isinstance(value, Tensor) and value.is_floating_point()
            return take_input(value, "replicate", 0, tp) if is_activation else value

        args = tuple(map(taken, args))
        kwargs = {name: taken(value) for name, value in kwargs.items()}
        # In front of the parameter: itself on the first rank, zeros on the others.
        for name in tp.once:
            module.__dict__[name] = module._parameters[name] * (1 - torch.sym_min(tp.axis.rank, 1))
        try:
            y = _forward_of(tp, module)(module, *args, **kwargs)
        finally:
            for name in tp.once:
                del module.__dict__[name]
        if not isinstance(y, Tensor):
            raise StateError(
                f"{type(module).__name__} as {self} gave a {type(y).__name__}; the ranks' outputs are "
                "summed, which takes one tensor"
            )
        return reduce_from_tp(y, tp.axis)


@dataclass(frozen=True)
class IdentityExpert(Style):
    """Style of an expert inside :class:`Experts` that returns its input. All ranks add its output, so it is
    divided by their number."""

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if any(True for _ in module.parameters()):
            raise PlanError(f"{type(module).__name__} has parameters, so it is not an identity")
        return {}

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return tp.inner(module, *args, **kwargs) / tp.axis.size


_GROUPED = 16  # bytes of which torch's grouped matmul takes multiples, in each row


def _forward_of(tp: TpState, module: Any) -> Callable[..., Any]:
    """Returns the module's forward. If transformers' experts would use a grouped matmul for which this rank's
    part of the features is too narrow, it is the model's own forward, which computes one expert after the
    other."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen != "grouped_mm" or not hasattr(module, "is_concatenated"):
        return tp.inner
    weights = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    if all(size * p.element_size() % _GROUPED == 0 for p in weights for size in p.shape[1:]):
        return tp.inner
    if not torch.compiler.is_compiling():
        shapes = ", ".join(str(tuple(p.shape)) for p in weights)
        warnings.warn(
            f"{type(module).__name__} as {tp.style}: rows of this rank's weights {shapes} are no multiple of "
            f"{_GROUPED} bytes, which torch's grouped matmul needs: the experts are computed one after the "
            "other. A smaller tp, or wider experts, are faster",
            stacklevel=2,
        )
    return inspect.unwrap(tp.inner)


# Words in the names of attributes that hold an expert's width, where another size is the same number.
_EXPERT_WORDS = {"intermediate", "ffn", "expert", "inner"}


def _weight_of(name: str) -> str:
    """Returns the name of the weight to which the bias ``name`` belongs, as transformers names them; ``""``:
    it is no bias."""
    return name.removesuffix("_bias") if name.endswith("_bias") else ""


def _split_sizes(module: nn.Module, rules: dict[str, ParamRule]) -> dict[str, int]:
    """Returns the names of the module's split parameters -> size of the dim along which they are split."""
    return {
        name: param.shape[rules[name].placement.dim]  # type: ignore[union-attr]
        for name, param in own_params(module).items()
        if name in rules and isinstance(rules[name].placement, Shard)
    }


def _split_alike(
    module: nn.Module, rules: dict[str, ParamRule], styles: dict[str, Style], tp: int
) -> dict[str, ParamRule]:
    """Returns ``rules`` changed so that a rank holds the same intermediate features of every weight. A weight
    with ``k`` times as many features holds ``k`` sections (gate and up), one after the other or
    interleaved."""
    split = _split_sizes(module, rules)
    features = min(split.values())
    result = dict(rules)
    for name, size in split.items():
        times, packed = size // features, getattr(styles[name], "packed", 1)
        if size % features:
            raise PlanError(
                f"{name} is split along {size} features and another parameter along {features}: no rank "
                "would hold the same of both"
            )
        if isinstance(packed, int):
            dim = rules[name].placement.dim  # type: ignore[union-attr]
            result[name] = _weight_rule(module, name, dim, size, times, packed, tp)
    return result


def _weight_rule(
    module: Any, name: str, dim: int, size: int, times: int, packed: int, tp: int
) -> ParamRule:
    # transformers marks modules whose gate and up are interleaved.
    if times > 1 and not getattr(module, "is_concatenated", True):
        return ParamRule(Shard(dim), packing=cut_sections(dim, (size,), tp, times, chunked=True))
    if times > 1 and packed == 1 and not hasattr(module, "is_concatenated"):
        raise PlanError(
            f"{name} has {times} times the features of the other weights; if they are {times} sections "
            "one after the other, its style is 'packed_colwise'"
        )
    if packed not in (1, times):
        raise PlanError(f"{name} as {packed} sections: it has {times} times the others' features")
    return cut_features(f"dim {dim}", size, dim, times, 1, tp)


def _bias_rule(module: Any, bias: Tensor, weight: Tensor, rule: ParamRule) -> ParamRule:
    """Returns the rule of a bias: split as its weight's output features are; if these aren't split, whole,
    and added by one rank."""
    like = [dim for dim in (1, 2) if dim < weight.dim() and weight.shape[dim] == bias.shape[-1]]
    out_dim = weight.dim() - (1 if getattr(module, "is_transposed", False) else 2)
    if len(like) == 1:
        (out_dim,) = like
    if not isinstance(rule.placement, Shard) or rule.placement.dim != out_dim:
        return ParamRule(Replicate(), "partial")
    dim = bias.dim() - 1
    packing = None if rule.packing is None else replace(rule.packing, dim=dim)
    return ParamRule(Shard(dim), packing=packing)
