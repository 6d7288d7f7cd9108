"""Fused kernels that return the log-sum-exp, on a part of the keys: results, and gradients of its part."""

import pytest
import torch
from torch import Tensor

from parallel3d._torch.attention import fused_backward, fused_forward, fused_kernel

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In float64: the output and the log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    return weights @ v, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("form", ["full", "causal", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_the_keys(device: str, kv_heads: int, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = keys = 37
    if form != "causal":
        keys = 51
    q = torch.randn(2, 4, rows, 16, device=device).to(dtype)
    k, v = (torch.randn(2, kv_heads, keys, 16, device=device).to(dtype) for _ in range(2))
    grad = torch.randn(2, 4, rows, 16, device=device).to(dtype)
    mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    if form == "causal":
        mask = mask.tril()
    if form == "mask":
        mask = torch.rand(2, 1, rows, keys, device=device) > 0.5
        mask[:, :, 3] = False  # a query that sees no key
    kernel = fused_kernel(q, k, v, masked=form == "mask")
    assert kernel in (("cpu",) if device == "cpu" else ("flash", "efficient"))
    given = mask if form == "mask" else None
    out, lse = fused_forward(kernel, q, k, v, given, form == "causal", 0.3)

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = plain(*wide, mask, 0.3)
    eps = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), wanted_lse.detach(), rtol=eps, atol=eps)

    # As if there were further keys: a larger log-sum-exp, and another output.
    more, whole = wanted_lse.detach().masked_fill(~mask.any(-1), 0) + 0.5, out + 0.1
    delta = (grad.double() * whole.double()).sum(-1)
    group = 4 // kv_heads
    q_, k_, v_ = wide
    scores = (q_ @ k_.repeat_interleave(group, 1).mT * 0.3).masked_fill(~mask, float("-inf"))
    weights = torch.exp(scores - more[..., None]).detach()
    values = v_.repeat_interleave(group, 1)
    change = weights * (grad.double() @ values.mT - delta[..., None]) * 0.3
    expected = (
        change @ k_.repeat_interleave(group, 1),
        (change.mT @ q_).unflatten(1, (kv_heads, group)).sum(2),
        (weights.mT @ grad.double()).unflatten(1, (kv_heads, group)).sum(2),
    )
    got = fused_backward(
        kernel, grad, q, k, v, whole, more.to(lse.dtype), given, form == "causal", 0.3
    )
    for mine, theirs in zip(got, expected, strict=True):
        limit = eps * float(theirs.detach().abs().max())
        assert (mine.double() - theirs).abs().max() <= limit


def test_what_no_kernel_computes() -> None:
    x = torch.ones(1, 1, 4, 8)
    assert fused_kernel(x, x, x, masked=False) == "cpu"
    assert fused_kernel(x, x, torch.ones(1, 1, 4, 6), masked=False) is None
    assert fused_kernel(x, x[:, :, :0], x[:, :, :0], masked=False) is None
    assert fused_kernel(x.long(), x.long(), x.long(), masked=False) is None
    assert fused_kernel(x.to("meta"), x.to("meta"), x.to("meta"), masked=False) is None
