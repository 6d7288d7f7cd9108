"""Fine-tunes a causal language model with transformers' Trainer; "new": what a plain program lacks.

    torchrun --nproc-per-node 4 examples/trainer.py

prints:

    step 10: loss 4.68, norm 3.12
    step 20: loss 2.63, norm 1.57
    step 30: loss 2.05, norm 1.45
    step 40: loss 1.89, norm 1.39

--model is a folder with model and tokenizer; without it a tiny Llama with random weights reads bytes. --data
is a file with {"prompt": ..., "answer": ...} in each line; without it they are sums. Only answers count for
the loss. Started again, it goes on from the last checkpoint in --out, also on another mesh. from_pretrained
loads out/model. TRL's SFTTrainer changes in the same lines: parallel3d.integrations.trl has it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import parallel3d as p3d
from parallel3d.integrations.transformers import Trainer  # new: not transformers'

IGNORED = -100  # labels that do not count


def samples_of(data: str | None, tokenizer: Any) -> list[dict[str, list[int]]]:
    """The token ids of each prompt and answer, with labels for the answers."""
    texts = [(f"{i}+{i * 7 % 50}=", f"{i + i * 7 % 50}\n") for i in range(50)]
    if data:
        lines = [json.loads(line) for line in Path(data).read_text().splitlines()]
        texts = [(line["prompt"], line["answer"]) for line in lines]
    samples = []
    for prompt, answer in texts:
        if tokenizer is None:
            first, rest = list(prompt.encode()), list(answer.encode())
        else:
            first, rest = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
            rest = [*rest, tokenizer.eos_token_id]
        samples.append({"input_ids": first + rest, "labels": [IGNORED] * len(first) + rest})
    return samples


def batch(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Samples as (rows, longest); causal attention does not see what fills them up on the right."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    filled = {"input_ids": 0, "labels": IGNORED}.items()
    return {
        name: torch.tensor([s[name] + [value] * (longest - len(s[name])) for s in samples])
        for name, value in filled
    }


class Print(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "grad_norm" in logs:
            print(
                f"step {state.global_step}: loss {logs['loss']:.2f}, norm {logs['grad_norm']:.2f}"
            )


parser = argparse.ArgumentParser()
for name, folder in {"model": None, "data": None, "out": "out"}.items():
    parser.add_argument(f"--{name}", default=folder)
parser.add_argument("--lr", type=float, default=3e-3)
for name, number in {"steps": 40, "batch": 16, "micro-batches": 2, "tp": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=number)
options = parser.parse_args()

mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1, tp=options.tp))  # new: -1 is what the ranks leave
parts = mesh.size() // options.tp * options.micro_batches  # new: not all processes read other rows
if options.batch % parts:
    parser.error(f"--batch must be a multiple of {parts}: --micro-batches on each data rank")
tiny = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
config = AutoConfig.from_pretrained(options.model) if options.model else tiny
tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None
with torch.device("meta"):  # new: without values yet
    model = AutoModelForCausalLM.from_config(config)
p3d.parallelize(model, mesh, tp_plan="auto")  # new
if options.model:
    p3d.checkpoint.load_hf(options.model, model)  # new: each rank reads what it holds
else:
    p3d.materialize(model, seed=0)  # new
arguments = TrainingArguments(
    output_dir=options.out, max_steps=options.steps, logging_steps=10, save_steps=20,
    per_device_train_batch_size=options.batch // parts,
    gradient_accumulation_steps=options.micro_batches, learning_rate=options.lr,
    lr_scheduler_type="cosine", warmup_steps=options.steps // 10,
    use_cpu=mesh.device_type == "cpu", report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    model, arguments, train_dataset=samples_of(options.data, tokenizer), data_collator=batch,
    processing_class=tokenizer, callbacks=[Print()],
)  # fmt: skip
trainer.remove_callback(PrinterCallback)
last = get_last_checkpoint(options.out) if Path(options.out).exists() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model(f"{options.out}/model")
