"""What a recomputation in backward takes from its forward instead of computing, or sending, it again.

A collective that computes its result within ``kept`` is not issued again where activations are recomputed
selectively (``parallel3d.activations``): the first pass keeps the result, the recomputation returns it.
Everywhere else ``kept`` only calls. A collective of any axis is written so::

    return kept("all_to_all", lambda: start_and_wait(x, axis))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallel3d._util.forwards import packages_of

ResultT = TypeVar("ResultT", Tensor, list[Tensor], tuple[Tensor, ...])


class RecomputePass(Protocol):
    """A forward whose activations are recomputed, or its recomputation, while it runs."""

    recomputes: bool  # whether it is a recomputation
    paused: int  # within how many ``kept`` it is, where operations are none of its own

    def keep(self, what: str, result: Any) -> None:
        """In the forward: keeps ``result`` of the collective ``what``."""

    def take(self, what: str) -> Any:
        """In the recomputation: returns the next result kept, which must be of the collective ``what``."""

    def keep_no_value(self, tensor: Tensor) -> None:
        """In the forward: keeps only the shape of ``tensor`` if the policy would keep it."""


class _Passes(threading.local):
    """The passes under way on this thread, outermost first. (An accelerator's backward has another.)"""

    def __init__(self) -> None:
        self.under_way: list[RecomputePass] = []


_passes = _Passes()


def begin_pass(new: RecomputePass) -> None:
    """Makes ``new`` the innermost pass on this thread, until ``end_pass``."""
    _passes.under_way.append(new)


def end_pass(ended: RecomputePass) -> None:
    """Ends the pass ``ended``, and those inside it that an exception has left open."""
    under_way = _passes.under_way
    del under_way[under_way.index(ended) :]


def innermost() -> RecomputePass | None:
    """Returns the innermost pass on this thread; None if there is none, or while compiling."""
    if torch.compiler.is_compiling():  # the compiler keeps what the policy tells it to
        return None
    under_way = _passes.under_way
    return under_way[-1] if under_way else None


@contextmanager
def paused() -> Iterator[None]:
    """Context manager whose operations belong to none of the passes under way."""
    under_way = list(_passes.under_way)
    for each in under_way:
        each.paused += 1
    try:
        yield
    finally:
        for each in under_way:
            each.paused -= 1


def kept(what: str, compute: Callable[[], ResultT]) -> ResultT:
    """Returns ``compute()``; in a recomputation returns the forward's result instead of calling it.

    Args:
        what: name of the operation; a recomputation that comes to another one is an error.
        compute: issues a collective and returns its result, which may be still under way if the caller waits
            before reading it. The result must not be a tensor that ``compute`` was given.

    Raises:
        StateError: the recomputation comes to another operation than the forward did.
    """
    if innermost() is None:
        return compute()
    return _kept(what, compute, len(_passes.under_way) - 1)


def _kept(what: str, compute: Callable[[], ResultT], depth: int) -> ResultT:
    if depth < 0:
        return compute()
    current = _passes.under_way[depth]
    if current.recomputes:
        taken: ResultT = current.take(what)
        return taken
    current.paused += 1
    try:
        result = _kept(what, compute, depth - 1)  # a pass around it may be a recomputation
    finally:
        current.paused -= 1
    current.keep(what, result)
    return result


def with_hooks_of(block: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``recompute`` wrapped so that it runs with the forward hooks that modules in ``block`` have
    now: some exist during one forward only (peft's of aLoRA), and are gone when it is recomputed."""
    had: list[tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]] = []
    modules: list[Any] = [*block._modules.values()]
    for module in modules:
        if module is None:
            continue
        own = module.__dict__
        modules += own["_modules"].values()
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            if hooks := own[kind]:
                by_name = own[f"{kind}_with_kwargs"]
                had.append((hooks, by_name, dict(hooks), dict(by_name)))
    return partial(_with_hooks, had, recompute) if had else recompute


def _with_hooks(had: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    added = []
    for hooks, by_name, before, before_by_name in had:
        for key, hook in before.items():
            if key not in hooks and "parallel3d" not in packages_of(hook):
                hooks[key] = hook
                added.append((hooks, key))
                if key in before_by_name:
                    by_name[key] = True
                    added.append((by_name, key))
    try:
        return recompute(*args, **kwargs)
    finally:
        for hooks, key in added:
            hooks.pop(key, None)


def only_summed(tensor: Tensor) -> None:
    """Tells the passes under way that only the next collective reads ``tensor``: a recomputation takes that
    collective's result, and so does not need the tensor's values."""
    if innermost() is not None:
        for each in _passes.under_way:
            each.keep_no_value(tensor)
