"""PackedDTensor: what keeps rows goes through, position by position; what would mix them raises."""

import copy
import io
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d._layout.packed import (
    PackedDTensor,
    PackedShard,
    cut_packed,
    packing_of,
)
from parallel3d._layout.packing import Packing, cut_sections
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
from parallel3d.errors import Parallel3dError
from parallel3d.testing.worlds import LocalWorld, local_world

# The second is what torch 2.11 says of a plain tensor, before it asks the packed one.
OTHER_ROWS = "other rows|got mixed torch.Tensor and DTensor|used beside a plain tensor"
EVEN = cut_sections(0, (4, 4), 2)
UNEVEN = cut_sections(0, (3, 6), 2, (1, 2))
WHOLE = {
    (packing, seed): torch.randn(
        packing.size, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for packing in (EVEN, UNEVEN)
    for seed in (0, 1)
}


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    with local_world(2) as made:
        yield made


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def packed(packing: Packing, seed: int = 0) -> tuple[PackedDTensor, torch.Tensor]:
    """(it, the whole)."""
    whole = WHOLE[packing, seed]
    placements, on = (PackedShard(packing),), mesh()
    spec = make_spec(on, placements, whole.shape, whole.dtype)
    return make_dtensor(cut_packed(whole, on, placements), spec), whole


def plain(whole: torch.Tensor, placement=None) -> DTensor:
    made = DTensor.from_local(whole, mesh(), [Replicate()], run_check=False)
    return made if placement is None else made.redistribute(placements=[placement])


def check(world: LocalWorld, found: torch.Tensor, want: torch.Tensor, packing: Packing) -> None:
    assert isinstance(found, PackedDTensor) and found.packing == packing
    assert found.dtype == want.dtype
    same(world, found.full_tensor(), want)


def same(world: LocalWorld, found: torch.Tensor, want: torch.Tensor) -> None:
    """On every rank; what was computed on plain tensors is the same on all."""
    for got, wanted in zip(world.per_rank(found), world.per_rank(want), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)


ELEMENTWISE = {
    "mul": lambda a, b: a * 2 + b / 3,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "clamp": lambda a, b: a.clamp(min=0).addcmul(a, b, value=0.5),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "full_like": lambda a, b: torch.full_like(a, 3.0, dtype=torch.float32),
    "to": lambda a, b: a.to(torch.float32),
    "clone": lambda a, b: a.clone().detach(),
    "data": lambda a, b: a.data,
    "view": lambda a, b: a.view_as(b).expand(a.shape),
    "new_zeros": lambda a, b: a.new_zeros(a.shape),
    "new_full": lambda a, b: a.new_full(a.shape, 2.0, dtype=torch.float32),
    "isfinite": lambda a, b: a.isfinite(),
    "scalar": lambda a, b: a * torch.tensor(2.0, dtype=a.dtype),
}


@pytest.mark.parametrize("packing", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(world: LocalWorld, name, packing) -> None:
    (a, x), (b, y) = packed(packing, 0), packed(packing, 1)
    fn = ELEMENTWISE[name]
    check(world, fn(a, b), fn(x, y), packing)


def test_what_is_broadcast_over_rows(world: LocalWorld) -> None:
    a, x = packed(UNEVEN)
    row = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    check(world, a * plain(row), x * row, UNEVEN)
    check(world, a * plain(row[None]), x * row, UNEVEN)
    expanded = row[None].expand(9, 3)
    check(world, a * plain(row[None]).expand(9, 3), x * expanded, UNEVEN)


@pytest.mark.parametrize("packing", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_in_place_gives_the_same_object(world: LocalWorld, packing) -> None:
    (a, x), (b, y) = packed(packing, 0), packed(packing, 1)
    local = get_local_tensor(a)
    assert a.add_(b).mul_(2) is a
    assert a.copy_(a.clone()) is a
    assert torch.add(a, b, out=a) is a
    assert get_local_tensor(a) is local
    check(world, a, (x + y) * 2 + y, packing)
    assert a.zero_() is a and a.fill_(1.0) is a


def test_lists_are_marked_position_by_position(world: LocalWorld) -> None:
    (a, x), (b, y) = packed(EVEN), packed(UNEVEN)
    z = WHOLE[EVEN, 1]
    c = plain(z, Shard(0))
    made = torch._foreach_mul([c, b, a], 2.0)
    assert type(made[0]) is DTensor
    check(world, made[1], y * 2, UNEVEN)
    check(world, made[2], x * 2, EVEN)
    torch._foreach_add_([c, b, a], made)
    check(world, b, y * 3, UNEVEN)
    check(world, a, x * 3, EVEN)
    norms = torch._foreach_norm([a, c, b])
    for norm, want in zip(norms, (x * 3, z * 3, y * 3), strict=True):
        assert type(norm) is DTensor
        same(world, norm.full_tensor(), want.norm())


@pytest.mark.parametrize("packing", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_numbers_of_all(world: LocalWorld, packing) -> None:
    a, x = packed(packing)
    for fn in (torch.sum, torch.norm, torch.max, torch.linalg.vector_norm, lambda t: t.amax()):
        found = fn(a)
        assert type(found) is DTensor
        same(world, found.full_tensor(), fn(x))
    for fn in (torch.amin, torch.min):
        same(world, fn(a).full_tensor(), fn(x))
    for bound in (x.min(), x.median(), x.max()):  # on one rank only, on both
        for fn in (torch.all, torch.any):
            for found, want in (
                (a <= bound, x <= bound),
                (a < bound, x < bound),
                (a == bound, x == bound),
            ):
                for each in world.per_rank(fn(found).full_tensor()):
                    assert each.dtype is torch.bool and bool(each) == bool(fn(want))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_numbers_of_all_where_a_rank_holds_nothing(sizes) -> None:
    """It would raise alone, and the others wait for it."""
    rows, parts = sizes
    packing = Packing(0, (((0, rows),), ()))
    with local_world(2 * parts) as world:
        on = init_device_mesh("cpu", (parts, 2), mesh_dim_names=("shard", "tp"))
        whole = -WHOLE[EVEN, 0][:rows].abs()
        placements = (Replicate() if parts == 1 else Shard(1), PackedShard(packing))
        for dtype in (torch.float64, torch.int64):
            x = (whole * 100).to(dtype)
            made = make_dtensor(
                cut_packed(x, on, placements), make_spec(on, placements, x.shape, dtype)
            )
            found = [(fn(made), fn(x)) for fn in (torch.max, torch.min, torch.amax, torch.amin)]
            if dtype.is_floating_point:
                orders = (math.inf, -math.inf, -2.0, 1.0)
                norm = torch.linalg.vector_norm
                found += [(norm(made, p), norm(x, p)) for p in orders]
                found += [(torch._foreach_norm([made], p)[0], norm(x, p)) for p in orders]
            for got, want in found:
                same(world, got.full_tensor(), want)
            with pytest.raises(Parallel3dError, match="rows"):
                made.amax(1)


MIXING = {
    "matmul": lambda a: a @ a,
    "transpose": lambda a: a.t(),
    "row": lambda a: a[0],
    "index": lambda a: a[torch.tensor([0, 1])],
    "view": lambda a: a.view(-1),
    "cat": lambda a: torch.cat([a, a]),
    "stack": lambda a: torch.stack([a, a]),
    "sum over rows": lambda a: a.sum(0),
    "sum over columns": lambda a: a.sum(1),
    "chunk": lambda a: a.chunk(2),
    "softmax": lambda a: a.softmax(0),
    "sort": lambda a: a.sort(),
    "outer": lambda a: a + plain(torch.ones(2, 1, 1, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_raises(world: LocalWorld, name) -> None:
    a, _ = packed(EVEN)
    with pytest.raises(Parallel3dError, match=r"full_tensor\(\)"):
        MIXING[name](a)


def test_operands_that_lie_apart_raise(world: LocalWorld) -> None:
    a, x = packed(EVEN)
    other = make_dtensor(
        get_local_tensor(a),
        make_spec(mesh(), (PackedShard(cut_sections(0, (2, 6), 2)),), x.shape, x.dtype),
    )
    for wrong in (other, plain(x, Shard(0)), plain(x), x):
        with pytest.raises((Parallel3dError, RuntimeError), match=OTHER_ROWS):
            a + wrong
        with pytest.raises(Parallel3dError, match="other rows"):
            torch._foreach_add_([a], [wrong])


def test_copies_from_and_to_other_layouts(world: LocalWorld) -> None:
    for packing in (EVEN, UNEVEN):
        a, x = packed(packing)
        target = torch.zeros_like(a)
        for source in (plain(x, Shard(0)), plain(x, Shard(1)), plain(x)):
            target.zero_()
            assert target.copy_(source) is target
            check(world, target, x, packing)
        ordinary = plain(torch.zeros_like(x), Shard(0))
        ordinary.copy_(a)
        same(world, ordinary.full_tensor(), x)
        with pytest.raises((Parallel3dError, RuntimeError), match=OTHER_ROWS):
            target.copy_(x)


def test_new_tensors_of_other_shapes_are_not_packed(world: LocalWorld) -> None:
    a, _ = packed(UNEVEN)
    assert type(a.new_zeros(4)) is DTensor and a.new_zeros(()).shape == ()


def test_redistribute(world: LocalWorld) -> None:
    a, x = packed(UNEVEN)
    assert a.redistribute(placements=a.placements) is a
    whole = a.redistribute(placements=[Replicate()])
    assert type(whole) is DTensor
    same(world, whole.to_local(), x)
    with pytest.raises(Parallel3dError, match=r"full_tensor\(\)"):
        a.redistribute(placements=[Shard(0)])


def test_gradients_at_rest(world: LocalWorld) -> None:
    for packing in (EVEN, UNEVEN):
        a, x = packed(packing)
        param = nn.Parameter(a)
        assert isinstance(param, PackedDTensor)
        losses = {
            "whole": lambda p: (p.full_tensor() ** 2).sum(),
            "sum": lambda p: (p * p).sum().full_tensor(),
        }
        for loss in losses.values():
            loss(param).backward()
            check(world, param.grad, 2 * x, packing)
            param.grad = None
        (param.to_local() * 3).sum().backward()
        check(world, param.grad, torch.full_like(x, 3.0), packing)


def test_torch_does_not_cut_by_a_packing(world: LocalWorld) -> None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    a, x = packed(EVEN)
    with pytest.raises(Parallel3dError, match="load_model_state_dict"):
        compute_local_shape_and_global_offset(x.shape, a.device_mesh, a.placements)


def test_repr_and_copies(world: LocalWorld) -> None:
    a, x = packed(UNEVEN)
    param = nn.Parameter(a)
    assert "PackedDTensor" in repr(param) and "PackedShard" in repr(param)
    shard = a.placements[0]
    assert copy.deepcopy(shard) == shard and hash(copy.copy(shard)) == hash(shard)
    assert shard != Shard(0) and Shard(0) != shard
    assert packing_of(a) == UNEVEN and packing_of(x) is None
    assert isinstance(a.placements[0], Shard)
    assert io.StringIO().write(str(shard))
