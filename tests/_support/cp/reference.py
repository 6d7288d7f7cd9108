"""Attention of whole sequences in float64, and cases in which the parts on ``cp`` must equal it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from _support.tp.tp_world import real_world
from parallel3d.cp import CpAxis, Sequence, attention

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A call of attention.

    Attributes:
        documents: lengths of the documents of each sample; None: one.
        masked: how many first keys of each sample are masked by ``key_mask``; None: there is no mask.
        options: further arguments of ``attention``.
    """

    length: int = 13
    heads: int = 4
    kv_heads: int = 4
    batch: int = 2
    channels: int = 4
    values: int | None = None
    causal: bool = True
    documents: tuple[tuple[int, ...], ...] | None = None
    masked: tuple[int, ...] | None = None
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "causal": Case(),
    "bidirectional": Case(causal=False),
    "window": Case(options={"window": 3}),
    "wide window": Case(options={"window": 9}),
    "bidirectional window": Case(causal=False, options={"window": (2, 3)}),
    "left window": Case(causal=False, options={"window": 4}),
    "documents": Case(documents=((5, 8), (1, 3, 9))),
    "bidirectional documents": Case(causal=False, documents=((5, 8), (1, 3, 9))),
    "documents and window": Case(documents=((5, 8), (1, 3, 9)), options={"window": 2}),
    "grouped": Case(heads=8, kv_heads=2),
    "one kv head": Case(heads=4, kv_heads=1),
    "softcap": Case(options={"softcap": 1.5}),
    "softcap, grouped, window": Case(kv_heads=2, options={"softcap": 1.5, "window": 5}),
    "sinks": Case(sinks=True),
    "sinks, grouped, window": Case(heads=8, kv_heads=4, sinks=True, options={"window": 4}),
    "key mask": Case(masked=(3, 0)),
    "bidirectional key mask": Case(causal=False, masked=(5, 0)),
    "mask function": Case(options={"mask_function": lambda b, h, q, k: (q + k + h + b) % 3 > 0}),
    "scale": Case(options={"scale": 0.3}),
    "other value channels": Case(values=6),
    "one token": Case(length=1),
    "heads that cp does not divide": Case(heads=5, kv_heads=5),
    "groups that cp cuts": Case(heads=6, kv_heads=2, sinks=True, options={"softcap": 2.0}),
    "groups that cp cuts, masked": Case(
        heads=9,
        kv_heads=3,
        options={"mask_function": lambda b, h, q, k: (k <= q) & ((q + k + 2 * h) % 3 > 0)},
    ),
    "no key at all": Case(options={"mask_function": lambda b, h, q, k: (q > 3) & (k <= q)}),
    "odd length": Case(length=31, batch=1),
}


def axis_of(cp: int) -> CpAxis:
    """The axis cp of a mesh that has no other."""
    return CpAxis(init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",)))


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def document_numbers(case: Case) -> Tensor | None:
    """(B, length): which document each position is of."""
    if case.documents is None:
        return None
    rows = [[n for n, size in enumerate(sizes) for _ in range(size)] for sizes in case.documents]
    return torch.tensor(rows)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, sinks, and what weighs the output in the loss."""
    b, s, d = case.batch, case.length, case.channels
    values = case.values or d
    return (
        sample(b, case.heads, s, d, seed=1),
        sample(b, case.kv_heads, s, d, seed=2),
        sample(b, case.kv_heads, s, values, seed=3),
        sample(case.heads, seed=4),
        sample(b, case.heads, s, values, seed=5),
    )


def allowed(case: Case) -> Tensor:
    """(B, H, S, S): which keys each query sees."""
    s = case.length
    q, k = torch.arange(s)[:, None], torch.arange(s)
    mask = (k <= q) if case.causal else (k < s).expand(s, s)
    window = case.options.get("window")
    if isinstance(window, int):
        mask = mask & (k > q - window)
    elif window is not None:
        mask = mask & (k >= q - window[0]) & (k <= q + window[1])
    mask = mask.expand(case.batch, case.heads, s, s)
    numbers = document_numbers(case)
    if numbers is not None:
        mask = mask & (numbers[:, :, None] == numbers[:, None])[:, None]
    if case.masked is not None:
        mask = mask & (k >= torch.tensor(case.masked)[:, None, None, None])
    function = case.options.get("mask_function")
    if function is not None:
        b = torch.arange(case.batch)[:, None, None, None]
        mask = mask & function(b, torch.arange(case.heads)[:, None, None], q, k)
    return mask


def whole(case: Case) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the sinks, of plain attention."""
    q, k, v, sinks, weights = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    mask, options = allowed(case), case.options
    if not case.sinks and "softcap" not in options:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.get("scale"), enable_gqa=True
        )
    else:
        group = case.heads // case.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.mT * options.get("scale", case.channels**-0.5)
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = scores.masked_fill(~mask, float("-inf"))
        if case.sinks:
            column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        out = scores.softmax(-1)[..., : case.length] @ v
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]


def on_ranks(
    world: Any, cp: int, case: Case, kind: str, balanced: bool, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """The same from the parts on ``cp`` ranks, put together.

    Args:
        tensors: ``inputs`` of the case, made outside of simulated ranks.
    """
    axis = axis_of(cp)
    sequence = sequence_of(case, cp, balanced)
    q, k, v, sinks, weights = tensors
    parts = [part_of(world, axis, sequence, x).requires_grad_() for x in (q, k, v)]
    own_sinks = world.map(lambda rank: sinks.clone()).requires_grad_()
    options = dict(case.options)
    if case.sinks:
        options["sinks"] = own_sinks
    if case.masked is not None:
        seen = torch.arange(case.length) >= torch.tensor(case.masked)[:, None]
        options["key_mask"] = sequence.cut(seen, 1, axis, False)
    out = attention(*parts, axis, sequence, causal=case.causal, kind=kind, **options)
    (out * part_of(world, axis, sequence, weights)).sum().backward()
    found = [out, *(part.grad for part in parts)]
    wholes = [joined(world, sequence, x.detach()) for x in found]
    grad = own_sinks.grad
    total = torch.zeros_like(sinks) if grad is None else sum(world.per_rank(grad))
    return [*wholes, total]


def sequence_of(case: Case, cp: int, balanced: bool) -> Sequence:
    bare = Sequence(case.length, cp, balanced)
    numbers = document_numbers(case)
    if numbers is None:
        return bare
    return Sequence(case.length, cp, balanced, bare.pad(numbers, 1, -1))


def part_of(world: Any, axis: CpAxis, sequence: Sequence, x: Tensor) -> Tensor:
    return sequence.cut(world.map(lambda rank: x), 2, axis).detach()


def joined(world: Any, sequence: Sequence, part: Tensor) -> Tensor:
    """The whole sequence of what the ranks hold."""
    with world.paused():
        rows = torch.cat(world.per_rank(part), 2)
        return rows[:, :, sequence.inverse()][:, :, : sequence.length]


def check(
    enter: Callable[[int], AbstractContextManager[Any]],
    cp: int,
    name: str,
    kind: str,
    balanced: bool,
) -> None:
    """Raises unless output and gradients on the ranks of ``enter(cp)`` are those of plain attention."""
    case = CASES[name]
    wanted, tensors = whole(case), inputs(case)
    with enter(cp) as world:
        got = on_ranks(world, cp, case, kind, balanced, tensors)
    largest = max(float(x.abs().max()) for x in wanted[1:])  # the gradient of a lone key is zero
    for what, mine, theirs in zip(("out", "dq", "dk", "dv", "dsinks"), got, wanted, strict=True):
        of = float(theirs.abs().max()) if what == "out" else largest
        error = (mine - theirs).abs().max() / of
        assert error <= TOLERANCE, (name, kind, cp, balanced, what, float(error))


def check_on_processes(cp: int, kind: str) -> None:
    """Every case, where this process is one of ``cp``."""
    for name in CASES:
        for balanced in (True, False):
            check(real_world, cp, name, kind, balanced)
