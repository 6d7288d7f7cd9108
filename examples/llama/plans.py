"""What tensor parallelism does with each module of the Llama: the only place that says so."""

from typing import Any

from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

__all__ = ["LLAMA_SEQUENCE_PLAN", "LLAMA_TP_PLAN"]

LLAMA_TP_PLAN: dict[str, Any] = {
    "tok_embeddings": "embedding",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}

LLAMA_SEQUENCE_PLAN: dict[str, Any] = {
    "tok_embeddings": VocabParallel(output="sequence"),
    "layers.*.{attention_norm,ffn_norm}": SequenceParallel(),
    "layers.*.attention.{wq,wk,wv}": Colwise(input="sequence"),
    "layers.*.attention.wo": Rowwise(output="sequence"),
    "layers.*.feed_forward.w[13]": Colwise(input="sequence"),
    "layers.*.feed_forward.w2": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "output": Colwise(input="sequence", output="replicate"),
}
"""The same with sequence parallelism: between the layers each rank has a part of the sequence."""
