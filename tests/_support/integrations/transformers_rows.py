"""transformers' Trainer on models of ``parallelize``, and on torch's FSDP2."""

import math
import tempfile
from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from _support.integrations.hf import (
    LENGTH,
    VOCAB,
    Sizes,
    accelerate_state,
    arguments,
    loss_in_float64,
    parallel_model,
    recording,
    tiny_model,
    tiny_rows,
)
from _support.integrations.peft_rows import adapted, base, double
from _support.integrations.rows import Result, Row, Run, difference, whole_weights

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["StableLmDecoderLayer"],
    },
}
"""Arguments with which transformers' own Trainer shards the tiny model by accelerate."""


def train(trainer: type, model: Any, data_ranks: int, **changes: Any) -> Run:
    """A user's program with a Trainer."""
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        training = recording(trainer)(
            model,
            TrainingArguments(**arguments(folder, data_ranks, **changes)),
            train_dataset=tiny_rows(80),
            compute_loss_func=loss_in_float64,
        )
        training.train()
    assert "fsdp" not in changes or isinstance(training.model, FSDPModule)
    return Run(training.losses, whole_weights(training.model))


def compare(sizes: Sizes) -> Result:
    import transformers
    from accelerate.utils import ParallelismConfig

    from parallel3d.integrations.transformers import Trainer

    with accelerate_state(alone=True):
        plain = train(transformers.Trainer, tiny_model(), 1)
    with accelerate_state():
        ours = difference(train(Trainer, *parallel_model(sizes, tiny_model())), plain)
    if sizes[2] > 1:
        return Result(ours, None)
    mesh = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    options = {**FSDP2, "parallelism_config": mesh if sizes[0] > 1 else None}
    with accelerate_state(fsdp=True):
        peers = train(transformers.Trainer, tiny_model(), sizes[0] * sizes[1], **options)
    return Result(ours, difference(peers, plain))


def lora_model() -> Any:
    """A Llama with peft's LoRA in each linear layer of its blocks."""
    return adapted(model=base(vocab_size=VOCAB, max_position_embeddings=LENGTH)).double()


def lora(sizes: Sizes) -> Result:
    import transformers

    from parallel3d.integrations.transformers import Trainer

    def run(trainer: type, model: Any, data_ranks: int, **changes: Any) -> Run:
        # Models, and plans on simulated ranks, are made outside ``double``.
        with double("llama"):
            return train(trainer, model, data_ranks, **changes)

    with accelerate_state(alone=True):
        plain = run(transformers.Trainer, lora_model(), 1)
    with accelerate_state():
        ours = run(Trainer, *parallel_model(sizes, lora_model()))
    config = {**FSDP2["fsdp_config"], "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    with accelerate_state(fsdp=True):
        ranks = math.prod(sizes)
        peers = run(transformers.Trainer, lora_model(), ranks, fsdp=True, fsdp_config=config)
    return Result(difference(ours, plain), difference(peers, plain))


_row = partial(Row, packages=("transformers", "accelerate"), lines=3, peer="FSDP2", run=compare)
_MESHES = {"FSDP": (1, 4, 1), "FSDP and TP": (1, 2, 2), "HSDP": (2, 2, 1), "HSDP and TP": (2, 1, 2)}
ROWS = [
    _row(name=f"Trainer: {what}, accumulation, clipping", mesh=sizes, arguments=(sizes,))
    for what, sizes in _MESHES.items()
]
_lora = {"packages": ("transformers", "peft"), "peer": "FSDP2 on (1, 4, 1)", "run": lora}
ROWS.append(_row(name="Trainer: LoRA", mesh=(1, 2, 2), arguments=((1, 2, 2),), **_lora))
