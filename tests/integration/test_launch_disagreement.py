"""Four processes with torchrun's variables: other layouts are an error everywhere, not a hang."""

import os
import time
import warnings

import pytest
import torch
from _support.launch import free_ports, launch
from torch import distributed as dist

from parallel3d.errors import AgreementError
from parallel3d.mesh import MeshLayout, build_mesh

pytestmark = pytest.mark.xdist_group("gloo")


def launches(second_port: int) -> dict:
    """What a rank sees in two launches, on two ports."""
    rank = int(os.environ["RANK"])
    result: dict = {}
    start = time.monotonic()
    # Rank 2's layout does not even fit the world: it must not raise before the others know.
    layout = MeshLayout(tp=8) if rank == 2 else MeshLayout(replicate=2, shard=-1)
    try:
        build_mesh(layout, device_type="cpu")
    except AgreementError as error:
        result["error"] = str(error)
    result["seconds"] = time.monotonic() - start
    result["group after error"] = dist.is_initialized()

    os.environ["MASTER_PORT"] = str(second_port)
    os.environ["NCCL_DEBUG"] = "INFO" if rank == 1 else "WARN"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = build_mesh(MeshLayout(replicate=2, shard=-1), device_type="cpu")
    result["warnings"] = [str(w.message) for w in caught if "NCCL_DEBUG" in str(w.message)]
    result["sums"] = {}
    for axis in mesh.mesh_dim_names:
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=mesh.get_group(axis))
        result["sums"][axis] = total.item()
    # A second mesh in the same group agrees as well, and a disagreement there is seen too.
    build_mesh(MeshLayout(shard=4), device_type="cpu")
    try:
        build_mesh(MeshLayout(shard=4) if rank else MeshLayout(tp=4), device_type="cpu")
    except AgreementError as error:
        result["second error"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return result


@pytest.fixture(scope="module")
def launched() -> list[dict]:
    """The result of every rank, in order."""
    (second,) = free_ports(1)
    return [result for result, _ in launch(launches, second, ranks=4)]


def test_other_layout_is_the_same_error_on_every_rank(launched) -> None:
    assert len({result["error"] for result in launched}) == 1
    text = launched[0]["error"]
    assert "The ranks disagree about 'mesh': rank 2 differs from the majority." in text
    assert "layout: replicate 2 x shard 2 x tp 1 = 4 ranks on ranks 0-1, 3; " in text
    assert "replicate 1 x shard 1 x tp 8 = 8 ranks on rank 2" in text
    assert max(result["seconds"] for result in launched) < 30
    assert not any(result["group after error"] for result in launched)


def test_equal_layouts_make_a_mesh(launched) -> None:
    # The sum of 2**rank names the members of a group.
    sums = [result["sums"] for result in launched]
    assert [s["replicate"] for s in sums] == [5, 10, 5, 10]
    assert [s["shard"] for s in sums] == [3, 3, 12, 12]
    assert [s["tp"] for s in sums] == [1, 2, 4, 8]


def test_other_variables_are_a_warning_on_rank_0(launched) -> None:
    assert [len(result["warnings"]) for result in launched] == [1, 0, 0, 0]
    assert "NCCL_DEBUG: WARN on ranks 0, 2-3; INFO on rank 1" in launched[0]["warnings"][0]


def test_disagreement_inside_a_running_group(launched) -> None:
    assert len({result["second error"] for result in launched}) == 1
    assert "rank 0 differs from the majority" in launched[0]["second error"]
