"""Colwise, Rowwise, VocabParallel: features of a linear layer, rows of an embedding, split over ``tp``."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from parallel3d._layout.packed import packing_of
from parallel3d._layout.packing import Packing, cut_sections, pick_by_rank
from parallel3d._torch.autograd import assert_async
from parallel3d._torch.simulated import combine_ranks, ranks_of, value_on_rank
from parallel3d.errors import PlanError, StateError
from parallel3d.tp.collectives import SequenceLength, TpAxis, copy_by_rank
from parallel3d.tp.float8 import float8_linear, is_float8
from parallel3d.tp.forwards import (
    TpState,
    bind_base_forward,
    bind_forward,
    finish_sum,
    gather_features,
    split_features,
    take_input,
)
from parallel3d.tp.overlap import GatherLinear, linear, obstacle
from parallel3d.tp.styles.base import (
    LayoutStyle,
    ParamRule,
    RandomLayout,
    Style,
    StyleTraffic,
    fit_rules,
    input_traffic,
    is_embedding,
    linear_kind,
    refuse_lookup_options,
    sum_traffic,
    works_by_element,
)
from parallel3d.tp.styles.casts import cast_to, casts_weight


class SplitStyle(LayoutStyle):
    """Base class of styles whose ``forward`` replaces the forward of a linear layer or an embedding."""

    def install(self, module: Any, axis: TpAxis, sequence: SequenceLength) -> None:
        embedding = isinstance(module, nn.Embedding)
        base = nn.Embedding if embedding else linear_kind(self, module).base
        state = TpState(self, axis, sequence, packing=packing_of(module.weight))
        state.casts = casts_weight(module)
        if state.casts:  # all of its forward is the product
            bind_forward(module, state)
        else:
            bind_base_forward(module, base, state)

    def _check_forward(
        self, module: nn.Module, base: type, whole: str = "output", needs: str = "all features"
    ) -> None:
        """Raises PlanError if the module overrides the forward of ``base`` with code that would get or return
        a part, unless that code is elementwise. The error says that the code may need
        ``needs``, and that the style with its argument ``whole``="replicate" gives it."""
        if set(self.ends) - {"", "replicate"} and not works_by_element(module, base):
            raise PlanError(
                f"{type(module).__name__} does something of its own with what {base.__name__} takes or "
                f'gives, which may need {needs}; {type(self).__name__}({whole}="replicate") gives it all'
            )

    def _cut(self: Any, what: str, size: Any, dim: int, tp: int) -> ParamRule:
        return cut_features(what, size, dim, self.packed, self.multiple_of, tp)


@dataclass(frozen=True)
class VocabParallel(SplitStyle):
    """Splits the vocabulary of an ``nn.Embedding`` over ``tp``: each rank looks up the tokens that it holds.
    ``padding_idx`` works; ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` raise.

    Attributes:
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        sequence_dim: the sequence dim of the output, when ``output="sequence"``.
    """

    output: Literal["replicate", "sequence"] = "replicate"
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if not is_embedding(module):
            cls = type(module)
            raise PlanError(
                "VocabParallel is for torch.nn.Embedding with its own forward, not "
                f"{cls.__module__}.{cls.__qualname__}"
            )
        self._check_forward(module, nn.Embedding, needs="the whole sequence")
        refuse_lookup_options(module, scale_grad_by_freq=False)
        return fit_rules(module, weight=ParamRule(Shard(0)))

    def traffic(self, module: Any, tp: int) -> tuple[StyleTraffic, ...]:
        return sum_traffic(self.output, module.embedding_dim)

    def forward(self, tp: TpState, module: Any, /, input: Tensor) -> Tensor:
        """Returns the vectors, (..., width), of the ids ``input``, (...): each rank looks up the ids that it
        holds, with zeros for the others, and the results are summed. An id outside the vocabulary is an error
        on every rank."""
        size, chunk = module.num_embeddings, tp.axis.chunk(module.num_embeddings)
        start = tp.axis.rank * chunk
        ids = copy_by_rank(input, tp.axis)
        assert_async(
            ((ids >= 0) & (ids < size)).all(), f"an id is outside the vocabulary of {size}"
        )
        local = ids - start
        elsewhere = (local < 0) | (local >= chunk)
        weight = module.weight
        if chunk * (tp.axis.size - 1) >= size:  # the last rank holds no row
            weight = F.pad(weight, (0, 0, 0, 1))  # a row for id 0
        y = F.embedding(local.masked_fill(elsewhere, 0), weight)
        y = y.masked_fill(elsewhere.unsqueeze(-1), 0)
        if module.padding_idx is not None:  # its row is looked up but not trained
            y = torch.where((ids == module.padding_idx).unsqueeze(-1), y.detach(), y)
        return finish_sum(y, self.output, self.sequence_dim, tp)


Packed = int | tuple[int, ...] | Packing
"""The sections that features consist of: a number of equal ones, their sizes, or the rows on each rank."""


def cut_features(
    what: str, size: int, dim: int, packed: Packed, multiple_of: int | tuple[int, ...], tp: int
) -> ParamRule:
    """Returns the rule that splits ``size`` features along ``dim`` of a weight over ``tp`` ranks. ``what``
    names them in messages; ``packed`` and ``multiple_of`` are as in :class:`Colwise`.

    Each section is split as ``torch.chunk`` does, so that the layer that reads a product of sections (down
    after gate and up) is split alike without sections. Where that would cut a group of ``multiple_of``, ranks
    get whole groups, the first ranks one more. Raises PlanError if the sections don't add up to ``size``, or
    don't consist of whole groups.
    """
    if isinstance(packed, Packing):
        if len(packed.rows) != tp or packed.size != size:
            raise PlanError(
                f"the packing has {packed.size} rows on {len(packed.rows)} ranks, but {what} is {size} and "
                f"tp is {tp}"
            )
        return ParamRule(Shard(dim), packing=replace(packed, dim=dim))
    sections = sections_of(what, size, packed)
    groups = multiple_of if isinstance(multiple_of, tuple) else (multiple_of,) * len(sections)
    if len(groups) != len(sections):
        raise PlanError(
            f"multiple_of={multiple_of!r} is for {len(groups)} sections; packed={packed!r} has "
            f"{len(sections)}"
        )
    for index, (section, group) in enumerate(zip(sections, groups, strict=True)):
        name = what if len(sections) == 1 else f"section {index} of {what}"
        if type(group) is not int or group < 1:
            raise PlanError(f"multiple_of is {group!r}; it must be an int, 1 or more")
        if section % group:
            raise PlanError(f"{name} {section} is not a multiple of multiple_of={group}")
    if any(g > 1 and n % (g * tp) for n, g in zip(sections, groups, strict=True)):
        # Chunks would cut a group.
        return ParamRule(Shard(dim), packing=cut_sections(dim, sections, tp, groups))
    if len(sections) == 1:
        return ParamRule(Shard(dim))
    return ParamRule(Shard(dim), packing=cut_sections(dim, sections, tp, chunked=True))


def sections_of(what: str, size: int, packed: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of the sections of ``size`` features, for ``packed`` as in :class:`Colwise`; raises
    PlanError if they don't add up."""
    if isinstance(packed, int):
        if packed < 1 or size % packed:
            raise PlanError(
                f"{what} is {size}, which can't be divided into {packed} equal sections"
            )
        return (size // packed,) * packed
    if not packed or any(type(n) is not int or n < 1 for n in packed) or sum(packed) != size:
        raise PlanError(
            f"packed is {packed!r}; the sections of {what} must be positive and add up to {size}"
        )
    return packed


@dataclass(frozen=True)
class Colwise(SplitStyle):
    """Splits the output features over ``tp``: of ``nn.Linear`` and transformers' ``Conv1D`` the weight and
    bias, of ``nn.Embedding`` the width, so that each rank has all tokens and a part of each vector.

    For a single parameter, it splits the last dim but one, or the only one.

    Attributes:
        input: ``"replicate"``: whole. ``"sequence"``: a part along ``sequence_dim``, gathered here.
            ``"gathered"``: already prepared by an enclosing :class:`PrepareInput`.
        output: ``"shard"``: (..., out / tp). ``"replicate"``: gathered, (..., out).
        multiple_of: the number of features of a group that is never split, such as the size of a head, so
            that every rank holds whole heads, the first ranks one more if need be. For each section, or for
            all.
        packed: the sections of the output, each of which is split: a number of equal ones (2 for fused gate
            and up) or their sizes (fused q, k and v). A ``Packing`` gives the features of each rank. A
            gathered output has the order of the plain module's.
        sequence_dim: the sequence dim of the input, when ``input="sequence"``.
        chunks: gathers the sequence in this many chunks, each while the one before is multiplied. For a
            module that alone reads its input, on a backend whose collectives run beside a matmul (NCCL).
            Warns where that is impossible (``tp`` doesn't divide the sequence, autocast); an error with
            ``parallelize(compile=...)`` of its block.
    """

    input: Literal["replicate", "sequence", "gathered"] = "replicate"
    output: Literal["shard", "replicate"] = "shard"
    multiple_of: int | tuple[int, ...] = 1
    packed: Packed = 1
    sequence_dim: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.chunks) is not int or self.chunks < 1:
            raise PlanError(f"chunks is {self.chunks!r}; it must be an int, 1 or more")
        if self.chunks > 1 and self.input != "sequence":
            raise PlanError(
                f'chunks is {self.chunks}, which needs a sequence to gather: input="sequence"'
            )

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if is_embedding(module):
            if self.input != "replicate":
                raise PlanError(f"an nn.Embedding takes token ids; leave input={self.input!r} out")
            refuse_lookup_options(module, scale_grad_by_freq=True)
            self._check_forward(module, nn.Embedding)
            return fit_rules(module, weight=self._cut("embedding_dim", module.embedding_dim, 1, tp))
        kind = linear_kind(self, module)
        self._check_forward(module, kind.base)
        if self.chunks > 1 and is_float8(module):
            raise PlanError(
                f"chunks is {self.chunks}, but a Float8Linear multiplies at once; leave it out"
            )
        return fit_rules(
            module,
            weight=self._cut(kind.out_name, kind.out_features, kind.out_dim, tp),
            bias=self._cut(kind.out_name, kind.out_features, 0, tp),
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        dim = max(param.dim() - 2, 0)
        return self._cut(f"dim {dim}", param.shape[dim], dim, tp)

    def traffic(self, module: Any, tp: int) -> tuple[StyleTraffic, ...]:
        if is_embedding(module):
            width = module.embedding_dim
            return (StyleTraffic("all-gather", "forward", width),) * (self.output == "replicate")
        kind = linear_kind(self, module)
        gather = (StyleTraffic("all-gather", "forward", kind.out_features),)
        return input_traffic(self.input, kind.in_features) + gather * (self.output == "replicate")

    @property
    def random_after(self) -> RandomLayout:
        if self.output == "replicate" and self.input != "sequence":
            return ""
        return super().random_after

    def forward(self, tp: TpState, module: Any, /, input: Tensor) -> Tensor:
        """Returns the layer's output: for an input (..., in), or ids (...) of an embedding, (..., out / tp),
        or (..., out) if gathered."""
        y: Tensor | None = None
        if isinstance(module, nn.Embedding):
            y, size = tp.inner(module, input), module.embedding_dim
        else:
            size = module.out_features if isinstance(module, nn.Linear) else module.nf
            weight, bias = _weight_and_bias(tp, module, input)
            if self.chunks > 1:
                y = self._in_chunks(tp, input, weight, bias)
            if y is None:
                x = take_input(input, self.input, self.sequence_dim, tp, read_only=True)
                if is_float8(module):
                    y = float8_linear(module, x, tp.axis, "out", bias=True)
                else:
                    y = linear(x, weight, bias)
        return gather_features(y, size, tp) if self.output == "replicate" else y

    def _in_chunks(
        self, tp: TpState, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        size = tp.sequence.of(x, self.sequence_dim, tp.axis)
        if tp.axis.size == 1:
            return None
        why_not = obstacle(x, self.sequence_dim, size, tp.axis)
        if why_not:
            if not torch.compiler.is_compiling():  # which parallelize(compile=...) refuses
                warnings.warn(
                    f"{self}: the sequence is gathered at once, not in {self.chunks} chunks beside the "
                    f"matmul: {why_not}",
                    stacklevel=2,
                )
            return None
        dim = self.sequence_dim % x.dim()
        return GatherLinear.apply(x, weight, bias, dim, self.chunks, tp.axis)


@dataclass(frozen=True)
class Rowwise(SplitStyle):
    """Splits the input features of an ``nn.Linear`` or ``Conv1D`` over ``tp``; the bias is whole and added
    once, after the sum. On an ``nn.Embedding`` it means :class:`VocabParallel`, as in torch.

    For a single parameter, it splits the last dim; one of one dim, a bias, stays whole.

    Attributes:
        input: ``"shard"``: (..., in / tp), the output of :class:`Colwise`. ``"replicate"``: split here.
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        multiple_of, packed: as in :class:`Colwise`, for the input features.
        sequence_dim: the sequence dim of the output, when ``output="sequence"``.
    """

    input: Literal["shard", "replicate"] = "shard"
    output: Literal["replicate", "sequence"] = "replicate"
    multiple_of: int | tuple[int, ...] = 1
    packed: Packed = 1
    sequence_dim: int = 1

    def for_module(self, module: nn.Module) -> Style:
        if isinstance(module, nn.Embedding):
            return VocabParallel(output=self.output, sequence_dim=self.sequence_dim)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        kind = linear_kind(self, module)
        self._check_forward(module, kind.base, "input")
        # Added to a part of the sequence, the bias gets a part of its gradient.
        bias_grad: Literal["whole", "partial"] = "partial" if self.splits_sequence else "whole"
        return fit_rules(
            module,
            weight=self._cut(kind.in_name, kind.in_features, kind.in_dim, tp),
            bias=ParamRule(Replicate(), bias_grad),
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        if param.dim() == 1:
            return ParamRule(Replicate())
        dim = param.dim() - 1
        return self._cut(f"dim {dim}", param.shape[dim], dim, tp)

    def traffic(self, module: Any, tp: int) -> tuple[StyleTraffic, ...]:
        kind = linear_kind(self, module)
        gather = (StyleTraffic("all-gather", "backward", kind.in_features),)
        return sum_traffic(self.output, kind.out_features) + gather * (self.input == "replicate")

    def forward(self, tp: TpState, module: Any, /, input: Tensor) -> Tensor:
        """Returns (..., out) for an input (..., in / tp), or (..., in), which is split here."""
        x, (weight, bias) = input, _weight_and_bias(tp, module, input)
        features = module.in_features if isinstance(module, nn.Linear) else module.nx
        if self.input == "replicate":
            x = split_features(x, tp)
        elif isinstance(x.shape[-1], int) and x.shape[-1] == features != weight.shape[1]:
            raise StateError(
                f"a Rowwise linear of {features} input features got all of them, but each tp "
                f'rank\'s part was expected (the output of Colwise). Rowwise(input="replicate") splits '
                "a whole input."
            )
        if is_float8(module):
            y = float8_linear(module, x, tp.axis, "in", bias=False)
        else:
            y = F.linear(x, weight)
        y = finish_sum(y, self.output, self.sequence_dim, tp)
        # The bias after the sum, in which it would be added tp times.
        return y if bias is None else y + bias


def _weight_and_bias(tp: TpState, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the weight as (out, in), and the bias, cast to the dtype of ``x`` if the module's own forward
    does that."""
    weight: Any = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    return cast_to(x, weight, module.bias) if tp.casts else (weight, module.bias)  # type: ignore[return-value]


@dataclass(frozen=True)
class GroupedKv(Colwise):
    """The key or value projection where several ranks need the same key and value heads. Plans don't name it:
    ``tp/auto/heads.py`` replaces Colwise by it.

    Weight and bias are whole on every rank, at rest too; each rank computes the heads that its query heads
    attend to, so their gradients are partial sums.

    Attributes:
        kv_heads: the number of key and value heads in the model.
        heads: [rank] -> the heads in its output, in order; a head may be repeated.
    """

    kv_heads: int = 1
    heads: tuple[tuple[int, ...], ...] = ()

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        linear_kind(self, module)
        if is_float8(module):
            raise PlanError(
                f"tp={tp} is more than the {self.kv_heads} heads of keys and values, and a "
                "Float8Linear can't compute some heads of a whole weight; keep it out of the conversion by "
                f"module_filter_fn, or use a tp that divides {self.kv_heads}"
            )
        rule = ParamRule(Replicate(), "partial")
        return fit_rules(module, weight=rule, bias=rule)

    def forward(self, tp: TpState, module: Any, /, input: Tensor) -> Tensor:
        """Returns (..., number of this rank's heads x head size) for an input (..., in)."""
        x = take_input(input, self.input, self.sequence_dim, tp, read_only=True)
        # A rank's heads are neighbours: its rows of the weight are a view.
        numbers = [max(heads) - min(heads) + 1 for heads in self.heads]
        number = pick_by_rank(numbers, tp.axis.rank)
        weight, bias = _weight_and_bias(tp, module, input)
        size = weight.shape[0] // self.kv_heads
        start = pick_by_rank([min(heads) * size for heads in self.heads], tp.axis.rank)
        weight = weight.narrow(0, start, number * size)
        bias = None if bias is None else bias.narrow(0, start, number * size)
        y = F.linear(x, weight, bias)
        if [len(heads) for heads in self.heads] == numbers:
            return y
        # On some rank a head is repeated.
        if tp.index is None or tp.index.device != y.device:
            tp.index = _index(self.heads, tp.axis.rank, y.device)
        return y.unflatten(-1, (number, size)).index_select(-2, tp.index).flatten(-2)


def _index(heads: tuple[tuple[int, ...], ...], rank: int, device: torch.device) -> Tensor:
    if isinstance(rank, torch.SymInt):
        return combine_ranks(
            {r: _index(heads, value_on_rank(rank, r), device) for r in ranks_of(rank)}
        )
    return torch.tensor([head - min(heads[rank]) for head in heads[rank]], device=device)
