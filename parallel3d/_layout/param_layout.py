"""ParamLayout: what tensor parallelism tells the sharding engine about one parameter.

It is the only interface between ``fsdp`` and ``tp``. A style of ours replaces a parameter by a DTensor on the
``tp`` axis and attaches a ``ParamLayout``, which the engine reads when it shards the parameter.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_ATTRIBUTE = "_parallel3d_layout"


@dataclass(frozen=True)
class ParamLayout:
    """How a tensor-parallel parameter appears in the forward, and which part of its gradient a rank has.

    Attributes:
        compute: ``"local"``: the module's forward gets this rank's local tensor. ``"dtensor"``:
            it gets a DTensor on the ``tp`` axis, as torch's own parallel styles need.
        tp_grad: ``"whole"``: each tp rank's gradient is complete for the rows that it holds.
            ``"partial"``: it is a partial sum, which the engine sums over ``tp`` once per bucket.
    """

    compute: Literal["local", "dtensor"] = "dtensor"
    tp_grad: Literal["whole", "partial"] = "whole"


def set_param_layout(param: nn.Parameter, layout: ParamLayout) -> None:
    setattr(param, _ATTRIBUTE, layout)


def get_param_layout(param: nn.Parameter) -> ParamLayout:
    """Returns the layout attached to ``param``. Without one: "dtensor" for a DTensor, else "local"."""
    default = ParamLayout("dtensor" if isinstance(param, DTensor) else "local")
    return getattr(param, _ATTRIBUTE, default)


def smaller(a: Any, b: Any) -> Any:
    """Returns the smaller of two sizes, each an int or a ``SymInt`` of simulated ranks."""
    # torch 2.11 can't compile sym_min of ints.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def local_chunk(
    tensor: torch.Tensor, dim: int, parts: int, index: int, multiple: int = 1
) -> torch.Tensor:
    """Returns a copy of the ``index``-th of ``parts`` chunks of ``tensor`` along ``dim``.

    A chunk has ``ceil(size / parts)`` rows, as with ``torch.chunk``, rounded up to a multiple of
    ``multiple``; the last ones have fewer or none. ``index`` may be a ``SymInt`` of simulated ranks.
    """
    size = tensor.shape[dim]
    chunk = -(-size // (parts * multiple)) * multiple
    start = smaller(index * chunk, size)
    length = smaller(size - start, chunk)
    if isinstance(start, torch.SymInt):
        # A plain tensor can't be narrowed by a SymInt that differs by rank; a factory call makes a tensor of
        # simulated ranks.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        tensor = whole.copy_(tensor)
    return tensor.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def strided_chunk(
    tensor: torch.Tensor, dim: int, factor: int, parts: int, index: int
) -> torch.Tensor:
    """Cuts ``tensor`` into ``factor`` chunks along ``dim`` and each of them into ``parts``; returns the
    ``index``-th part of each, concatenated, as ``_StridedShard`` does."""
    if factor == 1:
        return local_chunk(tensor, dim, parts, index)
    # Not torch.chunk, which returns fewer chunks where the size is small.
    cells = [local_chunk(tensor, dim, factor, i) for i in range(factor)]
    return torch.cat([local_chunk(cell, dim, parts, index) for cell in cells], dim=dim)
