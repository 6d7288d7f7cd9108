"""Ranks that run other units or use other parameters, in whatever step: an error on all of them."""

import copy
from typing import Any

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh, equal_grads
from torch import distributed as dist
from torch import nn

from parallel3d import AgreementError, MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard
from parallel3d.testing import record_collectives

WIDTH = 6
Uses = dict[str, Any]


class Stack(nn.Module):
    """Layers of one size, each with two branches; a Python branch on the rank's data may leave some out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, run: list[int], branch: str = "ab") -> torch.Tensor:
        for i in run:
            x = x + self.layers[i](x, branch)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return sum((getattr(self, name)(x).tanh() for name in branch), torch.zeros_like(x))


ALL: Uses = {"run": [0, 1, 2, 3]}


def sharded(layout: MeshLayout, layers: int = 4) -> tuple[Stack, Stack]:
    plain = Stack(layers).double()
    model = copy.deepcopy(plain)
    mesh = build_mesh(layout, device_type="cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return plain, fully_shard(model, mesh=mesh)


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH) * (rank + 1)


def loss_of(model: nn.Module, rank: int, uses: Uses) -> torch.Tensor:
    out = model(batch(rank), **uses)
    return out.square().mean() if uses.get("run") else out.detach().square().mean()


def step(plain: Stack, model: nn.Module, uses: list[Uses]) -> None:
    """One step, compared with the plain model's."""
    rank, n = dist.get_rank(), len(uses)
    loss = loss_of(model, rank, uses[rank])
    assert torch.equal(loss.detach(), loss_of(plain, rank, uses[rank]).detach())
    loss.backward()
    plain.zero_grad()
    for each in range(n):
        (loss_of(plain, each, uses[each]) / n).backward()
    equal_grads(model, plain, rtol=1e-12, atol=1e-12)
    model.zero_grad()


def parting(layout: MeshLayout, steps: int, uses: list[Uses], train: bool = True) -> str:
    """The error of a pass in which ranks part, after ``steps`` in which they did not. Then they go on."""
    plain, model = sharded(layout)
    for _ in range(steps):
        step(plain, model, [ALL] * len(uses))
    rank = dist.get_rank()
    with pytest.raises(AgreementError) as error, torch.set_grad_enabled(train):
        loss = loss_of(model, rank, uses[rank])
        assert torch.equal(loss.detach(), loss_of(plain, rank, uses[rank]).detach())
        loss.backward()
    total = torch.ones(3)
    dist.all_reduce(total)  # the group is still usable, and so is the model
    assert total.tolist() == [len(uses)] * 3
    model.zero_grad()
    step(plain, model, [ALL] * len(uses))
    return str(error.value)


def skips(*which: int, **more: Any) -> Uses:
    return {"run": [i for i in range(4) if i not in which], **more}


PARTINGS: dict[str, tuple[list[Uses], bool, str]] = {
    "a layer dropped": ([ALL, skips(1)], True, "all-gather of unit layers."),
    "two layers dropped": ([skips(0, 1), ALL], True, "all-gather of unit layers.2 on rank 0"),
    "the last ones dropped": ([ALL, skips(2, 3)], True, "nothing more on rank 1"),
    "another order": ([ALL, {"run": [0, 2, 1, 3]}], True, "layers.1 on rank "),
    "one layer twice": ([{"run": [0, 1, 1, 2, 3]}, ALL], True, "layers."),
    "one layer more": ([{"run": [0, 1, 2, 3, 0]}, ALL], True, "layers.0 on rank 0; nothing more"),
    "other parameters": (
        [skips(branch="a"), skips(branch="b")],
        True,
        "without gradients of layers.3.b.weight, layers.3.b.bias on rank 0; reduction of unit layers.3, "
        "without gradients of layers.3.a.weight, layers.3.a.bias on rank 1",
    ),
    "fewer parameters": (
        [ALL, skips(branch="a")],
        True,
        "not arrived: (not set) on rank 0; layers.3.b.weight, layers.3.b.bias on rank 1",
    ),
    "a unit without a gradient": ([ALL, skips(branch="")], True, "unit layers.3 on rank 0"),
    "evaluation": ([ALL, skips(1, 2)], False, "all-gather of unit layers.3 on rank 1"),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("case", PARTINGS)
def test_ranks_part(gloo_pool, case: str, steps: int) -> None:
    uses, train, words = PARTINGS[case]
    for text in gloo_pool.run(parting, MeshLayout(shard=2), steps, uses, train, world_size=2):
        assert "set_reduce_scatter_unused_params(True)" in text
        assert words in text and "on rank 0" in text and "on rank 1" in text, text


@pytest.mark.parametrize("layout", [MeshLayout(replicate=2, shard=2), MeshLayout(replicate=4)])
def test_replicas_part(gloo_pool, layout: MeshLayout) -> None:
    """Ranks of one shard group use the same, those of the other one other parameters."""
    uses = [skips(branch="a")] * 2 + [skips(branch="b")] * 2
    for text in gloo_pool.run(parting, layout, 2, uses, world_size=4):
        assert ".b.bias" in text and "ranks 0-1" in text and "ranks 2-3" in text


def together(layout: MeshLayout, steps: list[Uses]) -> int:
    """Steps in which all ranks change what they run; returns how many all-gathers the last one issues."""
    plain, model = sharded(layout)
    for uses in steps:
        with record_collectives() as recorder:
            loss_of(model, dist.get_rank(), uses).backward()
        model.zero_grad()
        step(plain, model, [uses] * dist.get_world_size())
        with torch.no_grad():
            model(batch(0), **uses)
    return recorder.count("all_gather")


@pytest.mark.parametrize("layout", [MeshLayout(shard=2), MeshLayout(replicate=2)], ids=str)
def test_all_ranks_change_together(gloo_pool, layout: MeshLayout) -> None:
    """Layer drop with one draw for all, parts that are left out, or come back: as plain."""
    steps = [ALL, skips(1), skips(2), ALL, skips(branch="a"), ALL, ALL]
    steps += [skips(0, 1, branch=""), {"run": [3, 1, 1, 0]}, ALL]
    gathers = gloo_pool.run(together, layout, steps, world_size=2)
    assert gathers[0] == gathers[1]


def collectives() -> tuple[list[str], int]:
    from parallel3d._torch import groups
    from parallel3d.fsdp import same_order

    compared = []

    def counts(*args: Any, **kwargs: Any) -> Any:
        compared.append(1)
        return groups.max_over(*args, **kwargs)

    _, model = sharded(MeshLayout(shard=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_order, "max_over", counts)
        for _ in range(3):
            compared.clear()
            with record_collectives() as recorder:
                loss_of(model, dist.get_rank(), ALL).backward()
    return [call.op for call in recorder.calls], len(compared)


@pytest.mark.smoke
def test_what_it_costs(gloo_pool) -> None:
    """One small all-reduce for a forward and one for a backward, which no recorder lists."""
    for calls, compared in gloo_pool.run(collectives, world_size=2):
        assert compared == 2
        assert len(calls) == 5 + 4 + 5, calls


def unit_for_each_branch(use: list[str]) -> str:
    """Units that only some ranks run, with ``set_reduce_scatter_unused_params``."""
    mesh = cpu_mesh()
    model = Layer().double()
    fully_shard(model.a, mesh=mesh)
    fully_shard(model.b, mesh=mesh)
    fully_shard(model, mesh=mesh).set_reduce_scatter_unused_params(True)
    with record_collectives() as recorder, pytest.raises(AgreementError) as error:
        model(batch(0).requires_grad_(), use[dist.get_rank()]).sum().backward()
    assert not recorder.calls  # nothing was sent
    return str(error.value)


@pytest.mark.parametrize("use", [["a", "b"], ["", "ab"]], ids=["other ones", "none"])
def test_units_of_some_ranks(gloo_pool, use: list[str]) -> None:
    for text in gloo_pool.run(unit_for_each_branch, use, world_size=2):
        assert "all-gather of unit a on rank" in text
