"""Dropout: left out where models are compared, and its masks compared by themselves.

Masks can't be those of the plain model: tp ranks must drop different elements of their parts, and the
plain model has no parts. What can be checked is who draws alike: data ranks never, the ranks of one tp
group where they hold the same tensor, and only there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallel3d.testing.differences.fit import Group
from parallel3d.testing.differences.forward import Difference, Forward
from parallel3d.testing.differences.record import FUNCTION, Key, Recorder, Trace, Values

_SURE = 25.0  # nats: that two independent masks are equal has the chance exp(-25)
_BY_ELEMENT = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_OTHER = (F.alpha_dropout, F.feature_alpha_dropout, torch.feature_dropout, torch.alpha_dropout)
_ATTENTION = F.scaled_dot_product_attention
# Positions of dropout_p and training among multi_head_attention_forward's arguments.
_MHA_RATE, _MHA_TRAINING = 10, 13


class DropoutMode(TorchFunctionMode):
    """Within it nothing is dropped; or, with ``masks``, all is dropped as ever and noted.

    Args:
        recorder: told of every dropout.
        masks: whether to drop.
    """

    def __init__(self, recorder: Recorder | None = None, *, masks: bool = False) -> None:
        super().__init__()
        self.recorder, self.masks = recorder, masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _BY_ELEMENT or func in _OTHER:
            return self._elements(func, *args, **kwargs)
        if func is _ATTENTION:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and not self.masks:
            rate, args, kwargs = _without_rate(args, kwargs)
            if rate:
                self._note(func.__name__, args[:3], rate)
        return func(*args, **kwargs)

    def _note(self, name: str, inputs: tuple[Tensor, ...], rate: float, mask: Any = None) -> None:
        if self.recorder is not None:
            self.recorder.function(name, inputs, rate, mask)

    def _elements(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        training = more.get("train", training)
        if training is None:
            training = func in _BY_ELEMENT
        rate = float(p) if training else 0.0
        if not self.masks or not rate or func in _OTHER:
            self._note("dropout", (input,), rate)
            return func(input, p, training) if self.masks else input.clone()
        kept = func(torch.ones_like(input), p, True)
        self._note("dropout", (input,), rate, kept)
        return input * kept

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """With ``masks``: the weights are what it makes of an identity matrix for values."""

        def attend(value: Tensor, rate: float) -> Tensor:
            return _ATTENTION(query, key, value, attn_mask, rate, *rest, **more)

        rate = float(dropout_p)
        if not rate or not self.masks:
            self._note(_ATTENTION.__name__, (query, key, value), rate)
            return attend(value, 0.0)
        length = key.shape[-2]
        one = torch.eye(length, dtype=value.dtype, device=value.device)
        weights = attend(one.expand(*value.shape[:-1], length) + 0 * value[..., :1], rate)
        self._note(_ATTENTION.__name__, (query, key, value), rate, (weights != 0).to(value.dtype))
        repeats = weights.shape[-3] // value.shape[-3] if more.get("enable_gqa") else 1
        return weights @ (value.repeat_interleave(repeats, -3) if repeats > 1 else value)


def _without_rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any, Any]:
    """The rate of an attention (its own calls are not seen), and its arguments without it."""
    training = kwargs.get("training", args[_MHA_TRAINING] if len(args) > _MHA_TRAINING else True)
    if len(args) > _MHA_RATE:
        rate = args[_MHA_RATE]
        args = (*args[:_MHA_RATE], 0.0, *args[_MHA_RATE + 1 :])
    else:
        rate, kwargs = kwargs.get("dropout_p", 0.0), {**kwargs, "dropout_p": 0.0}
    return float(rate) if training else 0.0, args, kwargs


def first_in_dropout(
    plain: Trace, parallel: Trace, masks: Trace, forward: Forward, groups: Sequence[Group]
) -> tuple[Difference | None, int]:
    """The first dropout that is not as it must be, and how many were looked at.

    Args:
        plain, parallel: without dropout.
        masks: of the parallel model, with dropout.
        forward: how the parallel model's tensors fit the plain one's.
    """
    count = 0
    for what, key in plain.events:
        if what != "enter" or FUNCTION not in key[0]:
            continue
        theirs, ours = plain.calls[key], parallel.calls.get(key)
        if ours is not None and not math.isclose(theirs.rate, ours.rate, rel_tol=1e-6):
            drops = f"it drops {ours.rate:g} of the elements, in the plain model {theirs.rate:g}"
            return _found(key, drops, 0), count
        call = masks.calls.get(key)
        if call is None or call.mask is None:
            continue
        count += 1
        fit = forward.fits.get(("enter", key, 0))
        kind = "" if fit is None else fit.kind
        problem = _between_tp(call.mask, kind, call.rate, groups) or _between_data(
            call.mask, call.rate, groups
        )
        if problem:
            return _found(key, problem[0], problem[1]), count
    return _in_one_model(plain, parallel), count


def _in_one_model(plain: Trace, parallel: Trace) -> Difference | None:
    """A dropout that the other model hasn't: neither there, nor as much of it in another place."""
    theirs, ours = _drops(plain), _drops(parallel)
    lost = {key: rate for key, rate in theirs.items() if key not in parallel.calls}
    new = {key: rate for key, rate in ours.items() if key not in plain.calls}
    for key, rate in lost.items():
        if not _among(rate, new.values()):
            return _found(key, f"it drops nothing, in the plain model {rate:g} of the elements", 0)
    for key, rate in new.items():
        in_parts = [theirs[other] for other in theirs if other[0] == key[0]]
        if not _among(rate, [*lost.values(), *in_parts]):
            return _found(key, f"it drops {rate:g} of the elements, in the plain model nothing", 0)
    return None


def _drops(trace: Trace) -> dict[Key, float]:
    return {key: call.rate for key, call in trace.calls.items() if call.rate}


def _among(rate: float, rates: Iterable[float]) -> bool:
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in rates)


def _found(key: Key, what: str, rank: int) -> Difference:
    return Difference(key[0].partition(FUNCTION)[0], "dropout", what, rank=rank)


def _between_tp(
    mask: Values, kind: str, rate: float, groups: Sequence[Group]
) -> tuple[str, int] | None:
    for group in groups:
        first = mask[group.ranks[0]]
        for rank in group.ranks[1:]:
            if kind == "whole" and not _alike(first, mask[rank]):
                ranks = f"{group.ranks[0]} and {rank}"
                return (
                    f"the ranks {ranks} of one tp group drop other elements of the same tensor",
                    rank,
                )
            if kind in ("shard",) and _surely_alike(first, mask[rank], rate):
                ranks = f"{group.ranks[0]} and {rank}"
                return (
                    f"the ranks {ranks} of one tp group drop the same elements of their parts",
                    rank,
                )
    return None


def _between_data(mask: Values, rate: float, groups: Sequence[Group]) -> tuple[str, int] | None:
    for i, group in enumerate(groups):
        for other in groups[:i]:
            a, b = other.ranks[0], group.ranks[0]
            if _surely_alike(mask[a], mask[b], rate):
                return f"the data ranks of ranks {a} and {b} drop the same elements", b
    return None


def _alike(a: Tensor, b: Tensor) -> bool:
    count = min(a.numel(), b.numel())
    return bool(torch.equal(a.flatten()[:count] != 0, b.flatten()[:count] != 0))


def _surely_alike(a: Tensor, b: Tensor, rate: float) -> bool:
    """Alike, and of so many elements that it is no chance."""
    count = min(a.numel(), b.numel())
    drawn = int(((a.flatten()[:count] != 0) | (b.flatten()[:count] != 0)).sum())
    nats = -drawn * math.log(rate**2 + (1 - rate) ** 2) if 0 < rate < 1 else 0.0
    return nats > _SURE and _alike(a, b)
