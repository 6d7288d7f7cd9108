"""A step that another library's loop takes is audited: transformers' Trainer and accelerate."""

import tempfile
from typing import Any

import pytest
from _support.integrations.hf import (
    accelerate_state,
    arguments,
    loss_in_float64,
    parallel_model,
    tiny_model,
    tiny_rows,
)

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow


def by_the_trainer(sizes: tuple[int, int, int]) -> int:
    from transformers import TrainingArguments

    from parallel3d.integrations.transformers import Trainer

    with accelerate_state(), tempfile.TemporaryDirectory() as folder:
        model, data_ranks = parallel_model(sizes, tiny_model(), audit=True)
        Trainer(
            model,
            TrainingArguments(**arguments(folder, data_ranks, max_steps=2)),
            train_dataset=tiny_rows(16),
            compute_loss_func=loss_in_float64,
        ).train()
    return compared(model)


def by_accelerate(sizes: tuple[int, int, int]) -> int:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    with accelerate_state():
        model, data_ranks = parallel_model(sizes, tiny_model(), audit=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        for batch in list(DataLoader(tiny_rows(8, masked=False), batch_size=4 // data_ranks))[:2]:
            with accelerator.accumulate(model):
                logits = model(input_ids=batch["input_ids"]).logits
                accelerator.backward(loss_in_float64({"logits": logits}, batch["labels"]))
    return compared(model)


def compared(model: Any) -> int:
    report = p3d.audit.report(model)
    assert report is not None and not report.findings
    return sum(report.compared.values())


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize("client", [by_the_trainer, by_accelerate])
def test_of_a_client(gloo_pool: GlooPool, client: Any, sizes: tuple[int, int, int]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert gloo_pool.run(client, sizes, world_size=2, timeout=200.0)[0] > 30
