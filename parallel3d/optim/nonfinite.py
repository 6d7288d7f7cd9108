"""Which ranks' losses are nan or infinite, asked when a norm that all ranks know has turned out to be."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import timedelta

import torch

from parallel3d.mesh.naming import name_ranks
from parallel3d.mesh.store import next_table, others, wait_for

__all__ = ["name_losses"]

_LIMIT = timedelta(seconds=10)
"""For ranks that have no such error: their gradients are not among those of the norm."""


def name_losses(loss: torch.Tensor | float | None) -> str:
    """What each rank's loss is, for an error's text; through the store, once the step has failed."""
    if loss is None:
        return ". Give clip_grad_norm_ loss=, this rank's, to read here on which ranks it was not"
    own = _in_words(loss)
    found = others()
    if found is None:
        return f". This rank's loss is {own}"
    store, rank, world_size = found
    keys = [str(each) for each in range(world_size)]
    ranks_of: dict[str, list[int]] = {}
    with suppress(RuntimeError):  # the store has gone, with a rank that has raised already
        table = next_table(store, "optim/nonfinite", rank)
        table.set(str(rank), json.dumps(own))
        with suppress(RuntimeError):  # not all come
            wait_for(table, keys, _LIMIT)
        for each, key in enumerate(keys):
            if table.check([key]):
                ranks_of.setdefault(json.loads(table.get(key)), []).append(each)
    if not ranks_of:
        return f". This rank's loss is {own}"
    if set(ranks_of) == {"finite"}:
        return ". The loss is finite on every rank that has said so: its backward has made it"
    texts = [
        f"{what} on {name_ranks(ranks)}" for what, ranks in sorted(ranks_of.items(), reverse=True)
    ]
    return f". The loss is {', '.join(texts)}"


def _in_words(loss: torch.Tensor | float) -> str:
    values = loss.detach().double().flatten().tolist() if isinstance(loss, torch.Tensor) else [loss]
    bad = [value for value in values if not math.isfinite(value)]
    return str(bad[0]) if bad else "finite"
