"""ModelSpec of a transformer from a short list of shapes."""

from __future__ import annotations

from parallel3d.errors import PlanningError
from parallel3d.planner.model_spec import (
    Activation,
    Attention,
    Elementwise,
    Matmul,
    ModelSpec,
    Parameter,
    Unit,
)

__all__ = ["GATED", "spec_from_shapes"]

GATED = ("swiglu", "geglu", "gated_relu")
_MLPS = (*GATED, "gelu", "relu", "relu2", "silu")
_NORMS = ("rmsnorm", "layernorm")
_POSITIONS = ("rope", "learned", "alibi", "none")


def spec_from_shapes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp: str = "swiglu",
    positions: str = "rope",
    norm: str = "rmsnorm",
    bias: bool = False,
    tied: bool = False,
    seq_len: int = 0,
    name: str = "transformer",
    source: str = "shapes",
) -> ModelSpec:
    """A decoder of ``layers`` equal blocks: norm, attention, norm, MLP, each with a residual.

    Args:
        kv_heads: as many as heads unless given. head_dim: hidden / heads unless given.
        mlp: "swiglu", "geglu": three matrices; "gelu", "relu", "relu2", "silu": two.
        positions: "learned": a table of ``seq_len`` rows; "rope": rotation; "alibi", "none".
        bias: of all linear layers but the head. Norm biases come with "layernorm".
        tied: the head's weight is the embedding's.

    Raises:
        PlanningError: a name that isn't one of these, or a size below 1.
    """
    kv = heads if kv_heads is None else kv_heads
    dim = hidden // heads if head_dim is None else head_dim
    for what, value, known in (
        ("mlp", mlp, _MLPS),
        ("positions", positions, _POSITIONS),
        ("norm", norm, _NORMS),
    ):
        if value not in known:
            raise PlanningError(f"{what} is {value!r}; it must be one of {', '.join(known)}")
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": dim,
        "ffn": ffn,
        "vocab": vocab,
    }
    for what, size in sizes.items():
        if type(size) is not int or size < 1:
            raise PlanningError(f"{what} is {size!r}; it must be an int, 1 or more")
    if heads % kv:
        raise PlanningError(f"kv_heads is {kv}; it must divide heads, {heads}")
    shape = _Shapes(hidden, heads, kv, dim, ffn, vocab, mlp, positions, norm, bias)
    embedding = [Parameter("embed.weight", (vocab, hidden), 0)]
    if positions == "learned":
        embedding.append(Parameter("positions.weight", (max(seq_len, 1), hidden)))
    tail = shape.tail(tied)
    units = [Unit("blocks", "block", shape.block_parameters(), layers, **shape.block_work())]
    looked_up = _embedding_work(hidden)
    if tied:  # one group at the root, gathered before the blocks and kept
        root = Unit("root", "root", (*embedding, *tail.parameters), tp_outputs=(hidden,))
        units = [root, *units, Unit("tail", "tail", (), **_work_of(tail))]
    else:
        units = [
            Unit(
                "embed", "embedding", tuple(embedding), elementwise=looked_up, tp_outputs=(hidden,)
            ),
            *units,
            tail,
        ]
    return ModelSpec(
        name=name,
        units=tuple(units),
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        tied=tied,
        source=source,
    )


def _work_of(unit: Unit) -> dict:
    return {
        "matmuls": unit.matmuls,
        "elementwise": unit.elementwise,
        "activations": unit.activations,
        "tp_inputs": unit.tp_inputs,
    }


def _embedding_work(hidden: int) -> tuple[Elementwise, ...]:
    return (Elementwise("lookup", (2 * hidden, 3 * hidden), (2 * hidden, 3 * hidden)),)


class _Shapes:
    def __init__(
        self,
        hidden: int,
        heads: int,
        kv: int,
        dim: int,
        ffn: int,
        vocab: int,
        mlp: str,
        positions: str,
        norm: str,
        bias: bool,
    ) -> None:
        self.hidden, self.heads, self.kv, self.dim = hidden, heads, kv, dim
        self.ffn, self.vocab, self.mlp, self.positions = ffn, vocab, mlp, positions
        self.norm, self.bias = norm, bias
        self.gated = mlp in GATED

    def linears(self) -> list[tuple[str, int, int, str]]:
        """(name, output, input, split) of a block's, in the order they run."""
        hidden, ffn = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        up = ["gate", "up"] if self.gated else ["up"]
        return [
            ("attn.q", query, hidden, "n"),
            ("attn.k", pair, hidden, "n"),
            ("attn.v", pair, hidden, "n"),
            ("attn.o", hidden, query, "k"),
            *((f"mlp.{name}", ffn, hidden, "n") for name in up),
            ("mlp.down", hidden, ffn, "k"),
        ]

    def block_parameters(self) -> tuple[Parameter, ...]:
        found = []
        for name, n, k, split in self.linears():
            found.append(Parameter(f"{name}.weight", (n, k), 0 if split == "n" else 1))
            if self.bias:
                found.append(Parameter(f"{name}.bias", (n,), 0 if split == "n" else None))
        for name in ("norm1", "norm2"):
            found += self._norm_parameters(name)
        return tuple(found)

    def _norm_parameters(self, name: str) -> list[Parameter]:
        found = [Parameter(f"{name}.weight", (self.hidden,))]
        if self.norm == "layernorm":
            found.append(Parameter(f"{name}.bias", (self.hidden,)))
        return found

    def block_work(self) -> dict:
        hidden = self.hidden
        return {
            "matmuls": tuple(Matmul(*each) for each in self.linears()),
            "attention": (Attention(self.heads, self.kv, self.dim),),
            "elementwise": tuple(self._elementwise()),
            "activations": tuple(self._activations()),
            "tp_inputs": (hidden, hidden),
            "tp_outputs": (hidden, hidden),
        }

    def _norm_work(self, name: str) -> Elementwise:
        h = self.hidden
        if self.norm == "layernorm":  # torch's is one kernel
            return Elementwise(name, (2 * h, 3 * h), (2 * h, 3 * h), (1, 2), norm=True)
        # x.float(), pow, mean, * rsqrt, cast, * weight: 36 bytes forward, twice that backward
        return Elementwise(name, (18 * h, 36 * h), (2 * h, 3 * h), (6, 12), norm=True)

    def _elementwise(self) -> list[Elementwise]:
        h, f = self.hidden, self.ffn
        found = [self._norm_work("norm1"), self._norm_work("norm2")]
        found.append(Elementwise("residuals", (6 * h, 6 * h), (6 * h, 6 * h), (2, 2)))
        if self.gated:
            found.append(Elementwise(self.mlp, (5 * f, 8 * f), (3 * f, 5 * f), (2, 3), "tp"))
        else:
            found.append(Elementwise(self.mlp, (2 * f, 3 * f), (2 * f, 3 * f), (1, 1), "tp"))
        qk = (self.heads + self.kv) * self.dim
        if self.positions == "rope":
            found.append(Elementwise("rope", (10 * qk, 10 * qk), (3 * qk, 3 * qk), (8, 8), "tp"))
        if self.bias:
            outputs = sum(n for _, n, _, split in self.linears() if split == "n")
            found.append(Elementwise("bias gradients", (0, outputs), (0, outputs), (0, 3), "tp"))
            found.append(Elementwise("bias gradients", (0, 2 * h), (0, 2 * h), (0, 2)))
        return found

    def _activations(self) -> list[Activation]:
        """What autograd keeps, by op; the formulas of ``docs/planner.md``."""
        h, f = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        found = []
        for name in ("norm1", "norm2"):
            found.append(Activation(f"{name} input", h, of="norm"))
            if self.norm == "rmsnorm":  # x in fp32, its normed value in fp32 and in bf16
                found.append(Activation(f"{name} in fp32", 2 * h, 4, of="norm", eager_only=True))
                found.append(Activation(f"{name} normed", h, of="norm", eager_only=True))
        found.append(Activation("qkv input", h, split="gathered", of="norm"))
        found.append(Activation("q, k, v", query + 2 * pair, split="tp", of="matmul"))
        found.append(Activation("attention output", query, split="tp", of="attention"))
        found.append(Activation("softmax sums", self.heads, 4, split="tp", of="attention"))
        found.append(Activation("mlp input", h, split="gathered", of="norm"))
        found.append(
            Activation("mlp hidden", (2 if self.gated else 1) * f, split="tp", of="matmul")
        )
        found.append(Activation(f"{self.mlp} output", f, split="tp"))
        if self.gated:
            found.append(Activation("silu", f, split="tp", eager_only=True))
        return found

    def tail(self, tied: bool) -> Unit:
        """Final norm, head and loss."""
        h, v = self.hidden, self.vocab
        parameters = self._norm_parameters("norm")
        if not tied:
            parameters.append(Parameter("head.weight", (v, h), 0))
        return Unit(
            "tail",
            "tail",
            tuple(parameters),
            matmuls=(Matmul("head", v, h, "n"),),
            elementwise=(
                self._norm_work("norm"),
                # logits to fp32, log_softmax, and back: 20 bytes a logit eager, 12 fused
                Elementwise("loss", (5 * v, 5 * v), (3 * v, 3 * v), (3, 3), "loss"),
            ),
            activations=(Activation("norm input", h, of="norm"), Activation("head input", h)),
            tp_inputs=(h,),
        )
