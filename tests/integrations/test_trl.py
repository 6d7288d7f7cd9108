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
)
from _support.integrations.peft_rows import adapted
from _support.integrations.rows import whole_weights
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


def dpo(folder: Path, lora: bool, precompute: bool) -> None:
    """A reference by an adapter that TRL adds, or a model of its own; during the training or before."""
    import trl
    from datasets import Dataset

    from parallel3d.integrations.transformers import ParallelMixin

    class Ours(ParallelMixin, trl.DPOTrainer):
        pass

    texts = tiny_texts(24)["text"]
    triples = zip(*[iter(text + " " for text in texts)] * 3, strict=True)
    names = ("prompt", "chosen", "rejected")
    rows = Dataset.from_list([dict(zip(names, each, strict=True)) for each in triples])
    runs: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for sizes in (None, (1, 2, 1)):
        with accelerate_state(alone=sizes is None):
            model: Any = tiny_model(dtype=torch.float32)
            model = adapted(model=model) if lora else model
            reference: Any = None if lora else tiny_model(dtype=torch.float32)
            if sizes is not None:
                model, _ = parallel_model(sizes, model)
                reference = None if lora else parallel_model(sizes, reference)[0]
            config = trl.DPOConfig(
                output_dir=str(folder),
                per_device_train_batch_size=4 if sizes is None else 2,
                max_steps=2,
                learning_rate=0.1,
                optim="sgd",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                precompute_ref_log_probs=precompute,
            )
            trainer = (trl.DPOTrainer if sizes is None else Ours)(
                model, reference, config, train_dataset=rows, processing_class=tiny_tokenizer()
            )
            trainer.train()
            if sizes is not None:
                trainer.save_model(str(folder / "model"))
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            runs.append((losses, whole_weights(trainer.model)))
    (losses, weights), (our_losses, our_weights) = runs
    assert len(losses) == 2 and losses[1] != losses[0]
    assert our_losses == pytest.approx(losses, rel=1e-3)
    for name, weight in weights.items():
        torch.testing.assert_close(our_weights[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precompute", [False, True], ids=["during", "before"])
@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_dpo_trains_as_in_one_process(
    gloo_pool: GlooPool, tmp_path: Path, lora: bool, precompute: bool
) -> None:
    gloo_pool.run(dpo, tmp_path, lora, precompute, world_size=2, timeout=300)


def dpo_over_tp(folder: Path) -> None:
    import trl

    from parallel3d.integrations.transformers import ParallelMixin

    class Ours(ParallelMixin, trl.DPOTrainer):
        pass

    with accelerate_state():
        model, _ = parallel_model((1, 1, 2), adapted(model=tiny_model(dtype=torch.float32)))
        given = trl.DPOConfig(output_dir=str(folder), use_cpu=True, report_to=[])
        with pytest.raises(p3d.Parallel3dError, match=r"adapter 'ref'.*use a mesh with tp=1"):
            Ours(model, None, given, train_dataset=tiny_texts(8), processing_class=tiny_tokenizer())
        assert "add_adapter" not in vars(model) and list(model.peft_config) == ["default"]


def test_dpo_over_tp_is_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(dpo_over_tp, tmp_path, world_size=2, timeout=300)
