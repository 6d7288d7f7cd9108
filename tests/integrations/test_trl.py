"""TRL's SFTTrainer for models of ``parallelize``: what docs/integrations.md has no row for."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
import torch
from _support.integrations.hf import (
    Sizes,
    accelerate_state,
    parallel_model,
    tiny_model,
    tiny_texts,
    tiny_tokenizer,
    whole_weights,
)
from _support.integrations.peft_rows import adapted
from _support.integrations.trl_rows import make_trainer

import parallel3d as p3d
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow


def sft(sizes: Sizes, folder: Path, lora: bool) -> None:
    import trl
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from parallel3d.integrations.trl import SFTTrainer

    logs: list[list[dict[str, float]]] = []
    for mesh in (None, sizes):
        with accelerate_state(alone=mesh is None):
            model: Any = tiny_model(dtype=torch.float32)
            model = adapted(model=model) if lora else model
            model, data = (model, 1) if mesh is None else parallel_model(mesh, model)
            trainer_class = trl.SFTTrainer if mesh is None else SFTTrainer
            trainer = make_trainer(trainer_class, str(folder), model, data, max_steps=4)
            trainer.train()
            evaluated = trainer.evaluate(trainer.train_dataset.select(range(8)))
            keys = ("entropy", "mean_token_accuracy", "num_tokens")
            # Not eval_loss: TRL averages the means of the processes, whose numbers of tokens differ.
            names = ["loss", "grad_norm", *keys, *(f"eval_{key}" for key in keys)]
            every = [*trainer.state.log_history, evaluated]
            logs.append([{name: log[name] for name in names if name in log} for log in every])
            if mesh is None:
                continue
            ids = torch.tensor([[5, 6, 7]])
            out = trainer.model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
            trainer.save_model(str(folder / "model"))
            weights = whole_weights(trainer.model)
            if lora:
                plain_model = tiny_model(dtype=torch.float32)
                again = PeftModel.from_pretrained(plain_model, folder / "model")
            else:
                again = AutoModelForCausalLM.from_pretrained(folder / "model")
            assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
            assert again.generate(input_ids=ids, max_new_tokens=3, do_sample=False).equal(out)
    plain, ours = logs
    assert [log.keys() for log in ours] == [log.keys() for log in plain]
    assert sum(len(log) for log in plain) >= 4 * 5 + 3
    for got, want in zip(ours, plain, strict=True):
        assert got == pytest.approx(want, rel=1e-4), (got, want)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)])
def test_sft_logs_and_saves_as_one_process(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes, lora: bool
) -> None:
    """With entropy, accuracy and tokens, in training and evaluation; a LoRA model is made before."""
    gloo_pool.run(sft, sizes, tmp_path, lora, world_size=sizes[1] * sizes[2], timeout=300)


def refused(folder: Path) -> None:
    import trl
    from peft import LoraConfig

    from parallel3d.integrations.transformers import ParallelMixin
    from parallel3d.integrations.trl import SFTTrainer

    class Mixed(ParallelMixin, trl.SFTTrainer):
        pass

    with accelerate_state():
        model, data = parallel_model((1, 1, 2), tiny_model(dtype=torch.float32))
        with pytest.raises(p3d.Parallel3dError, match=r"multiplies by lm_head\.weight itself"):
            make_trainer(Mixed, str(folder), model, data)
    with accelerate_state():
        model, data = parallel_model((1, 2, 1), tiny_model(dtype=torch.float32))
        given = trl.SFTConfig(output_dir=str(folder), use_cpu=True, report_to=[])
        with pytest.raises(p3d.Parallel3dError, match="heads before parallelize"):
            SFTTrainer(
                model,
                given,
                train_dataset=tiny_texts(8),
                processing_class=tiny_tokenizer(),
                peft_config=LoraConfig(target_modules=["down_proj"]),
            )


def test_what_would_be_wrong_is_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A head that TRL computes from a part of its weight, and adapters added to a sharded model."""
    gloo_pool.run(refused, tmp_path, world_size=2, timeout=300)
