"""Gate: one node of autograd's graph that the gradients of a bucket's parameters arrive at together.

Where the unsharded parameters are the shards themselves, nothing comes and goes, and the tensors that
forward sees can be made once: outputs of one function, each the memory of a parameter. Autograd counts
their uses. When all that a backward has are in, it calls the function's backward once, with a gradient for
each parameter that was used: a call for each bucket where a hook on leaves is one for each parameter, and
no node that accumulates. The function saves nothing, so that every step's graph can end in the same one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._compat import set_backward_order, untraced

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.buckets.joint_reduce import JointReduce

__all__ = ["Gate"]

# Of all nodes that can run, backward runs the one of the highest number first; so do those of leaves.
_AT_ONCE = 2**64 - 1

Take = Callable[["Gate", tuple[torch.Tensor | None, ...]], None]


class Gate:
    """Of one bucket, which has it; it refers to the bucket weakly.

    Attributes:
        indices: the parameters that get a gradient.
        outputs: what forward sees, for every parameter of the bucket.
        joint: the reduction its gradients go to, and its place there; None until it is planned.
        take: what is called with the gradients of ``indices``, in their order; None for those without.
    """

    def __init__(self, bucket: Bucket, take: Take) -> None:
        self._bucket = weakref.ref(bucket)
        self.take = take
        self.joint: tuple[JointReduce, int] | None = None
        self.indices = [i for i, p in enumerate(bucket.compute_params) if p.requires_grad]
        self.outputs: list[torch.Tensor] = list(bucket.compute_params)
        if not self.indices:
            return
        with torch.inference_mode(False), torch.enable_grad():
            anchor = torch.empty((), requires_grad=True)  # outputs want an input that does
            sources = [bucket.compute_params[i] for i in self.indices]
            outputs = _Arrival.apply(anchor, weakref.ref(self), sources)
        set_backward_order(outputs[0].grad_fn, _AT_ONCE)
        for index, output in zip(self.indices, outputs, strict=True):
            output._is_param = True  # for isinstance(..., nn.Parameter)
            self.outputs[index] = output

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @untraced
    def arrive(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """The gradients of one backward."""
        self.take(self, grads)


class _Arrival(torch.autograd.Function):
    """Outputs of the same memory as ``sources``, each with a version counter of its own."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, gate: Any, sources: list[torch.Tensor]) -> Any:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(source.data for source in sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        gate = ctx.gate()
        if gate is not None:
            gate.arrive(grads)
        return None, None, None
