"""Compares the parallel model with the plain one, step by step."""

import torch
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from training import Schedule, Trainer

import parallel3d as p3d

__all__ = ["CHECK_STEPS", "Checker"]

CHECK_STEPS = 20


class Checker:
    """On rank 0, trains the plain model on the whole batches; keeps the largest differences.

    Args:
        dtype: of the plain model's weights.
        seed: of its weights.
        tolerance: largest difference of the losses that is still equal.
    """

    def __init__(
        self,
        config: LlamaConfig,
        device: torch.device,
        dtype: torch.dtype,
        schedule: Schedule,
        *,
        seed: int,
        tolerance: float,
    ) -> None:
        self.tolerance, self.steps = tolerance, 0
        self.plain: Trainer | None = None
        self.largest = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
        if dist.get_rank() == 0:
            with torch.device("meta"):
                model = Llama(config).to(dtype)
            p3d.materialize(model, device=device, seed=seed)
            self.plain = Trainer(model, nn.utils.clip_grad_norm_, schedule)

    def step(self, tokens: Tensor, loss: float, norm: float) -> None:
        """Trains the plain model for a step and compares it with the parallel one's results."""
        self.steps += 1
        if self.plain is not None:
            plain_loss, plain_norm = self.plain.step(tokens)
            self._note("loss", abs(loss - plain_loss.item()))
            self._note("grad_norm", abs(norm - plain_norm.item()))

    def compare_weights(self, model: nn.Module) -> None:
        """Gathers each of the parallel model's weights; a collective, so all ranks take part."""
        plain = dict(self.plain.model.named_parameters()) if self.plain else {}
        for name, param in model.named_parameters():
            weight = param.detach()
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.plain is not None:
                self._note("weights", (whole - plain[name]).abs().max().item())

    @property
    def failed(self) -> bool:
        """Whether the losses differ by more than the tolerance, or one is NaN."""
        return not self.largest["loss"] <= self.tolerance

    @property
    def result(self) -> dict[str, float]:
        """The largest differences, for programs."""
        return {f"check_{name}": value for name, value in self.largest.items()}

    def __str__(self) -> str:
        found = ", ".join(
            f"{name.replace('_', ' ')} {value:.0e}" for name, value in self.largest.items()
        )
        equal, verdict = ("NOT equal", "FAILED") if self.failed else ("equal", "OK")
        return f"{equal} to the plain model over {self.steps} steps: {found}: {verdict}"

    def _note(self, name: str, difference: float) -> None:
        if not difference <= self.largest[name]:  # so that a NaN stays
            self.largest[name] = difference
