"""What ``fully_shard`` makes of its arguments, beyond the numbers that tests/engine compares."""

import dataclasses
import socket
import warnings

import pytest
import torch
from _support.models import Block, Lm
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from parallel3d import MeshError, MeshLayout, Parallel3dError, build_mesh, parallelize
from parallel3d.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
)
from parallel3d.fsdp.inspect import data_axes, unit_of
from parallel3d.fsdp.members import check_reshard
from parallel3d.fsdp.placement import warn_of_replicas
from parallel3d.testing import fake_world


def data_mesh(size: int = 2):
    return init_device_mesh("cpu", (size,))


class TestMesh:
    @pytest.mark.parity("argument: mesh=None")
    def test_none_is_all_ranks(self) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)
        with fake_world(2, 6):
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
            for each in (*model, model):
                fully_shard(each)
            meshes = [p.device_mesh for p in model.parameters()]
            assert meshes[0].shape == (6,) and meshes[0].mesh_dim_names is None
            assert meshes[0].device_type == ("cpu" if device is None else device.type)
            assert all(mesh == meshes[0] for mesh in meshes)

    @pytest.mark.parity("argument: mesh=None")
    def test_none_initialises_the_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in environment.items():
            monkeypatch.setenv(key, str(value))
        try:
            model = fully_shard(nn.Linear(4, 6))
            assert dist.get_world_size() == 1
            assert model.weight.placements == (Shard(0),)
        finally:
            dist.destroy_process_group()

    @pytest.mark.parity("argument: mesh=None")
    def test_none_and_no_way_to_a_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(key, raising=False)
        model = nn.Linear(4, 6)
        with pytest.raises(MeshError, match=r"no default process group.*torchrun"):
            fully_shard(model)
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
        assert not dist.is_initialized()

    def test_a_rank_outside_the_mesh(self) -> None:
        with fake_world(5, 6):
            mesh = torch.distributed.DeviceMesh("cpu", [0, 1, 2])
            with pytest.raises(MeshError, match="this rank is not in"):
                fully_shard(Block(), mesh=mesh)

    def test_meshes_of_two_device_types(self) -> None:
        with fake_world(0, 4):
            whole = init_device_mesh("meta", (2, 2), mesh_dim_names=("shard", "tp"))
            weight = DTensor.from_local(torch.zeros(2, 4), whole["tp"], [Shard(0)], run_check=False)
            model = nn.Linear(4, 4, bias=False)
            weight._is_param = (
                True  # torch 2.15 can't make a Parameter of it: it asks for the device
            )
            model.weight = weight
            with pytest.raises(MeshError, match=r"weight is a DTensor on meta.*mesh is on cpu"):
                fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            with pytest.raises(MeshError, match=r"a mesh on meta for parameter weight.*on cpu"):
                fully_shard(
                    nn.Linear(4, 4),
                    mesh=data_mesh(4),
                    shard_placement_fn=lambda p: ShardPlacementResult(None, whole["shard"]),
                )

    def test_dp_replicate_alone_says_that_torch_would_shard(self) -> None:
        with fake_world(0, 2):
            for name, shards in (("dp_replicate", False), ("replicate", False), ("dp_shard", True)):
                warn_of_replicas.cache_clear()
                mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    models = [fully_shard(nn.Linear(4, 6), mesh=mesh) for _ in range(2)]
                said = [str(w.message) for w in caught if "dp_shard" in str(w.message)]
                assert len(said) == (name == "dp_replicate")  # once
                assert models[1].weight.placements == (Shard(0) if shards else Replicate(),)

    def test_parameters_on_an_equal_mesh(self) -> None:
        """torch wants the same object."""
        with fake_world(0, 2):
            one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)) for _ in range(2))
            model = distribute_module(nn.Linear(4, 6), one)
            fully_shard(model, mesh=other, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
            model(DTensor.from_local(torch.ones(2, 4), one)).sum().backward()
            assert model.weight.grad.placements == (Shard(0),)
            different = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            model = distribute_module(nn.Linear(4, 6), one)
            with pytest.raises(MeshError, match="on the mesh given"):
                fully_shard(model, mesh=different, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def placed(shard: Shard):
    return lambda param: shard


@pytest.mark.parametrize("wrap", [fully_shard, torch_fsdp.fully_shard])
def test_what_torch_refuses_with_an_assertion(wrap) -> None:
    """``except AssertionError`` written for torch's engine catches ours, as ``except ValueError`` does."""
    kinds = (AssertionError,) if wrap is torch_fsdp.fully_shard else (AssertionError, ValueError)
    for kind in kinds:
        with fake_world(0, 2):
            for shard in (Shard(1), Shard(2)):
                with pytest.raises(kind):
                    wrap(nn.Linear(4, 6), shard_placement_fn=placed(shard))
            with pytest.raises(kind):
                wrap(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (1, 2)))
            model = wrap(nn.Linear(4, 6))
            with pytest.raises(kind):
                wrap(model)


class TestPolicies:
    def test_a_class_is_its_instance_with_the_defaults(self) -> None:
        with fake_world(0, 2):
            for kind in (OffloadPolicy, CPUOffloadPolicy):
                model = fully_shard(nn.Linear(4, 6), offload_policy=kind, mesh=data_mesh())
                model(torch.ones(2, 4)).sum().backward()
                offload = unit_of(model).group.buckets[0].offload
                assert (offload is not None) == (kind is CPUOffloadPolicy)
            for kind in (torch_fsdp.MixedPrecisionPolicy, MixedPrecisionPolicy):
                fully_shard(nn.Linear(4, 6), mp_policy=kind)
                parallelize(nn.Linear(4, 6), build_mesh(MeshLayout(shard=2)), mp_policy=kind)
            for wrong in ({"mp_policy": OffloadPolicy}, {"offload_policy": int}):
                with pytest.raises(Parallel3dError, match="must be"):
                    fully_shard(nn.Linear(4, 6), **wrong)

    @pytest.mark.parametrize("made_by", [MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy])
    @pytest.mark.parametrize(
        "wrong", [{"param_dtype": torch.int8}, {"reduce_dtype": "bf16"}, {"cast_forward_inputs": 1}]
    )
    def test_the_same_rules_for_both(self, made_by, wrong) -> None:
        (field,) = wrong
        with (
            fake_world(0, 2),
            pytest.raises(Parallel3dError, match=f"MixedPrecisionPolicy.{field}"),
        ):
            fully_shard(Block(), mesh=data_mesh(), mp_policy=made_by(**wrong))

    @pytest.mark.parametrize(
        ("wrong", "way_out"),
        [
            ({"buffer_dtype": torch.int32}, "such as torch.bfloat16, or None"),
            ({"keep_low_precision_grads": None}, "True or False"),
            ({"full_precision_in_eval": "no"}, "True or False"),
            (
                {"cast_root_forward_inputs": 0},
                "True, False, or None for that of cast_forward_inputs",
            ),
            (
                {"full_precision_modules": nn.LayerNorm},
                r"such as \(nn.LayerNorm,\), or \(\) for none",
            ),
            ({"full_precision_modules": (nn.LayerNorm, int)}, "a tuple of module classes"),
        ],
        ids=str,
    )
    def test_what_ours_refuses(self, wrong, way_out) -> None:
        (field,) = wrong
        with pytest.raises(Parallel3dError, match=f"MixedPrecisionPolicy.{field} is .*{way_out}"):
            MixedPrecisionPolicy(**wrong)


class TestReshard:
    @pytest.mark.parity("argument: reshard_after_forward=int")
    def test_what_a_number_means(self) -> None:
        with fake_world(0, 24):
            twelve = data_axes(init_device_mesh("cpu", (2, 12), mesh_dim_names=("a", "b")))
            eight = data_axes(init_device_mesh("cpu", (3, 8), mesh_dim_names=("a", "b")))
            assert [check_reshard(v, [twelve]) for v in (None, True, False, 4)] == [
                None,
                True,
                False,
                4,
            ]
            assert check_reshard(12, [twelve]) is True  # as torch
            with pytest.warns(UserWarning, match="number of ranks"):
                assert check_reshard(1, [twelve]) is False
            assert check_reshard(4, [twelve, eight]) == 4
            # Meshes of several sizes: the number of one's ranks may be a divisor of another's.
            four = data_axes(init_device_mesh("cpu", (6, 4), mesh_dim_names=("a", "b")))
            assert check_reshard(4, [four, eight]) == 4

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (5, r"is 5;.*12 ranks.*give 2, 3, 4, 6, or True"),
            (0, r"give 2, 3, 4, 6, or True"),
            (-2, r"give 2, 3, 4, 6, or True"),
            (24, r"give 2, 3, 4, 6, or True"),
            (2.0, r"is 2\.0;.*2, 3, 4, 6"),
            ("always", r"is 'always';.*2, 3, 4, 6"),
        ],
    )
    def test_wrong_numbers(self, value, says) -> None:
        with fake_world(0, 12):
            model = Block()
            with pytest.raises(Parallel3dError, match=says):
                fully_shard(model, mesh=data_mesh(12), reshard_after_forward=value)
            assert type(model) is Block

    def test_no_divisors(self) -> None:
        with fake_world(0, 7), pytest.raises(Parallel3dError, match="give True or False"):
            fully_shard(Block(), mesh=data_mesh(7), reshard_after_forward=3)

    def test_a_mesh_of_a_parameter_that_it_does_not_divide(self) -> None:
        with fake_world(0, 12):
            mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("replicate", "shard"))
            with pytest.raises(Parallel3dError, match=r"4 and of 12 ranks.*give 2, or True"):
                fully_shard(
                    Block(),
                    mesh=data_mesh(12),
                    reshard_after_forward=3,
                    shard_placement_fn=lambda p: ShardPlacementResult(None, mesh),
                )


class TestModules:
    def test_managed_modules_are_marked_for_dynamo(self) -> None:
        """As torch marks them: all but those with nothing but ignored parameters."""
        for shard in (fully_shard, torch_fsdp.fully_shard):
            with fake_world(0, 2):
                model = Lm()
                ignored = set(model.layers[1].up.parameters())
                shard(model.layers[0], mesh=data_mesh())
                shard(model, mesh=data_mesh(), ignored_params=ignored)
                unmarked = {
                    name
                    for name, m in model.named_modules()
                    if not (
                        getattr(m, "_is_fsdp_managed_module", False)
                        and getattr(m, "_fsdp_use_orig_params", False)
                    )
                }
                assert unmarked == {"layers.1.up"}

    @pytest.mark.parity("argument: module")
    def test_a_container_with_a_forward_of_its_own(self) -> None:
        class Chain(nn.ModuleList):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for module in self:
                    x = module(x)
                return x

        with fake_world(0, 2):
            model = fully_shard(Chain([nn.Linear(4, 4), nn.Linear(4, 2)]), mesh=data_mesh())
            assert model(torch.zeros(3, 4)).shape == (3, 2)


def test_fallbacks_for_torch_2_11_are_like_the_real_ones() -> None:
    from parallel3d._torch import fully_shard as names
    from parallel3d._torch import v2_11

    for name in ("DataParallelMeshDims", "ShardPlacementResult"):
        ours, real = getattr(v2_11, name), getattr(names, name)
        assert [f.name for f in dataclasses.fields(ours)] == [
            f.name for f in dataclasses.fields(real)
        ]
    for dims in (v2_11.DataParallelMeshDims, DataParallelMeshDims):
        assert dims(shard="a", replicate=("b", "c")).shard_names == ("a",)
        assert dims(replicate=("b", "c")).replicate_names == ("b", "c")
        assert dims(replicate="b").shard_names == ()
        with pytest.raises(ValueError, match="shard"):
            dims()
