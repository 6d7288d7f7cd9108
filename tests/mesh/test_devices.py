"""More ranks on a machine than it has devices: an error before any collective. A stand-in for the devices."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.errors import AgreementError, MeshError
from parallel3d.mesh import build
from parallel3d.testing import GlooPool


@contextlib.contextmanager
def machine(seen: list[str], ranks: int, rank: int) -> Iterator[None]:
    """This process as local rank ``rank`` of ``ranks``, which sees the CUDA devices with these uuids."""
    module = SimpleNamespace(get_device_properties=lambda i: SimpleNamespace(uuid=seen[i]))
    accelerator = {
        "is_available": lambda: bool(seen),
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: len(seen),
    }
    environment = {"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    with (
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(torch, "get_device_module", lambda kind: module),
        mock.patch.dict(os.environ, environment),
    ):
        yield


ALL = [f"GPU-{i}" for i in range(8)]


def outcome(seen: list[str], ranks: int, rank: int, device_type: str | None) -> str:
    """The device type of the mesh, or the error."""
    try:
        with machine(seen, ranks, rank):
            mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1), device_type=device_type)
            return mesh.device_type
    except (MeshError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"


def on_rank(visible: dict[int, list[str]], per_machine: int) -> str:
    """What a rank gets; the mesh, with its collectives, is a stand-in's."""
    rank = dist.get_rank()
    host = f"node{rank // per_machine}"
    made = SimpleNamespace(device_type="cuda")
    with (
        mock.patch("platform.node", lambda: host),
        mock.patch.object(build, "_init_mesh", lambda *_: made),
    ):
        return outcome(visible[rank], per_machine, rank % per_machine, None)


FINE = "cuda"
TOO_FEW = (
    "MeshError: there are {ranks} ranks on a machine with {devices}: start {count} (torchrun "
    "--nproc-per-node {count}), or set PARALLEL3D_DEVICE=cpu, which build_mesh without device_type= reads, "
    "to run on the CPU."
)


@pytest.mark.parametrize(
    ("ranks", "visible", "want"),
    [
        pytest.param(
            8,
            dict.fromkeys(range(8), ALL[:1]),
            TOO_FEW.format(ranks=8, devices="1 cuda device", count=1),
            id="8 on 1",
        ),
        pytest.param(
            8,
            dict.fromkeys(range(8), ALL[:2]),
            TOO_FEW.format(ranks=8, devices="2 cuda devices", count=2),
            id="8 on 2",
        ),
        pytest.param(8, dict.fromkeys(range(8), ALL), FINE, id="8 on 8"),
        pytest.param(2, dict.fromkeys(range(2), ALL), FINE, id="2 on 8"),
        pytest.param(8, {i: [ALL[i]] for i in range(8)}, FINE, id="8 shown one each"),
        pytest.param(8, {i: ALL[i // 2 * 2 :][:2] for i in range(8)}, FINE, id="8 shown two each"),
        pytest.param(
            8,
            {i: [ALL[i // 2]] for i in range(8)},
            TOO_FEW.format(ranks=8, devices="4 cuda devices", count=4),
            id="8 shown one for two",
        ),
    ],
)
def test_ranks_of_a_machine(
    gloo_pool: GlooPool, ranks: int, visible: dict[int, list[str]], want: str
) -> None:
    for got in gloo_pool.run(on_rank, visible, ranks, world_size=ranks):
        assert got.startswith(want)


def test_a_machine_of_two_has_too_few(gloo_pool: GlooPool) -> None:
    """All ranks have one error, also those of the machine with enough."""
    visible = {0: ALL, 1: ALL, 2: ALL[:1], 3: ALL[:1]}
    (got,) = set(gloo_pool.run(on_rank, visible, 2, world_size=4))
    assert got.startswith(
        "AgreementError: mesh: ranks 2-3: there are 2 ranks on a machine with 1 cuda"
    )


def test_the_cpu_by_the_environment_variable(
    gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gloo_pool.run(on_cpu, world_size=2) == ["cpu", "cpu"]
    monkeypatch.setenv("PARALLEL3D_DEVICE", "gpu")
    assert build.default_device_type() == "gpu"
    with pytest.raises(
        MeshError, match=r"device_type='gpu' \(of PARALLEL3D_DEVICE\).*must be 'cpu'"
    ):
        p3d.build_mesh(p3d.MeshLayout())


def on_cpu() -> str:
    with mock.patch.dict(os.environ, PARALLEL3D_DEVICE="cpu"):
        return outcome(ALL[:1], 2, dist.get_rank(), None)


@pytest.mark.parametrize("seen", [[], ALL[:1]], ids=["no device", "one device"])
def test_one_rank(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    got = outcome(seen, 1, 0, "cpu" if seen else None)
    dist.destroy_process_group()
    assert got == "cpu"


PROGRAM = """
import torch
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
import types
torch.get_device_module = lambda kind: types.SimpleNamespace(
    get_device_properties=lambda i: types.SimpleNamespace(uuid="GPU-0")
)
import parallel3d as p3d
p3d.build_mesh(p3d.MeshLayout(shard=-1))
"""


@pytest.mark.slow
def test_it_is_printed_once(tmp_path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ["-m", "parallel3d", "run", "--standalone", "--nproc-per-node", "3", "train.py"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert done.stderr.count("there are 3 ranks on a machine with 1 cuda device") == 1, done.stderr
