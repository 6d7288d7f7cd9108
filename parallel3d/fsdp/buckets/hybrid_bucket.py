"""HybridBucket: HFSDP, in which what the optimizer sees is sharded over replicate x shard.

HSDP keeps whole optimizer states on every replica. Here Parameters, gradients and so optimizer states are cut
into R * N parts (R, N: sizes of replicate and shard), and the engine keeps a copy of the weights in compute
dtype, sharded over ``shard`` alone, from which forward and backward gather as HSDP does. It is renewed by one
all-gather over replicate at each forward of the root. Gradients are reduce-scattered over
shard, then over replicate. Megatron-FSDP calls this HFSDP; hpZ of ZeRO++ is its relative.

Part ``s * R + r`` is that of the rank (r, s): the R parts of one shard rank are neighbours, so that both
gathers, one after the other, bring all parts in order. ``set_requires_all_reduce(False)`` puts the second
reduce-scatter off; see ``hybrid_grads``. Buffers beside a Bucket's: ``copy`` (R * S).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel3d._compat import foreach_copy_
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension import is_extended
from parallel3d.fsdp.buckets.hybrid_grads import HybridGradients
from parallel3d.fsdp.placing.placement import ParamAxes
from parallel3d.fsdp.placing.placement_fn import Wish
from parallel3d.fsdp.storage import allocate

if TYPE_CHECKING:
    from parallel3d.fsdp.comm import Comm

__all__ = ["HybridBucket", "cut_over_replicate"]


def cut_over_replicate(name: str, param: nn.Parameter, wish: Wish) -> Wish:
    """``wish`` with axes that cut ``param`` over replicate too, where that is possible.

    It is where a dim divides evenly by all ranks. Others stay as in HSDP, as do all-gather extensions.
    """
    axes = wish.axes
    if axes.size(axes.replicate) == 1 or axes.spmd is not None or is_extended(param):
        return wish
    cut = replace(axes, over_replicate=True)
    dims = ParamAxes(name, param, cut).dims(param.shape)
    possible = wish.dim in dims if wish.dim is not None else bool(dims and param.numel())
    return Wish(cut, wish.dim) if possible else wish


class HybridBucket(Bucket):
    """See the module's docstring.

    Attributes:
        copy: (R * S,) in compute dtype: the parts of this rank's place on the shard axis.
        renewing: what to wait for until ``copy`` is there, and the tensor it is made of.
        is_new: whether there has been no copy yet.
    """

    joinable = False
    packs_all = True  # the R parts of a parameter are not neighbours in ``copy``

    def _find_groups(self) -> None:
        super()._find_groups()
        axes = self.axes
        assert axes.replicate is not None
        self.second_group = axes.group(axes.replicate)
        self.replicate_groups = []

    def _describe(self, device: torch.device) -> None:
        super()._describe(device)
        self.grads = HybridGradients(self)

    def build_unsharded(self) -> None:
        """As a Bucket does, and the copy, which there is in the present dtype only."""
        super().build_unsharded()
        self.make_copy()

    def make_copy(self) -> None:
        """Memory for the copy, which the next unshard fills."""
        assert self.second_group is not None
        size = self.second_group.size() * self.numel
        self.copy = torch.empty(size, dtype=self.compute_dtype, device=self.device)
        if (
            self.shard_group is None
        ):  # views made now: those made in inference mode could not be trained
            allocate(self.unsharded)
            pairs = self.copy_pairs(self.copy.view(self.parts, -1))
            self.free_unsharded()
            self._whole_pairs = [list(side) for side in zip(*pairs, strict=True)]
        self.renewing: tuple[Any, torch.Tensor] | None = None
        self.is_new = True

    def leave_precision(self) -> None:
        """As a Bucket does."""
        self.finish_renewal()

    def enter_precision(self) -> None:
        """As a Bucket does: the copy is of the other dtype."""
        self.make_copy()

    # -- the copy ------------------------------------------------------------------------------------

    @property
    def is_old(self) -> bool:
        """Whether there is no copy yet, or the weights were seen to change since the last renewal began."""
        return self.is_new or self.versions.stamp.is_old()

    def note_weights(self, comm: Comm) -> None:
        """As a Bucket does: what is gathered is the copy, of the values that it was renewed with."""
        if self.is_new:
            comm.renew_copy(self)

    def renewal(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, input) of the all-gather over replicate."""
        return self.copy, super().gather_input()

    def begin_renewal(self, work: Any, part: torch.Tensor) -> None:
        """The all-gather is issued; an exception on the way here has left the copy in need of it."""
        self.renewing = (work, part)
        self.is_new = False
        self.versions.stamp.take()

    def finish_renewal(self) -> None:
        """Lets who comes next, on an accelerator the current stream, wait for the copy."""
        if self.renewing is not None:
            work, _ = self.renewing
            if work is not None:
                work.wait()
            self.renewing = None

    # -- unshard -------------------------------------------------------------------------------------

    def gather_input(self) -> torch.Tensor:
        """What this rank brings to the all-gather over shard."""
        if self.part is not None:
            return self.part
        self.finish_renewal()
        return self.copy

    def cast_whole(self) -> None:
        """Unshard without a shard axis: the copy is all."""
        self.finish_renewal()
        allocate(self.unsharded)
        foreach_copy_(*self._whole_pairs)
