"""Extension: one parameter that has its own way of being gathered, by torch's all-gather extension protocol.

Such a parameter is of a tensor subclass with the methods ``fsdp_pre_all_gather``, which says what to gather
instead of the shard (a quantised copy and its scale, say), and ``fsdp_post_all_gather``, which makes the
unsharded parameter of what was gathered. The shard at rest is of the subclass too.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, inner_tensors, preserved_versions
from parallel3d._compat_simulated import LocalTensor
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.param import ShardedParam

__all__ = ["Extension", "as_plain", "is_extended"]

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has one of the protocol's methods; ``Extension`` raises if it lacks the other."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST)


class Extension:
    """See the module's docstring. n is the size of the shard axis.

    Attributes:
        param: the parameter's layouts.
        kinds: (shape, dtype) of each gather input; empty before the first gather.
        metadata: what came with the gather inputs.
        rows: for each input, the bytes of its output, (n, bytes): row i is what shard rank i gives.
        compute: the unsharded parameter; None before the first gather.
    """

    def __init__(
        self,
        unit: str,
        param: ShardedParam,
        local: torch.Tensor,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
    ) -> None:
        """``local``: the shard, or what it will be cut from. ``dtype``: what to compute in."""
        self.label = f"parameter {param.name} of unit {unit} ({type(local).__name__})"
        self.arguments = _check_methods(self.label, local)
        self.param = param
        self.mesh = mesh
        self.policy = policy
        self.dtype = dtype
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.rows: list[torch.Tensor] = []
        self.metadata: Any = None
        self.compute: nn.Parameter | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inner: tuple[torch.Tensor, ...] = ()
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    # -- before the gather -------------------------------------------------------------------------

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """What to gather for the shard ``local``, as flat bytes."""
        if self.arguments == 1:
            given = local.fsdp_pre_all_gather(self.mesh)  # type: ignore[attr-defined]
        else:
            shape = torch.Size(self.param.compute_shape)
            given = local.fsdp_pre_all_gather(  # type: ignore[attr-defined]
                self.mesh, shape, _strides(shape), self.param.module(), self.policy
            )
        inputs, self.metadata = self._split_result(given)
        kinds = [(t.shape, t.dtype) for t in inputs]
        if not self.kinds:
            self.kinds = kinds
        elif kinds != self.kinds:
            raise Parallel3dError(
                f"{self.label}: {_PRE} returned tensors of {_show(kinds)}, and of {_show(self.kinds)} "
                "the first time; it must return the same shapes and dtypes each time"
            )
        return [as_plain(t).reshape(-1).view(torch.uint8) for t in inputs]

    def _split_result(self, given: Any) -> tuple[Sequence[torch.Tensor], Any]:
        if isinstance(given, tuple) and len(given) == 2:
            inputs, metadata = given
            if isinstance(inputs, (tuple, list)) and inputs and _all_tensors(inputs):
                return inputs, metadata
        raise Parallel3dError(
            f"{self.label}: {_PRE} returned {_describe(given)}; it must return (inputs, metadata), where "
            "inputs is a tuple of at least one tensor"
        )

    # -- after the gather --------------------------------------------------------------------------

    def make_outputs(self, n: int, device: torch.device) -> None:
        """Buffers for the gathered inputs, each with storage of its own, kept for the model's life.

        An input with the parameter's number of dims is put together along the sharded dim, any other along
        its first.
        """
        outputs = []
        for shape, dtype in self.kinds:
            shape = shape or torch.Size([1])
            same = len(shape) == len(self.param.compute_shape)
            dim = (self.param.dim or 0) if same else 0
            whole = [size * n if i == dim else size for i, size in enumerate(shape)]
            buffer = torch.empty(whole, dtype=dtype, device=device)
            rows = buffer
            if dim != 0:
                rows = torch.empty([n * shape[0], *shape[1:]], dtype=dtype, device=device)
                by_rank = buffer.unflatten(dim, (n, shape[dim])).movedim(dim, 0)
                self._scattered.append((by_rank, rows.view(n, *shape)))
            self.rows.append(rows.view(-1).view(torch.uint8).view(n, -1))
            self._keep([buffer, rows])
            # .data: a version counter of its own, as the computing parameters of a Bucket have.
            outputs.append(buffer.data)
        self._outputs = tuple(outputs)

    def rebuild(self) -> bool:
        """Makes the unsharded parameter of the gathered ``rows``, or renews it.

        Returns:
            Whether it was made, and not renewed.
        """
        for by_rank, rows in self._scattered:
            by_rank.copy_(rows)
        local, given = self.param.local, (self._outputs, self.metadata, self.dtype)
        if self.compute is None:
            result = local.fsdp_post_all_gather(*given)  # type: ignore[attr-defined]
            self.compute = self._make_compute(result)
            return True
        written = [self.compute, *self._inner]
        if isinstance(self.compute, DTensor):
            written.append(get_local_tensor(self.compute))
        with preserved_versions(written):
            local.fsdp_post_all_gather(*given, out=self.compute)  # type: ignore[attr-defined]
        return False

    def _make_compute(self, result: Any) -> nn.Parameter:
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[0], torch.Tensor)
            and isinstance(result[1], (tuple, list))
            and _all_tensors(result[1])
        ):
            raise Parallel3dError(
                f"{self.label}: {_POST} returned {_describe(result)}; without out= it must return "
                "(unsharded tensor, tensors to free), where the latter is a tuple"
            )
        whole, inner = result
        for tensor in inner:
            if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, LocalTensor):
                raise Parallel3dError(
                    f"{self.label}: {_POST} returned a {type(tensor).__name__} among the tensors to free; "
                    "it has no memory of its own: list the tensors inside it"
                )
        self._inner = (*self._outputs, *inner)
        self._keep(inner)
        whole = self.param.as_compute(self._trimmed(whole))
        return nn.Parameter(whole, requires_grad=self.param.sharded.requires_grad)

    def _trimmed(self, whole: torch.Tensor) -> torch.Tensor:
        """``whole`` without the rows that pad the sharded dim."""
        shape = torch.Size(self.param.compute_shape)
        dim = self.param.dim or 0
        if whole.shape == shape:
            return whole
        if (
            whole.ndim != len(shape)
            or whole.shape[dim] < shape[dim]
            or any(
                a != b for i, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if i != dim
            )
        ):
            raise Parallel3dError(
                f"{self.label}: {_POST} returned a tensor of shape {tuple(whole.shape)}; the unsharded "
                f"parameter has shape {tuple(shape)}, or more along dim {dim} if its inputs were padded"
            )
        if dim == 0:  # as torch does, so that a subclass written for it has what we ask of it
            return torch.as_strided(whole, shape, _strides(shape), 0)
        return whole.narrow(dim, 0, shape[dim])

    # -- memory ------------------------------------------------------------------------------------

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes storages to free at reshard, and their sizes: several tensors may share one."""
        for tensor in tensors:
            for inner in inner_tensors(tensor):
                storage = inner.untyped_storage()
                if all(storage._cdata != known._cdata for known, _ in self._storages):
                    self._storages.append((storage, storage.nbytes()))

    def allocate(self) -> None:
        """Gives outputs and inner tensors storage again, with undefined content."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def release(self) -> None:
        """Frees them."""
        for storage, _ in self._storages:
            storage.resize_(0)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of an instance of a user's subclass as an ordinary tensor; an ordinary one itself."""
    if type(tensor) is torch.Tensor or isinstance(tensor, (DTensor, LocalTensor)):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor)


def _check_methods(label: str, local: torch.Tensor) -> int:
    """Number of arguments ``fsdp_pre_all_gather`` takes: 1 in its first form, 5 now."""
    for name, other in ((_PRE, _POST), (_POST, _PRE)):
        if not hasattr(local, name):
            raise Parallel3dError(
                f"{label} has {other} but not {name}; an all-gather extension needs both methods"
            )
    signature = inspect.signature(local.fsdp_pre_all_gather)  # type: ignore[attr-defined]
    count = len(signature.parameters)
    if count not in (1, 5):
        raise Parallel3dError(
            f"{label}: {_PRE}{signature} takes {count} arguments; it must take (mesh, outer_size, "
            "outer_stride, module, mp_policy), or (mesh) alone"
        )
    return count


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _all_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _show(kinds: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in kinds)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
