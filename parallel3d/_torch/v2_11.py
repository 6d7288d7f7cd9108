"""Features of torch 2.13 that torch 2.11 lacks. On a later one the functions do nothing.

Two classes, DTensor subclasses with operations of their own, matrix products of simulated ranks of uneven
sizes, and outputs of the fake group.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

IS_2_11 = not hasattr(torch_fsdp, "DataParallelMeshDims")


@dataclass
class DataParallelMeshDims:
    """Names the axes of a mesh over which ``fully_shard`` shards and replicates.

    Attributes:
        shard, replicate: one name, or a tuple of names whose axes count as one; at least one is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs shard, replicate or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        names = self.replicate
        return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass
class ShardPlacementResult:
    """The dim and mesh of one parameter, as ``shard_placement_fn`` may return it.

    Attributes:
        placement: the dim to shard; None for the default.
        mesh_info: the mesh to shard over: a ``DeviceMesh``, or torch's ``FSDPMeshInfo``.
    """

    placement: Shard | None
    mesh_info: Any


def call_torch_dispatch_of(kind: type[DTensor]) -> None:
    """Makes operations on tensors of class ``kind`` call its ``__torch_dispatch__``.

    torch 2.11 handles a subclass of DTensor as a DTensor. Where its cache has no entry for the operands, as
    always for a placement of ours, it calls two methods of its dispatcher, and returns the second one's
    result unless that is an ``OutputSharding``: these methods are replaced.
    """
    if not IS_2_11:
        return
    dispatcher: Any = DTensor._op_dispatcher
    unwrap = dispatcher.unwrap_to_op_info
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    handlers = dispatcher._custom_op_handlers

    def unwrap_to_op_info(op: Any, args: Any, kwargs: Any) -> Any:
        return _OWN if _has_instance(kind, args, kwargs) else unwrap(op, args, kwargs)

    def propagate_or_run(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        if info is _OWN:
            return kind.__torch_dispatch__(op, (kind,), args, kwargs)
        return propagate(op, args, kwargs, info, try_cache)

    def or_own(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(op: Any, args: Any, kwargs: Any) -> Any:
            if _has_instance(kind, args, kwargs):
                return kind.__torch_dispatch__(op, (kind,), args, kwargs)
            return handler(op, args, kwargs)

        return handle

    dispatcher.unwrap_to_op_info = unwrap_to_op_info
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate_or_run
    dispatcher._custom_op_handlers = {op: or_own(handler) for op, handler in handlers.items()}


_OWN = object()


def _has_instance(kind: type[torch.Tensor], args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    items = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return kind in map(type, chain.from_iterable(items))


@contextmanager
def fake_outputs_written() -> Iterator[None]:
    """Context manager in which the fake group's reductions and exchanges write this rank's input to the
    output, as on 2.13. 2.11 leaves the output as it was, perhaps uninitialized memory."""
    if not IS_2_11:
        yield
        return
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name, kernel in _FAKES.items():
            for device in ("CPU", "CUDA"):
                library.impl(name, kernel, device, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _write(outputs: Any, inputs: Any, *_: Any) -> Any:
    """Copies each of ``inputs`` to its output; returns a finished work."""
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    for output, source in zip(outputs, inputs, strict=True):
        rows = min(len(output), len(source))  # a reduction's first chunk; exchanges may be uneven
        output[:rows].copy_(source[:rows])
    return FakeWork().boxed()


def _write_and_return(outputs: Any, inputs: Any, *_: Any) -> Any:
    return outputs, _write(outputs, inputs)


_FAKES = {
    "alltoall_base_": _write,
    "alltoall_": _write_and_return,
    "_reduce_scatter_base_": _write_and_return,
    "reduce_scatter_tensor_coalesced_": _write,
}


def uneven_matmuls() -> AbstractContextManager[Any]:
    """Returns a context manager in which matmuls of simulated ranks may differ in size by rank."""
    return MatmulsOfSimulatedRanks() if IS_2_11 else nullcontext()


class MatmulsOfSimulatedRanks(TorchFunctionMode):
    """Lets matrix products of simulated ranks have sizes that differ by rank.

    2.11 converts such sizes to plain numbers where an operand has three dims or more, which raises.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS and not kwargs and any(isinstance(a, LocalTensor) for a in args):
            return _PRODUCTS[func](*args)
        return func(*args, **(kwargs or {}))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if x.dim() <= 2:
        return F.linear(x, weight, bias)
    flat = F.linear(x.flatten(0, -2), weight, bias)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dim() <= 2 and b.dim() <= 2:
        return torch.matmul(a, b)
    if b.dim() == 1:
        return _matmul(a, b.unsqueeze(-1)).squeeze(-1)
    if a.dim() == 1:
        return _matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() == 2:
        return torch.mm(a.flatten(0, -2), b).reshape(*a.shape[:-1], b.shape[-1])
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    a = a.expand(*batch, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:])
    product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3))
    return product.reshape(*batch, a.shape[-2], b.shape[-1])


def _broadcast(a: Any, b: Any) -> list[Any]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    missing = len(longer) - len(shorter)
    pairs = zip(longer, [1] * missing + list(shorter), strict=True)
    return [y if isinstance(x, int) and x == 1 else x for x, y in pairs]


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda b, a: _matmul(a, b),
}


def for_compiled_function(output: torch.Tensor) -> torch.Tensor:
    """Returns ``output``, which a collective has written, in a form that an autograd function may return.

    In a graph compiled by torch 2.11 that is a copy: an output written in place would get no gradient.
    """
    return output.clone() if IS_2_11 and torch.compiler.is_compiling() else output
