"""Which modules a trace doesn't look into: linear layers, embeddings, torch's attention."""

from typing import Any

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.derive.trace import Layer
from parallel3d.tp.styles import Colwise
from parallel3d.tp.styles.kinds import is_embedding, linear_kind

__all__ = ["find_layers"]


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """The modules a trace doesn't look into, by path."""
    layers: dict[str, Layer] = {}
    module: Any
    for name, module in model.named_modules():
        if any(
            name.startswith(f"{n}.") for n, layer in layers.items() if layer.kind == "attention"
        ):
            continue
        if isinstance(module, nn.MultiheadAttention):
            layers[name] = Layer("attention", module.embed_dim)
            continue
        if is_embedding(module):
            layers[name] = Layer("embedding", module.embedding_dim)
            continue
        try:
            layers[name] = Layer("linear", linear_kind(Colwise(), module).out_features)
        except PlanError:
            continue
    return layers
