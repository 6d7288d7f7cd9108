"""build_mesh, read_layout, and meshes from elsewhere, whose axes are called otherwise."""

import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d._torch import simulated
from parallel3d.errors import MeshError
from parallel3d.fsdp import FSDPModule, fully_shard
from parallel3d.mesh import MeshLayout, build, build_mesh, read_layout
from parallel3d.mesh.build import name_axes
from parallel3d.parallelize import parallelize
from parallel3d.testing import fake_world

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _no_group(monkeypatch) -> Iterator[None]:
    """Starts without a process group and launcher, and leaves none behind."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def fake(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=world_size)


@pytest.mark.parametrize("rank", [0, 2047, 4095])
@pytest.mark.parametrize("layout", [MeshLayout(16, 32, 8), MeshLayout(4, 32, 8, cp=4)], ids=str)
def test_groups_of_4096_ranks_are_the_layouts(layout, rank) -> None:
    fake(rank, 4096)
    start = time.monotonic()
    mesh = build_mesh(layout, device_type="cpu")
    assert time.monotonic() - start < 10
    assert mesh.mesh_dim_names == layout.axes
    assert tuple(mesh.shape) == layout.sizes and read_layout(mesh) == layout
    coordinates = layout.coordinates(rank)
    for axis in layout.axes:
        mine = next(group for group in layout.groups(axis) if rank in group)
        assert tuple(dist.get_process_group_ranks(mesh.get_group(axis))) == mine
        assert mesh.get_local_rank(axis) == coordinates[axis]
    assert torch.equal(mesh.mesh.flatten(), torch.arange(4096))


def test_unknown_size_is_resolved_from_the_world() -> None:
    fake(5, 24)
    mesh = build_mesh(MeshLayout(replicate=2, shard=-1, tp=4), device_type="cpu")
    assert tuple(mesh.shape) == (2, 3, 4)


def test_simulated_ranks() -> None:
    fake(0, 8)
    with simulated.LocalTensorMode(8):
        mesh = build_mesh(MeshLayout(2, 2, 2), device_type="cpu")
        assert read_layout(mesh) == MeshLayout(2, 2, 2)


def test_single_process_needs_no_launcher() -> None:
    mesh = build_mesh(MeshLayout(shard=-1), device_type="cpu")
    assert tuple(mesh.shape) == (1, 1, 1)
    total = torch.ones(2)
    dist.all_reduce(total, group=mesh.get_group("shard"))
    assert torch.equal(total, torch.ones(2))
    again = build_mesh(MeshLayout(), device_type="cpu")  # uses the group that is there
    assert read_layout(again) == MeshLayout()


def test_launcher_with_one_rank(monkeypatch) -> None:
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    values = ("0", "1", "127.0.0.1", str(port), "0")
    for name, text in zip(LAUNCHER, values, strict=True):
        monkeypatch.setenv(name, text)
    mesh = build_mesh(MeshLayout(), device_type="cpu")
    assert tuple(mesh.shape) == (1, 1, 1)
    assert dist.get_world_size() == 1


def test_default_device_type_is_this_machines() -> None:
    fake(0, 2)
    accelerator = torch.accelerator.current_accelerator()
    mesh = build_mesh(MeshLayout(shard=2))
    if accelerator is None:
        assert mesh.device_type == "cpu"
    else:
        assert mesh.device_type in ("cpu", accelerator.type)


def test_backends() -> None:
    assert build.backend_string("cpu") == "gloo"
    assert build.backend_string("cuda") == "cpu:gloo,cuda:nccl"
    assert build.backend_string("xpu") == "cpu:gloo,xpu:xccl"


class _Accelerator:
    """A machine with ``count`` CUDA devices, for the choice of the current one."""

    def __init__(self, monkeypatch, count: int) -> None:
        self.chosen: int | None = None
        device = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self._choose)

    def _choose(self, index: int) -> None:
        self.chosen = index


@pytest.mark.parametrize(
    ("count", "rank", "local_rank", "index"),
    [(8, 11, "3", 3), (8, 11, None, 3), (1, 11, "3", 0), (1, 2, None, 0)],
)
def test_device_of_a_rank(monkeypatch, count, rank, local_rank, index) -> None:
    machine = _Accelerator(monkeypatch, count)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    build.set_device("cuda", rank)
    assert machine.chosen == index
    assert build.default_device_type() == "cuda"


def test_more_ranks_than_devices(monkeypatch) -> None:
    _Accelerator(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match=r"LOCAL_RANK=2, but .* 2 cuda devices.*--nproc-per-node 2"):
        build.set_device("cuda", 2)


# Errors


def test_layout_that_does_not_fit_leaves_no_mesh() -> None:
    fake(0, 12)
    with pytest.raises(MeshError, match=r"12 ranks.*tp may be 1, 2, 3, 4, 6 or 12"):
        build_mesh(MeshLayout(shard=-1, tp=8), device_type="cpu")


def test_single_process_with_a_larger_layout() -> None:
    with pytest.raises(MeshError, match=r"single process.*torchrun --nproc-per-node 8"):
        build_mesh(MeshLayout(2, 2, 2), device_type="cpu")
    with pytest.raises(MeshError, match=r"single process.*torchrun --nproc-per-node N"):
        build_mesh(MeshLayout(2, -1, 2), device_type="cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher(monkeypatch, missing) -> None:
    for name, text in zip(LAUNCHER, ("0", "2", "127.0.0.1", "1", "0"), strict=True):
        if name != missing:
            monkeypatch.setenv(name, text)
    with pytest.raises(MeshError, match=rf"but {missing} is not set.*torchrun"):
        build_mesh(MeshLayout(shard=2), device_type="cpu")


@pytest.mark.parametrize("layout", [None, (2, 2, 2), {"tp": 2}])
def test_not_a_layout(layout) -> None:
    with pytest.raises(MeshError, match=r"needs a MeshLayout"):
        build_mesh(layout)


@pytest.mark.parametrize("device_type", ["gpu", "meta", ""])
def test_unknown_device_type(device_type) -> None:
    with pytest.raises(MeshError, match=r"device_type=.*no backend.*'cpu'"):
        build_mesh(MeshLayout(), device_type=device_type)
    assert not dist.is_initialized()


def test_device_this_machine_lacks() -> None:
    absent = "xpu" if not torch.xpu.is_available() else "cuda"
    with pytest.raises(MeshError, match=rf"device_type='{absent}': this machine has none"):
        build_mesh(MeshLayout(), device_type=absent)
    assert not dist.is_initialized()


def test_group_that_does_not_carry_the_device() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(MeshError, match=r"'cuda', but the process group carries cpu only"):
        build_mesh(MeshLayout(), device_type="cuda")


def test_group_is_ended_when_the_mesh_fails(monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no mesh today")

    monkeypatch.setattr(build, "_init_mesh", fail)
    with pytest.raises(RuntimeError, match="no mesh today"):
        build_mesh(MeshLayout(), device_type="cpu")
    assert not dist.is_initialized()


# read_layout


@pytest.mark.parametrize(
    ("names", "shape", "layout"),
    [
        (("replicate", "shard", "tp"), (2, 3, 4), (2, 3, 4)),
        (("shard", "tp"), (6, 4), (1, 6, 4)),
        (("tp",), (24,), (1, 1, 24)),
        (("replicate", "tp"), (6, 4), (6, 1, 4)),
        (("dp_replicate", "dp_shard"), (4, 6), (4, 6, 1)),
        (("dp_shard", "tp"), (6, 4), (1, 6, 4)),
    ],
)
def test_read_layout(names, shape, layout) -> None:
    fake(0, 24)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    assert read_layout(mesh) == MeshLayout(*layout)


def test_read_layout_of_a_slice() -> None:
    fake(0, 24)
    mesh = build_mesh(MeshLayout(2, 3, 4), device_type="cpu")
    assert read_layout(mesh["shard", "tp"]) == MeshLayout(1, 3, 4)
    assert read_layout(mesh["tp"]) == MeshLayout(tp=4)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (None, "have no names"),
        (("pp", "tp"), "'pp' is unknown"),
        (("tp", "shard"), "in this order"),
        (("shard", "replicate"), "in this order"),
        (("dp_shard", "shard"), "at most once"),
    ],
)
def test_read_layout_of_another_mesh(names, what) -> None:
    fake(0, 8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    with pytest.raises(MeshError, match=what):
        read_layout(mesh)


# What ranks compare


def test_compared_settings(monkeypatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        build, "check_agreement", lambda topic, value, **kw: seen.update(value=value, **kw)
    )
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TORCH_HOME", "elsewhere")
    fake(0, 8)
    build_mesh(MeshLayout(2, -1, 2), device_type="cpu")
    value = seen["value"]
    assert isinstance(value, dict)
    assert value["layout"] == "replicate 2 x shard 2 x tp 2 = 8 ranks"
    assert value["torch"] == torch.__version__
    assert value["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert value["world size"] == "8"
    assert value["device type"] == "cpu"
    assert "parallel3d" in value and "TORCH_HOME" not in value
    names = {"NCCL_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME"}
    assert names <= set(seen["warn_only"])  # type: ignore[call-overload]
    assert not {"layout", "torch", "python"} & set(seen["warn_only"])  # type: ignore[call-overload]


# A mesh from elsewhere, whose axes are called otherwise

LIGHTNING = ("data_parallel", "tensor_parallel")
AS_OURS = {"data_parallel": "shard", "tensor_parallel": "tp"}
PLAN = {"0": "colwise", "2": "rowwise"}


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def mesh_of(*shape: int, names: tuple[str, ...] | None = LIGHTNING):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_foreign_names_are_an_error_that_shows_the_argument():
    with fake_world(0, 4):
        for shape in ((4, 1), (2, 2)):
            with pytest.raises(MeshError) as caught:
                parallelize(a_model(), mesh_of(*shape))
            said = str(caught.value)
            assert "'data_parallel', 'tensor_parallel' are not known" in said
            assert 'axes={"data_parallel": "shard", "tensor_parallel": "tp"}' in said
        with pytest.raises(MeshError, match="have no names"):
            parallelize(a_model(), mesh_of(2, 2, names=None))
        # What the name would mean is there already: no advice to give it twice.
        for names in (("pp", "shard"), ("stage", "dp_shard"), ("tp_outer", "tp")):
            with pytest.raises(MeshError, match=f"'{names[0]}' are not known") as caught:
                parallelize(a_model(), mesh_of(2, 2, names=names))
            said = str(caught.value)
            assert (
                "axes=" not in said and f'Give a submesh without them, mesh["{names[1]}"]' in said
            )


def test_the_mapping_is_taken():
    with fake_world(0, 4):
        wrapped = parallelize(a_model(), mesh_of(2, 2), PLAN, axes=AS_OURS)
        assert isinstance(wrapped, FSDPModule)
        weight = wrapped[0].weight
        assert weight.device_mesh.mesh_dim_names == ("shard", "tp")
        assert tuple(weight.shape) == (8, 8) and tuple(weight.to_local().shape) == (2, 8)
        # Of one rank too: a plan isn't needed, and data is all there is.
        alone = parallelize(a_model(), mesh_of(4, 1), axes=AS_OURS)
        assert tuple(alone[0].weight.to_local().shape) == (2, 8)


def test_some_axes_may_have_our_names():
    with fake_world(0, 4):
        named = name_axes(mesh_of(2, 2, names=("dp_replicate", "fsdp")), {"fsdp": "shard"})
        assert named.mesh_dim_names == ("dp_replicate", "shard")
        ours = mesh_of(2, 2, names=("dp_shard", "tp"))
        assert name_axes(ours) is ours
        one = mesh_of(4, names=None)
        assert name_axes(one) is one
        assert name_axes(mesh_of(4, names=("dp",)), {"dp": "shard"}).mesh_dim_names == ("shard",)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"data": "shard"}, "'data' is not an axis of the mesh"),
        ({"data_parallel": "dp", "tensor_parallel": "tp"}, "given as 'dp'"),
        ({"data_parallel": "shard"}, "'tensor_parallel' are not known"),
        ({"data_parallel": "shard", "tensor_parallel": "shard"}, "two axes"),
        ({"data_parallel": "tp", "tensor_parallel": "shard"}, "tp is not the innermost axis"),
        ("shard", "it must be a dict"),
    ],
)
def test_mappings_that_do_not_fit(axes, said):
    with fake_world(0, 4), pytest.raises(MeshError, match=said):
        parallelize(a_model(), mesh_of(2, 2), PLAN, axes=axes)


def test_fully_shard_keeps_positions():
    with fake_world(0, 4):
        wrapped = fully_shard(a_model(), mesh=mesh_of(2, 2, names=("a", "b")))
        assert wrapped[0].weight.device_mesh.mesh_dim_names == ("a", "b")


def on_ranks() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=LIGHTNING)
    wrapped = parallelize(a_model(), mesh, PLAN, axes=AS_OURS)
    x = torch.arange(16.0).view(2, 8) / 10 + mesh.get_local_rank(0)
    wrapped(x).square().mean().backward()
    return wrapped[0].weight.grad.full_tensor().flatten().tolist()


@pytest.mark.smoke
def test_it_trains_as_the_plain_model(gloo_pool):
    plain = a_model()
    for rank in (0, 1):
        x = torch.arange(16.0).view(2, 8) / 10 + rank
        (plain(x).square().mean() / 2).backward()
    want = plain[0].weight.grad.flatten()
    for got in gloo_pool.run(on_ranks, world_size=4):
        torch.testing.assert_close(torch.tensor(got), want)
