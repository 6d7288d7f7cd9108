"""Layouts: random chains of moves, followed and done; cut by boxes of the sources as a mesh cuts them."""

import random
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from parallel3d.checkpoint.hf.layout import (
    Layout,
    Traced,
    Untraceable,
    in_source,
    whole_of,
    within_source,
)


def joined(rng: random.Random, real: list[Tensor], traced: list[Tensor]) -> tuple[Tensor, Tensor]:
    dim = rng.randint(-real[0].dim(), real[0].dim() - 1)
    how = rng.choice([torch.cat, torch.stack])
    return how(real, dim), how(traced, dim)


def moved(rng: random.Random, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same random move of a tensor and a traced one."""
    dim, other = (rng.randint(-x.dim(), x.dim() - 1) for _ in range(2))
    match rng.choice(["transpose", "chunk", "reshape", "split", "unsqueeze", "squeeze", "unbind"]):
        case "transpose":
            return x.transpose(dim, other).contiguous(), torch.transpose(y, dim, other).contiguous()
        case "chunk":
            parts = rng.randint(1, 3)
            return rng.choice(
                list(zip(x.chunk(parts, dim), torch.chunk(y, parts, dim), strict=True))
            )
        case "reshape":
            a = rng.choice([k for k in range(1, x.numel() + 1) if x.numel() % k == 0])
            b = rng.choice([k for k in range(1, x.numel() // a + 1) if x.numel() // a % k == 0])
            return x.reshape(a, b, -1), y.reshape(a, b, -1)
        case "split" if x.shape[dim] > 1:
            first = rng.randint(1, x.shape[dim] - 1)
            sizes = [first, x.shape[dim] - first]
            return rng.choice(
                list(zip(x.split(sizes, dim), torch.split(y, sizes, dim=dim), strict=True))
            )
        case "unbind" if x.dim() > 1:
            return rng.choice(list(zip(x.unbind(dim), torch.unbind(y, dim), strict=True)))
        case "unsqueeze":
            return x.unsqueeze(dim), y.unsqueeze(dim)
        case _:
            return (x.squeeze(dim), y.squeeze(dim)) if x.dim() > 1 else (x, y)


def assembled(layout: Layout, sources: dict[str, Tensor]) -> Tensor:
    """As a load reads: by offsets and strides."""
    out = torch.full(layout.shape, -1)
    for patch in layout.patches:
        flat = sources[patch.source].contiguous().view(-1)
        target = out[patch.slices()]
        assert (target == -1).all()  # patches don't overlap
        target.copy_(flat.as_strided(patch.counts, patch.strides, patch.offset))
    return out


def by_boxes(layout: Layout, sources: dict[str, Tensor], rng: random.Random) -> Tensor:
    """As an export sends: each source cut into boxes, each box sliced."""
    out = torch.full(layout.shape, -1)
    for patch in layout.patches:
        source = sources[patch.source]
        cuts = [sorted({0, n, rng.randint(0, n)}) for n in source.shape]
        for box in product(*(list(pairwise(cut)) for cut in cuts)):
            offsets, sizes = [low for low, _ in box], [high - low for low, high in box]
            for part in within_source(patch, tuple(source.shape), offsets, sizes):
                for one, alongs in in_source(part, tuple(source.shape)):
                    index = []
                    for along, low, size in zip(alongs, offsets, sizes, strict=True):
                        n = 1 if along.dim is None else one.runs[along.dim].size
                        last = along.start + (n - 1) * along.step
                        assert low <= along.start and last < low + size
                        every = slice(along.start, last + 1, along.step)
                        index.append(along.start if along.dim is None else every)
                    dims = [along.dim for along in alongs if along.dim is not None]
                    order = sorted(range(len(dims)), key=lambda i: dims[i])
                    target = out[one.slices()]
                    assert (target == -1).all()
                    target.copy_(source[tuple(index)].permute(order).reshape(one.counts))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_random_chains(seed: int) -> None:
    rng = random.Random(seed)
    followed = 0
    for _ in range(100):
        shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 3))]
        count = torch.Size(shape).numel()
        sources = {
            f"s{i}": (torch.arange(count) + 1000 * i).reshape(shape)
            for i in range(rng.randint(1, 3))
        }
        traced: list[Tensor] = [
            Traced.of(whole_of(name, value.shape), value.dtype) for name, value in sources.items()
        ]
        x, y = joined(rng, list(sources.values()), traced)
        try:
            for _ in range(rng.randint(0, 5)):
                x, y = moved(rng, x, y)
        except Untraceable:  # every other index, cut into rows: an error that says so
            continue
        assert isinstance(y, Traced) and tuple(x.shape) == tuple(y.shape) == y.origin.shape
        assert torch.equal(assembled(y.origin, sources), x)
        assert torch.equal(by_boxes(y.origin, sources, rng), x)
        followed += 1
    assert followed > 80


def test_what_computes_is_refused() -> None:
    traced = Traced.of(whole_of("a", (4, 4)), torch.float32)
    plain = torch.zeros(4, 4)
    for compute in (
        lambda: traced + 1,
        lambda: traced.to(torch.float64),
        lambda: traced.view(torch.int32),
        lambda: torch.cat([traced, plain]),
        lambda: traced[::2],
        lambda: traced.T @ traced,
        lambda: torch.flip(traced, [0]),
        lambda: torch.roll(traced, 1),
    ):
        with pytest.raises(Untraceable):
            compute()
    for wrong in (
        lambda: traced.reshape(3, 5),
        lambda: torch.cat([traced, Traced.of(whole_of("b", (4, 3)), torch.float32)]),
        lambda: torch.cat([traced, Traced.of(whole_of("b", (4, 4)), torch.float64)]),
        lambda: torch.split(traced, [1, 2]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            wrong()


@pytest.mark.ci
def test_operations_of_transformers() -> None:
    """Those that reorder rows: rotary pairs and interleaved gate and up, there and back."""
    from transformers.core_model_loading import Interleave, PermuteForRope

    class Config:
        num_attention_heads = 3

    for operation in (PermuteForRope(), Interleave(0), Interleave(1)):
        for op in (operation, operation.reverse_op):
            source = torch.arange(24 * 6).reshape(24, 6)
            traced = Traced.of(whole_of("a", source.shape), source.dtype)
            real, found = (
                op.convert({"a": [t]}, source_patterns=["a"], target_patterns=["b"], config=Config)
                for t in (source, traced)
            )
            assert torch.equal(assembled(found["b"].origin, {"a": source}), real["b"])
            rng = random.Random(0)
            assert torch.equal(by_boxes(found["b"].origin, {"a": source}, rng), real["b"])
