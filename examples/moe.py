"""Trains a mixture of experts of Hugging Face on two views of the ranks; "new": what a plain program lacks.

    torchrun --nproc-per-node 4 examples/moe.py

prints:

    step 10: loss 3.517, busiest expert 1.22 x the mean
    step 20: loss 1.911, busiest expert 1.18 x the mean
    step 30: loss 0.669, busiest expert 1.20 x the mean
    wrote qwen3_moe

It needs `pip install transformers`. The model is a small Qwen3-MoE with random weights: its dense layers are
sharded over 4 ranks, its 16 experts lie on 4 ranks, 4 on each. Qwen3-30B-A3B is trained by the same lines,
with `AutoConfig.from_pretrained` and `p3d.checkpoint.load_hf` in the place of `materialize`.
"""

import torch
from torch import distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import parallel3d as p3d

layout = p3d.MeshLayout(
    shard=-1, ep=4
)  # new: -1 is the number of ranks, of which ep is a second view
mesh = p3d.build_mesh(layout)  # new
layout = layout.resolve(dist.get_world_size())  # new
config = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, moe_intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_experts=16, num_experts_per_tok=4,
)  # fmt: skip
with torch.device("meta"):  # new: no memory yet
    model = AutoModelForCausalLM.from_config(config)
p3d.parallelize(model, mesh)  # new: it finds the experts
p3d.materialize(model, seed=0)  # new
p3d.ep.count(model)  # new: counts the tokens of each expert

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
        busiest = max(each.imbalance for each in p3d.ep.stats(model).values())  # new
        if rank == 0:
            print(
                f"step {step}: loss {loss.item() / dist.get_world_size():.3f}, "
                f"busiest expert {busiest:.2f} x the mean"
            )

p3d.checkpoint.save_hf("qwen3_moe", model)  # new: a folder for from_pretrained, from all ranks
if rank == 0:
    print("wrote qwen3_moe")
