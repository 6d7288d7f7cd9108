"""What is done for real within a dry run does not count; models of fake parameters change their dtype."""

import torch
from torch import nn

import parallel3d as p3d
from parallel3d.tools.dryrun import real, record


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_trials_of_an_optimizer_are_no_steps():
    """``optim.local`` makes some with real numbers, to see how the class works."""

    def program():
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4), device_type="cpu")
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        p3d.parallelize(model, mesh)
        optimizer = p3d.optim.local(torch.optim.AdamW, model.parameters())
        for _ in range(5):
            step(model, optimizer)

    run = record(program, 4, steps=2)
    assert run.steps == 2 and not run.unknown
    assert [call.op for call in run.collectives].count("reduce_scatter") == 2
    assert {operation.step for operation in run.operations} == {0, 1}


def test_a_model_that_is_trained_for_real_is_not_the_programs():
    def program():
        with real():
            other = nn.Linear(8, 64)
            step(other, torch.optim.SGD(other.parameters(), lr=0.1))
            assert other.weight.sum().item() == other.weight.sum().item()
        model = nn.Linear(8, 8)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run = record(program, 2)
    assert run.steps == 1
    assert [each.shape for each in run.parameters] == [(8, 8), (8,)]
    assert max(each.bytes for each in run.peak.largest) == 8 * 8 * 4


def test_a_model_changes_its_dtype():
    def program():
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model.half().double()
        model(torch.randn(2, 8).double()).sum().backward()
        model.float().to(torch.bfloat16)
        assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.bfloat16
        model(torch.randn(2, 8).bfloat16())

    end = record(program, 2).memory[-1].by_kind
    size = (8 * 8 + 8 + 8 + 8) * 2
    assert (end["parameters"], end["gradients"]) == (size, size)
