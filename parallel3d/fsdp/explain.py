"""What errors of a forward or backward mean, in the engine's words; see ``bucket.Versions``."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.simulated import inner_tensors
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import (
    CHANGE_BITS,
    FREE,
    NUMBER_BITS,
    VALUE_BITS,
    Bucket,
    numbered_buckets,
)
from parallel3d.fsdp.group import WATCHED_BY
from parallel3d.fsdp.mixed import MIXED, explain_mixed
from parallel3d.fsdp.param import ShardedParam, owner_of

_MISMATCH = re.compile(r"is at version (\d+); expected version (\d+)")
# What comes of asking a view of a subclass for its name in that message.
_NO_STORAGE = re.compile(r"setStorage: .*storage offset (\d+), .* storage of size 0")


def explain(error: BaseException) -> str | None:
    """Returns what has happened where ``error``, of a backward, is about a unit's parameters; else None."""
    return _of_versions(str(error)) or _of_recomputation(error) or explain_mixed(error)


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
    if MIXED not in str(error):
        return None
    units = [unit for module in _modules_on_stack(error) for unit in _units_at_rest_in(module)]
    return _read_while_free(units[-1].label if units else "")


def explain_call(error: BaseException) -> str | None:
    """Returns why a forward ended in ``error``: which module was called without its unit or was given a
    DTensor, or which buffers have no values; None if it is none of these."""
    if isinstance(error, Parallel3dError):
        return None
    stack = list(_modules_on_stack(error))
    if "meta" in str(error):
        names = (
            [name for name, buffer in stack[0].named_buffers() if buffer.is_meta] if stack else []
        )
        return without_values(names, "are still on the meta device") if names else None
    if MIXED not in str(error):
        return None
    running = set(map(id, stack))
    for unit in (unit for module in stack for unit in _units_at_rest_in(module)):
        if any(id(module) in running for module in unit.modules):
            continue  # its forward ran: it has ended since, by this error
        inside = {id(m): name for top in unit.modules for name, m in top.named_modules() if name}
        name = next((inside[id(module)] for module in stack if id(module) in inside), None)
        if name is not None:
            block = _NUMBER.sub("*", unit.label)
            return (
                f"{name} of unit {unit.label} was called outside the unit's forward, while the unit's "
                "parameters are sharded. It must be a unit of its own: "
                f'parallelize(..., units=["{block}", "{block}.{name}"]), or fully_shard of it before that of '
                "the module around it"
            )
    return _of_input(error)


def _of_input(error: BaseException) -> str | None:
    """Where a module with plain parameters was given a DTensor, as ``PrepareModuleInput`` of torch does."""
    paths: dict[int, str] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            continue
        paths = paths or {id(m): name for name, m in module.named_modules()}
        given = (name for name in inspect.getargs(frame.f_code).args if name != "self")
        for name in given:
            value = frame.f_locals.get(name)
            # Where it came in: modules inside are given it, or what was computed from it.
            if isinstance(value, DTensor) and owner_of(value) is None:
                return (
                    f"{paths.get(id(module)) or 'the model'} ({type(module).__name__}) was given a DTensor "
                    f"as {name!r}, {value.placements} on {value.device_mesh}, but its parameters are plain: "
                    "give it value.to_local(), or where one of torch's styles made it, "
                    "PrepareModuleInput(..., use_local_output=True)"
                )
    return None


def without_values(buffers: Sequence[str], why: str) -> str:
    """Returns the message of a forward that would read ``buffers``, which have no values."""
    shown = ", ".join(buffers[:8]) + (f" and {len(buffers) - 8} more" if len(buffers) > 8 else "")
    return (
        f"buffers {shown} {why}, without values. A state dict does not have non-persistent buffers (rotary "
        "tables, say), and to_empty does not compute them. Call parallel3d.materialize(model) instead of "
        "to_empty, before values are loaded, or parallel3d.checkpoint.load_hf; or fill them as the module's "
        "__init__ does"
    )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _modules_on_stack(error: BaseException) -> Iterator[nn.Module]:
    """Yields the modules in whose methods ``error`` was raised, the outermost first."""
    frames = error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frames = frames.tb_next


def _units_at_rest_in(module: nn.Module) -> Iterator[Any]:
    """Yields the unit of each of the module's own parameters that is sharded."""
    for param in module._parameters.values():
        owner = None if param is None else owner_of(param)
        unit = None if owner is None else owner.unit()
        if unit is not None:
            yield unit


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
