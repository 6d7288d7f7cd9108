"""SplitHeads: the heads of torch's ``nn.MultiheadAttention`` split over ``tp``."""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from parallel3d._layout.packing import cut_sections
from parallel3d.errors import PlanError
from parallel3d.tp.collectives import (
    SequenceLength,
    TpAxis,
    gather_packed,
    reduce_from_tp,
    split_packed,
)
from parallel3d.tp.forwards import TpState, take_input
from parallel3d.tp.styles.base import (
    ParamRule,
    RandomLayout,
    Style,
    StyleTraffic,
    fit_rules,
    input_traffic,
    is_plain,
    sum_traffic,
)


@dataclass(frozen=True)
class SplitHeads(Style):
    """Splits the heads of an ``nn.MultiheadAttention`` over ``tp``: rows of its input projections, columns of
    its output projection. Each rank has whole heads, the first ranks one more where they don't divide.

    All options of the module work: inputs batched or not, ``kdim`` and ``vdim``, masks of either type and
    shape, ``add_bias_kv``, ``add_zero_attn``, dropout. Attention weights that are returned are summed or
    gathered over the ranks; ``need_weights=False`` avoids that.
    """

    random_before: ClassVar = True  # dropout inside is on this rank's heads
    random_after: ClassVar[RandomLayout] = "whole"

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
        three = ParamRule(Shard(0), packing=cut_sections(0, (module.embed_dim,) * 3, tp, size))
        one = _rule(0, heads, size, tp)
        extra = _rule(2, heads, size, tp)  # a row at the end of every sequence of keys and values
        return fit_rules(
            module,
            **dict.fromkeys(("in_proj_weight", "in_proj_bias"), three),
            **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), one),
            **dict.fromkeys(("bias_k", "bias_v"), extra),
        )

    def inside(self, module: Any) -> dict[str, Style]:
        plain = is_plain(module, nn.MultiheadAttention)
        return {"out_proj": _OutProjection(module.num_heads)} if plain else {}

    def traffic(self, module: Any, tp: int) -> tuple[StyleTraffic, ...]:
        size = module.embed_dim
        return *sum_traffic("replicate", size), *input_traffic("replicate", size)

    def forward(
        self,
        tp: TpState,
        module: Any,
        /,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``nn.MultiheadAttention``'s forward on this rank's heads. In the shapes below, B is the batch, L
        the length of the queries, S of the keys, h the number of this rank's heads and d the size of a head.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which must be given too")
        batched = query.dim() == 3
        whole: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in whole:
                taken = take_input(x, "replicate", 1, tp)
                first = module.batch_first or not batched
                taken = taken if batched else taken.unsqueeze(0)
                whole[id(x)] = taken if first else taken.transpose(0, 1)
        q, k, v = _project(module, *(whole[id(x)] for x in (query, key, value)))
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            is_causal = False
            mask = _merge_masks(module, attn_mask, key_padding_mask, q, batched, tp)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q * module.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal)
        out = F.linear(attended.transpose(1, 2).flatten(2), module.out_proj.weight)
        out = reduce_from_tp(out, tp.axis, in_place=True)
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias
        if weights is not None and average_attn_weights:  # (B, h, L, S) -> (B, L, S)
            weights = reduce_from_tp(weights.sum(1) / module.num_heads, tp.axis, in_place=True)
        elif weights is not None:  # (B, h, L, S) -> (B, heads, L, S)
            weights = gather_packed(
                weights, cut_sections(1, (module.num_heads,), tp.axis.size), tp.axis
            )
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if module.batch_first else out.transpose(0, 1)), weights


@dataclass(frozen=True)
class _OutProjection(Style):
    """Splits the output projection of torch's attention by heads; the attention itself reads its weight."""

    heads: int

    def plan(self, module: Any, tp: int) -> dict[str, ParamRule]:
        size = module.in_features // self.heads
        return fit_rules(module, weight=_rule(1, self.heads, size, tp), bias=ParamRule(Replicate()))


@dataclass(frozen=True)
class NoFastPath(Style):
    """Disables the fast path of torch's transformer encoder and its layers, which in inference reads weights
    without calling the modules inside them."""

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        else:  # used only to decide whether the fast path may be taken
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]


def _rule(dim: int, heads: int, size: int, tp: int) -> ParamRule:
    packing = None if heads % tp == 0 else cut_sections(dim, (heads * size,), tp, size)
    return ParamRule(Shard(dim), packing=packing)


def _project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Returns the queries, (B, h, L, d), and the keys and values, (B, h, S, d), of this rank's heads.
    ``self``: the attention module; inputs are (B, L or S, features)."""
    bias = self.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if self._qkv_same_embed_dim and query is key is value:
        q, k, v = F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
    else:
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
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
    """Returns the sum of attention mask and padding mask, to add to this rank's scores (B, h, L, S); None if
    there are none."""
    extra = (self.bias_k is not None) + bool(self.add_zero_attn)  # keys without a mask
    mask = None
    if attn is not None:
        mask = F.pad(_as_numbers("attn_mask", attn, q), (0, extra))
        if mask.dim() == 3:
            # One mask for each head.
            mask = mask.unflatten(0, (-1, self.num_heads))
            mask = cut_sections(1, (self.num_heads,), tp.axis.size).take(mask, tp.axis.rank)
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


@dataclass(frozen=True)
class HeadArguments(Style):
    """Style for an attention module whose heads are split and that has arguments with values for each head
    (ALiBi, a position bias). Each rank uses the values of its heads; the argument's gradient is all-gathered,
    so that it is complete on each rank.

    Attributes:
        heads: number of heads of the plain module. Ranks hold them in order; if the number doesn't divide,
            the first ranks hold one more.
        arguments: (name, dim) of arguments of the forward; the size of ``dim`` is the number of heads, or
            batch size x heads, sample by sample.
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

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        return (StyleTraffic("all-gather", "backward", None),) * len(self.arguments)

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's forward with this rank's heads of ``arguments``."""
        positional = list(args)
        for name, dim in self.arguments:
            place = tp.names.index(name)
            if place < len(positional):
                positional[place] = _own_heads(positional[place], dim, tp)
            elif name in kwargs:
                kwargs = {**kwargs, name: _own_heads(kwargs[name], dim, tp)}
        return tp.inner(module, *positional, **kwargs)


def _own_heads(value: Any, dim: int, tp: TpState) -> Any:
    if not isinstance(value, Tensor):
        return value
    heads = tp.style.heads
    packing = cut_sections(dim + 1, (heads,), tp.axis.size)
    part = split_packed(value.unflatten(dim, (-1, heads)), packing, tp.axis)
    return part.flatten(dim, dim + 1)
