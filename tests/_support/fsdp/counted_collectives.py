"""Collectives of the user's own, which count what they are asked for."""

import torch

from parallel3d._torch.groups import all_gather_single, reduce_scatter_single


class Memory:
    """Allocates, and remembers what."""

    def __init__(self, ops: list | None = None) -> None:
        self.made: list[torch.Tensor] = []
        self.ops = [] if ops is None else ops

    def allocate(self, size, *, dtype, device):
        self.made.append(torch.zeros(size, dtype=dtype, device=device))
        return self.made[-1]

    def made_here(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.made)


class Gather(Memory):
    """An all-gather of the user's, complete when the call returns."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert self.made_here(output_tensor)
        self.ops.append(group.size())
        all_gather_single(output_tensor, input_tensor, group=group)


class Scatter(Memory):
    """A reduce-scatter of the user's that returns a work."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert self.made_here(output_tensor) and self.made_here(input_tensor)
        self.ops.append(op)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
