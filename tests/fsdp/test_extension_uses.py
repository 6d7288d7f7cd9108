"""All-gather extensions beside the engine's other features, most of which torch refuses for them."""

import copy

import pytest
import torch
from _support.extended import Bf16, Int8, Wrapped, curious, extend, mlp, plain_twin
from _support.fsdp.counted_collectives import Gather
from _support.fsdp.noted_streams import Device, find, happens_before, note
from _support.fsdp.wrapped import at_rest, cpu_mesh, equal_grads, held_bytes
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d.fsdp import DataParallelMeshDims, fully_shard
from parallel3d.fsdp.inspect import ExtensionBucket, unit_of
from parallel3d.testing import LocalWorld, fake_world, local_world, record_collectives


def step(model: nn.Module) -> None:
    model(torch.ones(3, 6)).square().mean().backward()


def check_gradients(world: LocalWorld, model: nn.Module, kind: type[Wrapped], hidden: int) -> None:
    with world.paused():
        plain = plain_twin(mlp(hidden), kind)
        step(plain)
    equal_grads(model, plain, rtol=1e-5, atol=1e-7)


class Columns(Wrapped):
    """Gathers bfloat16 and float32 columns: what is gathered is put together along the sharded dim."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        whole = self.held.new_zeros(outer_size[0], -(-outer_size[1] // mesh.size()))
        whole.narrow(1, 0, self.held.shape[1]).copy_(self.held)
        half = whole.to(torch.bfloat16)
        return (half, whole - half, torch.ones(5)), outer_size

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        half, rest, ones = all_gather_outputs
        assert half.shape[0] == rest.shape[0] == metadata[0] and ones.shape == (10,)
        whole = half + rest
        if out is None:
            return whole, (whole, half, rest)
        return out.copy_(whole[:, : out.shape[1]])

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return weight


@pytest.mark.parity("argument: shard_placement_fn: dim", "behaviour: uneven Shard(1)")
@pytest.mark.parametrize("hidden", [8, 7])
def test_cut_along_columns(hidden) -> None:
    """torch makes other shapes of what it gathers there, and refuses an uneven cut."""
    with local_world(2) as world:
        model = extend(mlp(hidden), Columns)
        fully_shard(
            model,
            mesh=cpu_mesh(),
            shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None,
        )
        step(model)
        check_gradients(world, model, Columns, hidden)
        assert model[2].weight.placements[1] == Shard(1)


def test_uneven_and_alone_in_its_unit() -> None:
    """Its one gather input is sent without a copy; its gradient needs padding all the same."""
    with local_world(3) as world:
        model = extend(mlp(7), Bf16)
        for linear in (model[0], model[2]):
            fully_shard(linear, mesh=cpu_mesh(1, 3))
        step(model)
        check_gradients(world, model, Bf16, 7)


@pytest.mark.parity("argument: reshard_after_forward=int")
@pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
def test_reshard_to_fewer_ranks(kind) -> None:
    """torch: NotImplementedError. Backward gathers what forward has gathered, over two ranks."""
    with local_world(4) as world:
        model = extend(mlp(7), kind)
        mesh = cpu_mesh(1, 4)
        fully_shard(model, mesh=mesh, reshard_after_forward=2)
        for _ in range(2):
            model.zero_grad()
            Wrapped.calls.clear()
            with record_collectives(mesh) as recorder:
                step(model)
            assert [c.group_size for c in recorder.select("all_gather")] == [4, 4, 2, 2]
            assert [name for name, _ in Wrapped.calls] == ["pre"] * 2 + ["post"] * 4
            check_gradients(world, model, kind, 7)
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        assert bucket.post_forward_shard is None and at_rest(model)


@pytest.mark.parity("method: set_custom_all_gather")
@pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reshard", [True, 2])
def test_custom_all_gather(kind, reshard) -> None:
    with local_world(4) as world:
        model = extend(mlp(8), kind)
        fully_shard(model, mesh=cpu_mesh(1, 4), reshard_after_forward=reshard)
        gather = Gather()
        model.set_custom_all_gather(gather)
        step(model)
        assert [made.dtype for made in gather.made].count(torch.uint8) == 2
        check_gradients(world, model, kind, 8)
        assert at_rest(model)


@pytest.mark.parity("argument: dp_mesh_dims: tuple of axes")
def test_joined_shard_axes() -> None:
    """Parameters on a whole mesh; the subclass is given the joined axes as one mesh."""
    sizes = []

    with fake_world(0, 8):
        mesh = torch.distributed.init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "other")
        )
        model = extend(mlp(8), curious(lambda mesh, *_: sizes.append((mesh.ndim, mesh.size()))))
        for module in (model[0], model[2]):
            for name, param in list(module.named_parameters()):
                on_mesh = DTensor.from_local(
                    param.detach(), mesh, [Replicate()] * 3, run_check=False
                )
                setattr(module, name, nn.Parameter(on_mesh))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
        model.unshard()
        assert sizes == [(1, 4), (1, 4)]
        assert model[0].weight.device_mesh == mesh and model[0].weight.shape == (8, 6)
        model.reshard()
        assert isinstance(model[0].weight.to_local(), Bf16) and at_rest(model)


@pytest.mark.parity("fault n: copy.deepcopy")
def test_deepcopy_gathers_for_itself() -> None:
    modules = []
    kind = curious(lambda mesh, size, stride, module, policy: modules.append(module))
    with local_world(2) as world:
        model = fully_shard(extend(mlp(8), kind), mesh=cpu_mesh())
        step(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model[0].weight.zero_()
        modules.clear()
        twin.zero_grad()
        step(twin)
        assert modules[:2] == [twin[0], twin[2]]
        assert type(twin[0].weight.to_local()) is kind
        check_gradients(world, twin, kind, 8)


@pytest.mark.parity("fault n: tied parameters across units", "behaviour: shared parameters")
def test_tied_across_units() -> None:
    with local_world(2) as world:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        extend(model, Bf16)
        model[2].weight = model[0].weight
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        Wrapped.calls.clear()
        step(model)
        assert model[0].weight is model[2].weight
        assert Wrapped.calls.count(("post", False)) == 1
        (twice,) = (b for b in unit_of(model[0]).group.buckets if isinstance(b, ExtensionBucket))
        assert len(twice.params) == 1 and world.per_rank(model[0].weight.grad)[0].abs().sum() > 0


class Failing(Bf16):
    """Raises where it is told to."""

    fails: str | None = None

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if Failing.fails == "pre":
            raise ZeroDivisionError
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *given, out=None):
        if Failing.fails == "post":
            raise ZeroDivisionError
        return super().fsdp_post_all_gather(*given, out=out)


@pytest.mark.parity("reliability: exceptions at every hook")
@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("method", ["pre", "post"])
def test_exceptions_in_the_methods(method, backward, reset) -> None:
    with local_world(2) as world:
        model = fully_shard(extend(mlp(8), Failing), mesh=cpu_mesh(), reshard_after_forward=True)
        Failing.fails = None if backward else method
        with pytest.raises(ZeroDivisionError):
            loss = model(torch.ones(3, 6)).sum()
            Failing.fails = method
            loss.backward()
        Failing.fails = None
        if reset:
            model.reset_iter_state()
        model.zero_grad()
        step(model)
        check_gradients(world, model, Bf16, 8)
        assert at_rest(model)


class Noting(Bf16):
    """Notes the stream its methods run on."""

    noted: Device

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.noted.now.put("pre")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *given, out=None):
        self.noted.now.put("post")
        return super().fsdp_post_all_gather(*given, out=out)


def test_streams(monkeypatch) -> None:
    """What is gathered is made beside the computation, after the optimizer; and used after the gather."""
    device = Noting.noted = Device()
    note(device, monkeypatch)
    with fake_world(0, 2):
        model = fully_shard(extend(mlp(8), Noting), mesh=cpu_mesh())
        step(model)
        device.compute.put("optimizer")
        (optimizer,) = find(device.log, "optimizer")
        device.log.clear()
        step(model)
    before, after = find(device.log, "pre"), find(device.log, "post")
    gathers = [entry for entry in device.log if entry[0].startswith("all_gather")]
    assert {stream for _, stream, _ in before} == {"gather"}
    assert {stream for _, stream, _ in after} == {"compute"}
    assert happens_before(optimizer, before[0])
    assert happens_before(before[1], gathers[0]) and happens_before(gathers[0], after[0])


@pytest.mark.parity("argument: offload_policy=CPUOffloadPolicy(pin_memory=False)")
@pytest.mark.parametrize("shard", [2, 1])
def test_offload(monkeypatch, shard) -> None:
    """The shard is taken to the device, which is the CPU under another name, before its method is called."""
    storage_device, device = torch.device("cpu"), torch.device("cpu", 0)
    monkeypatch.setattr(
        "parallel3d.fsdp.options.offload.CpuOffload.places",
        lambda *_: (device, storage_device, False),
    )
    with local_world(2) as world:
        model = fully_shard(
            extend(mlp(8), Int8),
            mesh=cpu_mesh(2 // shard, shard),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        assert bucket.reads_host
        step(model)
        check_gradients(world, model, Int8, 8)


@pytest.mark.parity("method: set_reduce_scatter_unused_params")
def test_unused() -> None:
    with local_world(2) as world:

        class Half(nn.ModuleDict):
            def forward(self, x):
                return self["used"](x)

        model = extend(Half({"used": nn.Linear(6, 4), "other": nn.Linear(6, 4)}), Int8)
        fully_shard(model, mesh=cpu_mesh())
        model.set_reduce_scatter_unused_params(True)
        step(model)
        for grad in world.per_rank(model["other"].weight.grad):
            assert not grad.any()
        for grad in world.per_rank(model["used"].weight.grad):
            assert grad.any()


def test_kept_bytes() -> None:
    """Between forward and backward a quarter of the ranks' bytes are kept: n/k of one rank's."""
    with fake_world(0, 4):
        model = fully_shard(extend(mlp(8), Int8), mesh=cpu_mesh(1, 4), reshard_after_forward=2)
        model(torch.ones(3, 6))
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        one_rank = 12 + 8 + 2 * 4 + 4  # two rows of 6 and one of 8, and a scale for each
        assert held_bytes(bucket.post_forward_shard) == 2 * one_rank
        assert not any(held_bytes(rows) for rows in bucket.precision.rows)
