"""LoRA (peft) of a Hugging Face causal language model on three axes; "new" marks what a plain program lacks.

    torchrun --nproc-per-node 8 examples/hf_lora.py [folder of a model, with safetensors]

It needs `pip install peft transformers`. Without a folder it is a small Llama with random weights. The base
weights are frozen, and sharded like the adapters. These are saved in a folder as peft's, which
PeftModel.from_pretrained(model, "adapters") loads.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import parallel3d as p3d

layout = p3d.MeshLayout(replicate=-1, shard=2, tp=2)  # new
mesh = p3d.build_mesh(layout)  # new: -1 is what the number of ranks leaves
layout = layout.resolve(torch.distributed.get_world_size())  # new
folder = sys.argv[1] if len(sys.argv) > 1 else None
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
if folder:
    config = AutoConfig.from_pretrained(folder)

torch.manual_seed(0)  # the same on all ranks: base weights without a folder, and the adapters
model = AutoModelForCausalLM.from_config(config)
if folder:
    p3d.checkpoint.load_hf(folder, model)  # new
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
p3d.parallelize(model, mesh, tp_plan="auto")  # new

trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
data = torch.arange(16 * 65).view(16, 65) % 251  # 16 sequences
rank = torch.distributed.get_rank()  # new
data = data.chunk(layout.data_size)[layout.data_rank(rank)].to(mesh.device_type)  # new: its rows
for step in range(10):
    loss = model(input_ids=data, labels=data).loss
    loss.backward()
    p3d.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")

# Every rank takes part in gathering the adapters; to go on with training later instead:
# p3d.checkpoint.save("run", model, optimizer, step=10, only="trainable")
shards = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
state = {name: p3d.fsdp.gather(shard).full_tensor() for name, shard in shards.items()}  # new
if rank == 0:
    model.save_pretrained("adapters", state_dict=state)
