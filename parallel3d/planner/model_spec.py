"""ModelSpec: what the planner knows about a model: the parameters of each unit, and the work that it does.

All sizes are of the whole model, before any sharding. The work is that of one token, in a sequence whose
length is only known later; so ``AttentionSpec``, which grows with the length, is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from parallel3d._layout.heads import attended_heads
from parallel3d.errors import PlanningError
from parallel3d.fsdp.layout import ceil_div
from parallel3d.planner.arguments import Mistakes, check_choice, check_size


@dataclass(frozen=True)
class Parameter:
    """One parameter of the plain model.

    Attributes:
        name: its name within its unit.
        shape: its shape in the plain model.
        tp_dim: the dim that tensor parallelism shards; None: the parameter is replicated over tp.
        trainable: whether it has a gradient.
        itemsize: bytes of an element in the plain model. Parameters of a unit with different dtypes are in
            different buckets. A frozen one is at rest in this dtype, unless the workload's is smaller.
        heads: (query heads, key and value heads) of its attention layer, if ``tp_dim`` consists of heads: tp
            then cuts only between heads, even if its size doesn't divide them.
        kv: whether it computes keys or values.
        used: fraction of the parameter that one token uses; below 1 for experts.
        tp_partial: when the gradient of a parameter that is replicated over tp is partial and must be summed
            over tp: "sequence" (with sequence parallelism), "always" or "never".
        experts: number of experts in its first dim, which ep divides; 0: it isn't of experts.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    trainable: bool = True
    itemsize: int = 4
    heads: tuple[int, int] | None = None
    kv: bool = False
    tp_partial: str = "sequence"
    used: float = 1.0
    experts: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Matmul:
    """``(tokens, k) @ (k, n)``, for every token that goes through the unit.

    Attributes:
        n, k: output and input features.
        split: which size tensor parallelism divides: ``"n"`` (colwise), ``"k"`` (rowwise) or None (neither).
        input_gradient: whether backward computes the gradient of the input.
        weight_gradient: whether backward computes the gradient of the weight, which a frozen one has not.
        heads, kv: as in ``Parameter``, for the features that tensor parallelism divides.
        experts: (number of experts, experts that a token goes through), each with a matmul of (n, k); None:
            no experts.
    """

    name: str
    n: int
    k: int
    split: str | None = None
    input_gradient: bool = True
    heads: tuple[int, int] | None = None
    kv: bool = False
    weight_gradient: bool = field(default=True, kw_only=True)
    experts: tuple[int, int] | None = None

    @property
    def times(self) -> int:
        """How many of these matmuls one token goes through."""
        return self.experts[1] if self.experts else 1

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of the two matmuls of a LoRA adapter."""
        return ".lora_" in self.name


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention among the tokens of one sequence; its heads are divided by ``tp``.

    Attributes:
        fused: whether one matrix computes queries, keys and values; ``tp`` cuts it only between groups of
            heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    fused: bool = False


class HeadShare(NamedTuple):
    """Numbers of heads on the tp rank with the most heads.

    Attributes:
        query: query heads.
        kv: key and value heads that it computes.
        paired: key and value heads that the attention kernel gets. If query heads can't be grouped evenly,
            key and value heads are repeated for them.
    """

    query: int
    kv: int
    paired: int


@lru_cache(maxsize=4096)
def head_share(heads: int, kv_heads: int, tp: int, fused: bool = False) -> HeadShare:
    """Returns how many heads a rank has if ``tp`` ranks divide ``heads`` query heads and ``kv_heads`` key and
    value heads.

    Query heads that share a key and value head stay together: a rank has ceil(kv_heads / tp) such groups.
    With fewer key and value heads than ranks, query heads are divided and each rank has the keys and values
    that they need; but a ``fused`` matrix of queries, keys and values is then whole on each rank. With fewer
    query heads than ranks, each rank computes all heads.
    """
    if heads < tp or (fused and kv_heads < tp):
        return HeadShare(heads, kv_heads, kv_heads)
    if kv_heads >= tp:
        groups = ceil_div(kv_heads, tp)
        return HeadShare(groups * (heads // kv_heads), groups, groups)
    attended = attended_heads(heads, kv_heads, tp)
    alike = len({own.count(head) for own in attended for head in own}) == 1
    query, span = len(attended[0]), max(len(set(own)) for own in attended)
    return HeadShare(query, span, span if alike else query)


def rows_computed(size: int, heads: tuple[int, int] | None, kv: bool, tp: int) -> int:
    """Returns how many of ``size`` features, divided over ``tp`` ranks, the rank with most of them computes.

    Args:
        heads: (query heads, key and value heads) if the features are made of heads.
        kv: whether they are made of key and value heads.
    """
    if heads is None or tp == 1:
        return ceil_div(size, tp)
    share = head_share(*heads, tp)
    return size * share.kv // heads[1] if kv else size * share.query // heads[0]


def local_heads(attention: AttentionSpec, tp: int) -> HeadShare:
    """Returns the heads of ``attention`` on the tp rank that has most."""
    return head_share(attention.heads, attention.kv_heads, tp, attention.fused)


@dataclass(frozen=True)
class Elementwise:
    """Elementwise kernels, which memory limits, by the elements that they read and write for one token.

    Attributes:
        eager: (forward, backward) elements of the compute dtype if each op is a kernel of its own.
        fused: the same if they are one kernel: with a compiler or a fused norm.
        kernels: (forward, backward) numbers of eager ops.
        split: what divides the values of a token: ``"tp"``: tp, as between a colwise and a rowwise layer;
            ``"heads"``, ``"kv"``: tp, in whole query heads or key and value heads; ``"sequence"``: tp, under
            sequence parallelism only; ``"gathered"``: nothing, but with ZeRO-1 as "sequence"; ``"loss"``: tp,
            with ``loss_parallel``; ``"masked"``: nothing, and there is such work only with tp.
        norm: whether it is a norm; a fused kernel for it exists without a compiler.
        of_experts: whether it is done once for each expert of a token, which ep divides.
    """

    name: str
    eager: tuple[float, float]
    fused: tuple[float, float]
    kernels: tuple[int, int] = (1, 1)
    split: str = "sequence"
    norm: bool = False
    of_experts: bool = False


@dataclass(frozen=True)
class Activation:
    """Values that forward keeps for backward, by token.

    Attributes:
        elements: number of elements per token.
        itemsize: bytes of an element; None: those of the compute dtype.
        split: as in ``Elementwise``.
        of: the op that computes them, for selective checkpointing: "matmul", "attention", "norm",
            "elementwise".
        eager_only: whether a compiler would compute them again in backward instead of keeping them.
        of_experts: as in ``Elementwise``.
        only_for: names of the matmuls if these values are kept only for their weight gradients; empty: they
            are kept for other reasons too, or it isn't known.
    """

    name: str
    elements: float
    itemsize: int | None = None
    split: str = "sequence"
    of: str = "elementwise"
    eager_only: bool = False
    of_experts: bool = False
    only_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitSpec:
    """A unit of the engine: parameters that are gathered together, and the work of its forward and backward.

    Attributes:
        kind: "block", "embedding", "tail" (final norm and head) or "root".
        parameters: in the order in which forward uses them, so that their gradients arrive in reverse; tied
            ones once.
        count: number of equal units of the model that this one stands for.
        tp_inputs: for each input that colwise layers share, its features. With sequence parallelism it is
            gathered in forward; its gradient is summed over ``tp`` in backward.
        tp_outputs: for each output of a rowwise layer (or of a vocabulary-parallel embedding), its features;
            it is summed over ``tp`` in forward.
    """

    name: str
    kind: str
    parameters: tuple[Parameter, ...]
    count: int = 1
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[AttentionSpec, ...] = ()
    elementwise: tuple[Elementwise, ...] = ()
    activations: tuple[Activation, ...] = ()
    tp_inputs: tuple[int, ...] = ()
    tp_outputs: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the parameters of one of its ``count`` units."""
        return sum(parameter.numel for parameter in self.parameters)


ALL = "all-linear"
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Lora:
    """LoRA adapters beside linear layers of the blocks; all other parameters are frozen.

    Attributes:
        rank: features between the two matrices of an adapter; peft's ``r``.
        targets: names of the adapted layers, such as ("q", "v") or ("q_proj", "v_proj"); peft's
            ``target_modules``. "all-linear": all linear layers of the blocks but routers and stacked experts.
        base_dtype: dtype of the frozen parameters at rest: "bf16", "fp16" or "fp32".

    Raises:
        MistakesError: a rank, target or dtype is not of this kind.
    """

    rank: int = 16
    targets: tuple[str, ...] | str = ALL
    base_dtype: str = "bf16"

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        mistakes.of(lambda: check_size("lora's rank", self.rank))
        mistakes.of(lambda: check_choice("lora's base_dtype", self.base_dtype, BYTES))
        names = (ALL,) if self.targets == ALL else self.targets
        if isinstance(names, list):
            object.__setattr__(self, "targets", tuple(names))
        elif not isinstance(names, tuple):
            mistakes.each.append(
                f"lora's targets are {names!r}; they must be {ALL!r} or names such as ('q', 'v')"
            )
        mistakes.end()

    @classmethod
    def of(cls, text: str) -> Lora:
        """Returns the ``Lora`` that a text describes: "16", or "rank=16,targets=q+v,base_dtype=bf16".

        Raises:
            PlanningError: the text has another form.
        """
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals and name.isdecimal():
                name, value = "rank", name
            if name not in ("rank", "targets", "base_dtype") or name in given:
                raise PlanningError(
                    f"lora is {text!r}; it must be a rank, 16, or rank=16,targets=q+v,base_dtype=bf16"
                )
            given[name] = value
        if given.get("rank", "16").isdecimal():
            given["rank"] = int(given.get("rank", 16))
        if given.get("targets", ALL) != ALL:
            given["targets"] = tuple(given["targets"].split("+"))
        return cls(**given)

    def __str__(self) -> str:
        """Such as "LoRA r 16 of q, v"."""
        names = "all linear layers" if self.targets == ALL else ", ".join(self.targets)
        return f"LoRA r {self.rank} of {names}"

    @property
    def peft(self) -> str:
        """The arguments of peft's ``LoraConfig`` for the same adapters, as Python text."""
        names: Any = self.targets
        if names != ALL:
            names = [name if "_" in name else f"{name}_proj" for name in names]
        return f"r={self.rank}, target_modules={names!r}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        targets = self.targets if self.targets == ALL else list(self.targets)
        return {"rank": self.rank, "targets": targets, "base_dtype": self.base_dtype}


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        units: its units in the order of the forward.
        hidden: features between the blocks.
        vocab: logits for each token; 0: no head.
        heads, kv_heads: query heads, and key and value heads, of attention; 0: there is no attention.
        divisible: name -> size that the number of tp ranks must divide, because the plan can't cut it
            unevenly (``LocalSizes``).
        tied: whether embedding and head share their weight.
        tp_ready: whether there is a tensor-parallel plan for the model.
        source: where the spec comes from, as text.
        seq_len: the longest sequence that the model's config allows; 0: it doesn't say.
        lora: the adapters that ``with_lora`` has added; None: there are none.
    """

    name: str
    units: tuple[UnitSpec, ...]
    hidden: int
    vocab: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    divisible: dict[str, int] = field(default_factory=dict)
    tied: bool = False
    tp_ready: bool = True
    source: str = ""
    seq_len: int = 0
    lora: Lora | None = None

    @property
    def blocks(self) -> int:
        return sum(unit.count for unit in self.units if unit.kind == "block")

    @property
    def numel(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(unit.count * unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Elements of all trainable parameters."""
        return sum(u.count * p.numel for u in self.units for p in u.parameters if p.trainable)

    @property
    def experts(self) -> int:
        """Number of experts in the block with the fewest; 0: no block has any."""
        return min((p.experts for u in self.units for p in u.parameters if p.experts), default=0)

    @property
    def active_numel(self) -> int:
        """Elements of the parameters that one token uses; of experts only the chosen ones."""
        used = (u.count * p.numel * p.used for u in self.units for p in u.parameters)
        return round(sum(used))

    @property
    def size(self) -> str:
        """The number of parameters as text."""
        total, active = self.numel / 1e9, self.active_numel / 1e9
        trained = self.trained_numel
        text = f"{total:,.2f} B parameters"
        text += f", {active:,.2f} B active" if active < total else ""
        return text + (f", {trained / 1e6:,.1f} M trained" if trained < self.numel else "")


def mask_work(features: int) -> Elementwise:
    """Returns the work of a vocabulary-parallel embedding's mask: outputs, and in backward gradients, of ids
    that other tp ranks have are set to zero."""
    moved = 2.0 * features, 2.0 * features
    return Elementwise("mask of the lookup", moved, moved, (0, 0), "masked")


def loss_work(vocab: int) -> Elementwise:
    """Returns the work of a loss (fp32 logits, log_softmax and backward): 36 bytes a logit, 12 fused."""
    return Elementwise("loss", (7 * vocab, 11 * vocab), (3 * vocab, 3 * vocab), (3, 3), "loss")
