"""Specs and plans of the models that the planner is compared on."""

from llama import LlamaConfig

from parallel3d.planner import ModelSpec, spec_from_shapes
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel


def tp_plan(sequence: bool) -> dict:
    """Of examples/llama/llama.py; all activations between layers divided under sequence parallelism."""
    whole = "sequence" if sequence else "replicate"
    found: dict = {
        "tok_embeddings": VocabParallel(output=whole),
        "layers.*.attention.{wq,wk,wv}": Colwise(input=whole),
        "layers.*.attention.wo": Rowwise(output=whole),
        "layers.*.feed_forward.w[13]": Colwise(input=whole),
        "layers.*.feed_forward.w2": Rowwise(output=whole),
        "output": Colwise(input=whole, output="replicate"),
    }
    if sequence:
        found["layers.*.{attention_norm,ffn_norm}"] = SequenceParallel()
        found["norm"] = SequenceParallel()
    return found


def spec_of(config: LlamaConfig) -> ModelSpec:
    return spec_from_shapes(
        layers=config.n_layers,
        hidden=config.dim,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        ffn=config.hidden_dim,
        vocab=config.vocab_size,
    )
