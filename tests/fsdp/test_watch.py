"""PARALLEL3D_WATCH=0: torch stays as it is, and a step trains."""

import os
import subprocess
import sys

import pytest
import torch

from parallel3d.fsdp.watch import explain

PROGRAM = """
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from parallel3d import MeshLayout, build_mesh, fully_shard
from parallel3d.testing import local_world

def now():
    from torch.nn.modules import module
    engine = torch.autograd.Variable._execution_engine
    hooks = len(module._global_parameter_registration_hooks)
    return type(engine).__name__, hooks, DTensor.__add__, vars(nn.Parameter).get("data")

before = now()
with local_world(2):
    mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    print([a is b or a == b for a, b in zip(before, now(), strict=True)])
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch(switch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PARALLEL3D_WATCH": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([switch == "0"] * 4)


def test_an_error_of_a_second_backward_stays() -> None:
    """What was saved is freed: reading it, to see whether it was changed, is an error of its own."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if vars(Once).get("ran"):
                raise RuntimeError("called a second time")
            Once.ran = True
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    loss = Once.apply(x.exp()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="called a second time"):
        try:
            loss.backward()
        except RuntimeError as error:
            assert explain(error, [loss]) is None
            raise
