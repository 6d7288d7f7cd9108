"""ModelSpec of a transformer from a short list of shapes."""

from __future__ import annotations

from parallel3d.errors import PlanningError
from parallel3d.planner.decoder import GATED, Decoder
from parallel3d.planner.model_spec import ModelSpec

__all__ = ["GATED", "spec_from_shapes"]

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
    for what, size in (("hidden", hidden), ("heads", heads)):
        if type(size) is not int or size < 1:
            raise PlanningError(f"{what} is {size!r}; it must be an int, 1 or more")
    if head_dim is None and hidden % heads:
        raise PlanningError(f"heads is {heads}; it must divide hidden, {hidden}, or give head_dim")
    kv = heads if kv_heads is None else kv_heads
    dim = hidden // heads if head_dim is None else head_dim
    for what, value, known in (
        ("mlp", mlp, _MLPS),
        ("positions", positions, _POSITIONS),
        ("norm", norm, _NORMS),
    ):
        if value not in known:
            raise PlanningError(f"{what} is {value!r}; it must be one of {', '.join(known)}")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "head_dim": dim}
    sizes |= {"ffn": ffn, "vocab": vocab}
    for what, size in sizes.items():
        if type(size) is not int or size < 1:
            raise PlanningError(f"{what} is {size!r}; it must be an int, 1 or more")
    if heads % kv:
        raise PlanningError(f"kv_heads is {kv}; it must divide heads, {heads}")
    decoder = Decoder(
        layers,
        hidden,
        heads,
        kv,
        dim,
        ffn,
        vocab,
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
    return decoder.spec(name, source)
