"""Dropout: switched off while models are compared, and its masks compared by themselves.

Masks can't be those of the plain model: tp ranks must drop different elements of their shards, and the plain
model has no shards. What can be checked is which ranks draw the same mask: data ranks never, the ranks of one
tp group if and only if they hold the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d._trace.record import Functions, Sdpa
from parallel3d.testing.differences.fit import FitGroup
from parallel3d.testing.differences.forward import Difference, Forward
from parallel3d.testing.differences.record import (
    FUNCTION,
    ForwardRecorder,
    ForwardTrace,
    Key,
    Values,
)

_SURE = 25.0  # nats: two independent masks are equal with probability exp(-25)
_BY_ELEMENT = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_OTHER = (F.alpha_dropout, F.feature_alpha_dropout, torch.feature_dropout, torch.alpha_dropout)
_ATTENTION = F.scaled_dot_product_attention
_MHA = signature(F.multi_head_attention_forward)


class DropoutMode(Functions):
    """Runs torch's functions without dropout or, with ``masks``, with it; ``recorder`` gets the calls."""

    def __init__(self, recorder: ForwardRecorder | None = None, *, masks: bool = False) -> None:
        super().__init__(self.function)
        self.recorder, self.masks = recorder, masks

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``func``, without its dropout or, with ``masks``, with it; the mask is then recorded."""
        if func in _BY_ELEMENT or func in _OTHER:
            return self._elements(func, *args, **kwargs)
        if func is _ATTENTION:
            return self._attention(Sdpa(*args, **kwargs))
        if func is F.multi_head_attention_forward and not self.masks:
            # The calls inside are not seen: it runs without its rate.
            given = _MHA.bind(*args, **kwargs)
            given.apply_defaults()
            rate, given.arguments["dropout_p"] = float(given.arguments["dropout_p"]), 0.0
            args, kwargs = given.args, given.kwargs
            if rate and given.arguments["training"]:
                self._note(func.__name__, args[:3], rate)
        return func(*args, **kwargs)

    def _note(self, name: str, inputs: tuple[Tensor, ...], rate: float, mask: Any = None) -> None:
        if self.recorder is not None:
            self.recorder.function(name, inputs, rate, mask)

    def _elements(
        self, func: Any, input: Tensor, p: float = 0.5, training: Any = None, *_: Any, **more: Any
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

    def _attention(self, call: Sdpa) -> Tensor:
        """Calls attention; with ``masks``, an identity matrix as values shows which weights are dropped."""
        rate, value, length = float(call.dropout_p), call.value, call.key.shape[-2]
        if not rate or not self.masks:
            self._note(_ATTENTION.__name__, call[:3], rate)
            return _ATTENTION(**call._replace(dropout_p=0.0)._asdict())
        one = torch.eye(length, dtype=value.dtype, device=value.device)
        ones = one.expand(*value.shape[:-1], length) + 0 * value[..., :1]
        weights = _ATTENTION(**call._replace(value=ones)._asdict())
        self._note(_ATTENTION.__name__, call[:3], rate, (weights != 0).to(value.dtype))
        repeats = weights.shape[-3] // value.shape[-3] if call.enable_gqa else 1
        return weights @ (value.repeat_interleave(repeats, -3) if repeats > 1 else value)


def first_in_dropout(forward: Forward, masks: ForwardTrace) -> tuple[Difference | None, int]:
    """Returns the first dropout with a wrong rate or mask, and how many masks were compared.

    ``forward`` was recorded without dropout, ``masks``, of the parallel model only, with it.
    """
    plain, parallel, count = forward.plain, forward.parallel, 0
    for what, key in plain.events:
        if what != "enter" or FUNCTION not in key[0]:
            continue
        rate, call, drawn = plain.calls[key].rate, parallel.calls.get(key), masks.calls.get(key)
        if call is not None and not math.isclose(rate, call.rate, rel_tol=1e-6):
            drops = f"it drops {call.rate:g} of the elements, in the plain model {rate:g}"
            return _difference(key, drops), count
        if drawn is None or drawn.mask is None:
            continue
        count += 1
        fit = forward.fits.get(("enter", key, 0))
        kind = "" if fit is None else fit.kind
        for text, rank in _wrong_masks(drawn.mask, kind, drawn.rate, forward.groups):
            return _difference(key, text, rank), count
    return _in_one_model(plain, parallel), count


def _in_one_model(plain: ForwardTrace, parallel: ForwardTrace) -> Difference | None:
    """Returns a dropout that one model lacks, unless it has one of the same rate in another place."""
    plain_rates, rates = (
        {key: call.rate for key, call in trace.calls.items() if call.rate}
        for trace in (plain, parallel)
    )
    removed = {key: rate for key, rate in plain_rates.items() if key not in parallel.calls}
    added = {key: rate for key, rate in rates.items() if key not in plain.calls}
    for key, rate in removed.items():
        if not _among(rate, added.values()):
            drops = f"it drops nothing, in the plain model {rate:g} of the elements"
            return _difference(key, drops)
    for key, rate in added.items():
        of_module = [r for k, r in plain_rates.items() if k[0] == key[0]]
        if not _among(rate, [*removed.values(), *of_module]):
            drops = f"it drops {rate:g} of the elements, in the plain model nothing"
            return _difference(key, drops)
    return None


def _among(rate: float, rates: Iterable[float]) -> bool:
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in rates)


def _difference(key: Key, what: str, rank: int = 0) -> Difference:
    return Difference(key[0].partition(FUNCTION)[0], "dropout", what, rank=rank)


def _wrong_masks(
    mask: Values, kind: str, rate: float, groups: Sequence[FitGroup]
) -> Iterator[tuple[str, int]]:
    """Yields (text, rank) for ranks that must draw the same mask and don't, or the reverse; ``kind`` says how
    tp ranks hold the input, see ``Fit``."""
    for group in groups:
        first = group.ranks[0]
        for rank in group.ranks[1:]:
            ranks = f"the ranks {first} and {rank} of one tp group"
            if kind == "whole" and not _alike(mask[first], mask[rank]):
                yield f"{ranks} drop other elements of the same tensor", rank
            if kind == "shard" and _surely_alike(mask[first], mask[rank], rate):
                yield f"{ranks} drop the same elements of their parts", rank
    firsts = [group.ranks[0] for group in groups]
    for i, b in enumerate(firsts):
        for a in firsts[:i]:
            if _surely_alike(mask[a], mask[b], rate):
                yield f"the data ranks of ranks {a} and {b} drop the same elements", b


def _alike(a: Tensor, b: Tensor) -> bool:
    count = min(a.numel(), b.numel())
    return bool(torch.equal(a.flatten()[:count] != 0, b.flatten()[:count] != 0))


def _surely_alike(a: Tensor, b: Tensor, rate: float) -> bool:
    """Returns whether two masks are equal and have too many elements for it to be chance."""
    count = min(a.numel(), b.numel())
    drawn = int(((a.flatten()[:count] != 0) | (b.flatten()[:count] != 0)).sum())
    nats = -drawn * math.log(rate**2 + (1 - rate) ** 2) if 0 < rate < 1 else 0.0
    return nats > _SURE and _alike(a, b)
