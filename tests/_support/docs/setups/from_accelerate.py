"""What docs/from_accelerate.md takes as given: a folder, batches, the files that accelerate writes."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import parallel3d as p3d
from parallel3d.dryrun import real

folder = Path("model")  # in a folder that the ranks share
if dist.get_rank() == 0:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    with real():  # the folder is there before a dry run too
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
ids = torch.arange(32).view(2, 16)
loader = [[{"input_ids": ids, "labels": ids}] * 2] * 2


def write_as_accelerate_does(model: nn.Module, path: str) -> None:
    """Both forms of ``save_fsdp_model`` of accelerate 1.15, FSDP2."""
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/pytorch_model_fsdp_0")
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.save(whole, f"{path}/pytorch_model_fsdp.bin")
    dist.barrier()
