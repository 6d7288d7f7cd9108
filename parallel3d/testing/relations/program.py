"""A user's program as an audit trains it, in variants, and what a training gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.fully_shard import plain_name
from parallel3d._util.trees import cast_floats
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout
from parallel3d.testing.samples import LossFn, Samples, built

MICRO_BATCHES = 2  # samples of a data rank in each step

Step = Callable[[nn.Module, torch.optim.Optimizer, Sequence[Any]], Any]
"""``step(model, optimizer, micro_batches)`` -> loss, or (loss, gradient norm): a user's training step."""


@dataclass(frozen=True)
class Variant:
    """How one training differs from the others; each field's default is the base.

    Attributes:
        plain: the plain model, in one process, on all ranks' samples in one batch.
        micro_batches: number of parts into which a data rank's batch is cut.
        rotated: each data rank gets the samples of the next one.
        frozen: the parameters of the first module that has some are frozen in the first step.
        resumed: the last step is taken by a new model and optimizer, which load a checkpoint.
        recomputed: activations are recomputed in the backward.
        compiled: blocks are compiled.
        again: a repetition without a change.
    """

    plain: bool = False
    micro_batches: int = 1
    rotated: bool = False
    frozen: bool = False
    resumed: bool = False
    recomputed: bool = False
    compiled: bool = False
    again: bool = False


@dataclass
class Result:
    """The results of a training, as full tensors.

    Attributes:
        losses: for each step the loss, as the mean over all ranks.
        grads: for each step a dict, name -> gradient at the optimizer's step, which may be None.
        norms: for each step the gradient norm that the engine or the user's step returned; empty if none did.
        own_norms: for each step the norm computed from ``grads``.
        before_last, weights: name -> parameter, before the last step and after it.
        no_norm: why the engine could not compute a norm; ``""`` if it could.
        exported: the state dict that a user would write to a file, after the last step.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    no_norm: str = ""
    own_norms: list[float] = field(default_factory=list)
    before_last: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    exported: dict[str, Tensor] = field(default_factory=dict)


def sgd(params: Any) -> torch.optim.Optimizer:
    """SGD with momentum: unlike Adam's, its steps show a gradient's factor, and rounding stays small."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Program:
    """What is trained.

    Attributes:
        build: makes the plain model.
        samples: the inputs of each data rank's micro-batches.
        loss: ``loss(model, *inputs)``.
        layout: the mesh.
        tp_plan, options: arguments of ``parallelize``.
        step: the user's training step; None: the engine's own way to accumulate, and no clipping.
        optimizer: makes the optimizer.
        steps: number of optimizer steps.
        seed: seed of the weights.
        shard_batch: see ``assert_parity``.
    """

    build: Callable[[], nn.Module]
    samples: Samples
    loss: LossFn
    layout: MeshLayout
    tp_plan: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    step: Step | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    steps: int = 3
    seed: int = 0
    shard_batch: Callable[..., Any] | None = None

    def model(self) -> nn.Module:
        """Returns the plain model in float64, with the same values on every rank."""
        return built(self.build, self.seed).double()

    def batches(self, step: int, data_rank: int, variant: Variant) -> list[Any]:
        """Returns the micro-batches of one data rank: tuples of inputs."""
        ranks, count = self.layout.data_size, MICRO_BATCHES
        first = step * ranks * count
        if variant.plain:
            return [self._joined(range(first, first + ranks * count))]
        data_rank = (data_rank + variant.rotated) % ranks
        first += data_rank * count
        each = count // variant.micro_batches
        return [self._joined(range(n, n + each)) for n in range(first, first + count, each)]

    def _joined(self, numbers: range) -> tuple[Tensor, ...]:
        samples = [cast_floats(self.samples(number), torch.float64) for number in numbers]
        joined = []
        for parts in zip(*samples, strict=True):
            if len({part.shape[1:] for part in parts}) > 1:
                shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts}))
                raise Parallel3dError(
                    f"the inputs of samples have shapes {shapes}: an audit joins samples along dim 0, so "
                    "that their other dims must be equal; pad them"
                )
            joined.append(torch.cat(parts) if parts[0].dim() else parts[0])
        return tuple(joined)

    def loss_of(self, model: nn.Module, inputs: Any) -> Tensor:
        """Returns the loss of one micro-batch."""
        return self.loss(model, *inputs) if isinstance(inputs, tuple) else self.loss(model, inputs)

    def first_trained(self, model: nn.Module) -> list[str]:
        """Returns the trained parameters of the first module that has some; none if that is all of them."""
        trained = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad]
        owner = trained[0].rpartition(".")[0] if trained else ""
        first = [name for name in trained if name.rpartition(".")[0] == owner]
        return first if len(first) < len(trained) else []
