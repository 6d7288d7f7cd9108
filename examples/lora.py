"""Trains LoRA adapters (peft) of a Hugging Face model on three axes; "new": what a plain program lacks.

    torchrun --nproc-per-node 4 examples/lora.py

prints:

    step 10: loss 5.024
    step 20: loss 4.779
    step 30: loss 4.662
    wrote adapters

It needs `pip install peft transformers`. --model is a folder with config.json and safetensors; without it a
small Llama has random weights. They are frozen, and sharded like the adapters: no rank ever has the whole
model. PeftModel.from_pretrained(model, "adapters") loads what is written, and so does --adapters here.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import parallel3d as p3d

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", help="folder of the base model; default: a small Llama, random weights"
)
parser.add_argument("--adapters", help="folder of adapters to go on with; default: new ones")
parser.add_argument("--out", default="adapters", help="folder to write")
options = parser.parse_args()

layout = p3d.MeshLayout(replicate=-1, shard=2, tp=2)  # new
mesh = p3d.build_mesh(layout)  # new: -1 is what the number of ranks leaves
layout = layout.resolve(dist.get_world_size())  # new
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
if options.model:
    config = AutoConfig.from_pretrained(options.model)

with torch.device("meta"):  # new: no memory yet
    model = AutoModelForCausalLM.from_config(config)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
p3d.parallelize(model, mesh, tp_plan="auto")  # new
if options.model:
    p3d.checkpoint.load_hf(options.model, model)  # new: the base; adapters are peft's initial ones
else:
    p3d.materialize(model, seed=0)  # new
if options.adapters:
    p3d.checkpoint.load_peft(options.adapters, model)  # new

trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
data = torch.arange(16 * 65).view(16, 65) % 251  # 16 sequences
rank = dist.get_rank()  # new
data = data.chunk(layout.data_size)[layout.data_rank(rank)].to(mesh.device_type)  # new: its rows
for step in range(1, 31):
    loss = model(input_ids=data, labels=data).loss
    loss.backward()
    p3d.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)  # new: the mean over all ranks' rows
        if rank == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.3f}")

# With the optimizer, to go on: p3d.checkpoint.save("run", model, optimizer, step=step, only="trainable")
p3d.checkpoint.save_peft(options.out, model)  # new: whole adapters, from all ranks
if rank == 0:
    print(f"wrote {options.out}")
