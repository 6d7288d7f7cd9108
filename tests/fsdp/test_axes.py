"""Which axes of a mesh the engine takes: by name where there are names it knows."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from parallel3d import MeshError
from parallel3d.fsdp.inspect import data_axes
from parallel3d.fsdp.placement import checked_mesh
from parallel3d.testing import fake_world

GOOD = {
    ("shard",): (None, 0, None),
    ("replicate",): (0, None, None),
    ("anything",): (None, 0, None),
    ("replicate", "shard"): (0, 1, None),
    ("dp_replicate", "dp_shard"): (0, 1, None),
    ("outer", "inner"): (0, 1, None),
    ("outer", "shard"): (0, 1, None),
    ("shard", "tp"): (None, 0, 1),
    ("replicate", "tp"): (0, None, 1),
    ("replicate", "shard", "tp"): (0, 1, 2),
    ("replicate", "shard", "cp"): (0, 1, None),  # shard and cp as one
    ("fsdp", "cp"): (0, 1, None),  # by position
}
BAD = {
    ("shard", "replicate"): "shard comes before replicate",
    ("tp",): "no axis to shard or replicate",
    ("tp", "shard"): "tp is not the innermost",
    ("replicate", "shard", "x"): "'x' is not known",
    ("a", "cp", "tp"): "cp does not come right after shard",
    ("a", "b", "c"): "'a' is not known",
    ("dp", "tp"): "'dp' is not known",
    ("pp", "shard"): "'pp' is not one to shard",
}


@pytest.mark.parametrize("names", GOOD, ids="-".join)
def test_found(names: tuple[str, ...]) -> None:
    with fake_world(0, 2 ** len(names)):
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        axes = data_axes(mesh)
        assert (axes.replicate, axes.shard, axes.tp) == GOOD[names]


@pytest.mark.parametrize("names", BAD, ids="-".join)
def test_refused(names: tuple[str, ...]) -> None:
    with fake_world(0, 2 ** len(names)):
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        with pytest.raises(MeshError, match=BAD[names]):
            data_axes(mesh)


def test_two_unnamed_axes_are_refused() -> None:
    with fake_world(0, 4), pytest.raises(MeshError, match="no names"):
        data_axes(init_device_mesh("cpu", (2, 2)))


def test_the_default_mesh_is_on_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch names CUDA as its accelerator on a machine without a GPU too."""

    def of_a_cuda_build(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_a_cuda_build)
    with fake_world(0, 2):
        assert checked_mesh(None).device_type == "cpu"
