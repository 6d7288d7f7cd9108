"""Gradient accumulation that all-reduces over the replicate axis once, on the last micro-batch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch import nn

from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import FSDPModule

__all__ = ["accumulate"]

T = TypeVar("T")
_END = object()


def accumulate(model: nn.Module, micro_batches: Iterable[T]) -> Iterator[T]:
    """Yields ``micro_batches``; backwards of all but the last put HSDP's all-reduce off.

    Gradients are still reduce-scattered each time, so memory stays that of one micro-batch::

        for tokens in p3d.optim.accumulate(model, micro_batches):
            (loss_of(model(tokens)) / len(micro_batches)).backward()
        optimizer.step()

    Args:
        model: a model that ``parallelize`` or ``fully_shard`` was applied to.
        micro_batches: any iterable; read one ahead.

    Raises:
        Parallel3dError: ``model`` has no sharded unit, or there is no micro-batch.
    """
    if not isinstance(model, nn.Module) or not isinstance(micro_batches, Iterable):
        raise Parallel3dError(
            f"accumulate was given {type(model).__name__} and {type(micro_batches).__name__}; it needs a "
            "module and an iterable of micro-batches"
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise Parallel3dError(
            f"accumulate: {type(model).__name__} is not parallel; call parallel3d.parallelize first, or "
            "accumulate a plain model without it"
        )
    return _deferring(units, iter(micro_batches))


def _deferring(units: Sequence[FSDPModule], source: Iterator[T]) -> Iterator[T]:
    current = next(source, _END)
    if current is _END:
        raise Parallel3dError("accumulate: there is no micro-batch; give at least one")
    try:
        while current is not _END:
            following = next(source, _END)
            _set_all_reduce(units, following is _END)
            yield current  # type: ignore[misc]
            current = following
    finally:
        _set_all_reduce(units, True)


def _set_all_reduce(units: Sequence[FSDPModule], wanted: bool) -> None:
    for unit in units:
        unit.set_requires_all_reduce(wanted, recurse=False)
