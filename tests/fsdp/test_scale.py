"""A model of thousands of ranks, seen from one: placements, shapes, and the list of collectives."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from llama import Llama, LlamaConfig
from torch.distributed.tensor import Replicate, Shard

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._torch.dtensor import StridedShard
from parallel3d.testing import fake_world, record_collectives

LAYOUT = MeshLayout(16, 32, 8)
CONFIG = LlamaConfig(dim=512, n_layers=3, n_heads=16, n_kv_heads=8)
STRIDED, PLAIN = StridedShard(0, split_factor=8), Shard(0)
COLWISE = (Replicate(), STRIDED, Shard(0))
ROWWISE = (Replicate(), PLAIN, Shard(1))
WHOLE = (Replicate(), PLAIN, Replicate())
PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}
PLACEMENTS = {
    "tok_embeddings": COLWISE,
    "wq": COLWISE,
    "wk": COLWISE,
    "wv": COLWISE,
    "wo": ROWWISE,
    "w1": COLWISE,
    "w3": COLWISE,
    "w2": ROWWISE,
    "attention_norm": WHOLE,
    "ffn_norm": WHOLE,
    "norm": WHOLE,
    "output": COLWISE,
}


def chunk(size: int, parts: int, index: int) -> int:
    """Rows of chunk ``index``, written out again."""
    each = -(-size // parts)
    return max(0, min(each, size - each * index))


def local_shape(shape: torch.Size, placements: tuple, coordinates: dict[str, int]) -> tuple:
    """tp cuts first, then shard."""
    sizes = list(shape)
    if isinstance(placements[2], Shard):
        sizes[placements[2].dim] = chunk(sizes[placements[2].dim], 8, coordinates["tp"])
    sizes[0] = chunk(sizes[0], 32, coordinates["shard"])
    return tuple(sizes)


@pytest.mark.parametrize("rank", [0, 2047, 4095])
def test_one_rank_of_4096(rank: int) -> None:
    with fake_world(rank, 4096):
        mesh = build_mesh(LAYOUT, device_type="cpu")
        with torch.device("meta"):
            model = Llama(CONFIG)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        parallelize(model, mesh, tp_plan=PLAN)
        assert list(shapes) == [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            placements = PLACEMENTS[name.split(".")[-2]]
            assert p.shape == shapes[name], name
            assert p.placements == placements, name
            want = local_shape(p.shape, placements, LAYOUT.coordinates(rank))
            assert tuple(p.to_local().shape) == want, name

        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        for _ in range(2):  # the second step also prefetches in forward
            with record_collectives(mesh) as forward:
                loss = model(ids).float().mean()
            with record_collectives(mesh) as backward:
                loss.backward()
            check_counts(forward, backward)


def test_a_second_equal_mesh_in_the_process() -> None:
    """DTensor may answer with the first mesh where it is asked for the second; buckets must not split."""
    with fake_world(0, 8):
        for _ in range(2):
            mesh = cpu_mesh(1, 4, 2)
            with torch.device("meta"):
                model = Llama(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2))
            parallelize(model, mesh, tp_plan=PLAN)
            with record_collectives(mesh) as recorder:
                model(torch.zeros(1, 8, dtype=torch.long, device="meta"))
            assert recorder.count("all_gather", "shard", "layers.0") == 1


def check_counts(forward, backward) -> None:
    """Exactly one all-gather forward and one backward, one reduce-scatter, one all-reduce."""
    blocks = [f"layers.{i}" for i in range(CONFIG.n_layers)]
    for unit in [*blocks, "tok_embeddings", "norm"]:
        gathers = (
            forward.count("all_gather", "shard", unit),
            backward.count("all_gather", "shard", unit),
        )
        # The embedding's backward doesn't read its table; norm and head stay gathered.
        assert gathers == ((1, 1) if unit in blocks else (1, 0)), unit
        assert backward.count("reduce_scatter", "shard", unit) == 1, unit
        assert backward.count("all_reduce", "replicate", unit) == 1, unit
    units = len(blocks) + 2
    assert forward.count(axis="shard") == units
    assert forward.count(axis="replicate") == 0
    assert backward.count(axis="shard") == len(blocks) + units
    assert backward.count(axis="replicate") == units
