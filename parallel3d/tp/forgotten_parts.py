"""Modules that the plan forgot, among modules that hold parts of the sequence.

Such a module computes what it would, but its parameters get the gradient of this rank's part alone: nothing
fails, and the ranks' copies of them drift apart.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel3d.errors import StateError
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength

if TYPE_CHECKING:
    from parallel3d.tp.plan import ResolvedPlan

__all__ = ["watch_forgotten"]


def watch_forgotten(
    model: nn.Module, plan: "ResolvedPlan", axis: TpAxis, sequence: SequenceLength
) -> None:
    """Makes modules without a style refuse a part of the sequence in their first forward."""
    splits = [p.style for p in plan.modules if p.style.splits_sequence]
    dims = {getattr(style, "sequence_dim", 1) for style in splits}
    if axis.size == 1 or not dims or not isinstance(axis.rank, int):  # simulated ranks
        return
    modules = dict(model.named_modules())
    for name in {n.rpartition(".")[0] for n in plan.unplanned}:
        if name in modules:
            watch = _Watch(name, axis, sequence, tuple(dims))
            modules[name].register_forward_pre_hook(watch)


class _Watch:
    """The hook. One forward is enough to see a module that always gets parts; in later ones a whole tensor
    may have a part's length by chance."""

    def __init__(
        self, name: str, axis: TpAxis, sequence: SequenceLength, dims: tuple[int, ...]
    ) -> None:
        self.name, self.axis, self.sequence, self.dims = name, axis, sequence, dims
        self.done = False

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        if self.done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.done = True
        own = module.parameters(recurse=False)
        if self.sequence.length is None or not any(p.requires_grad for p in own):
            return
        for x in args[:1]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self._check(x)

    def _check(self, x: Tensor) -> None:
        length, axis = self.sequence.length, self.axis
        assert length is not None
        rows = axis.rows(length)
        for dim in self.dims:
            # The last dim is of features.
            if length > 1 and 0 <= dim < x.dim() - 1 and x.shape[dim] == rows:
                self.done = False
                raise StateError(
                    f"{self.name!r} has no style in the plan, but its input {tuple(x.shape)} looks like "
                    f"this rank's part of a sequence of {length}: its parameters would get the gradient "
                    'of that part alone. Give it SequenceParallel() or Replicated(tp_grad="partial"); or '
                    "Replicated(), if its input is whole"
                )
