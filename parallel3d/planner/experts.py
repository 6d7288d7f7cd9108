"""Experts: a mixture of experts in the place of a block's MLP, from its sizes.

Every expert's parameters are sharded, gathered and stepped; a token uses those that the router chose. Tensor
parallelism splits the features of each expert, as ``tp.Experts`` does: every rank computes all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.planner.model_spec import Activation, Elementwise, Matmul, Parameter


@dataclass(frozen=True)
class ExpertsSpec:
    """Gated experts, whose weights are stacked, (experts, features, features).

    Attributes:
        count: of the experts of a block; chosen: how many a token goes through.
        ffn: features within one.
        shared: features within an MLP that every token goes through as well; 0: there is none.
        shared_gate: whether the shared MLP's output is scaled by a layer of one feature.
    """

    count: int
    chosen: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False

    def parameters(self, hidden: int) -> Iterator[Parameter]:
        """In the order of their use."""
        used = self.chosen / self.count
        yield Parameter("mlp.gate.weight", (self.count, hidden))
        up = (self.count, 2 * self.ffn, hidden)
        yield Parameter("mlp.experts.gate_up_proj", up, 1, used=used)
        down = (self.count, hidden, self.ffn)
        yield Parameter("mlp.experts.down_proj", down, 2, used=used)
        if self.shared:
            for name in ("gate_proj", "up_proj"):
                yield Parameter(f"mlp.shared_expert.{name}.weight", (self.shared, hidden), 0)
            yield Parameter("mlp.shared_expert.down_proj.weight", (hidden, self.shared), 1)
        if self.shared_gate:
            yield Parameter("mlp.shared_expert_gate.weight", (1, hidden))

    def matmuls(self, hidden: int) -> Iterator[Matmul]:
        """The router's, the experts', grouped, and the shared MLP's."""
        routed = (self.count, self.chosen)
        yield Matmul("mlp.gate", self.count, hidden)
        yield Matmul("mlp.experts.gate_up", 2 * self.ffn, hidden, "n", experts=routed)
        yield Matmul("mlp.experts.down", hidden, self.ffn, "k", experts=routed)
        if self.shared:
            for name in ("gate", "up"):
                yield Matmul(f"mlp.shared.{name}", self.shared, hidden, "n")
            yield Matmul("mlp.shared.down", hidden, self.shared, "k")

    def elementwise(self, hidden: int) -> Iterator[Elementwise]:
        """Routing, tokens copied to their experts and weighted results added up; the activation functions."""
        f = self.chosen * self.ffn + self.shared

        def alike(
            name: str, forward: float, backward: float, kernels: tuple[int, int]
        ) -> Elementwise:
            moved = forward, backward
            return Elementwise(name, moved, moved, kernels, "gathered")

        copies = self.chosen * hidden
        yield alike("router", 6 * self.count, 8 * self.count, (4, 6))
        yield alike("permute", 2 * copies, 3 * copies, (1, 1))
        yield alike("combine", 4 * copies, 5 * copies, (2, 2))
        yield Elementwise("experts' swiglu", (5 * f, 9 * f), (3 * f, 5 * f), (2, 3), "tp")

    def activations(self, hidden: int) -> Iterator[Activation]:
        """What autograd keeps: the copies of the tokens, hidden features, and results before weighting."""
        copies, f = self.chosen * hidden, self.chosen * self.ffn + self.shared
        yield Activation("router", 2 * self.count, 4, "gathered")
        yield Activation("experts' input", copies, split="gathered")
        yield Activation("experts' hidden", 2 * f, split="tp", of="matmul")
        yield Activation("experts' swiglu output", f, split="tp")
        yield Activation("experts' silu", f, split="tp", eager_only=True)
        yield Activation("experts' output", copies, split="gathered", of="matmul")
