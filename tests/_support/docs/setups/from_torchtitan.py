"""What docs/from_torchtitan.md takes as given: a Llama, batches, and a folder as torchtitan writes them."""

import torch
import torch.distributed.checkpoint as dcp
from llama import Llama, LlamaConfig
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.nn import functional as F

import parallel3d as p3d

config = LlamaConfig(dim=32, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=16)
micro_batches = torch.arange(2 * 2 * 9).view(2, 2, 9)


def write_as_torchtitan_does(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The model's names at the top, the optimizer flattened, a counter beside them."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(1)},
    }
    dcp.save(state, checkpoint_id="step-1")
    return "step-1"
