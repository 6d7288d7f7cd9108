"""SplitHeads: the heads of torch's ``nn.MultiheadAttention`` split over ``tp``."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from parallel3d._layout.packing import Packing, cut_sections
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules, is_plain
from parallel3d.tp.collectives import (
    SequenceLength,
    TpAxis,
    gather_packed,
    reduce_from_tp,
    split_packed,
)
from parallel3d.tp.forwards import TpState, bind_forward, take_input
from parallel3d.tp.styles.base import Style, Traffic, entered, summed


@dataclass(frozen=True)
class SplitHeads(Style):
    """The heads of an ``nn.MultiheadAttention`` split over ``tp``: rows of its input projections, columns of
    its output projection. Each rank has whole heads, the first ranks one more where they don't divide.

    Everything the module takes works, on each rank as in the plain module: inputs batched or not, ``kdim``
    and ``vdim``, masks of either type and shape, ``add_bias_kv``, ``add_zero_attn``, dropout. Weights that
    are returned are summed or gathered over the ranks: ``need_weights=False`` spares that.
    """

    def plan(self, module: Any, tp: int) -> dict[str, ParamRule]:
        if not is_plain(module, nn.MultiheadAttention):
            raise PlanError(
                "SplitHeads is for nn.MultiheadAttention with its own forward, not "
                f"{type(module).__name__}"
            )
        heads, size = module.num_heads, module.head_dim
        if heads < tp:
            raise PlanError(
                f"num_heads {heads} is too small for {tp} tp ranks; the largest tp is {heads}"
            )
        features = module.embed_dim
        three = cut_sections(0, (features,) * 3, tp, size)
        one = _rule(0, heads, size, tp)
        # One row each, at the end of every sequence of keys and values: cut along the heads.
        extra = _rule(2, heads, size, tp)
        return fit_rules(
            module,
            in_proj_weight=ParamRule(Shard(0), packing=three),
            q_proj_weight=one,
            k_proj_weight=one,
            v_proj_weight=one,
            in_proj_bias=ParamRule(Shard(0), packing=three),
            bias_k=extra,
            bias_v=extra,
        )

    def inside(self, module: Any) -> dict[str, Style]:
        if not is_plain(module, nn.MultiheadAttention):
            return {}
        return {"out_proj": _OutProjection(module.num_heads)}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, split_heads, TpState(self, axis, sequence))

    def traffic(self, module: Any, tp: int) -> tuple[Traffic, ...]:
        return *summed("replicate", module.embed_dim), *entered("replicate", module.embed_dim)

    @property
    def random_before(self) -> bool:
        """Dropout inside is on this rank's heads."""
        return True

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return "whole"


@dataclass(frozen=True)
class _OutProjection(Style):
    """The output projection, which the attention reads and never calls."""

    heads: int

    def plan(self, module: Any, tp: int) -> dict[str, ParamRule]:
        size = module.in_features // self.heads
        return fit_rules(module, weight=_rule(1, self.heads, size, tp), bias=ParamRule(Replicate()))


@dataclass(frozen=True)
class NoFastPath(Style):
    """For torch's transformer encoder and its layers: in inference they'd read the weights of the modules
    inside them themselves, and all of them. With this they call the modules, as in training."""

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        else:  # its only use is to say that the fast path may be taken
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]


def _rule(dim: int, heads: int, size: int, tp: int) -> ParamRule:
    packing = None if heads % tp == 0 else cut_sections(dim, (heads * size,), tp, size)
    return ParamRule(Shard(dim), packing=packing)


def split_heads(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention``'s forward on this rank's heads. Below, B: batch, L: length of the queries, S:
    of the keys, h: heads of this rank, d: size of a head."""
    tp: TpState = self._parallel3d_tp
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, which must be given too")
    batched = query.dim() == 3
    whole: dict[int, Tensor] = {}
    for x in (query, key, value):
        if id(x) not in whole:
            taken = take_input(x, "replicate", 1, tp)
            if not batched:
                taken = taken.unsqueeze(0)
            elif not self.batch_first:
                taken = taken.transpose(0, 1)
            whole[id(x)] = taken
    q, k, v = _project(self, whole[id(query)], whole[id(key)], whole[id(value)])
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
        mask = _merge_masks(self, attn_mask, key_padding_mask, q, batched, tp)
    dropout = self.dropout if self.training else 0.0
    weights = None
    if need_weights:
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        attended = weights @ v
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal)
    out = F.linear(attended.transpose(1, 2).flatten(2), self.out_proj.weight)
    out = reduce_from_tp(out, tp.axis, in_place=True)
    if self.out_proj.bias is not None:
        out = out + self.out_proj.bias
    if weights is not None:
        weights = _join_weights(self, weights, average_attn_weights, tp)
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return (out if self.batch_first else out.transpose(0, 1)), weights


def _project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """(B, L or S, features) -> queries (B, h, L, d), keys and values (B, h, S, d)."""
    bias = self.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if not self._qkv_same_embed_dim:
        of_each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    elif query is key is value:
        of_each = None
    else:
        of_each = self.in_proj_weight.chunk(3)
    if of_each is None:
        q, k, v = F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
    else:
        q, k, v = map(F.linear, (query, key, value), of_each, biases)
    if self.bias_k is not None:
        k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
        v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
    if self.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    size = self.head_dim
    return tuple(x.view(*x.shape[:2], -1, size).transpose(1, 2) for x in (q, k, v))


def _merge_masks(
    self: Any, attn: Tensor | None, padding: Tensor | None, q: Tensor, batched: bool, tp: TpState
) -> Tensor | None:
    """Both masks as numbers to add to scores (B, h, L, S)."""
    extra = (self.bias_k is not None) + bool(self.add_zero_attn)  # keys that all may attend to
    mask = None
    if attn is not None:
        mask = F.pad(_as_numbers("attn_mask", attn, q), (0, extra))
        if mask.dim() == 3:
            # A mask for each head, of which this rank has some.
            mask = mask.unflatten(0, (-1, self.num_heads))
            mask = _local_heads(self.num_heads, tp).take(mask, tp.axis.rank)
        elif mask.dim() != 2:
            raise RuntimeError(f"attn_mask has {mask.dim()} dims; it must have 2 or 3")
    if padding is not None:
        padding = F.pad(_as_numbers("key_padding_mask", padding, q), (0, extra))
        padding = padding[:, None, None] if batched else padding[None, None, None]
        mask = padding if mask is None else mask + padding
    return mask


def _as_numbers(name: str, mask: Tensor, like: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise RuntimeError(f"{name} is {mask.dtype}; it must be bool or floating-point")
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
    return zeros.masked_fill(mask, float("-inf"))


def _local_heads(heads: int, tp: TpState) -> Packing:
    """Which heads each rank has, as a packing of dim 1."""
    return cut_sections(1, (heads,), tp.axis.size)


def _join_weights(self: Any, weights: Tensor, average: bool, tp: TpState) -> Tensor:
    """(B, h, L, S) of this rank's heads -> (B, L, S) averaged, or (B, heads, L, S)."""
    if average:
        return reduce_from_tp(weights.sum(1) / self.num_heads, tp.axis, in_place=True)
    return gather_packed(weights, _local_heads(self.num_heads, tp), tp.axis)


# HeadArguments: what attention gets for each head as an argument, cut to a rank's heads.


@dataclass(frozen=True)
class HeadArguments(Style):
    """For an attention module that is given something for each head (ALiBi, a bias of positions) and whose
    heads are split: each rank uses its heads' part. The gradient of the whole is complete on each rank.

    Attributes:
        heads: of the plain module. Ranks hold them in order, the first ones one more where they don't divide.
        arguments: (name, dim): the forward's arguments to cut, and the dim that counts heads; it may be a
            multiple, of a batch's heads one sample after the other.
    """

    heads: int
    arguments: tuple[tuple[str, int], ...]

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        known = inspect.signature(module.forward).parameters
        unknown = [name for name, _ in self.arguments if name not in known]
        if unknown:
            raise PlanError(
                f"{type(module).__name__}'s forward has no argument {unknown[0]!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
        if self.heads < tp:
            raise PlanError(f"{self.heads} heads are too few for {tp} tp ranks")
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        names = tuple(inspect.signature(module.forward).parameters)
        bind_forward(module, head_arguments, _State(self, axis, sequence, names=names))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return (Traffic("all-gather", "backward", None),) * len(self.arguments)


@dataclass
class _State(TpState):
    """With the names of the forward's arguments, in their order."""

    names: tuple[str, ...] = ()


def head_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward on this rank's part of some arguments."""
    tp: Any = self._parallel3d_tp
    given = list(args)
    for name, dim in tp.style.arguments:
        place = tp.names.index(name)
        if place < len(given):
            given[place] = _cut(given[place], dim, tp)
        elif name in kwargs:
            kwargs = {**kwargs, name: _cut(kwargs[name], dim, tp)}
    return tp.inner(self, *given, **kwargs)


def _cut(value: Any, dim: int, tp: TpState) -> Any:
    if not isinstance(value, Tensor):
        return value
    heads = tp.style.heads
    packing = cut_sections(dim + 1, (heads,), tp.axis.size)
    part = split_packed(value.unflatten(dim, (-1, heads)), packing, tp.axis)
    return part.flatten(dim, dim + 1)
