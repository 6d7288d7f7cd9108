"""ModelSpec: what the planner needs to know of a model: its parameters by unit, and the work of each unit.

All sizes are of the whole model, before any sharding. The work is that of one token in a sequence of a
length that is only known later, so everything that grows with the sequence is kept apart (``Attention``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

__all__ = ["Activation", "Attention", "Elementwise", "Matmul", "ModelSpec", "Parameter", "Unit"]


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: within its unit.
        shape: of the plain model.
        tp_dim: the dim that tensor parallelism shards; None: whole on each tp rank.
        trainable: whether it has a gradient.
        itemsize: bytes of an element at rest.
        heads: (query, key and value heads) of the attention layer, where ``tp_dim`` is made of them: tp cuts
            between heads, also where they don't divide. kv: whether it makes keys or values.
        tp_partial: when the gradient of one that is whole on each tp rank is a part, summed over tp:
            "sequence": under sequence parallelism, "always", "never".
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    trainable: bool = True
    itemsize: int = 4
    heads: tuple[int, int] | None = None
    kv: bool = False
    tp_partial: str = "sequence"

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Matmul:
    """``(tokens, k) @ (k, n)`` for every token that goes through the unit.

    Attributes:
        n, k: output and input features.
        split: what tensor parallelism divides: ``"n"`` (colwise), ``"k"`` (rowwise) or nothing.
        input_gradient: whether backward needs the gradient of the input too.
        heads, kv: as in ``Parameter``, of what is divided.
    """

    name: str
    n: int
    k: int
    split: str | None = None
    input_gradient: bool = True
    heads: tuple[int, int] | None = None
    kv: bool = False


@dataclass(frozen=True)
class Attention:
    """Softmax attention among the tokens of one sequence; its heads are divided by ``tp``.

    Attributes:
        fused: queries, keys and values come of one matrix, which ``tp`` cuts between groups of heads only.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    fused: bool = False


@dataclass(frozen=True)
class Elementwise:
    """Kernels that are bound by memory: what they read and write for one token.

    Attributes:
        eager: (forward, backward) elements of the compute dtype, each op a kernel of its own.
        fused: the same where they are one kernel: with a compiler, or a fused norm.
        kernels: (forward, backward) ops, eager.
        split: ``"tp"``: between a colwise and a rowwise layer, divided by tp; ``"heads"``, ``"kv"``: the
            same, in whole heads of queries, or of keys and values; ``"sequence"``: divided by tp under
            sequence parallelism only.
        norm: whether this is a norm, of which there are fused kernels without a compiler.
    """

    name: str
    eager: tuple[float, float]
    fused: tuple[float, float]
    kernels: tuple[int, int] = (1, 1)
    split: str = "sequence"
    norm: bool = False


@dataclass(frozen=True)
class Activation:
    """Values that forward keeps for backward, per token.

    Attributes:
        elements: how many.
        itemsize: bytes of each; None: those of the compute dtype.
        split: as in ``Elementwise``; ``"gathered"``: whole on each rank in spite of sequence parallelism.
        of: what has made them: "matmul", "attention", "norm" or "elementwise": what selective
            checkpointing keeps or makes again.
        eager_only: a compiler would make them again.
    """

    name: str
    elements: float
    itemsize: int | None = None
    split: str = "sequence"
    of: str = "elementwise"
    eager_only: bool = False


@dataclass(frozen=True)
class Unit:
    """A unit of the engine: parameters that are gathered together, and what its forward does.

    Attributes:
        kind: "block", "embedding", "tail" or "root".
        parameters: in the order in which forward uses them, so that gradients come in the reverse one; tied
            ones once.
        count: how many units of the model are equal to this one.
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
    attention: tuple[Attention, ...] = ()
    elementwise: tuple[Elementwise, ...] = ()
    activations: tuple[Activation, ...] = ()
    tp_inputs: tuple[int, ...] = ()
    tp_outputs: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of its parameters, of one such unit."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        units: in the order of the forward.
        hidden: features between the blocks.
        vocab: rows of the logits; 0: no head.
        heads, kv_heads: of attention, for what ``tp`` may divide; 0: none.
        divisible: sizes that ``tp`` must divide, by name: only those that the plan can't cut otherwise, as
            ``LocalSizes``.
        tied: the embedding is the head's weight as well.
        tp_ready: there is a tensor-parallel plan.
        source: where this was read.
    """

    name: str
    units: tuple[Unit, ...]
    hidden: int
    vocab: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    divisible: dict[str, int] = field(default_factory=dict)
    tied: bool = False
    tp_ready: bool = True
    source: str = ""

    def each_unit(self) -> Iterator[Unit]:
        """Every unit, equal ones as often as they come."""
        for unit in self.units:
            for _ in range(unit.count):
                yield unit

    @property
    def blocks(self) -> int:
        """How many units are blocks."""
        return sum(unit.count for unit in self.units if unit.kind == "block")

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(unit.count * unit.numel for unit in self.units)
