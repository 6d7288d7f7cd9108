"""The axis cp without attention: meshes, gradients, norms, seeds, recorded axes."""

from typing import Any

import pytest
import torch
from _support.cp_axis import Sizes, batch, build, layout_of, loss, plan_of, shard_batch
from _support.emulated import EmulatedNetwork, Link
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import parallel3d as p3d
from parallel3d.errors import MeshError
from parallel3d.fsdp.inspect import data_axes
from parallel3d.mesh import read_layout
from parallel3d.mesh.joined import axis_sizes, joined_mesh
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives, verify

MESHES: list[Any] = [
    (1, 1, 2, 1),
    (1, 2, 2, 1),
    (1, 1, 2, 2),
    pytest.param((2, 1, 2, 2), marks=pytest.mark.slow),
    pytest.param((1, 2, 4, 1), marks=pytest.mark.slow),
    pytest.param((2, 2, 2, 1), marks=pytest.mark.slow),
]


def parity(sizes: Sizes, **options: Any) -> dict[str, float]:
    """Each cp rank has its part of the tokens; the plain model has all."""
    options = {"steps": 3, "fp32": False, **options}
    if plan := plan_of(sizes):
        options["tp_plan"] = plan
    result = assert_parity(
        build, batch, layout_of(sizes), loss=loss, shard_batch=shard_batch, **options
    )
    return result.grads


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equal_to_plain(sizes: Sizes) -> None:
    assert 0 < parity(sizes)["float64"] < 1e-12


def test_a_part_that_is_missing_shows() -> None:
    """The oracle sees it if every cp rank has the first part of the tokens."""

    def first_part(inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
        return tuple(whole[:, :4] for whole in inputs)

    with pytest.raises(AssertionError, match="loss"):
        assert_parity(
            build, batch, layout_of((1, 1, 2, 1)), loss=loss, shard_batch=first_part, fp32=False
        )


@pytest.mark.parametrize("options", [{"shard_optimizer_over_replicate": True}, {}], ids=str)
@pytest.mark.slow
def test_micro_batches_and_hfsdp(options: dict[str, bool]) -> None:
    assert parity((2, 1, 2, 1), micro_batches=2, **options)["float64"] < 1e-12


def test_arguments_by_name() -> None:
    """A dict of inputs is cut as a dict, and may come back with more names."""

    def inputs(index: int) -> dict[str, torch.Tensor]:
        return {"ids": batch(index)}

    def by_name(
        model: torch.nn.Module, ids: torch.Tensor, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        seen.add(more is None)
        return loss(model, ids)

    def with_more(whole: Any, mesh: DeviceMesh) -> Any:
        return shard_batch(whole, mesh) | {"more": torch.ones(1)}

    seen: set[bool] = set()
    layout = layout_of((1, 1, 2, 1))
    assert_parity(build, inputs, layout, loss=by_name, shard_batch=with_more, steps=1, fp32=False)
    assert seen == {True, False}


def test_verify_says_what_assert_parity_does() -> None:
    layout = layout_of((1, 1, 2, 1))
    found = verify(build, batch, layout, loss=loss, shard_batch=shard_batch)
    assert found.difference is None and found.parity.grads["float64"] < 1e-12
    wrong = verify(
        build, batch, layout, loss=loss, shard_batch=lambda inputs, _: (inputs[0][:, 1:],)
    )
    assert wrong.difference is not None and "loss" in wrong.difference.what


def on_gloo(sizes: Sizes) -> list[float]:
    """By this engine and by torch's ``fully_shard``."""
    by_torch = {"engine": "torch", "defer": "nothing"}
    return [parity(sizes, steps=2, **options)["float64"] for options in ({}, by_torch)]


def test_on_processes(gloo_pool) -> None:
    results = gloo_pool.run(on_gloo, (1, 2, 2, 1), world_size=4)
    assert len(results) == 4 and all(max(each) < 1e-12 for each in results)


@pytest.mark.slow
def test_resharded_to_fewer_ranks_after_forward() -> None:
    """The joined axis is cut into groups of two."""

    def apply(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        for layer in model.layers:
            p3d.fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        return p3d.fully_shard(model, mesh=mesh)

    assert parity((1, 2, 2, 1), apply=apply)["float64"] < 1e-12


# The mesh at rest


@pytest.mark.parametrize(
    ("names", "shape", "at_rest"),
    [
        (
            ("replicate", "shard", "cp", "tp"),
            (2, 2, 2, 2),
            {"replicate": 2, "shard_cp": 4, "tp": 2},
        ),
        (("replicate", "shard", "cp", "tp"), (2, 4, 1, 2), {"replicate": 2, "shard": 4, "tp": 2}),
        (("dp_replicate", "dp_shard", "cp"), (2, 2, 4), {"dp_replicate": 2, "dp_shard_cp": 8}),
        (("shard", "cp"), (1, 16), {"shard_cp": 16}),
        (("cp",), (16,), {"cp": 16}),
    ],
)
def test_mesh_at_rest(names: tuple[str, ...], shape: tuple[int, ...], at_rest: dict) -> None:
    with fake_world(5, 16):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        joined = joined_mesh(mesh)
        assert dict(zip(joined.mesh_dim_names, joined.shape, strict=True)) == at_rest
        assert joined_mesh(mesh) is joined is joined_mesh(joined) is data_axes(mesh).mesh
        assert data_axes(mesh).data_size == 16 // at_rest.get("tp", 1)
        if "cp" in names[1:]:
            assert read_layout(joined) == read_layout(mesh)
        if shape[-1] > 1 and joined is not mesh:
            assert axis_sizes(joined) == dict(zip(names, shape, strict=True)) or 1 in shape
        assert torch.equal(joined.mesh.flatten(), mesh.mesh.flatten())


@pytest.mark.parametrize("names", [("cp", "shard", "tp"), ("replicate", "cp", "tp")], ids=str)
def test_cp_comes_right_after_shard(names: tuple[str, ...]) -> None:
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        with pytest.raises(MeshError, match=r"cp=2.*: cp does not come right after shard"):
            p3d.parallelize(build(), mesh, plan_of((1, 1, 1, 2)))


def test_other_names() -> None:
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "model"))
        with pytest.raises(MeshError, match='"context": "cp", "model": "tp"'):
            p3d.parallelize(build(), mesh, plan_of((1, 1, 1, 2)))
        axes = {"data": "shard", "context": "cp", "model": "tp"}
        model = p3d.parallelize(build(), mesh, plan_of((1, 1, 1, 2)), axes=axes)
        assert model.norm.weight.device_mesh.mesh_dim_names == ("shard_cp", "tp")


def test_fsdp_false_counts_cp() -> None:
    with fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(cp=2), device_type="cpu")
        with pytest.raises(MeshError, match=r"2 ranks with other tokens \(.* shard 1 x cp 2\)"):
            p3d.parallelize(build(), mesh, fsdp=False)


def test_fully_shard_takes_the_whole_mesh() -> None:
    with fake_world(1, 8):
        mesh = p3d.build_mesh(p3d.MeshLayout(1, 2, 2, cp=2), device_type="cpu")
        model = build()
        for layer in model.layers:
            p3d.fully_shard(layer, mesh=mesh)
        p3d.fully_shard(model, mesh=mesh)
        weight = model.layers[0].up.weight
        assert weight.device_mesh.mesh_dim_names == ("replicate", "shard_cp", "tp")
        assert tuple(weight.to_local().shape) == (3, 6)  # 10 rows on 4 ranks


# Who is where


def test_seeds_differ_by_tokens() -> None:
    def seeds(layout: p3d.MeshLayout) -> list[int]:
        found = []
        for rank in range(layout.world_size):
            with fake_world(rank, layout.world_size):
                mesh = p3d.build_mesh(layout, device_type="cpu")
                found.append(p3d.seed_step(mesh, seed=1, step=2))
                assert p3d.seed_step(joined_mesh(mesh), seed=1, step=2) == found[-1]
        return found

    a, _, b, _, c, _, d, _ = by_cp = seeds(p3d.MeshLayout(1, 2, 2, cp=2))
    assert len({a, b, c, d}) == 4 and by_cp == seeds(p3d.MeshLayout(1, 4, 2))


@pytest.mark.parametrize("layout", [p3d.MeshLayout(cp=4), p3d.MeshLayout(1, 2, cp=2)], ids=str)
@pytest.mark.parametrize("world", ["fake", "local", "emulated"])
def test_recorded_axes(world: str, layout: p3d.MeshLayout) -> None:
    """Gathers have the joined axis's name, and not attention's group, also where both are the world."""
    network = EmulatedNetwork(
        world_size=4,
        links={"slow": Link(bandwidth=1e9), "fast": Link(bandwidth=1e11)},
        axes={"shard": "slow", "cp": "fast"},
    )
    made = {"fake": lambda: fake_world(0, 4), "local": lambda: local_world(4)}
    with made.get(world, lambda: network)():
        mesh = p3d.build_mesh(layout, device_type="cpu")
        if world == "emulated":
            network.attach(mesh)
        model = p3d.parallelize(build(), mesh)
        with (
            record_collectives(mesh) as found,
            record_collectives(model.head.weight.device_mesh) as same,
        ):
            model(batch(0)).sum().backward()
            dist.all_reduce(torch.ones(1), group=mesh.get_group("cp"))
        *engine, own = found.calls
        assert {call.axis for call in engine} == {"shard_cp"} and len(engine) > 4
        assert own.axis == "cp" and own.group_size == layout.cp
        assert [call.axis for call in same.calls] == [call.axis for call in found.calls]
        assert mesh.get_group("cp").group_name != joined_mesh(mesh).get_group("shard_cp").group_name
        if world == "emulated":
            assert {t.axis: t.link for t in network.timeline} == {"shard_cp": "slow", "cp": "fast"}


def norms(sizes: Sizes) -> None:
    """Norm, clipping, full parameters and the mean over all tokens as on one rank."""
    torch.manual_seed(0)
    plain = build().double()
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    mesh = p3d.build_mesh(layout_of(sizes), device_type="cpu")
    model = p3d.parallelize(build_like(weights), mesh, plan_of(sizes))
    whole = batch(0)
    (part,) = shard_batch((whole,), mesh)
    part = part[:, : 1 + mesh.get_local_rank("cp") * 3]  # 1 and 4 tokens of 4
    kept = torch.cat([whole[:, :1], whole[:, 4:]], dim=1)
    loss(plain, kept).backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    summed = torch.nn.functional.cross_entropy(
        model(part).flatten(0, 1), part.flatten(), reduction="sum"
    )
    p3d.optim.global_mean(summed, part.numel(), mesh=mesh).backward()
    got = p3d.optim.clip_grad_norm_(model.parameters(), 1e-3)
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12
        )
    with p3d.fsdp.full_params(model):
        for name, p in model.named_parameters():
            assert torch.equal(p, weights[name])


def build_like(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = build().double()
    model.load_state_dict(weights)
    return model


@pytest.mark.smoke
def test_norm_and_global_mean(gloo_pool) -> None:
    gloo_pool.run(norms, (1, 1, 2, 2), world_size=4)


def test_same_weights_on_every_mesh() -> None:
    def weights(sizes: Sizes) -> dict[str, torch.Tensor]:
        with local_world(4):
            mesh = p3d.build_mesh(layout_of(sizes), device_type="cpu")
            with torch.device("meta"):
                model = build()
            p3d.materialize(p3d.parallelize(model, mesh, plan_of(sizes)), seed=3)
            wholes = {name: p.full_tensor() for name, p in model.named_parameters()}
            return {name: whole.reconcile() for name, whole in wholes.items()}

    by_cp, by_shard = weights((1, 1, 2, 2)), weights((1, 4, 1, 1))
    assert all(torch.equal(by_cp[name], by_shard[name]) for name in by_shard)
