"""What torch 2.11 lacks of 2.13.

Classes; DTensor subclasses with operations of their own; products of simulated ranks of uneven sizes; outputs
of the fake group.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass
class DataParallelMeshDims:
    """Which axes of a whole mesh ``fully_shard`` shards and replicates over.

    Attributes:
        shard, replicate: one name, or several whose axes count as one. At least one of the two.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs shard, replicate or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """``replicate`` as a tuple."""
        return _names(self.replicate)


@dataclass
class ShardPlacementResult:
    """One parameter's dim and mesh, as ``shard_placement_fn`` may return it.

    Attributes:
        placement: the dim to shard; None for the default.
        mesh_info: the mesh to shard over: a ``DeviceMesh``, or torch's ``FSDPMeshInfo``.
    """

    placement: Shard | None
    mesh_info: Any


def call_torch_dispatch_of(kind: type[DTensor]) -> None:
    """Has the operations on tensors of class ``kind`` go to its ``__torch_dispatch__``.

    2.11 takes a subclass of DTensor for a DTensor. Where its cache knows nothing of the operands, which it
    never does of a placement of ours, it asks two methods of its dispatcher one after the other, and takes
    what the second one returns for the operation's result, unless that is a description of one.
    """
    dispatcher: Any = DTensor._op_dispatcher
    describe = dispatcher.unwrap_to_op_info
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    handlers = dispatcher._custom_op_handlers

    def unwrap_to_op_info(op: Any, args: Any, kwargs: Any) -> Any:
        return _OWN if _is_among(kind, args, kwargs) else describe(op, args, kwargs)

    def propagate_or_run(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        if info is _OWN:
            return kind.__torch_dispatch__(op, (kind,), args, kwargs)
        return propagate(op, args, kwargs, info, try_cache)

    def or_own(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(op: Any, args: Any, kwargs: Any) -> Any:
            if _is_among(kind, args, kwargs):
                return kind.__torch_dispatch__(op, (kind,), args, kwargs)
            return handler(op, args, kwargs)

        return handle

    dispatcher.unwrap_to_op_info = unwrap_to_op_info
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate_or_run
    dispatcher._custom_op_handlers = {op: or_own(handler) for op, handler in handlers.items()}


_OWN = object()


def _is_among(kind: type[torch.Tensor], args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            if any(type(item) is kind for item in value):
                return True
        elif type(value) is kind:
            return True
    return False


@contextmanager
def fake_outputs_written() -> Iterator[None]:
    """Within it the fake group's reductions and exchanges write what this rank has put in, as on 2.13.

    2.11's leave their outputs as they were: memory that nobody has written, and other numbers each time.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel that takes another's place
        for name, kernel in _FAKES.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _write(output: torch.Tensor, given: torch.Tensor) -> None:
    written = min(
        len(output), len(given)
    )  # of a reduction the first chunk; exchanges may be uneven
    output[:written].copy_(given[:written])


def _fake_exchange(output: torch.Tensor, given: torch.Tensor, *_: Any) -> Any:
    _write(output, given)
    return FakeWork().boxed()


def _fake_exchanges(outputs: list[torch.Tensor], given: list[torch.Tensor], *_: Any) -> Any:
    for output, each in zip(outputs, given, strict=True):
        _write(output, each)
    return outputs, FakeWork().boxed()


def _fake_reduce_scatter(output: torch.Tensor, given: torch.Tensor, *_: Any) -> Any:
    _write(output, given)
    return output, FakeWork().boxed()


def _fake_reduce_scatters(outputs: list[torch.Tensor], given: list[torch.Tensor], *_: Any) -> Any:
    return _fake_exchanges(outputs, given)[1]


_FAKES = {
    "alltoall_base_": _fake_exchange,
    "alltoall_": _fake_exchanges,
    "_reduce_scatter_base_": _fake_reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _fake_reduce_scatters,
}


class MatmulsOfSimulatedRanks(TorchFunctionMode):
    """Within it matrix products of simulated ranks may have sizes that differ by rank.

    2.11 asks for such sizes as plain numbers where an operand has three dims or more, which is an error.
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
