"""torchao's Float8Linear with its features split over ``tp``.

torchao casts a matrix to float8 with a scale from its largest absolute value, or from that of each row. If
the features are split, each rank has only a part of the matrix. So the largest values are all-reduced (one
number, or one per row), and all ranks use the scales of the plain layer. Tensors gathered or summed over
``tp`` have the activations' dtype. torchao is imported when such a layer computes.
"""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from parallel3d._util.recompute import kept
from parallel3d.tp.collectives import TpAxis


def is_float8(module: nn.Module) -> bool:
    """Whether ``module`` is torchao's Float8Linear or a subclass, also one with a style's forward."""
    return _float8_class(type(module)) is not None  # type: ignore[arg-type]  # a class has a hash


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of ``module``, a Float8Linear, has been overridden by other code than torchao's."""
    base = _float8_class(type(module))  # type: ignore[arg-type]
    return "forward" in module.__dict__ or type(module).forward is not getattr(
        base, "forward", None
    )


@cache
def _float8_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    named = ((c.__module__, c.__name__, c) for c in cls.__mro__)
    float8 = ("torchao.float8.float8_linear", "Float8Linear")
    return next((c for *name, c in named if tuple(name) == float8), None)


def float8_linear(
    module: Any, x: Tensor, axis: TpAxis, split: Literal["out", "in"], *, bias: bool
) -> Tensor:
    """Returns the product of ``x``, (..., in), with this rank's part of the layer's weight, (out, in).

    Args:
        split: which features of the weight are split over ``axis``, ``"out"`` or ``"in"``.
        bias: whether to add the layer's bias.
    """
    if torch.is_autocast_enabled():  # as torchao's forward does
        x = x.to(torch.get_autocast_gpu_dtype())
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _Float8Product.apply(
        flat, module.weight.t(), module.linear_mm_config, module.config, axis, split
    )
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y + module.bias.to(y.dtype) if bias and module.bias is not None else y


class _Float8Product(torch.autograd.Function):
    """``x @ w`` in float8, for (tokens, in) and (in, out), and its gradients, as torchao's
    ``matmul_with_hp_or_float8_args`` computes them. Every matmul casts its operands again: with one scale for
    each row, rows run along the dim that the matmul sums over."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, products: Any, config: Any, axis: TpAxis, split: str
    ) -> Tensor:
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        ctx.save_for_backward(x, w)
        ctx.scales = _Scales(products, config, axis)
        ctx.split = split
        inner = split == "in"
        x8 = ctx.scales.cast(x, config.cast_config_input, Role.INPUT, -1, 1 if inner else None)
        w8 = ctx.scales.cast(w, config.cast_config_weight, Role.WEIGHT, 0, 0 if inner else 1)
        return torch.mm(x8, w8)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        x, w = ctx.saved_tensors
        cast, c, inner = ctx.scales.cast, ctx.scales.config, ctx.split == "in"
        x_split, w_split, grad_split = (1, 0, None) if inner else (None, 1, 1)
        x_grad = w_grad = None
        if ctx.needs_input_grad[0]:
            grad8 = cast(grad, c.cast_config_grad_output, Role.GRAD_OUTPUT, -1, grad_split)
            w8 = cast(w, c.cast_config_weight_for_grad_input, Role.WEIGHT, -1, w_split)
            x_grad = torch.mm(grad8, w8.t())
        if ctx.needs_input_grad[1]:
            config = c.cast_config_grad_output_for_grad_weight
            grad8 = cast(grad, config, Role.GRAD_OUTPUT, 0, grad_split)
            x8 = cast(x, c.cast_config_input_for_grad_weight, Role.INPUT, 0, x_split)
            w_grad = torch.mm(grad8.t(), x8).t()
        return x_grad, w_grad, None, None, None, None


class _Scales:
    """Casts the operands of one product and its gradients; scales of whole tensors are computed once."""

    def __init__(self, products: Any, config: Any, axis: TpAxis) -> None:
        self.products, self.config, self.axis = products, config, axis
        self._known: dict[Any, Tensor] = {}

    def cast(self, x: Tensor, config: Any, role: Any, dim: int, split: int | None) -> Tensor:
        """Returns the two-dimensional ``x`` in float8, unless it is already or ``config`` disables it.

        Args:
            role: torchao's role of ``x`` in the matmul.
            dim: the dim over which each row's maximum is taken, if ``config`` asks for one scale for each
                row.
            split: the dim of ``x`` of which this rank has a part; None: it has the whole tensor.
        """
        from torchao.float8.config import ScalingType
        from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        if tensor_already_casted_to_fp8(x) or config.scaling_type is ScalingType.DISABLED:
            return x
        of_rows = get_maybe_axiswise_dim(dim, config.scaling_granularity)
        known = None if of_rows is not None else (role, config.target_dtype)
        scale = self._known.get(known)
        if scale is None:
            scale = self._scale(x, config, of_rows, split)
            if known is not None:
                self._known[known] = scale
        cast: Tensor = hp_tensor_and_scale_to_float8(
            x, scale, config.target_dtype, self.products, role, of_rows
        )
        return cast

    @torch.no_grad()
    def _scale(self, x: Tensor, config: Any, of_rows: int | None, split: int | None) -> Tensor:
        from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

        whole = split is None or of_rows not in (None, split, split - 2)
        if not whole and not x.numel():  # a rank without features: nothing is largest
            x = x.new_zeros([size or 1 for size in x.shape])
        largest = tensor_to_amax(
            x, scaling_granularity=config.scaling_granularity, axiswise_dim=of_rows
        )
        if not whole and self.axis.size > 1:
            own = largest

            def of_ranks() -> Tensor:
                dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.axis.group)
                return own

            largest = kept("largest of parts", of_ranks)
        power = self.config.round_scales_to_power_of_2
        scale: Tensor = amax_to_scale(largest, config.target_dtype, power)
        return scale
