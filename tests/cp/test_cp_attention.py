"""Attention on the ranks of ``cp`` equals plain attention of the whole sequences, in float64."""

from typing import Any

import pytest
import torch
from _support.cp import reference
from _support.cp.reference import (
    CASES,
    TOLERANCE,
    Case,
    axis_of,
    check,
    check_on_processes,
    inputs,
    part_of,
    sample,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d.cp import CpAxis, Sequence, attention, blocks
from parallel3d.errors import PlanError
from parallel3d.testing import GlooPool
from parallel3d.testing.worlds import local_world

KINDS = ("ulysses", "gather", "ring")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equal_on_four_simulated_ranks(name: str, kind: str) -> None:
    check(local_world, 4, name, kind, True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cp", "balanced"), [(2, True), (2, False), (3, True), (4, False), (5, True)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equal_on_simulated_ranks(name: str, kind: str, cp: int, balanced: bool) -> None:
    if kind == "ulysses" and CASES[name].heads < cp:
        with pytest.raises(PlanError, match="whole heads"):
            check(local_world, cp, name, kind, balanced)
        return
    check(local_world, cp, name, kind, balanced)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_on_processes(gloo_pool: GlooPool, kind: str) -> None:
    gloo_pool.run(check_on_processes, 2, kind, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_on_more_processes(gloo_pool: GlooPool, kind: str, cp: int) -> None:
    gloo_pool.run(check_on_processes, cp, kind, world_size=cp)


@pytest.mark.parametrize("name", ["causal", "softcap, grouped, window", "documents"])
def test_one_rank_communicates_nothing(name: str) -> None:
    for kind in KINDS:
        check(local_world, 1, name, kind, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["causal", "window", "documents", "softcap", "mask function", "key mask"]
)
def test_equal_in_small_blocks(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sequences are computed that are too long for their scores to be in memory."""
    monkeypatch.setattr(blocks, "ELEMENTS", 40)
    monkeypatch.setattr(blocks, "QUERIES", 3)
    check(local_world, 2, name, kind, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_function_may_hold_tensors_of_simulated_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(options={"mask_function": None})
    seen = torch.arange(13) % 4 > 0
    plain = Case(options={"mask_function": lambda b, h, q, k: seen[k] | (q == k)})
    wanted, tensors = reference.whole(plain), inputs(plain)
    with local_world(2) as world:
        own = world.map(lambda rank: seen)
        case = Case(options={"mask_function": lambda b, h, q, k: own[k] | (q == k)})
        got = reference.on_ranks(world, 2, case, kind, True, tensors)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def run(world: Any, call: Any, cp: int = 2, length: int = 13) -> list[list[torch.Tensor]]:
    """What the ranks have: the result of ``call(q, k, v, axis, sequence)`` and the gradients."""
    with world.paused():
        tensors = inputs(Case(length=length))[:3]
    axis, sequence = axis_of(cp), Sequence(length, cp, True)
    parts = [part_of(world, axis, sequence, x).requires_grad_() for x in tensors]
    out = call(*parts, axis, sequence)
    out.square().sum().backward()
    return [world.per_rank(x.detach()) for x in (out, *(part.grad for part in parts))]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_bits(kind: str) -> None:
    def plain(q: Any, k: Any, v: Any, axis: CpAxis, sequence: Sequence) -> torch.Tensor:
        return attention(q, k, v, axis, sequence, causal=True, kind=kind, softcap=3.0)  # type: ignore[arg-type]

    def again(*args: Any) -> torch.Tensor:
        return checkpoint(plain, *args, use_reentrant=False)

    with local_world(2) as world:
        results = [run(world, call) for call in (plain, again)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_other_dtypes(kind: Any, dtype: torch.dtype) -> None:
    q, k, v = (sample(1, 4, 32, 8, seed=n).to(dtype) for n in range(3))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*wide, is_causal=True).square().sum().backward()
    with local_world(4) as world:
        axis, sequence = axis_of(4), Sequence(32, 4, True)
        parts = [part_of(world, axis, sequence, x).requires_grad_() for x in (q, k, v)]
        out = attention(*parts, axis, sequence, causal=True, kind=kind)
        assert out.dtype is dtype
        out.square().sum().backward()
        got = [
            reference.joined(world, sequence, x.detach()) for x in (out, *(p.grad for p in parts))
        ]
    eps = torch.finfo(dtype).eps
    for mine, theirs in zip(got, [wanted, *(x.grad for x in wide)], strict=True):
        assert mine.dtype is dtype
        assert (mine.double() - theirs).abs().max() / theirs.abs().max() <= 4 * eps


def check_compiled(kind: Any, backend: str) -> None:
    axis, sequence = axis_of(2), Sequence(16, 2, True)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).double()
    x = sequence.cut(sample(2, 16, 8, seed=1), 1, axis).requires_grad_()
    weights = sequence.cut(sample(2, 16, 8, seed=2), 1, axis)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = layer(x).view(2, 8, 2, 4).transpose(1, 2)
        out = attention(h, 2 * h, h + 1, axis, sequence, causal=True, kind=kind)
        return layer(out.transpose(1, 2).reshape(2, 8, 8))

    found = []
    for run in (forward, torch.compile(forward, fullgraph=True, backend=backend)):
        for _ in range(2):
            out = run(x)
            grads = torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])
        found.append((out, *grads))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_one_compiled_graph(kind: str, gloo_pool: GlooPool) -> None:
    gloo_pool.run(check_compiled, kind, "aot_eager", world_size=2)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_what_comes_in(kind: Any, options: dict[str, Any]) -> None:
    found = []
    for autocast in (True, False):
        with local_world(2) as world:
            axis, sequence = axis_of(2), Sequence(16, 2, True)
            with world.paused():
                wholes = [sample(1, 4, 16, 8, seed=n).float() for n in range(3)]
            parts = [part_of(world, axis, sequence, x).requires_grad_() for x in wholes]
            given = parts if autocast else [part.bfloat16() for part in parts]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = attention(*given, axis, sequence, causal=True, kind=kind, **options)
                out.float().square().sum().backward()
            results = [out, *(part.grad for part in parts)]
            found.append([world.per_rank(x.detach()) for x in results])
    assert found[0][0][0].dtype is torch.bfloat16
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_may_come_from_a_view(kind: Any) -> None:
    """(B, rows, heads, D) with heads and rows swapped, as models have them."""
    found = []
    for view in (True, False):
        with local_world(2) as world:

            def call(*args: Any, view: bool = view) -> torch.Tensor:
                *tensors, axis, sequence = args
                if view:
                    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
                return attention(*tensors, axis, sequence, causal=True, kind=kind)

            found.append(run(world, call))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
