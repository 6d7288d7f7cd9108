"""Gate: where the gradients of a bucket's parameters arrive together, at one node of autograd's graph.

Where the unsharded parameters are the shards themselves, nothing comes and goes, and the tensors that
forward sees can be made once: outputs of one function, each the memory of a parameter. Autograd counts
their uses. When all that a backward has are in, it calls the function's backward once, with a gradient for
each parameter that was used: a call where a hook on leaves is one for each parameter, and no node that
accumulates. The function saves nothing, so that every step's graph can end in the same one. Small buckets
share a node: their gradients wait for each other, as they do in a reduction that they share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel3d._torch.autograd import functorch_left, set_backward_order
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.unit import Unit

__all__ = ["Arrivals", "Gate", "open_gates"]

# Of all nodes that can run, backward runs the one of the highest number first; so do those of leaves.
_AT_ONCE = 2**64 - 1

Gradients = tuple[torch.Tensor | None, ...]
Take = Callable[[list["Arrivals"], Gradients], None]


class Arrivals:
    """The side of a gate that graphs hold, also those from before it was opened anew.

    Attributes:
        bucket: the bucket, weakly.
        unit: its unit, weakly.
        indices: the parameters that get a gradient.
        joint: the reduction its gradients go to, weakly, and its place there; where it is gone or None, they
            go the general way.
    """

    __slots__ = ("bucket", "indices", "joint", "unit")

    def __init__(self, bucket: Bucket, unit: weakref.ref[Unit]) -> None:
        self.bucket = weakref.ref(bucket)
        self.unit = unit
        self.indices = [i for i, p in enumerate(bucket.compute_params) if p.requires_grad]
        self.joint: tuple[weakref.ref, int] | None = None


class Gate:
    """Of one bucket, which has it.

    Attributes:
        arrivals: what graphs hold of it, those that are made from now on.
        outputs: what forward sees, for every parameter of the bucket.
    """

    def __init__(self, bucket: Bucket, unit: weakref.ref[Unit]) -> None:
        self.arrivals = Arrivals(bucket, unit)
        self.outputs: list[torch.Tensor] = list(bucket.compute_params)

    def renew(self) -> None:
        """Before it is opened again: gradients of earlier graphs go the general way, not where they went."""
        bucket = self.arrivals.bucket()
        assert bucket is not None
        self.arrivals = Arrivals(bucket, self.arrivals.unit)


def open_gates(
    gates: Sequence[Gate], sources: Sequence[Sequence[torch.Tensor]], take: Take
) -> None:
    """Makes the outputs of ``gates``, which share a node, neighbours in one reduction.

    Args:
        sources: the parameters that they are of.
        take: what is called with the gradients of one backward: all ``indices`` of all ``gates``, in their
            order; None for those without one.
    """
    arrivals = [gate.arrivals for gate in gates]
    inputs = [each[i] for a, each in zip(arrivals, sources, strict=True) for i in a.indices]
    # Outside of a transform of torch.func too, where the first forward may be: they serve all later ones.
    with functorch_left(), torch.inference_mode(False), torch.enable_grad():
        anchor = torch.empty((), requires_grad=True)  # outputs want an input that does
        outputs = _Arrival.apply(anchor, arrivals, inputs, take)
    set_backward_order(outputs[0].grad_fn, _AT_ONCE)
    made = iter(outputs)
    for gate in gates:
        for index in gate.arrivals.indices:
            gate.outputs[index] = output = next(made)
            output._is_param = True  # for isinstance(..., nn.Parameter)
            output.__deepcopy__ = _CopyOf(output)


class _CopyOf:
    """How ``copy.deepcopy`` copies an output: as the Parameter that it stands for."""

    __slots__ = ("output",)

    def __init__(self, output: torch.Tensor) -> None:
        self.output = weakref.ref(output)  # which holds this

    def __call__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        output = self.output()
        assert output is not None
        memo[id(output)] = copy = torch.nn.Parameter(output.detach().clone())
        return copy


class _Arrival(torch.autograd.Function):
    """Outputs of the same memory as ``sources``, each with a version counter of its own."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, gates: Any, sources: list[torch.Tensor], take: Take
    ) -> Any:
        ctx.gates, ctx.take = gates, take
        ctx.set_materialize_grads(False)
        return tuple(source.data for source in sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.take(ctx.gates, grads)
        return None, None, None, None
