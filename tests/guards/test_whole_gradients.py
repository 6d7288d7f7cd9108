"""guards.debug compares, before the first step, the gradients that each rank of a tp group has whole."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d import AgreementError, MeshLayout, build_mesh, guards

PLAN = {"attention.{q,k,v}": "colwise", "attention.o": "rowwise"}
SUMMED = {"attention.norm": "replicated_with_grad_allreduce"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.RMSNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.norm(q), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Of which no input can be guessed, so that the plan is not checked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), Attention()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.attention(self.first(batch["x"])).square().mean()


def on_ranks(plan: dict) -> str:
    layout = MeshLayout(1, 2, 2)
    mesh = build_mesh(layout, device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(Model(), mesh, plan, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("shard")))
    said = ""
    with guards.debug(model):
        for _ in range(2):
            model({"x": x}).backward()
            try:
                optimizer.step()
            except AgreementError as error:
                said = str(error)
                break
            optimizer.zero_grad()
    return said


def test_a_norm_on_each_ranks_heads(gloo_pool) -> None:
    for said in gloo_pool.run(on_ranks, PLAN, world_size=4):
        assert "the gradient of attention.norm.weight" in said
        assert "and those of" not in said
        assert "replicated_with_grad_allreduce" in said


def test_with_its_style(gloo_pool) -> None:
    assert gloo_pool.run(on_ranks, {**PLAN, **SUMMED}, world_size=4) == [""] * 4


def test_other_rows_on_a_rank_of_the_group(gloo_pool) -> None:
    for said in gloo_pool.run(other_rows, world_size=2):
        assert "the gradient of first.weight" in said


def other_rows() -> str:
    mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(Model(), mesh, {**PLAN, **SUMMED}, check_same_batch=False, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(mesh.get_local_rank("tp"))
    with guards.debug(model), pytest.raises(AgreementError) as error:
        model({"x": torch.randn(2, 3, 8)}).backward()
        optimizer.step()
    return str(error.value)
