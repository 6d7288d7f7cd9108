"""Worlds and tiny models for tests with accelerate, transformers' Trainer and TRL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from parallel3d.testing.relations.engines import accelerates_state

VOCAB, LENGTH = 64, 12


@contextmanager
def accelerate_state(*, fsdp: bool = False, alone: bool = False) -> Iterator[None]:
    """A gloo rank as accelerate and TrainingArguments see it; undone at the end.

    Args:
        fsdp: whether accelerate is to shard.
        alone: this rank is one plain process.
    """
    if not alone:
        dist.barrier()  # the first import of these libraries takes a rank up to a minute
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    hidden = {name: os.environ.pop(name) for name in names if alone}
    try:
        with accelerates_state(fsdp=fsdp, cpu=True):
            yield
    finally:
        os.environ.update(hidden)


def tiny_model(*, tied: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A StableLM: LayerNorm, so that all of it computes in float64; the same values on every rank."""
    from transformers import StableLmConfig, StableLmForCausalLM

    config = StableLmConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **changes,
    )
    torch.manual_seed(7)
    return StableLmForCausalLM(config).to(dtype)


def tiny_rows(count: int, *, seed: int = 0, masked: bool = True) -> list[dict[str, Tensor]]:
    """Rows of a causal language model; with ``masked`` they have different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        if masked:
            labels[: int(torch.randint(0, LENGTH - 2, (), generator=generator))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def loss_in_float64(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A ``compute_loss_func`` that, unlike transformers' own, does not compute in float32."""
    total = F.cross_entropy(
        outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return total / (
        (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )


Sizes = tuple[int, int, int]


def parallel_model(sizes: Sizes, model: Any, **options: Any) -> tuple[Any, int]:
    """The model on a mesh of these sizes, "auto" where there is tp; and the number of data ranks."""
    import parallel3d as p3d

    layout = p3d.MeshLayout(*sizes)
    mesh = p3d.build_mesh(layout)
    plan = "auto" if layout.tp > 1 else None
    return p3d.parallelize(model, mesh, tp_plan=plan, **options), layout.data_size


def arguments(folder: Any, data_ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Of TrainingArguments: 10 steps of 8 rows, in two micro-batches, by SGD with clipping."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // data_ranks,
        "per_device_eval_batch_size": 4 // data_ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "disable_tqdm": True,
        "log_level": "error",
        **changes,
    }


def recording(trainer: type) -> Any:
    """A subclass of a Trainer whose ``losses`` are those of its steps, in the model's dtype.

    Those that a Trainer logs are summed in float32.
    """

    class Recording(trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **options: Any) -> Any:
            self.micro_losses: list[float] = []
            return super().train(*args, **options)

        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss = super().training_step(*args, **options)
            self.micro_losses.append(self.accelerator.gather(loss).mean().item())
            return loss

        @property
        def losses(self) -> list[float]:
            a, b = self.micro_losses[::2], self.micro_losses[1::2]
            return [first + second for first, second in zip(a, b, strict=True)]

    return Recording


def tiny_tokenizer() -> Any:
    """Words w4, w5, ... with the tiny model's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<bos>": 0, "<eos>": 1, "<pad>": 2, "<unk>": 3}
    words = special | {f"w{number}": number for number in range(len(special), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def tiny_texts(count: int) -> Any:
    """A dataset of texts of different lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)

    def text() -> str:
        length = int(torch.randint(4, LENGTH, (), generator=generator))
        words = torch.randint(4, VOCAB, (length,), generator=generator)
        return " ".join(f"w{word}" for word in words.tolist())

    return Dataset.from_dict({"text": [text() for _ in range(count)]})
