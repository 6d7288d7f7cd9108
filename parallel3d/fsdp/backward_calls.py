"""What is done around every backward: see ``watch_backwards``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import wrap_backward
from parallel3d.errors import StateError
from parallel3d.fsdp.group import unit_that_watches
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.versions import explain, read_while_free

if TYPE_CHECKING:
    from parallel3d.fsdp.param import ShardedParam

__all__ = ["watch_backwards"]

_watched = False


def watch_backwards() -> None:
    """From now on backwards refuse what they can't do, and their errors name units.

    Hooks on tensors see a backward only when it comes to them. That sharded Parameters were given as its
    ``inputs``, which no graph leads to, and what its error was, is known where it is called alone.
    """
    global _watched
    if not _watched:
        _watched = True
        wrap_backward(_run)


def _run(run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs")
    if inputs:
        _check_inputs(args[0], inputs)
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        message = explain(error) or _explain_recomputed(error)
        if message is None:
            raise
        raise StateError(message) from error


def _explain_recomputed(error: BaseException) -> str | None:
    """The same where checkpointing recomputes within a unit that no tensor has told of the backward."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    label, frames = None, error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        for param in module._parameters.values() if isinstance(module, nn.Module) else ():
            owner = None if param is None else owner_of(param)
            unit = owner.unit() if owner is not None and owner.unit is not None else None
            label = label if unit is None else unit.label
        frames = frames.tb_next
    return None if label is None else read_while_free(label)


def _check_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises if a gradient is wanted of a sharded Parameter whose unit ``outputs`` were computed with."""
    owners = [owner_of(each) for each in inputs if isinstance(each, DTensor)]
    wanted = {id(owner) for owner in owners if owner is not None}
    if not wanted:
        return
    for found in _owners_in(outputs):
        if id(found) in wanted:
            unit = None if found.unit is None else found.unit()
            label = "" if unit is None else unit.label
            raise StateError(
                f"a backward was given parameter {found.name} of unit {label} as one of its inputs. It is "
                "the sharded Parameter; the graph leads to the unsharded one, whose gradient is reduced over "
                "ranks only by a backward without inputs. Call backward() without inputs, with "
                "requires_grad_(False) before the forward on the parameters that are to get none"
            )


def _owners_in(outputs: Iterable[Any]) -> Iterable[ShardedParam]:
    """Of the unsharded parameters that the graph of ``outputs`` leads to."""
    nodes = [
        t.grad_fn if isinstance(t, torch.Tensor) else getattr(t, "node", None) for t in outputs
    ]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield from _owners_of(variable)
        for arrivals in getattr(node, "gates", ()):
            bucket = arrivals.bucket()
            if bucket is not None:
                yield from (bucket.params[index] for index in arrivals.indices)


def _owners_of(variable: torch.Tensor) -> Iterable[ShardedParam]:
    unit = unit_that_watches(variable)
    for bucket in () if unit is None else unit.group.buckets:
        for param, compute in zip(bucket.params, bucket.compute_params, strict=True):
            if compute is variable:
                yield param
