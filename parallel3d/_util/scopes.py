"""Scopes of the engine's phases in a profile, and their lines in a log. A step without both runs none of it.

In a profile a phase is ``parallel3d::all_gather (layers.0)``; with ``TORCH_LOGS=fsdp``, torch's own switch,
it is logged as ``FSDP::all_gather (layers.0)``. Phases are named as those of torch's ``fully_shard``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from parallel3d._torch.autograd import untraced

__all__ = ["LOGGER", "put_around"]

LOGGER = logging.getLogger("torch.distributed.fsdp.parallel3d")
"""A child of those that ``TORCH_LOGS=fsdp`` switches on."""

# Method of a unit, a context, a comm or a unit's registrar -> the phase that it is.
_OF_UNIT = {
    "_begin_forward": "pre_forward",
    "_leave_forward": "post_forward",
    "pre_backward": "pre_backward",
    "finish_backward": "post_backward",
}
_OF_CONTEXT = {"prepare_forward": "root_pre_forward", "finish_backward": "root_post_backward"}
_OF_COMM = {
    "issue_gather": "all_gather",
    "finish_gather": "all_gather_copy_out",
    "reduce": "post_backward_reduce",
}
_OF_REGISTRAR = {"before_unit": "pre_forward", "after_unit": "post_forward"}


def put_around(context: Any, *, on: bool) -> None:
    """Wraps the methods that run phases of a ``RunContext`` in profiler scopes; unwraps them if not ``on``.

    The wrappers are attributes of the objects, which hide the methods of their classes.
    """
    owners: list[tuple[Any, dict[str, str], Callable[..., str]]] = [
        (context, _OF_CONTEXT, lambda context, *_: context.root.label),
        (context.comm, _OF_COMM, lambda _, bucket, *__: bucket.unit),
    ]
    registrars = (option for option in context.options if hasattr(option, "before_unit"))
    owners += [(each, _OF_REGISTRAR, lambda _, unit, *__: unit.label) for each in registrars]
    owners += [(unit, _OF_UNIT, lambda unit, *_: unit.label) for unit in context.units]
    for owner, phases, label in owners:
        for method, phase in phases.items():
            vars(owner).pop(method, None)
            if on:
                setattr(owner, method, _scoped(owner, method, phase, label))


def _scoped(owner: Any, method: str, phase: str, label: Callable[..., str]) -> Callable[..., Any]:
    function = getattr(type(owner), method)
    ref = weakref.ref(owner)  # which has what this returns

    @untraced
    def run(*args: Any, **kwargs: Any) -> Any:
        name = f"{phase} ({label(ref(), *args)})"
        LOGGER.debug("FSDP::%s", name)
        with record_function(f"parallel3d::{name}"):
            return function(ref(), *args, **kwargs)

    return run
