"""Several ranks: each reads its slices, what fails on one fails on all; packed rows; other engines."""

from pathlib import Path

import pytest
import torch
from _support.checkpoint.bounded import no_space
from _support.checkpoint.hf_cases import (
    check_equal,
    contents,
    distribute,
    load_counted,
    plain,
    same_error_everywhere,
)
from _support.packed_models import even_lm, packed_plan, uneven_lm
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._layout.packed import PackedDTensor
from parallel3d.checkpoint import load_hf, save_hf
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.ci


class Wide(nn.Module):
    """Rows longer than a page, so that a slice of columns is read alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 8192)
        self.down = nn.Linear(8192, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def wide(seed: int) -> Wide:
    torch.manual_seed(seed)
    return Wide()


def reads_its_slices(folder: str) -> None:
    """Rows of ``up``, columns of ``down``, both ways of the mesh."""
    for sizes in ((1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)):
        mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
        plan = {"up": "colwise", "down": "rowwise"} if sizes[2] > 1 else None
        model = parallelize(wide(1), mesh, tp_plan=plan)
        read = load_counted(folder, model)
        check_equal(model, contents(wide(0)))
        shard = sum(
            (p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters()
        )
        assert shard <= read <= shard + 4096, (sizes, read, shard)


def test_each_rank_reads_only_its_slices(gloo_pool: GlooPool, tmp_path: Path) -> None:
    save_hf(tmp_path, wide(0))
    gloo_pool.run(reads_its_slices, str(tmp_path), world_size=4)


def packed(folder: str) -> None:
    for build, sizes in ((even_lm, (1, 2, 2)), (uneven_lm, (1, 1, 4)), (uneven_lm, (1, 2, 2))):
        torch.manual_seed(5)
        model = build()
        torch.manual_seed(6)
        want = contents(build())
        mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
        first = parallelize(model, mesh, tp_plan=packed_plan(model))
        load_hf(f"{folder}/{build.__name__}", first)
        assert any(isinstance(p, PackedDTensor) for p in first.parameters())
        check_equal(first, want)
        out = f"{folder}/{build.__name__}-{sizes}"
        save_hf(out, first, max_shard_size=600)
        again = build()
        load_hf(out, again)
        check_equal(again, want)


def test_packed_rows(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for build in (even_lm, uneven_lm):
        torch.manual_seed(6)
        save_hf(tmp_path / build.__name__, build())
    gloo_pool.run(packed, str(tmp_path), world_size=4)


# -- errors --------------------------------------------------------------------------------------------


def failures(folder: str) -> None:
    root, rank = Path(folder), dist.get_rank()
    model = distribute(plain("llama"), (1, 4, 1))
    save_hf(root / "good", model, max_shard_size="20KB")
    with no_space(rank == 2):
        same_error_everywhere(
            "on rank 2: OSError: .*No space",
            lambda: save_hf(root / "x", model, max_shard_size="20KB"),
        )
    dist.barrier()
    assert [path.name for path in root.iterdir()] == ["good"]

    other = distribute(plain("llama", seed=1), (1, 4, 1))
    names = None if rank != 3 else {"lm_head.weight": "head"}
    same_error_everywhere(
        "(?s)rank 3: .*not in the files: 'head'", lambda: load_hf(root / "good", other, names=names)
    )
    check_equal(other, contents(plain("llama", seed=1)))
    with full_params(model, writeback=False):
        same_error_everywhere("full_params", lambda: load_hf(root / "good", model))
        same_error_everywhere("full_params", lambda: save_hf(root / "y", model))
    same_error_everywhere(
        "max_shard_size", lambda: save_hf(root / "y", model, max_shard_size="5 PB")
    )
    same_error_everywhere("floating", lambda: save_hf(root / "y", model, dtype=torch.int8))
    if rank == 0:
        (root / "mine").mkdir()
        (root / "mine" / "notes.txt").write_text("keep")
        (root / "theirs").mkdir()
        plain("llama").save_pretrained(root / "theirs")
    dist.barrier()
    same_error_everywhere("holds notes.txt", lambda: save_hf(root / "mine", model))
    same_error_everywhere("holds model.safetensors", lambda: save_hf(root / "theirs", model))
    save_hf(root / "good", distribute(plain("llama", seed=1), (1, 4, 1)))  # an earlier export
    load_hf(root / "good", model)
    check_equal(model, contents(plain("llama", seed=1)))
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_what_fails_on_one_rank_fails_on_all(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(failures, str(tmp_path), world_size=4)


def a_file_that_one_rank_lacks(folder: str) -> None:
    """Each rank has a disk of its own, and one an incomplete copy."""
    rank = dist.get_rank()
    model = distribute(plain("llama", seed=1), (1, 4, 1))
    mine = Path(folder) / str(rank)
    same_error_everywhere("on rank 2: .* has .* bytes on this rank", lambda: load_hf(mine, model))
    check_equal(model, contents(plain("llama", seed=1)))


def test_an_incomplete_copy_on_one_rank(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for rank in range(4):
        plain("llama").save_pretrained(tmp_path / str(rank))
    file = tmp_path / "2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9000])
    gloo_pool.run(a_file_that_one_rank_lacks, str(tmp_path), world_size=4)


# -- states of a model, and models of others -----------------------------------------------------------


def states(folder: str) -> None:
    torch.manual_seed(0)
    want = contents(nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 3)))
    mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
    x = torch.ones(2, 5)

    def fresh() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 3))

    plain_model = fresh()
    load_hf(folder, plain_model)
    result = plain_model(x)
    kept = fully_shard(fresh(), mesh=mesh, reshard_after_forward=False).eval()
    with torch.no_grad():
        kept(x)  # stays gathered: the values loaded must be seen
        load_hf(folder, kept)
        assert torch.equal(kept(x), result)
    unsharded = fully_shard(fresh(), mesh=mesh)
    unsharded.unshard()
    load_hf(folder, unsharded)
    assert torch.equal(unsharded(x), result)

    theirs = torch_fully_shard(fresh(), mesh=mesh["shard"])
    load_hf(folder, theirs)
    check_equal(theirs, want)
    assert torch.equal(theirs(x), result)
    save_hf(f"{folder}-theirs", theirs)
    check_loaded(f"{folder}-theirs", want)

    moved = fully_shard(fresh(), mesh=mesh).to_empty(device="cpu")
    load_hf(folder, moved)
    assert torch.equal(moved(x), result)


def check_loaded(folder: str, want: dict[str, torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 3))
    load_hf(folder, model)
    check_equal(model, want)


def test_states_and_torchs_engine(gloo_pool: GlooPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_hf(tmp_path / "a", nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 3)))
    gloo_pool.run(states, str(tmp_path / "a"), world_size=2)


def on_parts_of_the_mesh(folder: str) -> None:
    """One tensor on all ranks, one on each row of the mesh, one plain: who holds what must be told."""
    mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
    torch.manual_seed(0)
    want = contents(wide(0))
    model = wide(0)
    up, down = model.up, model.down
    up.weight = nn.Parameter(
        distribute_tensor(up.weight, mesh["shard", "tp"], [Shard(0), Shard(1)])
    )
    down.weight = nn.Parameter(distribute_tensor(down.weight, mesh["tp"], [Shard(1)]))
    save_hf(folder, model, max_shard_size="400KB")
    again = wide(1)
    load_hf(folder, again)
    check_equal(again, want)


def test_tensors_on_parts_of_the_mesh(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(on_parts_of_the_mesh, str(tmp_path / "out"), world_size=4)
