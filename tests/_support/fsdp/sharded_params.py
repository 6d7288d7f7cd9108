"""Sharded parameters by hand."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallel3d._layout.param_layout import ParamLayout, local_chunk, set_param_layout


class Holder(nn.Module):
    """One parameter, tp-sharded or not."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.weight = param

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def tp_param(whole: torch.Tensor, mesh, placement) -> nn.Parameter:
    """``whole`` as a DTensor on the tp axis, as a style of ours leaves it."""
    tp = mesh["tp"]
    local = whole
    if isinstance(placement, Shard):
        local = local_chunk(whole, placement.dim, tp.size(), tp.get_local_rank())
    else:
        local = torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)
    made = DTensor.from_local(
        local, tp, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param = nn.Parameter(made.detach())
    set_param_layout(param, ParamLayout("local"))
    return param
