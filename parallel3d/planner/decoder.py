"""The parts of a decoder, from its sizes: parameters, matmuls, elementwise work and what autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel3d.planner.model_spec import (
    Activation,
    Attention,
    Elementwise,
    Matmul,
    ModelSpec,
    Parameter,
    Unit,
)

__all__ = ["GATED", "Decoder", "loss_work"]

GATED = ("swiglu", "geglu", "gated_relu")


@dataclass(frozen=True)
class Decoder:
    """``layers`` equal blocks: attention and an MLP, each with a residual, between an embedding and a head.

    Attributes:
        dim: of a head. kv: KV heads.
        mlp, positions: as in ``spec_from_shapes``. position_rows: of a learned table.
        norm: "rmsnorm", "layernorm" or "none" (it normalizes, but has no parameters).
        norm_bias: of the norms.
        norms: in a block: 1 (attention and MLP side by side), 2 or 4 (after each as well as before).
        qk_norm: "head": of queries and keys, weights of one head; "full": of all heads; "": none.
        qkv_bias, o_bias, mlp_bias, head_bias: of the linear layers.
        fused_qkv, fused_gate: one matrix for queries, keys and values; for both halves of a gated MLP.
        embed_norm: a norm after the embedding.
    """

    layers: int
    hidden: int
    heads: int
    kv: int
    dim: int
    ffn: int
    vocab: int
    mlp: str = "swiglu"
    positions: str = "rope"
    position_rows: int = 1
    norm: str = "rmsnorm"
    norm_bias: bool = False
    norms: int = 2
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    embed_norm: bool = False
    tied: bool = False

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    def spec(self, name: str, source: str) -> ModelSpec:
        """The whole model."""
        units = [
            Unit("blocks", "block", self.block_parameters(), self.layers, **self._block_work())
        ]
        hidden, tail = self.hidden, self._tail()
        looked_up = (Elementwise("lookup", (2 * hidden, 3 * hidden), (2 * hidden, 3 * hidden)),)
        tables = [
            Unit(p.name.partition(".")[0], "embedding", (p,)) for p in self._tables()[self.tied :]
        ]
        root = self._root()
        if self.tied or root:
            tables.insert(0, Unit("root", "root", root))
        # The first of them stands for the lookup, whichever has the parameters.
        tables[0] = replace(tables[0], elementwise=looked_up, tp_outputs=(hidden,))
        units = [*tables, *units, tail]
        return ModelSpec(
            name=name,
            units=tuple(units),
            hidden=hidden,
            vocab=self.vocab,
            heads=self.heads,
            kv_heads=self.kv,
            head_dim=self.dim,
            tied=self.tied,
            source=source,
        )

    def _tables(self) -> list[Parameter]:
        """Embeddings, each a unit of the engine's; a tied one is the root's."""
        found = [Parameter("embed.weight", (self.vocab, self.hidden), 0)]
        if self.positions == "learned":
            found.append(Parameter("positions.weight", (self.position_rows, self.hidden)))
        return found

    def _root(self) -> tuple[Parameter, ...]:
        """What is in no other unit: tied weights with their head's bias, a norm before the blocks."""
        found = [*self._tables()[: self.tied]]
        if self.embed_norm:
            found += self._norm_parameters("embed_norm")
        if self.tied and self.head_bias:
            found.append(Parameter("head.bias", (self.vocab,), 0))
        return tuple(found)

    def linears(self) -> Iterator[tuple[str, int, int, str, bool]]:
        """(name, output, input, split, bias) of a block's, in the order they run."""
        hidden, ffn = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        if self.fused_qkv:
            yield "attn.qkv", query + 2 * pair, hidden, "n", self.qkv_bias
        else:
            for name, n in (("q", query), ("k", pair), ("v", pair)):
                yield f"attn.{name}", n, hidden, "n", self.qkv_bias
        yield "attn.o", hidden, query, "k", self.o_bias
        if self.gated and self.fused_gate:
            yield "mlp.gate_up", 2 * ffn, hidden, "n", self.mlp_bias
        else:
            for name in ["gate", "up"] if self.gated else ["up"]:
                yield f"mlp.{name}", ffn, hidden, "n", self.mlp_bias
        yield "mlp.down", hidden, ffn, "k", self.mlp_bias

    def block_parameters(self) -> tuple[Parameter, ...]:
        """Of one block, in the order of their use."""
        found = self._norm_parameters("norm1")
        middle = [
            f"norm{i}" for i in ((2, 3) if self.norms == 4 else (2,) if self.norms == 2 else ())
        ]
        for name, n, k, split, bias in self.linears():
            if name == "attn.o" and self.qk_norm:
                found += self._qk_norms()
            found += self._linear(name, n, k, split, bias)
            if name == "attn.o":
                for norm in middle:
                    found += self._norm_parameters(norm)
        if self.norms == 4:
            found += self._norm_parameters("norm4")
        return tuple(found)

    def _linear(self, name: str, n: int, k: int, split: str, bias: bool) -> list[Parameter]:
        heads, pair = self._heads_of(name)
        cut = 0 if split == "n" else 1
        found = [Parameter(f"{name}.weight", (n, k), cut, heads=heads, kv=pair)]
        if bias:
            cuts = (0, heads) if split == "n" else (None, None)
            found.append(Parameter(f"{name}.bias", (n,), cuts[0], heads=cuts[1], kv=pair))
        return found

    def _heads_of(self, name: str) -> tuple[tuple[int, int] | None, bool]:
        """``heads`` and ``kv`` of a linear layer; fused ones are shared by groups of heads."""
        if not name.startswith("attn."):
            return None, False
        return (self.kv if self.fused_qkv else self.heads, self.kv), name in ("attn.k", "attn.v")

    def _qk_norms(self) -> list[Parameter]:
        each = 1 if self.qk_norm == "head" else None
        return [
            Parameter(f"attn.{name}.weight", ((each or heads) * self.dim,), tp_partial="always")
            for name, heads in (("q_norm", self.heads), ("k_norm", self.kv))
        ]

    def _norm_parameters(self, name: str) -> list[Parameter]:
        if self.norm == "none":
            return []
        found = [Parameter(f"{name}.weight", (self.hidden,))]
        if self.norm_bias:
            found.append(Parameter(f"{name}.bias", (self.hidden,)))
        return found

    def _block_work(self) -> dict:
        hidden = self.hidden
        return {
            "matmuls": tuple(
                Matmul(name, n, k, split, True, *self._heads_of(name))
                for name, n, k, split, _ in self.linears()
            ),
            "attention": (Attention(self.heads, self.kv, self.dim, fused=self.fused_qkv),),
            "elementwise": tuple(self._elementwise()),
            "activations": tuple(self._activations()),
            "tp_inputs": (hidden, hidden) if self.norms > 1 else (hidden,),
            "tp_outputs": (hidden, hidden),
        }

    def _norm_work(self, name: str, features: int, split: str = "sequence") -> Elementwise:
        h = features
        if self.norm != "rmsnorm":  # torch's layer norm is one kernel
            return Elementwise(name, (2 * h, 3 * h), (2 * h, 3 * h), (1, 2), split, norm=True)
        # x.float(), pow, mean, * rsqrt, cast, * weight: 36 bytes forward, twice that backward
        return Elementwise(name, (18 * h, 36 * h), (2 * h, 3 * h), (6, 12), split, norm=True)

    def _elementwise(self) -> Iterator[Elementwise]:
        h, f = self.hidden, self.ffn
        for i in range(self.norms):
            yield self._norm_work(f"norm{i + 1}", h)
        yield Elementwise("residuals", (6 * h, 6 * h), (6 * h, 6 * h), (2, 2))
        sums = (0 if self.fused_qkv else 2) + (1 if self.gated and not self.fused_gate else 0)
        if sums:  # of the gradients that layers with one input give it
            yield Elementwise(
                "gradient sums", (0, 3 * sums * h), (0, 3 * sums * h), (0, sums), "gathered"
            )
        if self.gated:
            yield Elementwise(self.mlp, (5 * f, 9 * f), (3 * f, 5 * f), (2, 3), "tp")
        else:
            yield Elementwise(self.mlp, (2 * f, 3 * f), (2 * f, 3 * f), (1, 1), "tp")
        qk = (self.heads + self.kv) * self.dim
        if self.qk_norm:
            yield self._norm_work("q, k norms", qk, "heads")
        if self.positions == "rope":
            yield Elementwise("rope", (10 * qk, 16 * qk), (3 * qk, 3 * qk), (8, 8), "heads")
        for which, split in (("n", "tp"), ("k", "sequence")):
            biased = [n for _, n, _, way, bias in self.linears() if bias and way == which]
            if biased:
                total, kernels = sum(biased), 3 if split == "tp" else 2
                yield Elementwise("bias gradients", (0, total), (0, total), (0, kernels), split)

    def _activations(self) -> Iterator[Activation]:
        """What autograd keeps, by op; the formulas of ``docs/planner.md``."""
        h, f = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        for i in range(self.norms):
            yield from self._norm_activations(f"norm{i + 1}", h)
        yield Activation("qkv input", h, split="gathered", of="norm")
        if self.qk_norm:
            yield from self._norm_activations("q norm", query, "heads")
            yield from self._norm_activations("k norm", pair, "kv")
        yield Activation("q", query, split="heads", of="matmul")
        yield Activation("k, v", 2 * pair, split="kv", of="matmul")
        if (
            self.fused_qkv and self.positions == "rope"
        ):  # v is a view of the whole, q and k are rotated copies
            yield Activation("q, k before rope", query + pair, split="heads", of="matmul")
        yield Activation("attention output", query, split="heads", of="attention")
        yield Activation("softmax sums", self.heads, 4, split="heads", of="attention")
        if self.norms > 1:
            yield Activation("mlp input", h, split="gathered", of="norm")
        yield Activation("mlp hidden", (2 if self.gated else 1) * f, split="tp", of="matmul")
        yield Activation(f"{self.mlp} output", f, split="tp")
        if self.gated:
            yield Activation("silu", f, split="tp", eager_only=True)

    def _norm_activations(
        self, name: str, features: int, split: str = "sequence"
    ) -> Iterator[Activation]:
        yield Activation(f"{name} input", features, split=split, of="norm")
        if self.norm == "rmsnorm":  # x in fp32
            # pow and the product share x; the bf16 input isn't kept, but the residual is
            yield Activation(f"{name} in fp32", features, 4, split, "norm", eager_only=True)

    def _tail(self) -> Unit:
        """Final norm, head and loss."""
        h, v = self.hidden, self.vocab
        parameters = self._norm_parameters("norm")
        if not self.tied:
            parameters.append(Parameter("head.weight", (v, h), 0))
        if self.head_bias and not self.tied:
            parameters.append(Parameter("head.bias", (v,), 0))
        return Unit(
            "tail",
            "tail",
            tuple(parameters),
            matmuls=(Matmul("head", v, h, "n"),),
            elementwise=(self._norm_work("norm", h), loss_work(v)),
            activations=(Activation("norm input", h, of="norm"), Activation("head input", h)),
            tp_inputs=(h,),
        )


def loss_work(vocab: int) -> Elementwise:
    """Logits to fp32, log_softmax, and back: 20 bytes a logit eager, 12 fused."""
    return Elementwise("loss", (5 * vocab, 5 * vocab), (3 * vocab, 3 * vocab), (3, 3), "loss")
