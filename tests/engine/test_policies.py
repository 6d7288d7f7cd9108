"""Mixed precision and offload policies: dtypes, and numbers equal to a plain model cast by hand."""

import copy

import pytest
import torch
from _support.engine.twins import device_mesh, floats, full, mean_square, same, shard_layers, train
from _support.models import Block, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from parallel3d._torch.autograd import follows_grad_dtype
from parallel3d.testing import fake_world, record_collectives

BF16, FP32 = torch.bfloat16, torch.float32


class Seen(nn.Linear):
    """Notes the dtypes that its forward sees."""

    def forward(self, x, *others, **named):
        self.dtypes = [x.dtype, self.weight.dtype, *(t.dtype for t in others)]
        self.dtypes += [t.dtype for t in named.get("deep", {}).get("list", [])]
        return super().forward(x.to(self.weight.dtype)), {"too": x}


@pytest.mark.parity(
    "argument: mp_policy: param_dtype",
    "argument: mp_policy: output_dtype",
    "argument: mp_policy: cast_forward_inputs",
)
def test_dtypes(engine) -> None:
    with fake_world(0, 2):
        mesh = device_mesh()
        x, ids, deep = torch.randn(2, 4), torch.arange(2), {"list": [torch.randn(1)]}

        def dtypes(**policy):
            model = Seen(4, 4)
            engine.fully_shard(model, mesh=mesh, mp_policy=engine.MixedPrecisionPolicy(**policy))
            y, extra = model(x, ids, deep=deep)
            y.float().sum().backward()
            assert model.weight.grad.dtype == model.weight.dtype == FP32
            return model.dtypes, y.dtype, extra["too"].dtype

        long = torch.int64
        assert dtypes() == ([FP32, FP32, long, FP32], FP32, FP32)
        assert dtypes(param_dtype=BF16) == ([BF16, BF16, long, BF16], BF16, BF16)
        assert dtypes(param_dtype=BF16, output_dtype=FP32)[1:] == (FP32, FP32)
        uncast = dtypes(param_dtype=BF16, cast_forward_inputs=False)
        assert uncast == ([FP32, BF16, long, FP32], BF16, FP32)
        assert dtypes(output_dtype=torch.float64)[1:] == (torch.float64, torch.float64)


@pytest.mark.parity("argument: mp_policy: reduce_dtype")
def test_dtype_of_collectives(engine) -> None:
    with fake_world(0, 2):
        mesh = device_mesh()

        def sizes(**policy):
            model = nn.Linear(8, 8, bias=False)
            engine.fully_shard(model, mesh=mesh, mp_policy=engine.MixedPrecisionPolicy(**policy))
            with record_collectives(mesh) as recorder:
                model(torch.randn(2, 8)).sum().backward()
            return [recorder.select(op)[0].bytes // 64 for op in ("all_gather", "reduce_scatter")]

        assert sizes() == [4, 4]
        assert sizes(param_dtype=BF16) == [2, 4 if follows_grad_dtype else 2]  # since torch 2.15
        assert sizes(param_dtype=BF16, reduce_dtype=FP32) == [2, 4]
        assert sizes(reduce_dtype=BF16) == [4, 2]


def mixed_precision(engine, param_dtype, reduce_dtype) -> None:
    """Gradients are those of a model cast by hand, added in the reduce dtype."""
    mesh = device_mesh()
    policy = engine.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    plain = Lm()
    model = shard_layers(engine, copy.deepcopy(plain), mesh, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        lm_loss(model, tokens(2 * step + dist.get_rank())).backward()
        halves = []
        for rank in range(2):
            cast = copy.deepcopy(plain).to(param_dtype)
            lm_loss(cast, tokens(2 * step + rank)).backward()
            usual = FP32 if follows_grad_dtype else param_dtype  # since torch 2.15
            halves.append([p.grad.to(reduce_dtype or usual) for p in cast.parameters()])
        for p, a, b in zip(plain.parameters(), *halves, strict=True):
            p.grad = ((a + b) / 2).float()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert got.grad.dtype == FP32
            same(full(got.grad), want.grad, name, 1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        same(full(got), want, name, 1e-6)


@pytest.mark.parity("argument: mp_policy: param_dtype", "argument: mp_policy: reduce_dtype")
@pytest.mark.parametrize("reduce_dtype", [FP32, None], ids=str)
def test_mixed_precision(on_ranks, reduce_dtype) -> None:
    on_ranks(mixed_precision, BF16, reduce_dtype)


def accumulates_in_the_reduce_dtype(engine) -> None:
    """Sums of unreduced gradients are kept in float32, where 1 + 1/512 is not 1 as in bfloat16."""
    model = nn.Linear(1, 1, bias=False)
    policy = engine.MixedPrecisionPolicy(BF16, FP32)
    engine.fully_shard(model, mesh=device_mesh(), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 1), 1 / 512)).sum().backward()
    assert full(model.weight.grad).item() == 1 + 1 / 512


@pytest.mark.parity("argument: mp_policy: reduce_dtype", "behaviour: gradient accumulation")
def test_unreduced_gradients_accumulate_in_the_reduce_dtype(on_ranks) -> None:
    on_ranks(accumulates_in_the_reduce_dtype)


def policies_side_by_side(engine) -> None:
    """A block of bfloat16 in a model of float32."""
    mesh, policy = device_mesh(), engine.MixedPrecisionPolicy(BF16, FP32, FP32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            return self.second(self.first(x))

    plain = Model()
    model = copy.deepcopy(plain)
    engine.fully_shard(model.first, mesh=mesh, mp_policy=policy)
    engine.fully_shard(model, mesh=mesh)
    x = floats(0).float()
    model(x).square().mean().backward()
    half = copy.deepcopy(plain.first).to(BF16)
    plain.second(half(x.to(BF16)).float()).square().mean().backward()
    grads = [p.grad.float() for p in (*half.parameters(), *plain.second.parameters())]
    for (name, got), want in zip(model.named_parameters(), grads, strict=True):
        same(full(got.grad), want, name, 1e-6)


@pytest.mark.parity("argument: mp_policy: output_dtype")
def test_policies_side_by_side(on_ranks) -> None:
    on_ranks(policies_side_by_side)


@pytest.mark.parity("argument: torch's own policy objects")
def test_torchs_own_policies(engine) -> None:
    with fake_world(0, 2):
        policy = torch_fsdp.MixedPrecisionPolicy(BF16, FP32, torch.float64, False)
        model = Seen(4, 4)
        engine.fully_shard(
            model, mesh=device_mesh(), mp_policy=policy, offload_policy=torch_fsdp.OffloadPolicy()
        )
        y, _ = model(torch.randn(2, 4))
        assert model.dtypes == [FP32, BF16] and y.dtype == torch.float64
        engine.fully_shard(
            nn.Linear(2, 2),
            mesh=device_mesh(),
            offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False),
        )


def offload(engine, policy) -> None:
    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh(), offload_policy=policy(engine))
        assert all(p.device.type == "cpu" for p in model.parameters())

    train(Lm(), wrap)


def none(engine):
    return engine.OffloadPolicy()


def pinned(engine):
    return engine.CPUOffloadPolicy()


def unpinned(engine):
    return engine.CPUOffloadPolicy(pin_memory=False)


@pytest.mark.parity(
    "argument: offload_policy=OffloadPolicy()",
    "argument: offload_policy=CPUOffloadPolicy(pin_memory=False)",
    "behaviour: CPU offload without a device",
)
@pytest.mark.parametrize("policy", [none, unpinned])
def test_offload_policy(on_ranks, policy) -> None:
    on_ranks(offload, policy)


@pytest.mark.parity(
    "argument: offload_policy=CPUOffloadPolicy()", "behaviour: CPU offload without a device"
)
@pytest.mark.torch_fails("no gloo", match="Cannot access accelerator device")
def test_offload_with_pinned_memory_on_the_cpu(on_ranks) -> None:
    """There is nothing to pin for, so nothing is pinned."""
    on_ranks(offload, pinned)


@pytest.mark.parity(
    "argument: offload_policy=CPUOffloadPolicy()", "behaviour: CPU offload with pinned memory"
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_with_pinned_memory(engine) -> None:
    torch.manual_seed(0)
    plain = Block().cuda()
    x = floats(0).float().cuda()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = copy.deepcopy(plain).cpu()
        engine.fully_shard(model, mesh=mesh, offload_policy=engine.CPUOffloadPolicy())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for _ in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                mean_square(each, x).backward()
                if each is model:
                    for p in model.parameters():
                        assert p.device.type == p.grad.device.type == "cpu"
                        assert p.to_local().is_pinned() and p.grad.to_local().is_pinned()
                optimizer.step()
                optimizer.zero_grad()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            same(full(got), want.cpu(), name, 1e-5)
    finally:
        dist.destroy_process_group()
