"""Checkpoints by torch.distributed.checkpoint between our models and torch's, on real processes.

By torch's functions alone; ``tests/checkpoint/test_dcp_interchange.py`` has ours.
"""

import copy
from pathlib import Path

import pytest
import torch
from _support.checkpoint.dcp_models import (
    adamw,
    as_they_lie,
    everything,
    loss_of,
    ours,
    plain,
    scramble,
    theirs,
)
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import shards_of

TWO_BY_TWO, FLAT = MeshLayout(shard=2, tp=2), MeshLayout(shard=4)
State = dict[str, torch.Tensor]


def load_and_compare(model: nn.Module, path: str, expected: State) -> None:
    """Loads ``path`` over nans; the shards and the whole tensors then equal ``expected``."""
    state = model.state_dict()
    scramble(state.values())
    assert list(state) == list(expected)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    compare(model.state_dict(), expected)


def compare(state: State, expected: State) -> None:
    for name, want in expected.items():
        got = state[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        for rank, box, part in shards_of(got):
            assert torch.equal(part, want[box]), f"{name}: shard of rank {rank}"
        if isinstance(got, DTensor):
            assert torch.equal(got.full_tensor(), want), f"{name}: whole"


def load_whole(path: str, like: State) -> State:
    """The checkpoint's tensors, in full, as a program without any parallelism reads them."""
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    return whole


# torch's checkpoint into ours, and ours into torch's: 12 and 10 hidden features are 6 and 5 on each of two
# tp ranks, then 3 + 3 and 3 + 2 on shard.


def from_torch(path: str) -> None:
    expected = plain(1).state_dict()
    dcp.save(theirs(1).state_dict(), checkpoint_id=path)
    compare(load_whole(path, expected), expected)
    for layout in (TWO_BY_TWO, FLAT):
        load_and_compare(ours(layout), path, expected)


def to_torch(path: str, layout: MeshLayout) -> None:
    expected = plain(1).state_dict()
    model = ours(layout, 1)
    dcp.save(model.state_dict(), checkpoint_id=path)
    compare(model.state_dict(), expected)  # saving has changed nothing
    compare(load_whole(path, expected), expected)
    load_and_compare(theirs(2), path, expected)


@pytest.mark.slow
def test_torchs_checkpoint_loads_into_ours(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(from_torch, str(tmp_path), world_size=4)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, FLAT], ids=str)
def test_our_checkpoint_loads_into_torchs(gloo_pool, tmp_path: Path, layout) -> None:
    gloo_pool.run(to_torch, str(tmp_path), layout, world_size=4)


# Rows that a shard axis of 4 after a tp axis of 2 can't cut as DTensor tells it, with optimizer state

UNEVEN = MeshLayout(shard=4, tp=2)
SIZES, VOCAB = (9, 17), 17


def train(model: nn.Module, samples: list[list[int]]) -> torch.optim.Optimizer:
    """One AdamW step for each list of samples, on the mean of their losses."""
    optimizer = adamw(model)
    for step in samples:
        for sample in step:
            (loss_of(model, sample) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_uneven(path: str) -> None:
    size, data_rank = UNEVEN.data_size, UNEVEN.data_rank(dist.get_rank())
    model = ours(UNEVEN, 2, *SIZES, vocab=VOCAB).double()
    saved = as_they_lie(model, train(model, [[step * size + data_rank] for step in range(2)]))
    dcp.save(saved, checkpoint_id=path)

    # What a plain program reads is what plain training gives, but for the order of sums.
    alone = plain(2, *SIZES, vocab=VOCAB).double()
    samples = [[step * size + rank for rank in range(size)] for step in range(2)]
    expected = as_they_lie(alone, train(alone, samples))
    assert sorted(saved) == sorted(expected)
    for name, got in load_whole(path, expected).items():
        torch.testing.assert_close(got, expected[name], rtol=0, atol=1e-12, msg=name)
    # Each rank's chunks lie where the file says: no rank saved another's rows as its own.
    compare(saved, load_whole(path, expected))
    if dist.get_rank() == 0:
        torch.save(load_whole(path, expected), f"{path}/whole.pt")


def load_uneven(path: str, layout: MeshLayout) -> None:
    expected = torch.load(f"{path}/whole.pt")
    model = ours(layout, 3, *SIZES, vocab=VOCAB).double()
    optimizer = train(model, [[50]])  # has state, of other values
    state = as_they_lie(model, optimizer)
    scramble(state.values())
    dcp.load(state, checkpoint_id=path)
    compare(state, expected)
    # The tensors were loaded in place: the model and its optimizer have the values.
    for name, tensor in as_they_lie(model, optimizer).items():
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (tensor, state[name])]
        assert local[0].shape == local[1].shape and torch.equal(*local), name
    alone = plain(3, *SIZES, vocab=VOCAB).double()
    alone.load_state_dict({name: expected[name] for name in alone.state_dict()})
    got, want = loss_of(model, 7).detach(), loss_of(alone, 7).detach()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


MORE = [MeshLayout(2, 2), MeshLayout(replicate=2, shard=2, tp=2), MeshLayout(shard=8)]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([MeshLayout(shard=3, tp=2)], marks=pytest.mark.slow),
        pytest.param([UNEVEN, MeshLayout()], marks=pytest.mark.slow),
        pytest.param(MORE, marks=pytest.mark.full),
    ],
    ids=["few", "some", "more"],
)
def test_uneven_rows_round_trip_with_optimizer_state(gloo_pool, tmp_path: Path, layouts) -> None:
    gloo_pool.run(save_uneven, str(tmp_path), world_size=UNEVEN.world_size)
    for layout in layouts:
        gloo_pool.run(load_uneven, str(tmp_path), layout, world_size=layout.world_size)


# torch's helpers that name optimizer state by parameter


def through_torchs_helpers(path: str) -> None:
    model = ours(TWO_BY_TWO, 1)
    state = get_optimizer_state_dict(model, train(model, [[dist.get_rank() // 2]]))
    expected = state["state"]["layers.0.up.weight"]["exp_avg"].full_tensor().clone()
    assert expected.abs().max() > 0
    dcp.save({"optimizer": state}, checkpoint_id=path)

    other = ours(FLAT, 1)
    optimizer = torch.optim.AdamW(other.parameters())
    state = get_optimizer_state_dict(other, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(other, optimizer, state)
    got = optimizer.state[other.layers[0].up.weight]["exp_avg"]
    assert torch.equal(got.full_tensor(), expected)


@pytest.mark.slow
def test_torchs_optimizer_state_helpers(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(through_torchs_helpers, str(tmp_path), world_size=4)


# A shard lies in its bucket's buffer: copies and files hold the shard only


def save_one_small(path: str) -> None:
    mesh = build_mesh(TWO_BY_TWO, device_type="cpu")
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 40_000))
    model = parallelize(model, mesh, tp_plan={"1": "colwise_gather_output"})
    weight = model.state_dict()["0.weight"]
    dcp.save({"0.weight": weight}, checkpoint_id=f"{path}/dcp")
    torch.save(weight, f"{path}/{dist.get_rank()}.pt")
    assert copy.deepcopy(model[0].weight).to_local().untyped_storage().nbytes() == 4 * 4


def test_one_parameter_does_not_drag_its_bucket_into_the_file(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(save_one_small, str(tmp_path), world_size=4)
    for files in (list((tmp_path / "dcp").iterdir()), list(tmp_path.glob("*.pt"))):
        assert files and sum(file.stat().st_size for file in files) < 20_000  # the bucket: 1.4 MB


def save_by_torch(path: str) -> None:
    model = ours(TWO_BY_TWO, 1)
    optimizer = train(model, [[0]])
    trained = everything(model)
    file = f"{path}/{dist.get_rank()}.pt"
    torch.save([model.state_dict(), optimizer.state_dict()], file)

    scramble(model.state_dict().values())
    state, optimizer_state = torch.load(file, weights_only=False)
    model.load_state_dict(state)
    compare(model.state_dict(), trained)
    assert not torch.equal(trained["head.weight"], plain(1).head.weight)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer_state)
    for param in model.parameters():
        got, want = other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"]
        assert torch.equal(got.full_tensor(), want.full_tensor())
        copied = copy.deepcopy(param)
        assert type(copied) is type(param) and copied.placements == param.placements
        assert torch.equal(copied.full_tensor(), param.full_tensor())
        with torch.no_grad():
            copied.zero_()
    compare(model.state_dict(), trained)  # the copies were copies


def test_torch_save_by_each_rank(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(save_by_torch, str(tmp_path), world_size=4)
