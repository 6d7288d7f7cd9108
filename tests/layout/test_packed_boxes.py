"""Which rows lie where: packings, boxes against an oracle, checkpoints of more ranks than processes."""

from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from _support.packed_models import PackedLm, even_lm, packed_plan, uneven_lm
from torch import nn, optim
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._layout.packed import PackedDTensor, PackedShard, packed_boxes
from parallel3d._layout.packing import Packing, cut_sections
from parallel3d._torch.dtensor import StridedShard, get_local_tensor
from parallel3d.errors import Parallel3dError
from parallel3d.testing import fake_world

# -- packings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "ranks", "group"),
    [((6, 6), 2, 1), ((8, 4, 4), 2, (4, 2, 2)), ((12,), 4, 2), ((5, 7), 3, 1), ((2,), 4, 1)],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_take_and_join(sections, ranks, group, dim) -> None:
    packing = cut_sections(dim, sections, ranks, group)
    shape = [3, 3]
    shape[dim] = sum(sections)
    whole = torch.arange(prod(shape)).view(shape)
    parts = [packing.take(whole, rank) for rank in range(ranks)]
    assert [part.shape[dim] for part in parts] == list(packing.lengths)
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(packing.join(parts), whole)


def test_neighbours_are_one_interval() -> None:
    # A rank that holds all of a packed dim holds it as a dim that isn't packed.
    assert cut_sections(0, (4, 2), 1).rows == (((0, 6),),)
    assert cut_sections(0, (2, 2), 2, (1, 2)).rows == (((0, 1), (2, 2)), ((1, 1),))


def test_rows_of() -> None:
    packing = Packing(0, (((0, 2), (6, 4)), ((2, 4), (10, 1))))
    assert packing.rows_of(0, 0, 6) == [(0, (0, 2)), (2, (6, 4))]
    assert packing.rows_of(0, 1, 3) == [(0, (1, 1)), (1, (6, 2))]
    assert packing.rows_of(0, 3, 2) == [(0, (7, 2))]
    assert packing.rows_of(1, 4, 1) == [(0, (10, 1))]
    assert packing.rows_of(1, 2, 0) == []


# -- boxes ---------------------------------------------------------------------------------------------------

EVEN = cut_sections(0, (8, 8), 2)
UNEVEN = cut_sections(0, (6, 6), 4, 1)
COLUMNS = cut_sections(1, (6,), 4)
LAYOUTS = {
    "tp alone": ((2,), (PackedShard(EVEN),), (16, 3)),
    "uneven": ((1, 4), (Replicate(), PackedShard(UNEVEN)), (12, 3)),
    "shard too": (
        (1, 4, 2),
        (Replicate(), StridedShard(0, split_factor=2), PackedShard(EVEN)),
        (16, 3),
    ),
    "shard of 3": ((3, 2), (StridedShard(0, split_factor=2), PackedShard(EVEN)), (16, 3)),
    "other dim": ((2, 3, 4), (Replicate(), Shard(1), PackedShard(UNEVEN)), (12, 5)),
    "columns": ((2, 4), (Shard(0), PackedShard(COLUMNS)), (5, 6)),
    "over replicate": (
        (2, 2, 2),
        (StridedShard(0, split_factor=4), StridedShard(0, split_factor=2), PackedShard(EVEN)),
        (16, 3),
    ),
}


def oracle(whole: torch.Tensor, mesh, at, placements) -> torch.Tensor:
    """This rank's part: the packing's rows, cut by torch.chunk by the axes before it, outermost last."""
    packing = placements[-1].packing
    rows = [i for first, n in packing.rows[at[-1]] for i in range(first, first + n)]
    local = whole.index_select(packing.dim, torch.tensor(rows, dtype=torch.int64))
    for size, rank, placement in reversed(list(zip(mesh, at, placements[:-1], strict=False))):
        if isinstance(placement, (Shard, StridedShard)):
            step = -(-local.shape[placement.dim] // size)
            begin = min(rank * step, local.shape[placement.dim])
            local = local.narrow(
                placement.dim, begin, min(step, local.shape[placement.dim] - begin)
            )
    return local


@pytest.mark.parametrize("name", LAYOUTS)
def test_boxes_on_all_coordinates(name) -> None:
    mesh, placements, shape = LAYOUTS[name]
    whole = torch.arange(prod(shape)).view(shape)
    held: dict[tuple[int, ...], set[int]] = {}
    for at in product(*map(range, mesh)):
        want = oracle(whole, mesh, at, placements)
        sizes, boxes = packed_boxes(shape, mesh, at, placements)
        assert tuple(want.shape) == sizes
        for box in boxes:
            assert torch.equal(box.of(want), whole[box.slices])
        assert sum(prod(box.sizes) for box in boxes) == want.numel()
        cutting = tuple(i for i, p in zip(at, placements, strict=True) if p != Replicate())
        held.setdefault(cutting, set()).update(want.flatten().tolist())
    everything = [number for rows in held.values() for number in rows]
    assert sorted(everything) == list(range(whole.numel()))  # each once, but for replicas


def test_a_placement_of_its_own() -> None:
    shard = PackedShard(EVEN)
    assert shard == PackedShard(cut_sections(0, (8, 8), 2)) and shard != PackedShard(UNEVEN)
    assert (
        shard.is_shard() and not shard.is_replicate() and "rows=[[(0, 4), (8, 12)]" in repr(shard)
    )
    with pytest.raises(Parallel3dError, match=r"load_model_state_dict"):
        shard._local_shard_size_and_offset(16, 2, 0)


# -- sixteen ranks in one process ----------------------------------------------------------------------------


class Rank:
    """What one rank of a fake world has: the model's shards, and moments of a gradient equal to it."""

    def __init__(self, rank: int, sizes: tuple[int, int, int], build) -> None:
        with fake_world(rank, prod(sizes)):
            model = parallel(build, sizes)
            self.state = stepped(model)


def plain(build) -> PackedLm:
    torch.manual_seed(11)
    return build()


def parallel(build, sizes: tuple[int, int, int]) -> PackedLm:
    model = plain(build)
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    return parallelize(model, mesh, tp_plan=packed_plan(model))


def stepped(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = value
    return found


def save(ranks: list[Rank], path: str) -> None:
    """``dcp.save``, of all ranks one after another."""
    planners, writer = [DefaultSavePlanner() for _ in ranks], FileSystemWriter(path)
    for index, (planner, rank) in enumerate(zip(planners, ranks, strict=True)):
        planner.set_up_planner(rank.state, None, index == 0)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    # Which checks that each row is there once.
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = []
    for planner, plan in zip(planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def load(ranks: list[Rank], path: str) -> None:
    """``dcp.load``, likewise."""
    for index, rank in enumerate(ranks):
        reader, planner = FileSystemReader(path), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(rank.state, metadata, index == 0)
        reader.set_up_storage_reader(metadata, index == 0)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


def local_of(value: torch.Tensor) -> torch.Tensor:
    return get_local_tensor(value) if isinstance(value, DTensor) else value


@pytest.mark.parametrize(
    ("build", "first", "second"),
    [
        pytest.param(uneven_lm, (1, 4, 4), (1, 1, 4), marks=pytest.mark.slow),
        pytest.param(uneven_lm, (1, 4, 4), (1, 2, 4), marks=pytest.mark.full),
        pytest.param(uneven_lm, (1, 1, 4), (1, 4, 4), marks=pytest.mark.full),
        pytest.param(uneven_lm, (2, 2, 4), (1, 4, 2), marks=pytest.mark.full),
        pytest.param(even_lm, (2, 4, 2), (1, 4, 4), marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_round_trip_of_sixteen_ranks(tmp_path: Path, build, first, second) -> None:
    """Bitwise what the plain model has, on file and on every rank that loads it."""
    want = stepped(plain(build))
    path = str(tmp_path / "step")
    save([Rank(rank, first, build) for rank in range(prod(first))], path)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    ranks = [Rank(rank, second, build) for rank in range(prod(second))]
    expected = [{name: local_of(v).clone() for name, v in rank.state.items()} for rank in ranks]
    assert sum(isinstance(v, PackedDTensor) for v in ranks[0].state.values()) == 18
    for rank in ranks:
        for value in rank.state.values():
            local_of(value).fill_(float("nan"))
    load(ranks, path)
    for rank, values in zip(ranks, expected, strict=True):
        for name, value in values.items():
            assert torch.equal(local_of(rank.state[name]), value), name


@pytest.mark.parametrize(
    "sizes", [(1, 2, 4), *(pytest.param(s, marks=pytest.mark.full) for s in ((1, 4, 4), (2, 2, 4)))]
)
def test_each_ranks_chunks_cover_the_whole_once(sizes) -> None:
    seen: dict[str, torch.Tensor] = {}
    chunks: dict[str, set] = {}
    for rank in range(prod(sizes)):
        with fake_world(rank, prod(sizes)):
            for name, param in parallel(uneven_lm, sizes).named_parameters():
                if not isinstance(param, PackedDTensor):
                    continue
                count = seen.setdefault(name, torch.zeros(param.shape, dtype=torch.int64))
                items = param.__create_write_items__(name, param)
                assert len(items) == len(param.boxes())
                for item, part in zip(items, param.__create_chunk_list__(), strict=True):
                    box = (tuple(part.offsets), tuple(part.sizes))
                    assert item.index.offset == part.offsets and item.tensor_data.chunk == part
                    shard = param.__get_tensor_shard__(item.index)
                    assert tuple(shard.shape) == box[1]
                    assert shard.untyped_storage().data_ptr() == (
                        get_local_tensor(param).untyped_storage().data_ptr()
                    )
                    if box not in chunks.setdefault(name, set()):  # replicas have the same
                        chunks[name].add(box)
                        count[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] += 1
    assert len(seen) == 6
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.slow
def test_saved_by_torch(tmp_path: Path) -> None:
    """torch.save of a parameter and of an optimizer's state, in the program that has the mesh."""
    with fake_world(1, 4):
        state = stepped(parallel(uneven_lm, (1, 1, 4)))
        torch.save(state, tmp_path / "rank.pt")
        again = torch.load(tmp_path / "rank.pt", weights_only=False)
        for name, value in state.items():
            assert type(again[name]) is type(value), name
            assert torch.equal(local_of(again[name]), local_of(value))
            if isinstance(value, DTensor):
                assert again[name].placements == value.placements
                assert isinstance(again[name] + value, type(value))
