"""torch's fused attention that returns the log-sum-exp, and its backward, which takes that of more keys.

All tensors are (batch, heads, positions, channels); the log-sum-exp is (batch, heads, positions), natural, of
the scaled scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def fused_kernel(q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> str | None:
    """Returns the name of the kernel that ``fused_forward`` can use for these tensors; None: no kernel."""
    channels, dtype = q.shape[-1], q.dtype
    if v.shape[-1] != channels or not k.shape[2]:
        return None
    if q.device.type == "cpu":
        known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return "cpu" if dtype in known else None
    if q.device.type != "cuda":
        return None
    half = dtype in (torch.bfloat16, torch.float16)
    if half and not masked and channels % 8 == 0 and channels <= 256:
        return "flash"
    if (half and channels % 8 == 0) or (dtype is torch.float32 and channels % 4 == 0):
        return "efficient"
    return None


_CHOICES = ("math", "flash", "efficient", "cudnn", "overrideable")  # as SDPBackend numbers them


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str:
    """Returns the kernel that scaled_dot_product_attention uses: "math", "flash", "efficient" or "cudnn"."""
    return _CHOICES[torch._fused_sdp_choice(q, k, v, is_causal=causal)]


def fused_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (the attention of ``q`` to ``k`` and ``v``, the log-sum-exp of the scaled scores).

    Args:
        kernel: from ``fused_kernel``.
        mask: bool, True where a key counts; it can be expanded to (B, Hq, Q, K).
        causal: query i sees keys up to i; there must be as many keys as queries.
    """
    if kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "efficient":
        k, v = _same_heads(k, q), _same_heads(v, q)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned_bias(mask, q, k), True, 0.0, causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
    if mask is None:
        return out, lse
    seen = mask.any(-1)  # of a query without a key the kernels return no -inf
    return out.masked_fill(~seen[..., None], 0), lse.masked_fill(~seen, float("-inf"))


def fused_backward(
    kernel: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v``.

    Args:
        grad, out, lse: gradient, output and log-sum-exp of the attention to all keys, of which ``k`` and
            ``v`` may be a part; ``lse`` is finite.
    """
    lse = lse.contiguous()  # of the other tensors the kernels take the strides
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
    queries, keys = q.shape[2], k.shape[2]
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, queries, keys, 0.0, causal, none, none),
            scale=scale,
        )
    lse = F.pad(lse, (0, -queries % 32), value=float("inf"))
    whole_k, whole_v, bias = _same_heads(k, q), _same_heads(v, q), _aligned_bias(mask, q, k)
    needed = [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(grad, q, whole_k, whole_v, bias, out, lse, none, none, 0.0, needed, causal), scale=scale
    )
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
        ~mask, float("-inf")
    )


def _aligned_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns ``mask`` as what the efficient kernel adds to the scores, with rows aligned to 16 elements."""
    if mask is None:
        return None
    keys = k.shape[2]
    rows = torch.zeros((*mask.shape[:-1], keys + -keys % 16), dtype=q.dtype, device=q.device)
    bias = rows[..., :keys].masked_fill_(~mask, float("-inf"))
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _same_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns ``x``, keys or values, with each head repeated so that there are as many as in ``q``."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    group = grad.shape[1] // x.shape[1]
    return grad if group == 1 else grad.unflatten(1, (x.shape[1], group)).sum(2)
