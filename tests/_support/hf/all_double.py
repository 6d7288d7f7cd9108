"""float64 everywhere: transformers' models cast to float32 in norms, routers and softmaxes.

There a parallel and a plain model of float64 would differ by 1e-7, and routed experts by more, so
that a small mistake could hide. In this mode a cast to float32 is one to float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AllDouble(TorchFunctionMode):
    """Within it, torch functions asked for float32 give float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        if func in _GROUPED and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **kwargs)
        if func not in _QUESTIONS:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


_GROUPED = (torch.nn.functional.grouped_mm, torch._grouped_mm)
_QUESTIONS = (torch.finfo, torch.is_floating_point)


def _grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
    """``torch.nn.functional.grouped_mm`` of rows sorted by group; the kernel has no float64."""
    assert not any(value is not None for value in options.values()), options
    ends = offs.tolist()
    parts = [x[i:j] @ w for i, j, w in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])
