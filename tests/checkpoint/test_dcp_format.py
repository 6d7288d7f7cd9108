"""Writer and Reader in the hands of others: torch.distributed.checkpoint.save and load with them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.small_models import exactly
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.checkpoint import LoadPlanner, Reader, SavePlanner, Writer, load
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def nested(value: float) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((3, 4), value), "b.c": torch.full((2,), value)},
        "list": [torch.full((2,), value), {"x": value}, "text"],
        "step": int(value),
        "rate": value,
        "values": {"tuple": (1, (value,)), "none": None, "nan": math.nan, "bytes": b"\0"},
        "scalar": torch.tensor(value),
        "nothing": torch.zeros(0, 3),
        "dtype": torch.bfloat16,
    }


@pytest.mark.parametrize("flat", [True, False])
def test_values_and_tensors(tmp_path: Path, flat: bool) -> None:
    if flat:
        state, other = nested(3.0), nested(0.0)
    else:
        state, other = (
            {"t": torch.full((3,), v), "v": [v, (v,)], "s": {"x": v}} for v in (3.0, 0.0)
        )
    path = tmp_path / "some" / "where"
    dcp.save(state, storage_writer=Writer(path), planner=SavePlanner(flatten_state_dict=flat))
    assert {entry.name for entry in path.parent.iterdir()} == {"where"}
    dcp.load(other, storage_reader=Reader(path), planner=LoadPlanner(flatten_state_dict=flat))
    exactly(other, state)


def test_by_the_id_of_the_checkpoint(tmp_path: Path) -> None:
    writer = Writer("unused", lambda: {"mine": 1})
    for number in (1, 2):
        path = tmp_path / str(number)
        dcp.save({"x": torch.full((2,), float(number))}, checkpoint_id=path, storage_writer=writer,
                 planner=SavePlanner())  # fmt: skip
    assert json.loads((path / "checkpoint.json").read_text()) == {"mine": 1}
    reader = Reader(tmp_path / "1")
    for number in (1, 2, 1):
        state = {"x": torch.zeros(2)}
        dcp.load(state, checkpoint_id=tmp_path / str(number), storage_reader=reader)
        assert torch.equal(state["x"], torch.full((2,), float(number)))


def test_again_to_the_same_place(tmp_path: Path) -> None:
    path = tmp_path / "here"
    for number in (1, 2):
        dcp.save({"x": torch.full((2,), float(number))}, storage_writer=Writer(path))
    state = {"x": torch.zeros(2)}
    dcp.load(state, storage_reader=Reader(path))
    assert torch.equal(state["x"], torch.full((2,), 2.0))
    assert {entry.name for entry in tmp_path.iterdir()} == {"here"}


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(
        CheckpointException, match="not a tensor, and torch's planner has pickled it"
    ):
        dcp.save({"x": torch.ones(1), "v": 3}, storage_writer=Writer(path))
    with pytest.raises(CheckpointException, match="which a checkpoint can't hold"):
        dcp.save({"v": {1, 2}}, storage_writer=Writer(path), planner=SavePlanner())
    dcp.save({"x": torch.ones(4)}, storage_writer=Writer(path))
    with pytest.raises(CheckpointException, match=r"Size mismatch|size mismatch"):
        dcp.load({"x": torch.ones(5)}, storage_reader=Reader(path))
    with pytest.raises(CorruptCheckpointError, match=r"with a Writer, and is read by its load"):
        load(path, torch.nn.Linear(1, 1))
    (path / "COMPLETE").unlink()
    with pytest.raises(CorruptCheckpointError, match="was not completed"):
        Reader(path)
    with pytest.raises(CorruptCheckpointError, match="is not a checkpoint of parallel3d"):
        Reader(tmp_path)


def test_damaged(tmp_path: Path) -> None:
    """In a load by others too: nothing has been read."""
    path = tmp_path / "run"
    dcp.save({"x": torch.ones(4), "y": torch.ones(3)}, storage_writer=Writer(path))
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    state = {"x": torch.zeros(4), "y": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="are not those that were saved"):
        dcp.load(state, storage_reader=Reader(path))
    assert not state["x"].any() and not state["y"].any()
    assert issubclass(CorruptCheckpointError, CheckpointError)


def with_torchs_helpers(path: str) -> None:
    """get_state_dict and set_state_dict, on two meshes."""

    def made(sizes: tuple[int, int, int], seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        mesh = p3d.build_mesh(MeshLayout(*sizes), device_type="cpu")
        model = p3d.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 9)), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def whole(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = [p.detach() for p in model.parameters()]
        found += [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [t.full_tensor().clone() if isinstance(t, DTensor) else t.clone() for t in found]

    model, optimizer = made((1, 2, 1), 1)
    state, moments = get_state_dict(model, optimizer)
    mesh = p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu")["shard"]
    more = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
    both = {"model": state, "optimizer": moments, "more": more, "rank": dist.get_rank()}
    dcp.save(both, storage_writer=Writer(path), planner=SavePlanner())

    other, another = made((2, 1, 1), 2)
    state, moments = get_state_dict(other, another)
    both = {"model": state, "optimizer": moments, "more": torch.zeros(5, 2), "rank": -1}
    dcp.load(both, storage_reader=Reader(path), planner=LoadPlanner())
    set_state_dict(
        other, another, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
    )
    for a, b in zip(whole(other, another), whole(model, optimizer), strict=True):
        assert torch.equal(a, b)
    assert another.param_groups[0]["lr"] == 0.1
    assert torch.equal(both["more"], torch.arange(10.0).reshape(5, 2)) and both["rank"] in (0, 1)


def test_with_torchs_helpers(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(with_torchs_helpers, str(tmp_path / "run"), world_size=2, timeout=60)
