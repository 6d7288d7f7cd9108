"""What errors of a backward mean, in the engine's words; see ``bucket.Versions``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.simulated import inner_tensors
from parallel3d.errors import StateError
from parallel3d.fsdp.bucket import (
    CHANGE_BITS,
    FREE,
    NUMBER_BITS,
    VALUE_BITS,
    Bucket,
    numbered_buckets,
)
from parallel3d.fsdp.group import WATCHED_BY
from parallel3d.fsdp.param import ShardedParam, owner_of

_MISMATCH = re.compile(r"is at version (\d+); expected version (\d+)")
# What comes of asking a view of a subclass for its name in that message.
_NO_STORAGE = re.compile(r"setStorage: .*storage offset (\d+), .* storage of size 0")


def explain(error: BaseException) -> str | None:
    """Returns what has happened where ``error``, of a backward, is about a unit's parameters; else None."""
    return _of_versions(str(error)) or _of_recomputation(error)


def _of_versions(text: str) -> str | None:
    found = _MISMATCH.search(text)
    if found is None:
        missing = _NO_STORAGE.search(text)
        return None if missing is None else _read_while_free(_free_at(int(missing.group(1))))
    now, then = map(int, found.groups())
    if now & FREE or then & FREE:
        bucket = numbered_buckets.get((now if now & FREE else then) & ~FREE)
        return _read_while_free("" if bucket is None else bucket.unit)
    shift = VALUE_BITS + CHANGE_BITS
    if now >> shift != then >> shift or not now >> shift:
        return None
    number = now >> shift
    names = _names(
        bucket for n, bucket in numbered_buckets.items() if n % (1 << NUMBER_BITS) == number
    )
    if not names:
        return None
    return (
        f"unit {names}: parameters that its forward has computed with were changed before the backward (an "
        "optimizer step, an in-place change), so that its gradient can't be computed any more; call backward "
        "before the weights change"
    )


def _free_at(offset: int) -> str:
    """Returns names of the units whose memory is free that have a parameter at storage offset ``offset``."""
    return _names(
        bucket
        for bucket in numbered_buckets.values()
        if any(
            p._version & FREE and int(next(inner_tensors(p)).storage_offset()) == offset
            for p in bucket.compute_params
        )
    )


def _read_while_free(names: str) -> str | None:
    """Returns the message for a backward that has come to the units ``names`` while their memory is free."""
    if not names:
        return None
    return (
        f"unit {names}: a backward reads parameters of the unit while they are freed. It reaches them "
        "through a tensor that the engine does not know of: one that the unit's forward neither returned nor "
        "left on an attribute of its modules (but, for example, in a global list). Return it from "
        "forward, or keep it on an attribute; with set_reshard_after_forward(False) and a single "
        "backward of the sum of all losses it may stay where it is"
    )


def _names(buckets: Iterable[Bucket]) -> str:
    return " or ".join(sorted({bucket.unit for bucket in buckets}))


def _of_recomputation(error: BaseException) -> str | None:
    """Where checkpointing recomputes within a sharded unit: no tensor known to the engine led there."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    label, frames = "", error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        for param in module._parameters.values() if isinstance(module, nn.Module) else ():
            owner = None if param is None else owner_of(param)
            unit = None if owner is None else owner.unit()
            label = label if unit is None else unit.label
        frames = frames.tb_next
    return _read_while_free(label)


def check_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises StateError if a backward of ``outputs`` is to compute gradients of sharded Parameters."""
    owners = [owner_of(each) for each in inputs if isinstance(each, DTensor)]
    wanted = {id(owner) for owner in owners if owner is not None}
    if not wanted:
        return
    for found in _owners_in(outputs):
        if id(found) in wanted:
            unit = found.unit()
            label = "" if unit is None else unit.label
            raise StateError(
                f"a backward was given parameter {found.name} of unit {label} as one of its inputs. It is "
                "the sharded Parameter; the graph leads to the unsharded one, whose gradient is reduced over "
                "ranks only by a backward without inputs. Call backward() without inputs, with "
                "requires_grad_(False) before the forward on the parameters that are to get none"
            )


def _owners_in(outputs: Iterable[Any]) -> Iterable[ShardedParam]:
    """Yields the owners of the unsharded parameters that the graph of ``outputs`` leads to."""
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
        unit = getattr(variable, WATCHED_BY, lambda: None)()
        for bucket in () if unit is None else unit.group.buckets:
            pairs = zip(bucket.params, bucket.compute_params, strict=True)
            yield from (param for param, compute in pairs if compute is variable)
        for arrived in getattr(node, "arrivals", ()):
            bucket = arrived.bucket()
            if bucket is not None:
                yield from (bucket.params[index] for index in arrived.indices)
