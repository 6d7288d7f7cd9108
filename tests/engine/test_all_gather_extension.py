"""All-gather extensions: subclasses that quantise what is gathered, against a plain model that rounds."""

from typing import Any

import pytest
import torch
from _support.extended import Aliased, Bf16, Int8, Rounded, Wrapped, extend, mlp, plain_twin
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from parallel3d.testing import fake_world, record_collectives

pytestmark = pytest.mark.parity(
    "function: all-gather extension: fsdp_pre_all_gather, fsdp_post_all_gather"
)

KINDS = {kind.__name__: kind for kind in (Bf16, Int8, Aliased)}
STEPS = 3


def policy_of(engine: Any, kind: type[Wrapped]) -> Any:
    """``Aliased`` computes in bfloat16; the others in the parameters' own dtype."""
    if kind is Aliased:
        return engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return engine.MixedPrecisionPolicy()


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )


def sample(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, ranks: range, dtype: torch.dtype) -> list[torch.Tensor]:
    """AdamW on the mean over ``ranks``; returns the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            loss = model(sample(rank, step).to(dtype)).square().mean() / len(ranks)
            loss.backward()
        optimizer.step()
    return [p.grad for p in model.parameters()]


def own_rows(whole: torch.Tensor, mesh: Any) -> torch.Tensor:
    chunks = whole.chunk(mesh.size(-1))
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def parity(
    engine: Any, name: str, shape: tuple[int, ...], hidden: int, reshard: bool
) -> dict[str, float]:
    """Runs on every rank; the largest differences from the plain model."""
    kind, mesh = KINDS[name], mesh_of(shape)
    policy = policy_of(engine, kind)
    dtype = policy.param_dtype or torch.float32
    plain = plain_twin(mlp(hidden), kind)
    expected = train(plain, range(mesh.size()), dtype)
    model = extend(mlp(hidden), kind)
    engine.fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    rank = torch.distributed.get_rank()
    got = train(model, range(rank, rank + 1), dtype)
    for layer in (model[0], model[2]):
        assert type(layer.weight.to_local()) is kind
        assert layer.weight.grad.placements == layer.weight.placements
    worst = {"weights": 0.0, "grads": 0.0}
    pairs = zip(model.parameters(), plain.parameters(), got, expected, strict=True)
    for param, twin, grad, twin_grad in pairs:
        local = param.to_local()
        rows = own_rows(twin.detach(), mesh)
        difference = (getattr(local, "held", local) - rows).abs()
        assert difference.shape == rows.shape
        worst["weights"] = max([worst["weights"], *difference.flatten().tolist()])
        difference = (grad.to_local() - own_rows(twin_grad, mesh)).abs() / twin_grad.abs().max()
        worst["grads"] = max([worst["grads"], *difference.flatten().tolist()])
    return worst


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_trains_as_plain_model(on_ranks, name, reshard) -> None:
    for worst in on_ranks(parity, name, (2,), 8, reshard, size=2):
        assert worst["weights"] < 1e-5 and worst["grads"] < 1e-5


@pytest.mark.parity("behaviour: uneven sharding", "behaviour: empty shards")
def test_uneven_rows(on_ranks) -> None:
    """7 rows on 3 ranks, and 4, of which the last has none."""
    for worst in on_ranks(parity, "Bf16", (3,), 7, True, size=3):
        assert worst["weights"] < 1e-5 and worst["grads"] < 1e-5


def test_hsdp(on_ranks) -> None:
    for worst in on_ranks(parity, "Int8", (2, 2), 8, True, size=4):
        assert worst["weights"] < 1e-5 and worst["grads"] < 1e-5


def lives(engine: Any, name: str) -> list[Any]:
    """Runs on every rank: two steps; the calls of the first weight, its bytes in forward and after."""
    kind = KINDS[name]
    policy = policy_of(engine, kind)
    model = extend(mlp(8), kind)
    model[2].weight = nn.Parameter(torch.randn(4, 8))  # an ordinary parameter beside it
    engine.fully_shard(model, mesh=mesh_of((2,)), mp_policy=policy, reshard_after_forward=True)
    seen: list[torch.Tensor] = []
    bytes_in_forward: list[int] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight)
        bytes_in_forward.append(held_bytes(module.weight))

    model[0].register_forward_pre_hook(look)
    Wrapped.calls.clear()
    after: list[int] = []
    for _ in range(2):
        loss = model(torch.ones(3, 6, dtype=policy.param_dtype)).sum()
        after.append(held_bytes(seen[0]))
        loss.backward()
        after.append(held_bytes(seen[0]))
    assert seen[0] is seen[1]
    return [list(Wrapped.calls), bytes_in_forward, after]


def held_bytes(weight: torch.Tensor) -> int:
    return getattr(weight, "held", weight).untyped_storage().nbytes()


@pytest.mark.parametrize(("name", "nbytes"), [("Bf16", 192), ("Int8", 192), ("Aliased", 96)])
def test_made_once_and_freed(on_ranks, name, nbytes) -> None:
    """Forward and backward gather each; ``out=`` is the tensor of the first gather, its memory new."""
    gather, first = [("pre", False), ("post", True)], [("pre", False), ("post", False)]
    for calls, in_forward, after in on_ranks(lives, name):
        assert calls == first + 3 * gather
        assert in_forward == [nbytes, nbytes]
        assert after == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "weights"), [("Bf16", 2 * (48 + 32)), ("Int8", 48 + 32 + 4 * (8 + 4))]
)
def test_gathers_what_the_subclass_says(engine, name, weights) -> None:
    with fake_world(0, 2):
        model = extend(mlp(8), KINDS[name])
        engine.fully_shard(model, mesh=mesh_of((2,)))
        with record_collectives() as recorder:
            model(torch.ones(3, 6)).sum().backward()
        biases, parameters = 4 * (8 + 4), 4 * (48 + 32 + 8 + 4)
        assert sum(c.bytes for c in recorder.select("all_gather")) == weights + biases
        assert sum(c.bytes for c in recorder.select("reduce_scatter")) == parameters


class Colwise(nn.Linear):
    """A linear whose weight's rows are cut over tp too, before the engine cuts them: as torchao does it."""

    def __init__(self, whole: nn.Linear, tp: Any) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        rows = whole.weight.detach().chunk(tp.size())[tp.get_local_rank()].clone()
        self.tp = tp
        self.weight = nn.Parameter(DTensor.from_local(Int8(rows), tp, [Shard(0)], run_check=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
        return nn.functional.linear(x, self.weight).full_tensor()


def tensor_parallel(engine: Any) -> list[float]:
    """Runs on every rank of shard=2, tp=2; how far two steps of SGD are from the plain model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = mlp(8)[0]
    model = Colwise(whole, mesh["tp"])
    engine.fully_shard(model, mesh=mesh["dp_shard"])
    plain = Rounded(whole, Int8.rounded)
    nn.init.zeros_(plain.bias)
    for step in range(2):
        for each, ranks in ((model, [mesh.get_local_rank("dp_shard")]), (plain, range(2))):
            each.zero_grad()
            for rank in ranks:
                (each(sample(rank, step)).square().mean() / len(ranks)).backward()
            with torch.no_grad():
                each.weight -= 0.5 * each.weight.grad
    assert model.weight.shape == (8, 6) and model.weight.device_mesh.ndim == 2
    start = 4 * mesh.get_local_rank("tp") + 2 * mesh.get_local_rank("dp_shard")
    rows = plain.weight.detach()[start : start + 2]
    return [(model.weight.to_local().held - rows).abs().max().item()]


def test_under_tensor_parallelism(on_ranks) -> None:
    assert max(max(worst) for worst in on_ranks(tensor_parallel, size=4)) < 1e-6


class Both(TwoTensor):
    """torch's example subclass, in which every operation is done twice: its gradients are of it as well."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            assert [out.a.data_ptr(), out.b.data_ptr()] == [
                t.data_ptr() for t in all_gather_outputs
            ]
            return None
        return TwoTensor(*all_gather_outputs), all_gather_outputs


def two_tensors(engine: Any) -> float:
    """Runs on every rank; how far the inner tensors are from a plain model's weight."""
    mesh = mesh_of((2,))
    plain = mlp(8)
    train(plain, range(2), torch.float32)
    model = mlp(8)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Both(layer.weight.detach(), layer.weight.detach().clone()))
    engine.fully_shard(model, mesh=mesh)
    rank = torch.distributed.get_rank()
    train(model, range(rank, rank + 1), torch.float32)
    rows = own_rows(plain[0].weight.detach(), mesh)
    local = model[0].weight.to_local()
    assert type(local) is Both
    return max((local.a - rows).abs().max().item(), (local.b - rows).abs().max().item())


def test_subclass_gradients(on_ranks) -> None:
    assert max(on_ranks(two_tensors)) < 1e-5
