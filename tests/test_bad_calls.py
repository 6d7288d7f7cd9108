"""Bad input to everything but parallelize of a plain model; see test_bad_input.py."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _support.bad_input import Case, With, X, check, given, one_rank
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.snapshot import Snapshot
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from parallel3d import (
    MeshError,
    MeshLayout,
    Parallel3dError,
    StateError,
    build_mesh,
    fully_shard,
    materialize,
    optim,
    parallelize,
)
from parallel3d.errors import RefusedError, RefusedStateError
from parallel3d.fsdp import CPUOffloadPolicy, DataParallelMeshDims
from parallel3d.testing import fake_world, local_world

CASES = [
    # fully_shard
    Case(
        "fully_shard of a ModuleList",
        lambda model, mesh: fully_shard(model.layers, mesh=mesh),
        Parallel3dError,
        (r"nn\.ModuleList", r"each of its modules, or pass them as one list"),
    ),
    Case(
        "fully_shard of nothing",
        lambda model, mesh: fully_shard([], mesh=mesh),
        Parallel3dError,
        (r"empty list", r"at least one module"),
    ),
    Case(
        "fully_shard of one module twice",
        lambda model, mesh: fully_shard([model.head, model.norm, model.head], mesh=mesh),
        Parallel3dError,
        (r"3 modules that has one of them twice", r"list each once"),
    ),
    Case(
        "names for ignored_params",
        lambda model, mesh: fully_shard(model, mesh=mesh, ignored_params=["head.weight"]),
        Parallel3dError,
        (r"'head\.weight'", r"the Parameters themselves"),
    ),
    Case(
        "fully_shard with a dtype for a policy",
        lambda model, mesh: fully_shard(model, mesh=mesh, mp_policy=torch.bfloat16),
        Parallel3dError,
        (r"mp_policy is torch\.bfloat16", r"MixedPrecisionPolicy"),
    ),
    Case(
        "fully_shard with a name for offload_policy",
        lambda model, mesh: fully_shard(model, mesh=mesh, offload_policy="cpu"),
        Parallel3dError,
        (r"offload_policy is 'cpu'", r"CPUOffloadPolicy\(pin_memory"),
    ),
    Case(
        "fully_shard with a device for pin_memory",
        lambda model, mesh: fully_shard(
            model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory="cuda")
        ),
        Parallel3dError,
        (r"pin_memory is 'cuda'", r"True or False"),
    ),
    Case(
        "fully_shard to a number of ranks that is no divisor",
        lambda model, mesh: fully_shard(model, mesh=mesh, reshard_after_forward=3),
        Parallel3dError,
        (r"reshard_after_forward is 3", r"2 ranks", r"give True or False", r"True \(free"),
    ),
    Case(
        "fully_shard with a dim that one parameter has not",
        lambda model, mesh: fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1)),
        RefusedError,
        (r"Shard\(1\) for parameter layers\.0\.norm\.weight", r"\(12,\)", r"from -1 to 0"),
    ),
    Case(
        "fully_shard with dp_mesh_dims for a plain model",
        lambda model, mesh: fully_shard(
            model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard")
        ),
        MeshError,
        (r"embed\.weight is plain", r"distribute_module"),
    ),
    Case(
        "fully_shard with dp_mesh_dims that the mesh has not",
        lambda model, mesh: fully_shard(
            model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp")
        ),
        MeshError,
        (r"no axis 'fsdp'", r"it has replicate, shard, tp"),
    ),
    Case(
        "fully_shard with a device for a mesh",
        lambda model, mesh: fully_shard(model, mesh="cpu"),
        MeshError,
        (r"mesh is 'cpu'", r"build_mesh", r"or None"),
    ),
    # materialize
    Case(
        "materialize of a model with values",
        lambda model, mesh: materialize(model, device="cpu"),
        Parallel3dError,
        (r"no parameter or buffer .* is on the meta device", r"torch\.device\('meta'\)"),
    ),
    Case(
        "materialize of a module without initialiser",
        lambda model, mesh: materialize(model, device="cpu"),
        Parallel3dError,
        (r"scale \(With\)", r"reset_parameters\(\)", r"_init_weights\(module\)"),
        build=lambda: With(scale=nn.Parameter(torch.ones(3))).to("meta"),
        inputs=(),
    ),
    Case(
        "materialize to an unknown device",
        lambda model, mesh: materialize(model, device="gpu"),
        Parallel3dError,
        (r"device is 'gpu'", r"'cpu' or 'cuda'"),
        build=lambda: Lm().to("meta"),
        inputs=(),
    ),
    Case(
        "materialize to meta",
        lambda model, mesh: materialize(model, device="meta"),
        Parallel3dError,
        (r"device is meta", r"a device that holds values"),
        build=lambda: Lm().to("meta"),
        inputs=(),
    ),
    # What surrounds the step
    Case(
        "a negative max_norm",
        lambda model, mesh: optim.clip_grad_norm_(model, -1.0),
        Parallel3dError,
        (r"max_norm is -1\.0", r">= 0"),
    ),
    Case(
        "max_norm that is nan",
        lambda model, mesh: optim.clip_grad_norm_(model, float("nan")),
        Parallel3dError,
        (r"max_norm is nan", r">= 0"),
    ),
    Case(
        "norm_type zero",
        lambda model, mesh: optim.clip_grad_norm_(model, 1.0, 0),
        Parallel3dError,
        (r"norm_type is 0", r"2\.0 or float\('inf'\)"),
    ),
    Case(
        "norm_type as a text",
        lambda model, mesh: optim.clip_grad_norm_(model, 1.0, "inf"),
        Parallel3dError,
        (r"norm_type is 'inf'", r"float\('inf'\)"),
    ),
    Case(
        "accumulate on a plain model",
        lambda model, mesh: optim.accumulate(model, [1, 2]),
        Parallel3dError,
        (r"Lm is not parallel", r"call parallel3d\.parallelize first"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_call(case: Case) -> None:
    with fake_world(0, case.layout.world_size):
        check(case, build_mesh(case.layout, device_type="cpu"))


LAYOUTS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("zero", lambda: MeshLayout(shard=0), (r"shard=0", r"1 or more")),
    ("negative", lambda: MeshLayout(tp=-2), (r"tp=-2", r"-1 to infer it from the world size")),
    ("a float", lambda: MeshLayout(replicate=2.0), (r"replicate=2\.0 is a float", r"an int")),
    ("two -1", lambda: MeshLayout(shard=-1, tp=-1), (r"shard and tp are -1", r"for example tp=1")),
    (
        "a product that is not the world",
        lambda: MeshLayout(2, 2, 2).resolve(12),
        (r"= 8 ranks", r"12 ranks", r"Nearest that fit: ", r"start 8 ranks"),
    ),
    (
        "a world that does not divide",
        lambda: MeshLayout(replicate=-1, tp=4).resolve(6),
        (r"6 is not a multiple of .*tp 4", r"tp may be .*3", r"Nearest that fit"),
    ),
    (
        "an unresolved layout",
        lambda: MeshLayout(shard=-1).coordinates(0),
        (r"not resolved", r"layout\.resolve\(world_size\)"),
    ),
    (
        "a rank outside",
        lambda: MeshLayout(shard=4).coordinates(4),
        (r"rank 4", r"from 0 to 3"),
    ),
    (
        "a mesh for another world",
        lambda: build_mesh(MeshLayout(shard=2, tp=3), device_type="cpu"),
        (
            r"= 6 ranks, but the world has 4 ranks",
            r"Nearest that fit: .*shard 2 x tp 2",
            r"start 6 ranks",
        ),
    ),
    (
        "sizes for a layout",
        lambda: build_mesh((1, 2, 2), device_type="cpu"),
        (r"not \(1, 2, 2\)", r"MeshLayout\(replicate=2, shard=-1, tp=4\)"),
    ),
    (
        "an unknown device",
        lambda: build_mesh(MeshLayout(shard=4), device_type="gpu"),
        (r"device_type='gpu'", r"carries .*cpu", r"Pass one of these"),
    ),
]


@pytest.mark.parametrize(("call", "says"), [x[1:] for x in LAYOUTS], ids=[x[0] for x in LAYOUTS])
def test_bad_layout(call: Callable[[], Any], says: tuple[str, ...]) -> None:
    with fake_world(0, 4), pytest.raises(MeshError) as caught:
        call()
    for pattern in says:
        assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


# Models that are parallel already: real numbers on a world of one rank


@pytest.fixture
def single() -> Iterator[DeviceMesh]:
    with one_rank() as mesh:
        yield mesh


def made_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["tp"], {"layers.0.up": ColwiseParallel()})


PARALLEL: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], str]] = {
    "ours": (lambda model, mesh: parallelize(model, mesh, LM_PLAN), r"it is of class FSDPLm"),
    "our fully_shard of a block": (
        lambda model, mesh: [fully_shard(model.layers[1], mesh=mesh), model][1],
        r"layers\.1 is of class FSDPBlock",
    ),
    "torch's fully_shard": (
        lambda model, mesh: torch_fully_shard(model, mesh=mesh["shard"]),
        r"it is of class FSDPLm",
    ),
    "DDP": (
        lambda model, mesh: DistributedDataParallel(model),
        r"is of class DistributedDataParallel",
    ),
    "torch's parallelize_module": (made_tensor_parallel, r"layers\.0\.up\.weight is a DTensor"),
}


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallel_already(kind: str, single: DeviceMesh) -> None:
    make, shown = PARALLEL[kind]
    says = ("parallel already", shown, "plain model, once")
    build = lambda: make(Lm(), single)  # noqa: E731
    for options in ({}, {"tp_plan": LM_PLAN}):
        check(Case(kind, given(**options), Parallel3dError, says, build=build), single)


def test_fully_shard_twice(single: DeviceMesh) -> None:
    build = lambda: parallelize(Lm(), single)  # noqa: E731
    says = (r"already applied to this FSDPBlock", r"once to each unit, inner units first")
    again = lambda model, mesh: fully_shard(model.layers[0], mesh=mesh)  # noqa: E731
    check(Case("", again, RefusedStateError, says, build=build), single)


def test_parallel_model_to_another_device(single: DeviceMesh) -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return parallelize(Lm(), single, LM_PLAN)

    says = (r"device is cuda", r"mesh is on cpu", r"leave device out")
    call = lambda model, mesh: materialize(model, device="cuda")  # noqa: E731
    check(Case("", call, Parallel3dError, says, build=build, inputs=()), single)


def test_no_micro_batch(single: DeviceMesh) -> None:
    build = lambda: parallelize(Lm(), single)  # noqa: E731
    call = lambda model, mesh: list(optim.accumulate(model, iter(())))  # noqa: E731
    says = (r"there is no micro-batch", r"at least one")
    check(Case("", call, Parallel3dError, says, build=build), single)


def test_not_finite_gradients(single: DeviceMesh) -> None:
    def build() -> nn.Module:
        model = parallelize(Lm(), single)
        lm_loss(model, tokens(0)).backward()
        model.norm.weight.grad.fill_(float("nan"))
        return model

    call = lambda model, mesh: optim.clip_grad_norm_(  # noqa: E731
        model, 1.0, error_if_nonfinite=True
    )
    says = (r"the 2\.0-norm .* is nan", r"must be finite")
    check(Case("", call, StateError, says, build=build), single)


def test_clipping_before_the_last_micro_batch() -> None:
    plain = Lm()
    with local_world(4) as world:
        mesh = build_mesh(MeshLayout(replicate=2, shard=2), device_type="cpu")
        model = parallelize(plain, mesh)
        for index in optim.accumulate(model, range(2)):
            lm_loss(model, world.map(lambda rank, i=index: tokens(rank + i))).backward()
            if index == 0:
                before = [world.per_rank(p.grad)[0].clone() for p in model.parameters()]
                with pytest.raises(StateError, match=r"P\(sum\) on axis 0.*last micro-batch"):
                    optim.clip_grad_norm_(model, 1e-3)
                for param, grad in zip(model.parameters(), before, strict=True):
                    assert torch.equal(world.per_rank(param.grad)[0], grad)
        optim.clip_grad_norm_(model, 1e-3)


def test_fully_shard_that_fails_changes_nothing(single: DeviceMesh) -> None:
    # The parameter that can't be is the last of three modules'.
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), With(odd=nn.Parameter(torch.ones(2).to_sparse()))]
    model = nn.Sequential(*layers)
    before = Snapshot(model, X)
    with pytest.raises(Parallel3dError, match=r"odd is torch\.sparse_coo.*to_dense"):
        fully_shard(list(model), mesh=single)
    before.check()
