"""What docs/from_megatron_fsdp.md takes as given: model, plan, batches, a folder with a wrapper's names."""

import torch
import torch.distributed.checkpoint as dcp
from _support.models import LM_PLAN as PLAN
from _support.models import Lm, tokens
from _support.models import lm_loss as loss_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import parallel3d as p3d


class Model(Lm):
    def __init__(self) -> None:
        super().__init__(dim=16, hidden=32)


micro_batches = [tokens(0), tokens(1)]


def write_as_megatron_fsdp_does(model: torch.nn.Module) -> str:
    weights = {f"module.{name}": value for name, value in get_model_state_dict(model).items()}
    dcp.save({"model": weights, "optimizer": {"param_groups.0.lr": 1e-3}}, checkpoint_id="ckpt")
    return "ckpt"
