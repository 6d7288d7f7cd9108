"""TRL's SFTTrainer on models of ``parallelize``, and on torch's FSDP2."""

import tempfile
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from _support.integrations.hf import (
    LENGTH,
    Sizes,
    accelerate_state,
    arguments,
    parallel_model,
    recording,
    tiny_model,
    tiny_texts,
    tiny_tokenizer,
)
from _support.integrations.rows import Result, Row, Run, difference, whole_weights
from _support.integrations.transformers_rows import FSDP2


def make_trainer(trainer: type, folder: str, model: Any, data_ranks: int, **changes: Any) -> Any:
    """A user's SFTTrainer, with the activation checkpointing that it has by default."""
    from trl import SFTConfig

    changes = {"max_length": LENGTH, "bf16": False, **changes}
    return recording(trainer)(
        model,
        SFTConfig(**arguments(folder, data_ranks, **changes)),
        train_dataset=tiny_texts(80),
        processing_class=tiny_tokenizer(),
    )


def train(trainer: type, model: Any, data_ranks: int, **changes: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        training = make_trainer(trainer, folder, model, data_ranks, **changes)
        training.train()
    assert "fsdp" not in changes or isinstance(training.model, FSDPModule)
    return Run(training.losses, whole_weights(training.model))


def model() -> Any:
    return tiny_model(dtype=torch.float32)


def compare(sizes: Sizes) -> Result:
    import trl

    from parallel3d.integrations.trl import SFTTrainer

    with accelerate_state(alone=True):
        plain = train(trl.SFTTrainer, model(), 1)
    with accelerate_state():
        ours = difference(train(SFTTrainer, *parallel_model(sizes, model())), plain)
    if sizes[2] > 1:
        return Result(ours, None)
    with accelerate_state(fsdp=True):
        peers = train(trl.SFTTrainer, model(), sizes[1], **FSDP2, gradient_checkpointing=False)
    return Result(ours, difference(peers, plain))


_row = partial(Row, packages=("trl", "transformers"), lines=3, peer="FSDP2", run=compare)
_loss = {"dtype": "float32", "note": "TRL computes the loss in float32"}
ROWS = [
    _row(name=f"SFTTrainer: {what}", mesh=sizes, arguments=(sizes,), **_loss)
    for what, sizes in {"FSDP": (1, 2, 1), "FSDP and TP": (1, 2, 2)}.items()
]
