"""Decoder: makes a ModelSpec of a decoder-only transformer from its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel3d.errors import PlanningError
from parallel3d.planner.arguments import check_choice, check_size
from parallel3d.planner.model_spec import (
    Activation,
    AttentionSpec,
    Elementwise,
    Matmul,
    ModelSpec,
    Parameter,
    UnitSpec,
    loss_work,
    mask_work,
)

# The parts of a decoder, from its sizes: parameters, matmuls, elementwise work and what autograd keeps.

GATED = ("swiglu", "geglu", "gated_relu")


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of gated experts in the place of a block's MLP, with stacked weights.

    All experts are sharded, gathered and updated like other parameters; a token goes through the few that the
    router chose. Tensor parallelism splits the features of each expert, as ``tp.Experts`` does, so that every
    rank computes all experts; with expert parallelism a rank has some of the experts, whole.

    Attributes:
        count: number of experts in a block.
        chosen: number of experts that a token goes through.
        ffn: hidden features of one expert.
        shared: hidden features of an MLP beside the experts that every token goes through; 0: there is none.
        shared_gate: whether a linear layer of one output feature scales the shared MLP's output.
    """

    count: int
    chosen: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False

    def parameters(self, hidden: int) -> Iterator[Parameter]:
        """Yields the parameters of router, experts and shared MLP, in the order of their use."""
        used = self.chosen / self.count
        yield Parameter("mlp.gate.weight", (self.count, hidden))
        up = (self.count, 2 * self.ffn, hidden)
        yield Parameter("mlp.experts.gate_up_proj", up, 1, used=used, experts=self.count)
        down = (self.count, hidden, self.ffn)
        yield Parameter("mlp.experts.down_proj", down, 2, used=used, experts=self.count)
        if self.shared:
            for name in ("gate_proj", "up_proj"):
                yield Parameter(f"mlp.shared_expert.{name}.weight", (self.shared, hidden), 0)
            yield Parameter("mlp.shared_expert.down_proj.weight", (hidden, self.shared), 1)
        if self.shared_gate:
            yield Parameter("mlp.shared_expert_gate.weight", (1, hidden))

    def matmuls(self, hidden: int) -> Iterator[Matmul]:
        """Yields the matmuls of the router, the experts (grouped matmuls) and the shared MLP."""
        routed = (self.count, self.chosen)
        yield Matmul("mlp.gate", self.count, hidden)
        yield Matmul("mlp.experts.gate_up", 2 * self.ffn, hidden, "n", experts=routed)
        yield Matmul("mlp.experts.down", hidden, self.ffn, "k", experts=routed)
        if self.shared:
            for name in ("gate", "up"):
                yield Matmul(f"mlp.shared.{name}", self.shared, hidden, "n")
            yield Matmul("mlp.shared.down", hidden, self.shared, "k")

    def elementwise(self, hidden: int) -> Iterator[Elementwise]:
        """Yields the work of routing, copying tokens to experts, summing results, and activations."""

        def alike(
            name: str, forward: float, backward: float, kernels: tuple[int, int], own: bool = True
        ) -> Elementwise:
            moved = forward, backward
            return Elementwise(name, moved, moved, kernels, "gathered", of_experts=own)

        copies = self.chosen * hidden
        yield alike("router", 6 * self.count, 8 * self.count, (4, 6), own=False)
        yield alike("permute", 2 * copies, 3 * copies, (1, 1))
        yield alike("combine", 4 * copies, 5 * copies, (2, 2))
        for name, f in (("experts'", self.chosen * self.ffn), ("shared", self.shared)):
            own = name != "shared"
            # Experts have one matrix for both halves, whose gradients are joined: 4 elements more.
            sizes = (5 * f, (13 if own else 9) * f), (3 * f, 5 * f)
            if f:
                yield Elementwise(f"{name} swiglu", *sizes, (2, 3), "tp", of_experts=own)

    def activations(self, hidden: int) -> Iterator[Activation]:
        """Yields what autograd keeps: the tokens' copies, hidden features, and results before weighting."""
        copies = self.chosen * hidden
        yield Activation("router", 2 * self.count, 4, "gathered")
        given = {"of_experts": True, "only_for": ("mlp.experts.gate_up",)}
        yield Activation("experts' input", copies, None, "gathered", **given)  # type: ignore[arg-type]
        for name, f in (("experts'", self.chosen * self.ffn), ("shared", self.shared)):
            own = name != "shared"
            if f:
                yield Activation(f"{name} hidden", 2 * f, None, "tp", "matmul", of_experts=own)
                only = ("mlp.experts.down",) if own else ("mlp.shared.down",)
                result = f"{name} swiglu output"
                yield Activation(result, f, split="tp", of_experts=own, only_for=only)
                yield Activation(f"{name} silu", f, None, "tp", eager_only=True, of_experts=own)
        yield Activation("experts' output", copies, None, "gathered", "matmul", of_experts=True)


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder: embedding, ``layers`` equal blocks of attention and MLP, final norm and head.

    Attributes:
        kv: number of key and value heads.
        dim: features of a head.
        mlp, positions: see ``spec_from_shapes``.
        position_rows: rows of a learned table of positions.
        norm: "rmsnorm", "layernorm" or "none" (it normalizes, but has no parameters).
        norm_bias: whether norms have a bias.
        norms: norms in a block: 1 (attention and MLP are parallel branches), 2 (one before each), or 4 (one
            before and one after each).
        qk_norm: norms of queries and keys over each head's features ("head"), all heads' ("full"); "": none.
        qkv_bias, o_bias, mlp_bias, head_bias: whether these linear layers have a bias.
        fused_qkv, fused_gate: one matrix for queries, keys and values; for both halves of a gated MLP.
        embed_norm: whether a norm follows the embedding.
        experts: the experts that replace the MLP; None: there is an MLP.
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
    experts: ExpertsSpec | None = None

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    def spec(self, name: str, source: str) -> ModelSpec:
        """Returns the whole model as units: root (tied weights), embeddings, blocks, final norm and head."""
        hidden = self.hidden
        embeddings = [Parameter("embed.weight", (self.vocab, hidden), 0)]
        if self.positions == "learned":
            embeddings.append(Parameter("positions.weight", (self.position_rows, hidden)))
        root = embeddings[:1] if self.tied else []
        if self.embed_norm:
            root += self._norm_parameters("embed_norm")
        if self.tied and self.head_bias:
            root.append(Parameter("head.bias", (self.vocab,), 0))
        units = [UnitSpec("root", "root", tuple(root))] if root else []
        for p in embeddings[self.tied :]:
            units.append(UnitSpec(p.name.partition(".")[0], "embedding", (p,)))
        # The lookup is work of the first unit, whichever has the parameters.
        moved = 2 * hidden, 3 * hidden
        lookup = Elementwise("lookup", moved, moved, split="gathered"), mask_work(hidden)
        units[0] = replace(units[0], elementwise=lookup, tp_outputs=(hidden,))
        return ModelSpec(
            name=name,
            units=(*units, self._block(), self._final_norm_and_head()),
            hidden=hidden,
            vocab=self.vocab,
            heads=self.heads,
            kv_heads=self.kv,
            head_dim=self.dim,
            tied=self.tied,
            source=source,
        )

    def _linears(self) -> Iterator[tuple[str, int, int, str, bool]]:
        """Yields (name, output features, input features, tp's split, has bias) of a block's linear layers, in
        the order in which they run; the split is "n" (colwise) or "k" (rowwise)."""
        hidden, ffn = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        if self.fused_qkv:
            yield "attn.qkv", query + 2 * pair, hidden, "n", self.qkv_bias
        else:
            for name, n in (("q", query), ("k", pair), ("v", pair)):
                yield f"attn.{name}", n, hidden, "n", self.qkv_bias
        yield "attn.o", hidden, query, "k", self.o_bias
        if self.experts is not None:
            return
        if self.gated and self.fused_gate:
            yield "mlp.gate_up", 2 * ffn, hidden, "n", self.mlp_bias
        else:
            for name in ["gate", "up"] if self.gated else ["up"]:
                yield f"mlp.{name}", ffn, hidden, "n", self.mlp_bias
        yield "mlp.down", hidden, ffn, "k", self.mlp_bias

    def _block_parameters(self) -> Iterator[Parameter]:
        """Yields a block's parameters in the order in which forward uses them."""
        yield from self._norm_parameters("norm1")
        for name, n, k, split, bias in self._linears():
            if name == "attn.o" and self.qk_norm:
                for norm, heads in (("q_norm", self.heads), ("k_norm", self.kv)):
                    features = self.dim * (1 if self.qk_norm == "head" else heads)
                    yield Parameter(f"attn.{norm}.weight", (features,), tp_partial="always")
            heads_kv, pair = self._heads_of(name)
            cut = 0 if split == "n" else 1
            yield Parameter(f"{name}.weight", (n, k), cut, heads=heads_kv, kv=pair)
            if bias:
                yield Parameter(f"{name}.bias", (n,), None if cut else 0, heads=heads_kv, kv=pair)
            if name == "attn.o" and self.norms > 1:
                yield from self._norm_parameters("norm2")
                if self.norms == 4:
                    yield from self._norm_parameters("norm3")
        if self.experts is not None:
            yield from self.experts.parameters(self.hidden)
        if self.norms == 4:
            yield from self._norm_parameters("norm4")

    def _heads_of(self, name: str) -> tuple[tuple[int, int] | None, bool]:
        """Returns the fields ``heads`` and ``kv`` of ``Parameter`` for a linear layer; a fused one is divided
        between groups, each a key and value head with its query heads."""
        if not name.startswith("attn."):
            return None, False
        return (self.kv if self.fused_qkv else self.heads, self.kv), name in ("attn.k", "attn.v")

    def _norm_parameters(self, name: str) -> list[Parameter]:
        names = ["weight", "bias"] if self.norm_bias else ["weight"]
        each = names if self.norm != "none" else []
        return [Parameter(f"{name}.{kind}", (self.hidden,)) for kind in each]

    def _block(self) -> UnitSpec:
        inputs = (self.hidden, self.hidden) if self.norms > 1 else (self.hidden,)
        return UnitSpec(
            "blocks",
            "block",
            tuple(self._block_parameters()),
            self.layers,
            matmuls=(
                *(
                    Matmul(name, n, k, split, True, *self._heads_of(name))
                    for name, n, k, split, _ in self._linears()
                ),
                *(self.experts.matmuls(self.hidden) if self.experts is not None else ()),
            ),
            attention=(AttentionSpec(self.heads, self.kv, self.dim, fused=self.fused_qkv),),
            elementwise=tuple(self._elementwise()),
            activations=tuple(self._activations()),
            tp_inputs=inputs,
            tp_outputs=(self.hidden, self.hidden),
        )

    def _norm_work(self, name: str, features: int, split: str = "sequence") -> Elementwise:
        h, fused = features, (2 * features, 3 * features)
        if self.norm != "rmsnorm":  # torch's layer norm is one kernel
            return Elementwise(name, fused, fused, (1, 2), split, norm=True)
        # x.float(), pow, mean, * rsqrt, cast, * weight, as recorded of Hugging Face's
        return Elementwise(name, (18 * h, 46 * h), fused, (8, 16), split, norm=True)

    def _elementwise(self) -> Iterator[Elementwise]:
        h, f = self.hidden, self.ffn
        for i in range(self.norms):
            yield self._norm_work(f"norm{i + 1}", h)
        yield Elementwise("residuals", (6 * h, 6 * h), (6 * h, 6 * h), (2, 2))
        pairs = self.gated and not self.fused_gate and self.experts is None
        sums = (0 if self.fused_qkv else 2) + (1 if pairs else 0)
        if sums:  # of the gradients that layers with one input give it
            moved = (0, 3 * sums * h)
            yield Elementwise("gradient sums", moved, moved, (0, sums), "gathered")
        if self.experts is not None:
            yield from self.experts.elementwise(h)
        elif self.gated:
            yield Elementwise(self.mlp, (5 * f, 9 * f), (3 * f, 5 * f), (2, 3), "tp")
        else:
            yield Elementwise(self.mlp, (2 * f, 3 * f), (2 * f, 3 * f), split="tp")
        qk = (self.heads + self.kv) * self.dim
        if self.qk_norm:
            yield self._norm_work("q, k norms", qk, "heads")
        if self.positions == "rope":
            yield Elementwise("rope", (10 * qk, 16 * qk), (3 * qk, 3 * qk), (8, 8), "heads")
        for which, split, kernels in (("n", "tp", 3), ("k", "sequence", 2)):
            total = sum(n for _, n, _, way, bias in self._linears() if bias and way == which)
            if total:
                moved = (0, total)
                yield Elementwise("bias gradients", moved, moved, (0, kernels), split)

    def _activations(self) -> Iterator[Activation]:
        """Yields what autograd keeps of a block, by the formulas of ``docs/planner.md``."""
        h, f = self.hidden, self.ffn
        query, pair = self.heads * self.dim, self.kv * self.dim
        for i in range(self.norms):
            yield from self._norm_activations(f"norm{i + 1}", h)
        reads = {
            way: [n for n, *_ in self._linears() if n.startswith(way)] for way in ("attn", "mlp")
        }
        qkv, (up, down) = tuple(reads["attn"][:-1]), (reads["mlp"][:-1], reads["mlp"][-1:])
        beside = tuple(up) if self.norms == 1 else ()
        yield Activation("qkv input", h, split="gathered", of="norm", only_for=qkv + beside)
        if self.qk_norm:
            yield from self._norm_activations("q norm", query, "heads")
            yield from self._norm_activations("k norm", pair, "kv")
        yield Activation("q", query, split="heads", of="matmul")
        yield Activation("k, v", 2 * pair, split="kv", of="matmul")
        if self.fused_qkv and self.positions == "rope":
            # v is a view of the whole, q and k are rotated copies
            yield Activation("q, k before rope", query + pair, split="heads", of="matmul")
        yield Activation("attention output", query, split="heads", of="attention")
        yield Activation("softmax sums", self.heads, 4, split="heads", of="attention")
        if self.norms > 1:
            only = tuple(up) if self.experts is None else ()
            yield Activation("mlp input", h, split="gathered", of="norm", only_for=only)
        if self.experts is not None:
            yield from self.experts.activations(h)
            return
        yield Activation("mlp hidden", (2 if self.gated else 1) * f, split="tp", of="matmul")
        yield Activation(f"{self.mlp} output", f, split="tp", only_for=tuple(down))
        if self.gated:
            yield Activation("silu", f, split="tp", eager_only=True)

    def _norm_activations(
        self, name: str, features: int, split: str = "sequence"
    ) -> Iterator[Activation]:
        yield Activation(f"{name} input", features, split=split, of="norm")
        if self.norm == "rmsnorm":
            # pow and the product share x in fp32; the bf16 input isn't kept, but the residual is
            yield Activation(f"{name} in fp32", features, 4, split, "norm", eager_only=True)

    def _final_norm_and_head(self) -> UnitSpec:
        h, v = self.hidden, self.vocab
        parameters = self._norm_parameters("norm")
        if not self.tied:
            bias = [Parameter("head.bias", (v,), 0)] if self.head_bias else []
            parameters += [Parameter("head.weight", (v, h), 0), *bias]
        return UnitSpec(
            "tail",
            "tail",
            tuple(parameters),
            matmuls=(Matmul("head", v, h, "n"),),
            elementwise=(self._norm_work("norm", h), loss_work(v)),
            activations=(
                Activation("norm input", h, of="norm"),
                Activation("head input", h, only_for=("head",)),
            ),
            tp_inputs=(h,),
        )


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
    experts: int = 0,
    experts_per_token: int = 0,
    seq_len: int = 0,
    name: str = "transformer",
    source: str = "shapes",
) -> ModelSpec:
    """Returns the spec of a decoder of ``layers`` equal blocks: norm, attention, norm, MLP, with residuals.

    Args:
        layers, hidden, heads: number of blocks, features between them, query heads of each.
        ffn, vocab: hidden features of an MLP, and size of the vocabulary.
        kv_heads: key and value heads of each block; by default as many as ``heads``.
        head_dim: features of a head; by default ``hidden / heads``.
        mlp: "swiglu", "geglu", "gated_relu": three matrices; "gelu", "relu", "relu2", "silu": two.
        norm: "rmsnorm", or "layernorm".
        positions: "learned" (a table of ``seq_len`` rows), "rope", "alibi" or "none".
        bias: whether all linear layers but the head have a bias. With "layernorm" norms have one.
        tied: the head's weight is the embedding's.
        experts: number of gated experts, of ``ffn`` features each, that replace each MLP; 0: none.
        experts_per_token: number of experts that a token goes through.
        name, source: the model's name, and where its sizes come from, as texts for the plan.

    Raises:
        PlanningError: a name that isn't one of these, or a size below 1.
    """
    check_size("hidden", hidden)
    check_size("heads", heads)
    if head_dim is None and hidden % heads:
        raise PlanningError(f"heads is {heads}; it must divide hidden, {hidden}, or give head_dim")
    kv = heads if kv_heads is None else kv_heads
    dim = hidden // heads if head_dim is None else head_dim
    check_choice("mlp", mlp, (*GATED, "gelu", "relu", "relu2", "silu"))
    check_choice("positions", positions, ("rope", "learned", "alibi", "none"))
    check_choice("norm", norm, ("rmsnorm", "layernorm"))
    sizes = {"layers": layers, "kv_heads": kv, "head_dim": dim, "ffn": ffn, "vocab": vocab}
    for what, size in sizes.items():
        check_size(what, size)
    if heads % kv:
        raise PlanningError(f"kv_heads is {kv}; it must divide heads, {heads}")
    if not 0 <= experts_per_token <= experts or (experts > 0) != (experts_per_token > 0):
        raise PlanningError(
            f"experts_per_token is {experts_per_token} of {experts} experts; it must be 1 to {experts}"
        )
    decoder = Decoder(
        *(layers, hidden, heads, kv, dim, ffn, vocab),
        experts=ExpertsSpec(experts, experts_per_token, ffn) if experts else None,
        mlp=mlp,
        positions=positions,
        position_rows=max(seq_len, 1),
        norm=norm,
        norm_bias=norm == "layernorm",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=tied,
    )
    return replace(decoder.spec(name, source), seq_len=seq_len)
