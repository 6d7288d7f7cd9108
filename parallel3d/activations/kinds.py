"""The kinds of ``parallelize(activation_checkpointing=...)``: checked, named, and applied to blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from parallel3d._util.forwards import wrap_forward
from parallel3d.activations.offload import ActivationOffload, attach, moved_to_host
from parallel3d.activations.selective import Policy, keep_costly, partly_recomputed, recomputed
from parallel3d.errors import Parallel3dError

Kind = bool | Literal["selective", "offload"] | ActivationOffload | Policy
"""False: everything is kept. True: blocks are recomputed. ``"selective"``: but for matmuls, attention and
collectives; a policy function: but for what it names, and collectives. ``"offload"``, or its settings."""

_CHOICES = (
    'it must be False, True (recompute each block), "selective", "offload" (or an ActivationOffload), or a '
    "policy function (ctx, op, *args, **kwargs) -> CheckpointPolicy, as "
    "torch.utils.checkpoint.create_selective_checkpoint_contexts takes"
)


def check_kind(value: Any, engine: str) -> None:
    """Raises Parallel3dError unless ``value`` is a valid ``activation_checkpointing`` argument that
    ``engine`` supports."""
    known = isinstance(value, (bool, ActivationOffload)) or value in ("selective", "offload")
    function = callable(value) and not isinstance(value, type) and not isinstance(value, nn.Module)
    if not known and not function:
        hint = {"full": "True", "none": "False"}.get(value) if isinstance(value, str) else None
        meant = f" {value!r} is {hint} here;" if hint else ""
        raise Parallel3dError(f"activation_checkpointing is {value!r};{meant} {_CHOICES}")
    if function and not known:
        _check_policy(value)
    if engine == "torch" and is_offload(value):
        raise Parallel3dError(
            f'activation_checkpointing={value!r} is not possible with engine="torch"; use True or '
            '"selective", or engine="parallel3d"'
        )


def _check_policy(policy: Policy) -> None:
    try:
        inspect.signature(policy).bind(None, None)
    except TypeError as error:
        raise Parallel3dError(
            f"activation_checkpointing is the function {name_of(policy)}, which can't be called with "
            f"(ctx, op, *args, **kwargs): {error}; {_CHOICES}"
        ) from error
    except ValueError:  # of a function that has none to read
        return


def is_offload(value: Any) -> bool:
    """Whether ``value`` is ``"offload"`` or an ``ActivationOffload``."""
    return isinstance(value, ActivationOffload) or value == "offload"


def name_of(value: Kind) -> str:
    """Returns a text for ``value`` that is equal on all ranks with equal values, to compare ranks by."""
    if callable(value) and not isinstance(value, (bool, ActivationOffload)):
        inner = getattr(value, "func", value)  # of a functools.partial
        return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    return repr(value) if isinstance(value, ActivationOffload) else str(value)


def recompute_blocks(blocks: Sequence[nn.Module], value: Kind) -> None:
    """Wraps the forwards of ``blocks`` so that backward recomputes them, as ``value`` says; nothing for False
    and offload."""
    if value is False or is_offload(value):
        return
    wrapper: Callable[..., Any] = recomputed
    if value is not True:
        policy: Any = keep_costly if value == "selective" else value
        wrapper = partly_recomputed(policy)
    for block in blocks:
        wrap_forward(block, wrapper, ("activations", value))


def move_activations(blocks: Sequence[nn.Module], value: Kind) -> Callable[[], None]:
    """Wraps the forwards of ``blocks`` if ``value`` is offload. Returns a function to call when the blocks
    have become units, which starts it."""
    if not is_offload(value):
        return lambda: None
    settings = value if isinstance(value, ActivationOffload) else ActivationOffload()
    for block in blocks:
        wrap_forward(block, moved_to_host, "offload")
    return lambda: attach(blocks, settings)
