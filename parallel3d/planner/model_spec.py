"""ModelSpec: what the planner needs to know of a model: its parameters by unit, and the work of each unit.

All sizes are of the whole model, before any sharding. The work is that of one token, in a sequence whose
length is only known later; so ``AttentionSpec``, which grows with the length, is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: within its unit.
        shape: its shape in the plain model.
        tp_dim: the dim that tensor parallelism shards; None: it is replicated over tp.
        trainable: whether it has a gradient.
        itemsize: bytes of an element of the plain model's parameter. Those of a unit with different dtypes
            are in different buckets.
        heads: (query heads, key and value heads) of the attention layer if ``tp_dim`` is made of heads: tp
            cuts between heads, also where the number of ranks doesn't divide them.
        kv: whether it makes keys or values.
        used: fraction of the parameter that a token goes through; below 1 for experts.
        tp_partial: whether the gradient of a parameter that is replicated over tp is partial, summed over tp:
            "sequence": under sequence parallelism, "always", "never".
        experts: how many experts its first dim has, which ep divides; 0: it is of none.
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
    """``(tokens, k) @ (k, n)`` for every token that goes through the unit.

    Attributes:
        n, k: output and input features.
        split: what tensor parallelism divides: ``"n"`` (colwise), ``"k"`` (rowwise) or None: nothing.
        input_gradient: whether backward computes the gradient of the input too.
        heads, kv: as in ``Parameter``, of the divided features.
        experts: (number of experts, number that a token goes through), each with a matmul of (n, k); None:
            every token goes through this one matmul.
    """

    name: str
    n: int
    k: int
    split: str | None = None
    input_gradient: bool = True
    heads: tuple[int, int] | None = None
    kv: bool = False
    experts: tuple[int, int] | None = None

    @property
    def times(self) -> int:
        """How many of these products there are for a token."""
        return self.experts[1] if self.experts else 1


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention among the tokens of one sequence; its heads are divided by ``tp``.

    Attributes:
        fused: whether queries, keys and values are computed by one matrix, which ``tp`` cuts between groups
            of heads only.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    fused: bool = False


@dataclass(frozen=True)
class Elementwise:
    """Kernels that are bound by memory, by the elements that they read and write for one token.

    Attributes:
        eager: (forward, backward) elements of the compute dtype, each op a kernel of its own.
        fused: the same if they are one kernel: with a compiler, or a fused norm.
        kernels: numbers of (forward, backward) ops, eager.
        split: ``"tp"``: between a colwise and a rowwise layer, divided by tp; ``"heads"``, ``"kv"``: the
            same, in whole query heads, or key and value heads; ``"sequence"``: divided by tp under sequence
            parallelism only.
        norm: whether this is a norm, for which there are fused kernels without a compiler.
        of_experts: whether it is of the experts that a token goes through, which ep divides.
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
    """Values that forward keeps for backward, per token.

    Attributes:
        elements: number of elements per token.
        itemsize: bytes of an element; None: those of the compute dtype.
        split: as in ``Elementwise``; ``"gathered"``: whole on each rank in spite of sequence parallelism.
        of: the op that computes them, for selective checkpointing: "matmul", "attention", "norm" or
            "elementwise".
        eager_only: whether a compiler would compute them again instead.
        of_experts: as in ``Elementwise``.
    """

    name: str
    elements: float
    itemsize: int | None = None
    split: str = "sequence"
    of: str = "elementwise"
    eager_only: bool = False
    of_experts: bool = False


@dataclass(frozen=True)
class UnitSpec:
    """A unit of the engine: parameters that are gathered together, and what its forward does.

    Attributes:
        kind: "block", "embedding", "tail" or "root".
        parameters: its parameters in the order in which forward uses them, so that gradients arrive in
            reverse; tied ones once.
        count: number of units of the model that are equal to this one, including it.
        tp_inputs: features of inputs that colwise layers share: gathered forward under sequence parallelism,
            their gradients summed over ``tp`` backward.
        tp_outputs: features of rowwise layers' outputs (and of a split embedding's): summed over ``tp``
            forward.
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
        """Elements of the parameters of one such unit."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        units: its units in the order of the forward.
        hidden: features between the blocks.
        vocab: rows of the logits; 0: no head.
        heads, kv_heads: numbers of heads of attention; 0: there is none.
        divisible: sizes that ``tp`` must divide, by name: only those that the plan can't cut otherwise, as
            ``LocalSizes``.
        tied: whether the embedding is the head's weight as well.
        tp_ready: whether there is a tensor-parallel plan.
        source: where the spec was read.
        seq_len: the longest sequence that its config allows; 0: it doesn't say.
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

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(unit.count for unit in self.units if unit.kind == "block")

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(unit.count * unit.numel for unit in self.units)

    @property
    def experts(self) -> int:
        """The fewest experts of a block that has any; 0: there are none."""
        return min((p.experts for u in self.units for p in u.parameters if p.experts), default=0)

    @property
    def active_numel(self) -> int:
        """Elements of the parameters that one token goes through: of experts those that are chosen."""
        used = (u.count * p.numel * p.used for u in self.units for p in u.parameters)
        return round(sum(used))

    @property
    def size(self) -> str:
        """How many parameters, in words."""
        total, active = self.numel / 1e9, self.active_numel / 1e9
        return f"{total:,.2f} B parameters" + (
            f", {active:,.2f} B active" if active < total else ""
        )


def loss_work(vocab: int) -> Elementwise:
    """Logits to fp32, log_softmax, zeros for the picked gradients, and back: 36 bytes a logit, 12 fused."""
    return Elementwise("loss", (7 * vocab, 11 * vocab), (3 * vocab, 3 * vocab), (3, 3), "loss")
