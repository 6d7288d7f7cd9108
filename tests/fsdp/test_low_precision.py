"""Numbers that a low-precision sum must not lose. Powers of two, so that all expectations are exact."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp.reduction import divisor_before_sum
from parallel3d.testing import local_world

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Scale(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def build(mesh_shape, dtype, *, hybrid=False, **policy):
    options = {
        "mp_policy": MixedPrecisionPolicy(**policy),
        "shard_optimizer_over_replicate": hybrid,
    }
    return fully_shard(Scale(dtype), mesh=cpu_mesh(*mesh_shape), **options)


def backward(model, gradient):
    model(torch.full((8,), float(gradient), dtype=SINGLE)).float().sum().backward()


@pytest.mark.parametrize("mesh_shape", [(1, 4, 1), (2, 2, 1), (1, 3, 1)])
def test_float16_sums_do_not_overflow(mesh_shape):
    with local_world(mesh_shape[0] * mesh_shape[1]):
        model = build(mesh_shape, SINGLE, param_dtype=HALF, reduce_dtype=HALF)
        backward(model, 30000)  # times 3 is beyond float16
        got = model.weight.grad.full_tensor()
        torch.testing.assert_close(got, torch.full((8,), 30000.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("hybrid", [False, True], ids=["", "HFSDP"])
@pytest.mark.parametrize("mesh_shape", [(1, 4, 1), (4, 1, 1), (2, 2, 1)], ids=str)
def test_float16_division_does_not_underflow(mesh_shape, hybrid, put_off):
    """Neither before the sum over shard nor before that over replicate, nor while it waits for that."""
    with local_world(4):
        model = build(mesh_shape, SINGLE, hybrid=hybrid, param_dtype=HALF, reduce_dtype=HALF)
        if put_off:
            model.set_requires_all_reduce(False)
            backward(model, 2**-23)
            model.set_requires_all_reduce(True)
        backward(model, 2**-23)  # a quarter of it is zero in float16, half of it isn't
        got = model.weight.grad.full_tensor()
        assert torch.equal(got, torch.full((8,), (1 + put_off) * 2.0**-23))


def test_divisor_before_the_sum():
    assert [divisor_before_sum(n, HALF) for n in (1, 2, 3, 4, 8, 64, 100)] == [1, 2, 2, 2, 4, 8, 16]
    assert divisor_before_sum(64, BRAIN) == divisor_before_sum(64, SINGLE) == 1


@pytest.mark.parity("method: set_requires_gradient_sync", "argument: mp_policy: reduce_dtype")
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_waiting_sums_are_kept_in_the_reduce_dtype(switch):
    """256 + 1 is 256 in bfloat16. The parameters are bfloat16; gradients are reduced in float32."""
    with local_world(4):
        model = build((2, 2, 1), BRAIN, reduce_dtype=SINGLE)
        getattr(model, switch)(False)
        backward(model, 256)
        for _ in range(63):
            backward(model, 1)
        assert model.weight.grad.dtype is SINGLE and isinstance(model.weight.grad, DTensor)
        getattr(model, switch)(True)
        backward(model, 1)
        assert model.weight.grad.dtype is BRAIN
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((8,), 320.0, dtype=BRAIN))
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.zero_grad()
        backward(model, 3)  # and a step as any other
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((8,), 3.0, dtype=BRAIN))


def test_waiting_sums_that_were_cleared_leave_no_dtype_behind():
    with local_world(2):
        model = build((1, 2, 1), BRAIN, reduce_dtype=SINGLE)
        model.set_requires_gradient_sync(False)
        backward(model, 256)
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        backward(model, 2)
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((8,), 2.0, dtype=BRAIN))
        model.set_requires_gradient_sync(False)
        backward(model, 1)  # the reduced gradient is folded in
        model.set_requires_gradient_sync(True)
        backward(model, 1)
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((8,), 4.0, dtype=BRAIN))
