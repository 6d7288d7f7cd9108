"""Before values are written into a model: its shards in their places, and memory for what is on meta."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.whole.other_form import check_at_rest
from parallel3d.init import check_can_initialise, give_memory

__all__ = ["bring_to_rest", "mark_changed", "memory_for", "without_values"]


def bring_to_rest(model: nn.Module, what: str) -> None:
    """Nothing is gathered, and the modules hold their sharded Parameters.

    Raises:
        StateError: within a forward, backward or ``full_params``.
    """
    units = list(units_of(model, recurse=True))
    for unit in units:
        check_at_rest(unit, what)
    for unit in units:
        group = unit.group
        if unit.context is not None:
            group.hide()
            group.reshard(unit.context.comm)
        group.adopt()


def without_values(model: nn.Module, loaded: Collection[int]) -> list[tuple[str, nn.Module]]:
    """Name and module of those that have something on meta which will not be loaded.

    Args:
        loaded: ids of the tensors that will be.

    Raises:
        Parallel3dError: one of them has no way to initialise itself.
    """
    found = []
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and t.is_meta and id(t) not in loaded for t in own):
            found.append((name, module))
    check_can_initialise(model, found)
    return found


def memory_for(model: nn.Module, initialised: list[tuple[str, nn.Module]]) -> None:
    """Memory for all that is on meta, if anything is; initial values for the modules ``initialised``."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        give_memory(model, initialised)


def mark_changed(tensor: Tensor) -> None:
    """Tells autograd, and what has gathered it, that values were written into its memory."""
    with torch.no_grad():
        tensor.as_strided((0,), (1,)).zero_()
