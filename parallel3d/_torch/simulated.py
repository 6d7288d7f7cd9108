"""The private torch names of simulated ranks (``torch.distributed._local_tensor``), in one place.

A tensor of simulated ranks holds one tensor for each; a number that differs by rank is a ``SymInt``.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    local_tensor_mode,
)
from torch.utils._mode_utils import no_dispatch

if not hasattr(LocalIntNode, "str"):
    # rms_norm and others prepare an error message with the sizes, and ask each for its text; on
    # 2.13 a size that differs by simulated rank has none under the name they use.
    LocalIntNode.str = LocalIntNode._str  # type: ignore[attr-defined]


def ranks_are_simulated() -> bool:
    """Whether a ``LocalTensorMode`` is active: one process plays all ranks."""
    return local_tensor_mode() is not None


def tensors_by_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor] | None:
    """What each simulated rank holds; None for an ordinary tensor."""
    return tensor._local_tensors if isinstance(tensor, LocalTensor) else None


def combine_ranks(by_rank: dict[int, torch.Tensor]) -> torch.Tensor:
    """The tensor that each simulated rank holds its own of; the other way than ``tensors_by_rank``."""
    return LocalTensor(by_rank)


def simulation_paused(mode: LocalTensorMode) -> bool:
    """Whether ``mode`` is active but suspended by its ``disable()``."""
    return mode._disable


def make_simulated(by_rank: dict[int, torch.Tensor], ranks: frozenset[int]) -> torch.Tensor:
    """A ``LocalTensor`` of ``by_rank``, which has one tensor for each of ``ranks``.

    Where all have the same sizes, strides and type it knows them itself: torch's own constructor makes
    one that asks Python for them at each use, several times an operation.
    """
    tensors = iter(by_rank.values())
    first = next(tensors)
    shape, strides, dtype, layout = first.shape, first.stride(), first.dtype, first.layout
    alike = not (first.requires_grad or first.is_conj() or first.is_neg())
    for tensor in tensors:
        if (
            tensor.shape != shape
            or tensor.stride() != strides
            or tensor.dtype != dtype
            or tensor.layout != layout
            or tensor.requires_grad
        ):
            alike = False
    if not alike or any(type(tensor) is not torch.Tensor for tensor in by_rank.values()):
        return LocalTensor(by_rank)  # which refuses what can't be
    simulated = torch.Tensor._make_wrapper_subclass(
        LocalTensor, shape, strides=strides, dtype=dtype, device=first.device, layout=layout
    )
    if _forbid_data_pointer is not None:
        _forbid_data_pointer(simulated)
    simulated._local_tensors = by_rank
    simulated._ranks = ranks
    simulated._size = list(shape)
    simulated.__dict__["_knows_sizes"] = True
    return simulated


# Only 2.13 has it: an error instead of a null pointer's contents.
_forbid_data_pointer = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)


def update_sizes(tensor: torch.Tensor, op: OpOverload, args: Any, kwargs: Any) -> None:
    """After ``op`` has changed ``tensor``'s sizes or strides in place on every simulated rank."""
    if getattr(tensor, "_knows_sizes", False):
        with no_dispatch():
            op(*args, **kwargs)  # on the wrapper, which has sizes and no data


def value_on_rank(value: Any, rank: int) -> Any:
    """What an operation's argument is on one simulated rank."""
    kind = type(value)
    if kind is LocalTensor:
        return value._local_tensors[rank]
    if kind is list or kind is tuple or kind is torch.Size:
        values = [value_on_rank(item, rank) for item in value]
        return values if kind is list else tuple(values)
    if kind is torch.SymInt:
        node = value.node
        return node._local_ints[rank] if isinstance(node, LocalIntNode) else int(value)
    return value


def ranks_of(value: torch.SymInt) -> Iterator[int]:
    """The simulated ranks that ``value``, a number that differs by rank, has a value for."""
    node = value.node
    assert isinstance(node, LocalIntNode)
    return iter(node._local_ints)


def for_each_rank(fn: Callable[[int], None]) -> None:
    """Runs ``fn(rank)`` for each simulated rank, with its random state."""
    mode = local_tensor_mode()
    assert mode is not None
    before = torch.get_rng_state()
    for rank, (state, devices) in list(mode._per_rank_rng_states.items()):
        torch.set_rng_state(state)
        fn(rank)
        mode._per_rank_rng_states[rank] = (torch.get_rng_state(), devices)
    torch.set_rng_state(before)


def uneven_matmuls() -> AbstractContextManager[Any]:
    """Within it products of simulated ranks' matrices may have sizes that differ by rank."""
    if hasattr(torch_fsdp, "DataParallelMeshDims"):  # since 2.12
        return nullcontext()
    from parallel3d._torch.v2_11 import MatmulsOfSimulatedRanks

    return MatmulsOfSimulatedRanks()


def simulation_off() -> AbstractContextManager[None]:
    """Within it tensors are plain, also where ranks are simulated: for what no rank does as such."""
    mode = local_tensor_mode()
    return nullcontext() if mode is None else mode.disable()


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The real tensors behind ``tensor``: itself, or one per simulated rank, in their order."""
    if isinstance(tensor, LocalTensor):
        by_rank = tensor._local_tensors
        yield from (by_rank[rank] for rank in sorted(by_rank))
    else:
        yield tensor
