"""An optimizer of matrices."""

import torch
from torch import optim


class Normed(optim.Optimizer):
    """Needs whole parameters: divides by norms. Has every kind of state, and reads numbers."""

    whole_matrix = True

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        whole = self.state["of no parameter"]
        whole["steps"] = whole.get("steps", 0) + 1
        assert whole["steps"] == self.steps
        for group in self.param_groups:
            group["calls"] += 1
            assert group["calls"] == self.steps
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["row"] = torch.zeros_like(p[..., :1])
                    state["norm"] = torch.zeros((), dtype=p.dtype)
                    state["step"], state["begun"] = 0, True
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 0.1)
                state["row"] += p.grad.abs().mean(-1, keepdim=True)
                state["norm"] += p.norm()
                scale = group["lr"] * state["norm"].item() / state["step"] / group["calls"]
                p.sub_(state["momentum"] / (state["momentum"].norm() + state["row"]), alpha=scale)
