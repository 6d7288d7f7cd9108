"""ParamLayout: what tensor parallelism tells the sharding engine about one parameter.

It is the only thing ``fsdp`` and ``tp`` both know. A style of ours replaces a parameter by a DTensor
on the ``tp`` axis and attaches a ``ParamLayout``; the engine reads it when it takes the parameter.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_ATTRIBUTE = "_parallel3d_layout"


@dataclass(frozen=True)
class ParamLayout:
    """How a tensor-parallel parameter is seen while computing, and what its gradient is.

    Attributes:
        compute: ``"local"``: the module's forward sees this rank's local tensor. ``"dtensor"``:
            it sees a DTensor on the ``tp`` axis, as torch's own parallel styles need.
        tp_grad: ``"whole"``: each tp rank's gradient is complete for what it holds.
            ``"partial"``: it is a part, which the engine sums over ``tp`` once per bucket.
    """

    compute: Literal["local", "dtensor"] = "dtensor"
    tp_grad: Literal["whole", "partial"] = "whole"


def set_param_layout(param: nn.Parameter, layout: ParamLayout) -> None:
    """Attaches ``layout`` to ``param``."""
    setattr(param, _ATTRIBUTE, layout)


def get_param_layout(param: nn.Parameter) -> ParamLayout:
    """The layout attached to ``param``. Without one, a DTensor computes as a DTensor, others locally."""
    default = ParamLayout("dtensor" if isinstance(param, DTensor) else "local")
    return getattr(param, _ATTRIBUTE, default)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes, each an int or, under simulated ranks, a ``SymInt`` that differs by rank."""
    # torch 2.11 can't compile sym_min of ints.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def local_chunk(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    """The ``index``-th of ``parts`` chunks of ``tensor`` along ``dim``, as ``torch.chunk`` cuts: all of
    ``ceil(size / parts)`` rows but the last ones, which may be shorter or empty.

    Args:
        index: a rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.

    Returns:
        A contiguous tensor with storage of its own, on ``tensor``'s device.
    """
    size = tensor.shape[dim]
    chunk = -(-size // parts)
    start = smaller(index * chunk, size)
    length = smaller(size - start, chunk)
    if isinstance(start, torch.SymInt):
        # A factory call makes a tensor of simulated ranks; a plain tensor can't be narrowed by a
        # SymInt that differs by rank.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        tensor = whole.copy_(tensor)
    return tensor.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def strided_chunk(
    tensor: torch.Tensor, dim: int, factor: int, parts: int, index: int
) -> torch.Tensor:
    """The ``index``-th chunk of each of ``factor`` chunks, one after another: ``_StridedShard``'s cut."""
    if factor == 1:
        return local_chunk(tensor, dim, parts, index)
    # By number, not torch.chunk, which makes fewer where a size is small.
    cells = [local_chunk(tensor, dim, factor, i) for i in range(factor)]
    return torch.cat([local_chunk(cell, dim, parts, index) for cell in cells], dim=dim)
