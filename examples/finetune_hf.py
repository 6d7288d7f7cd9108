"""Fine-tunes a Hugging Face causal language model with a loop of its own; "new": what a plain program lacks.

    torchrun --nproc-per-node 4 examples/finetune_hf.py

prints:

    step 10: loss 3.54, norm 2.86
    step 20: loss 2.16, norm 1.04
    step 30: loss 1.85, norm 1.17
    step 40: loss 1.79, norm 1.21

--model is a folder with model and tokenizer; without it a tiny Llama with random weights reads bytes. --data
is a file with {"prompt": ..., "answer": ...} in each line; without it they are sums. Only answers count for
the loss. Started again, it goes on from the last checkpoint in --out. from_pretrained loads out/model.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers import get_cosine_schedule_with_warmup as cosine_schedule

import parallel3d as p3d

IGNORED = -100  # cross_entropy leaves these labels out


def samples_of(data: str | None, model: str | None) -> list[tuple[list[int], list[int]]]:
    """Token ids of each prompt and answer."""
    texts = [(f"{i}+{i * 7 % 50}=", f"{i + i * 7 % 50}\n") for i in range(50)]
    if data:
        lines = [json.loads(line) for line in Path(data).read_text().splitlines()]
        texts = [(line["prompt"], line["answer"]) for line in lines]
    if model is None:
        return [(list(prompt.encode()), list(answer.encode())) for prompt, answer in texts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = (tokenizer([p, a], add_special_tokens=False)["input_ids"] for p, a in texts)
    return [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in ids]


def batch(rows: list[tuple[list[int], list[int]]], seq_len: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, (rows, seq_len) each; only the answers have labels that count."""
    ids = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        both = torch.tensor((prompt + answer)[:seq_len])
        ids[i, : len(both)] = both
        labels[i, len(prompt) : len(both)] = both[len(prompt) :]
    return ids, labels


def loss_sum(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of the labels that count."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


parser = argparse.ArgumentParser()
for name, folder in {"model": None, "data": None, "out": "out"}.items():
    parser.add_argument(f"--{name}", default=folder)
parser.add_argument("--lr", type=float, default=3e-3)
for name, number in {"steps": 40, "batch": 16, "micro-batches": 2, "seq-len": 16, "tp": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=number)
options = parser.parse_args()

mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1, tp=options.tp))  # new: -1 is what the ranks leave
layout = p3d.MeshLayout(shard=-1, tp=options.tp).resolve(mesh.size())  # new
rank, device = dist.get_rank(), mesh.device_type
each = options.batch // layout.data_size
if options.batch % (layout.data_size * options.micro_batches):
    parser.error(f"--batch must be a multiple of {layout.data_size} ranks x --micro-batches")
tiny = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
config = AutoConfig.from_pretrained(options.model) if options.model else tiny
with torch.device("meta"):  # new: without values yet
    model = AutoModelForCausalLM.from_config(config)
p3d.parallelize(model, mesh, tp_plan="auto")  # new
if options.model:
    p3d.checkpoint.load_hf(options.model, model)  # new: each rank reads what it holds
else:
    p3d.materialize(model, seed=0)  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
schedule = cosine_schedule(optimizer, options.steps // 10, options.steps)

start, samples = 0, samples_of(options.data, options.model)
if p3d.checkpoint.latest(options.out):
    info = p3d.checkpoint.load(options.out, model, optimizer)
    start = info.step
    schedule.load_state_dict(info.extra["schedule"])
for step in range(start, options.steps):
    first = step * options.batch + layout.data_rank(rank) * each  # new: this rank's rows
    rows = [samples[i % len(samples)] for i in range(first, first + each)]
    ids, labels = (x.to(device) for x in batch(rows, options.seq_len))
    parts = zip(*(x.chunk(options.micro_batches) for x in (ids, labels)), strict=True)
    count = (labels[:, 1:] != IGNORED).sum()
    loss = torch.zeros((), device=device)
    for part in p3d.optim.accumulate(model, parts):
        mean = p3d.optim.global_mean(loss_sum(model, *part), count)  # new: over all ranks' labels
        mean.backward()
        loss += mean.detach()
    norm = p3d.optim.clip_grad_norm_(model, 1.0)  # new
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    dist.all_reduce(loss)
    if rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss.item() / mesh.size():.2f}, norm {norm.item():.2f}")
    if (step + 1) % 20 == 0 or step + 1 == options.steps:
        state = {"schedule": schedule.state_dict()}
        p3d.checkpoint.save(options.out, model, optimizer, step=step + 1, extra=state)
p3d.checkpoint.save_hf(f"{options.out}/model", model)
if options.model and rank == 0:
    AutoTokenizer.from_pretrained(options.model).save_pretrained(f"{options.out}/model")
