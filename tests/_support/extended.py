"""Tensor subclasses with torch's all-gather extension protocol, as quantised training uses them.

Each holds a weight in full precision, as optimizers need it, and gathers something smaller. They are written
for torch's ``fully_shard``: what they do is all that it asks for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_KEEP_TYPE = {
    aten.detach.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}


class Wrapped(torch.Tensor):
    """A tensor around another; every operation is on the inner one, and those above keep the type.

    Attributes:
        held: the values.
        calls: (method, whether it was given out=) of this process, in order.
    """

    calls: list[tuple[str, bool]] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        bare = pytree.tree_map_only(Wrapped, lambda t: t.held, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        if func is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in _KEEP_TYPE else out

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["held"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.held})"

    def padded(self, outer_size: torch.Size, mesh) -> torch.Tensor:
        """The shard with the rows every other rank has; ours may have fewer."""
        if outer_size[0] % mesh.size() == 0:
            return self.held
        whole = self.held.new_zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
        whole.narrow(0, 0, self.held.shape[0]).copy_(self.held)
        return whole


def refill(out: torch.Tensor, values: torch.Tensor) -> None:
    """Writes to an unsharded parameter as torch wants it: unseen by autograd."""
    out = out._local_tensor if isinstance(out, DTensor) else out
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values[: out.shape[0]])


class Bf16(Wrapped):
    """Gathers bfloat16; the unsharded parameter is an ordinary tensor of the compute dtype."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.calls.append(("pre", False))
        assert isinstance(module, nn.Linear) and outer_stride == (outer_size[1], 1)
        assert mesh.ndim == 1
        return (self.padded(outer_size, mesh).to(torch.bfloat16),), "metadata"

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        self.calls.append(("post", out is not None))
        (values,) = all_gather_outputs
        assert metadata == "metadata" and values.dtype == torch.bfloat16
        if out is not None:
            refill(out, values)
            return None
        whole = values.to(param_dtype, copy=True)
        return whole, (values, whole)

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        """What a plain model would compute with."""
        return weight.to(torch.bfloat16).to(weight.dtype)


def curious(note: Callable[..., None]) -> type[Bf16]:
    """One that passes on what its first method is given."""

    class Curious(Bf16):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            note(mesh, outer_size, outer_stride, module, mp_policy)
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    return Curious


class Int8(Wrapped):
    """Gathers int8 and one scale per row: two inputs of different dtypes."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.calls.append(("pre", False))
        return self.quantised(self.padded(outer_size, mesh)), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        self.calls.append(("post", out is not None))
        values, scale = all_gather_outputs
        assert values.dtype == torch.int8 and scale.shape == (values.shape[0], 1)
        whole = (values * scale).to(param_dtype)
        if out is not None:
            refill(out, whole)
            return None
        return whole, (values, scale, whole)

    @staticmethod
    def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        return (weight / scale).round().to(torch.int8), scale

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        values, scale = Int8.quantised(weight)
        return values * scale


class Aliased(Wrapped):
    """Gathers bfloat16; the unsharded parameter is of the subclass, around the gathered memory itself.

    In the protocol's first form: the shard's method is given the mesh alone.
    """

    def fsdp_pre_all_gather(self, mesh):
        self.calls.append(("pre", False))
        return (self.held.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        self.calls.append(("post", out is not None))
        (values,) = all_gather_outputs
        assert param_dtype == torch.bfloat16
        if out is not None:
            assert out.held.data_ptr() == values.data_ptr()
            return None
        return Aliased(values), (values,)

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.bfloat16)


class Rounded(nn.Linear):
    """The plain model's layer: computes with the rounded weight, and its gradient is the weight's."""

    def __init__(self, linear: nn.Linear, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.rounded = rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.rounded(self.weight.detach())
        weight = self.weight.to(rounded.dtype)  # its gradient comes back in the weight's dtype
        return F.linear(x, weight + (rounded - weight).detach(), self.bias.to(x.dtype))


def mlp(hidden: int) -> nn.Sequential:
    """Two linears with biases; the second's weight is cut over its few rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4))


def extend(model: nn.Module, kind: type[Wrapped]) -> nn.Module:
    """Makes every linear's weight a ``kind``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def plain_twin(model: nn.Sequential, kind: Any) -> nn.Sequential:
    """The model that computes the same without sharding."""
    return nn.Sequential(
        *(Rounded(m, kind.rounded) if isinstance(m, nn.Linear) else m for m in model)
    )
