"""Four processes with torchrun's variables: other layouts are an error everywhere, not a hang."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.xdist_group("gloo")

RANKS = 4

# Each process goes through two launches, on two ports, to import torch once only.
SCRIPT = """
import json, os, sys, time, warnings
import torch
from torch import distributed as dist
from parallel3d.errors import AgreementError
from parallel3d.mesh import MeshLayout, build_mesh

rank = int(os.environ["RANK"])
result = {"rank": rank}

start = time.monotonic()
# Rank 2's layout does not even fit the world: it must not raise before the others know.
layout = MeshLayout(tp=8) if rank == 2 else MeshLayout(replicate=2, shard=-1)
try:
    build_mesh(layout, device_type="cpu")
except AgreementError as error:
    result["error"] = str(error)
result["seconds"] = time.monotonic() - start
result["group after error"] = dist.is_initialized()

os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
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
print("RESULT " + json.dumps(result), flush=True)
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@pytest.fixture(scope="module")
def launch() -> list[dict]:
    """The result of every rank, in order."""
    first, second = _free_ports(2)
    processes = []
    for rank in range(RANKS):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(first),
            "SECOND_PORT": str(second),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = []
    deadline = time.monotonic() + 60
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            assert process.returncode == 0, err
            results.append(json.loads(out.split("RESULT ")[1]))
    finally:
        for process in processes:
            process.kill()
    return results


def test_other_layout_is_the_same_error_on_every_rank(launch) -> None:
    assert len({result["error"] for result in launch}) == 1
    text = launch[0]["error"]
    assert "The ranks disagree about 'mesh': rank 2 differs from the majority." in text
    assert "layout: replicate 2 x shard 2 x tp 1 = 4 ranks on ranks 0-1, 3; " in text
    assert "replicate 1 x shard 1 x tp 8 = 8 ranks on rank 2" in text
    assert max(result["seconds"] for result in launch) < 30
    assert not any(result["group after error"] for result in launch)


def test_equal_layouts_make_a_mesh(launch) -> None:
    # The sum of 2**rank names the members of a group.
    sums = [result["sums"] for result in launch]
    assert [s["replicate"] for s in sums] == [5, 10, 5, 10]
    assert [s["shard"] for s in sums] == [3, 3, 12, 12]
    assert [s["tp"] for s in sums] == [1, 2, 4, 8]


def test_other_variables_are_a_warning_on_rank_0(launch) -> None:
    assert [len(result["warnings"]) for result in launch] == [1, 0, 0, 0]
    assert "NCCL_DEBUG: WARN on ranks 0, 2-3; INFO on rank 1" in launch[0]["warnings"][0]


def test_disagreement_inside_a_running_group(launch) -> None:
    assert len({result["second error"] for result in launch}) == 1
    assert "rank 0 differs from the majority" in launch[0]["second error"]
