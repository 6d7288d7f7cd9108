"""A module that the plan forgot among sequence-parallel ones is refused, not computed wrong."""

import pytest
import torch
from _support.tp.tp_world import tp_mesh
from torch import Tensor, nn

from parallel3d.errors import StateError
from parallel3d.testing import fake_world
from parallel3d.tp import Colwise, Replicated, Rowwise, SequenceParallel, resolve_plan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.split = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.split(self.before(x))
        return x + self.down(self.up(self.norm(x)))


PLAN = {
    "split": SequenceParallel(input="replicate"),
    "up": Colwise(input="sequence"),
    "down": Rowwise(output="sequence"),
}


def run(plan: dict, length: int, frozen: bool = False) -> nn.Module:
    model = Model()
    model.norm.requires_grad_(not frozen)
    with fake_world(0, 2):
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        for module in model.modules():
            for name, p in module._parameters.items():
                local = p.to_local() if hasattr(p, "to_local") else p
                module._parameters[name] = nn.Parameter(local.detach(), p.requires_grad)
        model(torch.randn(2, length, 8)).sum().backward()
        model(torch.randn(2, length // 2, 8)).sum().backward()  # now whole has the part's length
    return model


@pytest.mark.parametrize("length", [5, 6])
def test_a_forgotten_norm(length: int) -> None:
    with pytest.raises(
        StateError, match=r"'norm' has no style in the plan, but its input \(2, 3, 8\)"
    ):
        run(PLAN, length)


def test_what_is_not_forgotten() -> None:
    run({**PLAN, "norm": SequenceParallel()}, 6)
    run({**PLAN, "norm": Replicated(tp_grad="partial")}, 6)
    run(PLAN, 6, frozen=True)
