"""What torch 2.15's ``fully_shard`` has and 2.13's has not: ours on every torch, or refused."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn

from parallel3d import Parallel3dError
from parallel3d._torch.autograd import follows_grad_dtype
from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp.inspect import units_of
from parallel3d.testing import fake_world

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.seen["x"] = x.dtype
        return self.down(self.up(x).float() @ torch.eye(6)).sum()


def sharded(fn) -> Net:
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=fn)
    return fully_shard(Net(), mesh=cpu_mesh(), mp_policy=policy)


def test_param_dtype_override_fn() -> None:
    with fake_world(0, 2):
        asked = []

        def keeps_down(param: nn.Parameter) -> torch.dtype | None:
            asked.append(tuple(param.shape))
            return FP32 if param.shape[0] == 4 else None

        model = sharded(keeps_down)
        assert sorted(asked) == [(4,), (4, 6), (6,), (6, 4)]
        for _ in range(2):
            model(torch.ones(2, 4)).backward()
        assert len(asked) == 4  # once each
        assert model.seen == {
            "up.weight": BF16,
            "up.bias": BF16,
            "down.weight": FP32,
            "down.bias": FP32,
            "x": BF16,
        }
        assert all(p.grad.dtype is FP32 for p in model.parameters())


@pytest.mark.parametrize("wrong", [torch.float16, "float32"])
def test_param_dtype_override_fn_that_returns_anything_else(wrong) -> None:
    with fake_world(0, 2):
        net = Net()
        mesh = cpu_mesh()
        policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda _: wrong)
        with pytest.raises(Parallel3dError, match=r"param_dtype_override_fn.*returned.*up\.weight"):
            fully_shard(net, mesh=mesh, mp_policy=policy)
        assert type(net) is Net


def reduce_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {
        param.name: bucket.precision.reduce_dtype
        for unit in units_of(model, recurse=True)
        for bucket in unit.group.buckets
        for param in bucket.params
    }


def test_reduce_dtype_none_is_the_parameters_own_since_2_15() -> None:
    with fake_world(0, 2):
        model = sharded(None)
        assert set(reduce_dtypes(model).values()) == {FP32 if follows_grad_dtype else BF16}
        low = MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True)
        model = fully_shard(Net(), mesh=cpu_mesh(), mp_policy=low)
        assert set(reduce_dtypes(model).values()) == {BF16}


class WideGradient(torch.autograd.Function):
    """x @ w.T, whose gradient of w is a float32 one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.float().T @ x.float()


class WideLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WideGradient.apply(x, self.weight)


@pytest.mark.parametrize("how", ["grad_dtype", "grad_dtype None", "float32 at rest"])
@pytest.mark.parametrize("sync_first", [True, False])
def test_gradients_wider_than_the_unsharded_parameter(how, sync_first) -> None:
    """They are reduced as they are. Before 2.15 they are rounded first, by torch's engine too."""
    exact = 3 * (1 + 2.0**-7) ** 2
    x = torch.full((3, 4), 1 + 2.0**-7, dtype=BF16)
    with fake_world(0, 1):
        net = WideLinear(4, 4, bias=False, dtype=FP32 if how == "float32 at rest" else BF16)
        if how.startswith("grad_dtype"):
            net.weight.grad_dtype = FP32 if how == "grad_dtype" else None
        reduce_dtype = FP32 if how == "grad_dtype None" else None
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        model = fully_shard(net, mp_policy=policy)
        for sync in (sync_first, True):
            model.set_requires_gradient_sync(sync)
            model(x).backward(x)
        grad = model.weight.grad.to_local()
    rounded = torch.tensor(exact).to(BF16).item()
    assert torch.equal(
        grad.float(), torch.full((4, 4), 2 * (exact if follows_grad_dtype else rounded))
    )


@pytest.mark.parametrize("reduce_dtype", [None, FP32])
@pytest.mark.parametrize("sync_first", [True, False])
def test_gradients_have_the_grad_dtype_of_their_parameter(reduce_dtype, sync_first) -> None:
    """torch before 2.15 can't tell one that was set, and its engine drops it."""
    with fake_world(0, 2):
        net = nn.Sequential()
        net.up, net.down = nn.Linear(4, 6), nn.Linear(6, 4)
        net.up.weight.grad_dtype = BF16
        net.down.weight.grad_dtype = None
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        model = fully_shard(net, mesh=cpu_mesh(), mp_policy=policy)
        for sync in (sync_first, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, 4)).sum().backward()
        found = {name: p.grad.dtype for name, p in model.named_parameters()}
        expected = dict.fromkeys(found, FP32)
        if follows_grad_dtype:
            expected |= {"up.weight": BF16, "down.weight": reduce_dtype or BF16}
            wanted = {"up.weight": BF16, "down.weight": BF16} if reduce_dtype is None else {}
            assert reduce_dtypes(model) == dict.fromkeys(found, FP32) | wanted
            assert model.up.weight.grad_dtype is BF16
            assert model.down.weight.grad_dtype is None
        assert found == expected
