"""Attention and norms as the kernels that a GPU runs, whatever the device of the run that is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallel3d.planner.op_recorder import OpRecorder, hides_future

__all__ = ["KernelMode"]


class KernelMode(TorchFunctionMode):
    """Records ``scaled_dot_product_attention`` and ``rms_norm`` as one kernel each."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Any:
        causal = is_causal or (attn_mask is not None and hides_future(attn_mask))
        heads = query.shape[:-2].numel()
        pairs = key.shape[:-2].numel()
        if self.recorder.recording_forward:
            self.recorder.attentions.append((heads, pairs, query.shape[-1], causal))
        return _Attention.apply(self.recorder, query, key, value)

    def _rms_norm(
        self,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        return _RmsNorm.apply(self.recorder, input, weight)


class _Attention(torch.autograd.Function):
    """Flash attention: keeps its inputs, its output and a sum in fp32 for each query."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OpRecorder, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.recorder = recorder
        with recorder.quiet():
            out = torch.empty_like(
                query
            )  # in the memory order of the queries, as cuDNN and flash have it
            if value.shape[-1] != query.shape[-1]:
                out = query.new_empty(*query.shape[:-1], value.shape[-1])
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder.note("attention", "attention", [query, key, value], [out])
        recorder.note("attention", "attention", [query], [sums])
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        with ctx.recorder.quiet():
            grads = [torch.empty_like(t) for t in (query, key, value)]
        ctx.recorder.note("attention", "attention", [query, key, value, out, grad], grads)
        return None, *grads


class _RmsNorm(torch.autograd.Function):
    """One kernel: keeps its input and a sum in fp32 for each row."""

    @staticmethod
    def forward(ctx: Any, recorder: OpRecorder, input: Tensor, weight: Tensor | None) -> Tensor:
        ctx.recorder = recorder
        with recorder.quiet():
            out = torch.empty_like(input)
            sums = input.new_empty(input.shape[:-1], dtype=torch.float32)
        recorder.note("rms_norm", "norm", [input], [out, sums])
        ctx.save_for_backward(input, weight, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, sums = ctx.saved_tensors
        with ctx.recorder.quiet():
            back = torch.empty_like(input)
            weights = None if weight is None else torch.empty_like(weight)
        ctx.recorder.note("rms_norm", "norm", [input, grad, sums], [back])
        return None, back, weights
