"""Whether an optimizer is elementwise, or treats parameters one by one: found by trying it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel3d import _dry_run
from parallel3d._compat_simulated import simulation_off
from parallel3d.errors import Parallel3dError

__all__ = ["check_elementwise", "check_one_by_one"]

_SHAPE = (4, 6)
_STEPS = 2


def check_elementwise(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    group: dict[str, Any],
    device: torch.device,
) -> None:
    """Steps a small matrix whole, and in two flat halves: an elementwise optimizer does the same to both.

    On the shards of a parameter any other one computes something else than on the whole: norms, factors
    or orthogonal matrices of parts. Each half has an optimizer of its own, as on two ranks: one that looks
    at all its parameters together is not elementwise either.

    Args:
        options: what it is constructed with.
        group: what the first group of parameters has of its own, which the class may ask for.
        device: where it will step, which some options depend on.

    Raises:
        Parallel3dError: it is not elementwise, or does not step on plain dense tensors at all.
        Exception: what the class itself raises for the options.
    """
    name = optimizer_class.__name__
    # Not as any rank in particular, and without a trace in the user's random numbers.
    real = _dry_run.real()
    with simulation_off(), real, torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        start, *grads = torch.randn(_STEPS + 1, *_SHAPE, generator=generator, dtype=torch.float64)
        whole = [start.clone()]
        halves = [half.clone() for half in start.flatten().chunk(2)]
        states = []
        for parts in (whole, halves):
            params = [nn.Parameter(part.to(device)) for part in parts]
            if parts is whole:  # what the class says of the options is for the user
                optimizer_class([{**group, "params": params}], **options)
            try:
                optimizers = [
                    optimizer_class([{**group, "params": [p]}], **options) for p in params
                ]
                _steps(optimizers, params, grads)
            except Exception as error:
                raise Parallel3dError(
                    f"optim.local: {name} can't step on plain local tensors; a trial on a matrix of "
                    f"{_SHAPE}, whole and in parts, ended with {type(error).__name__}: {error}. Elementwise "
                    "optimizers work (AdamW, SGD, ...), and with matrix=True those that need whole parameters"
                ) from error
            parts[:] = [param.detach().cpu() for param in params]
            states += [o.state[p] for o, p in zip(optimizers, params, strict=True)]
    moved = (whole[0] - start).abs().max()
    apart = (whole[0].flatten() - torch.cat(halves)).abs().max()
    if not apart <= 1e-9 * moved.clamp(min=1e-30) or not _is_elementwise(states[0]):
        raise Parallel3dError(
            f"optim.local: {name} is not elementwise: it does something else to a whole matrix than to its "
            "parts, so that on shards it would not do what it does to the plain model; give matrix=True, and "
            "it is given whole parameters"
        )


def check_one_by_one(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    group: dict[str, Any],
) -> None:
    """Steps two small matrices, on the CPU, with one optimizer, and with two: each must come out the same.

    A class that fails at this is not judged: the user's parameters may have what it needs.

    Raises:
        Parallel3dError: it looks at all its parameters together.
    """
    ends, real = [], _dry_run.real()
    eager = torch.compiler.set_stance("force_eager")  # these sizes are no example of the user's
    rng = torch.random.fork_rng(devices=[])
    with simulation_off(), real, rng, torch.inference_mode(False), eager:
        generator = torch.Generator().manual_seed(0)
        both = torch.randn(_STEPS + 1, 2, *_SHAPE, generator=generator)
        both[:, 1] *= 3
        for apart in (False, True):
            torch.default_generator.manual_seed(0)  # whoever draws random numbers draws the same
            params = [nn.Parameter(start.clone()) for start in both[0]]
            try:
                shares = [[p] for p in params] if apart else [params]
                optimizers = [optimizer_class([{**group, "params": s}], **options) for s in shares]
                _steps(optimizers, params, list(both[1:]))
            except Exception:  # of a trial on sizes and a device that are not the user's
                return
            ends.append(torch.stack([p.detach() for p in params]))
    moved = (ends[0] - both[0]).abs().max()
    if (ends[0] - ends[1]).abs().max() > 1e-4 * moved:
        raise Parallel3dError(
            f"optim.local: {optimizer_class.__name__} does something else to a parameter where there are "
            "others; the ranks step on different ones, so that it would not do what it does to the plain "
            "model; use one that treats parameters one by one"
        )


def _set_lr(optimizer: Optimizer) -> None:
    """A rate that shows: the user's may be zero at first, or vanish beside rounding."""
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if lr is not None:
            group["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, torch.Tensor) else 0.1


def _steps(
    optimizers: list[Optimizer], params: list[nn.Parameter], grads: list[torch.Tensor]
) -> None:
    """With one for all ``params``, or one for each."""
    for optimizer in optimizers:
        _set_lr(optimizer)
    for grad in grads:
        parts = grad.flatten().split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view(param.shape).to(param.device)
        for optimizer in optimizers:
            optimizer.step()


def _is_elementwise(state: dict[str, Any]) -> bool:
    """Whether each entry is as large as the parameter, or a single number."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(tuple(t.shape) == _SHAPE or t.dim() == 0 for t in tensors)
