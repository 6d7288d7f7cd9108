"""Private torch names of simulated ranks (``torch.distributed._local_tensor``).

A tensor of simulated ranks holds one tensor for each rank; a number that differs by rank is a ``SymInt``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    local_tensor_mode,
)
from torch.utils._mode_utils import no_dispatch

if not hasattr(LocalIntNode, "str"):
    # rms_norm and others format the sizes for an error message; on 2.13 a size that differs by
    # simulated rank lacks the method they call.
    LocalIntNode.str = LocalIntNode._str  # type: ignore[attr-defined]


def ranks_are_simulated() -> bool:
    """Whether a ``LocalTensorMode`` is active, in which one process simulates all ranks."""
    return local_tensor_mode() is not None


def leave_operators(names: Iterable[str], kind: type[torch.Tensor]) -> None:
    """Makes operators ``names`` of simulated ranks' tensors defer to a right operand of class ``kind``."""
    for name in names:
        own = getattr(LocalTensor, name)

        def operate(self: LocalTensor, other: Any, own: Callable[..., Any] = own) -> Any:
            return NotImplemented if isinstance(other, kind) else own(self, other)

        setattr(LocalTensor, name, operate)


def tensors_by_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor] | None:
    """Returns {rank: tensor} of a tensor of simulated ranks; None for an ordinary tensor."""
    return tensor._local_tensors if isinstance(tensor, LocalTensor) else None


combine_ranks: Callable[[dict[int, torch.Tensor]], torch.Tensor] = LocalTensor
"""Returns one tensor of simulated ranks, the inverse of ``tensors_by_rank``."""


def simulation_paused(mode: LocalTensorMode) -> bool:
    """Whether ``mode`` was entered but is suspended now by its ``disable()``."""
    return mode._disable


def make_simulated(by_rank: dict[int, torch.Tensor], ranks: frozenset[int]) -> torch.Tensor:
    """Returns a ``LocalTensor`` with the tensors ``by_rank``, one for each of ``ranks``.

    If all have the same sizes, strides and type it stores these: torch's own constructor makes a tensor that
    calls Python for them at each use, several times an operation.
    """
    first = next(iter(by_rank.values()))
    shape, strides, dtype, layout = first.shape, first.stride(), first.dtype, first.layout
    alike = not (first.is_conj() or first.is_neg()) and all(
        type(tensor) is torch.Tensor
        and tensor.shape == shape
        and tensor.stride() == strides
        and tensor.dtype == dtype
        and tensor.layout == layout
        and not tensor.requires_grad
        for tensor in by_rank.values()
    )
    if not alike:
        return LocalTensor(by_rank)  # raises for tensors that can't be combined
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


# Raises instead of reading a null pointer; only 2.13 has it.
_forbid_data_pointer = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)


def update_sizes(tensor: torch.Tensor, op: OpOverload, args: Any, kwargs: Any) -> None:
    """Updates the stored sizes of ``tensor`` after ``op`` has changed them in place on every rank."""
    if getattr(tensor, "_knows_sizes", False):
        with no_dispatch():
            op(*args, **kwargs)  # on the wrapper, which has no data


def value_on_rank(value: Any, rank: int) -> Any:
    """Returns ``value``, an argument of an operation, as simulated rank ``rank`` has it."""
    kind = type(value)
    if kind is LocalTensor:
        return value._local_tensors[rank]
    if kind is list or kind is tuple or kind is torch.Size:
        values = [value_on_rank(item, rank) for item in value]
        return values if kind is list else tuple(values)
    if kind is torch.SymInt:
        node = value.node
        if isinstance(node, LocalIntNode):
            return node._local_ints[rank]
        constant = node.maybe_as_int()  # the only rank's
        return int(value) if constant is None else constant
    return value


def ranks_of(value: torch.SymInt) -> Iterator[int]:
    """Yields the ranks that ``value``, a number that differs by simulated rank, has values for."""
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


def simulation_off() -> AbstractContextManager[None]:
    """Returns a context manager in which no ranks are simulated: new tensors are ordinary ones."""
    mode = local_tensor_mode()
    return nullcontext() if mode is None else mode.disable()


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors of all simulated ranks in rank order; of an ordinary tensor, itself."""
    if isinstance(tensor, LocalTensor):
        yield from (tensor._local_tensors[rank] for rank in sorted(tensor._local_tensors))
    else:
        yield tensor


def call_by_rank(fn: Callable[..., Any], *args: Any, random: bool = False) -> Any:
    """Returns ``fn(*args)``, called for each of simulated ranks with its own tensors and numbers.

    ``fn`` may therefore branch on a rank. It computes without autograd and issues no collective.

    Args:
        args: tensors, numbers, lists and tuples of them, None, or objects that are the same on all ranks.
        random: whether ``fn`` draws random numbers.

    Returns: what ``fn`` returns: a tensor, None, or a tuple of these. Tensors may differ in size by rank.
    """
    mode = local_tensor_mode()
    if mode is None or not any(isinstance(a, LocalTensor) for a in _flat(args)):
        return fn(*args)
    results: dict[int, Any] = {}

    def call(rank: int) -> None:
        _computing.append(rank)
        try:
            results[rank] = fn(*(value_on_rank(a, rank) for a in args))
        finally:
            _computing.pop()

    with mode.disable():
        if random:
            for_each_rank(call)
        else:
            for rank in sorted(mode.ranks):
                call(rank)
        return join_ranks(results, frozenset(mode.ranks))


# The simulated rank that ``call_by_rank`` calls a function for, innermost last.
_computing: list[int] = []


def value_here(value: Any) -> Any:
    """Returns ``value`` as the rank has it that ``call_by_rank`` simulates now; elsewhere unchanged."""
    return value_on_rank(value, _computing[-1]) if _computing else value


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def join_ranks(results: dict[int, Any], ranks: frozenset[int]) -> Any:
    """Joins ``results``, rank -> its tensor, list, tuple or None, to one value of that kind, in which each
    tensor is one of all simulated ``ranks``; None stays None."""
    first = next(iter(results.values()))
    if isinstance(first, torch.Tensor):
        return make_simulated(results, ranks)
    if first is None:
        return None
    at = range(len(first))
    parts = [join_ranks({rank: r[i] for rank, r in results.items()}, ranks) for i in at]
    return parts if isinstance(first, list) else tuple(parts)
