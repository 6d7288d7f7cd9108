"""Bad input: the exact error, the value and a way out, an unchanged model."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _support.bad_input import DATA, Call, Case, Table, With, X, check, each_of, given, one_rank
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.snapshot import Snapshot
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from parallel3d import (
    MeshError,
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    PlanError,
    StateError,
    build_mesh,
    fully_shard,
    materialize,
    optim,
    parallelize,
    resolve_plan,
)
from parallel3d.errors import RefusedError, RefusedStateError
from parallel3d.fsdp import CPUOffloadPolicy, DataParallelMeshDims
from parallel3d.testing import fake_world, local_world
from parallel3d.tp import Colwise, Rowwise

TP = MeshLayout(tp=4)
THREE_AXES = MeshLayout(replicate=2, shard=2, tp=2)


def on_axes(*names: str | None, **options: Any) -> Call:
    """``parallelize`` on a mesh of these axes, of two ranks each."""

    def call(model: nn.Module, mesh: DeviceMesh) -> None:
        named = None if None in names else names
        other = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=named)
        parallelize(model, other, **options)

    return call


def plan(**rules: Any) -> dict[str, Any]:
    """The model's plan with other rules; a dot in a name is written as ``__``."""
    return {**LM_PLAN, **{name.replace("__", "."): style for name, style in rules.items()}}


def computing(**dtypes: Any) -> Call:
    """``parallelize`` with a policy, which is made by the call."""
    return lambda model, mesh: parallelize(
        model, mesh, LM_PLAN, mp_policy=MixedPrecisionPolicy(**dtypes)
    )


def on_data(build: Callable[[], nn.Module], *inputs: torch.Tensor) -> Case:
    """``parallelize`` of another model."""
    return Case(given(), DATA, build, inputs)


CASES: Table = {
    MeshError: {
        r"a=2, b=2, c=2.*'a', 'b', 'c' are not known.*axes=\{\"a\": \"shard\"": Case(
            on_axes("a", "b", "c", tp_plan=LM_PLAN), THREE_AXES
        ),
        r"\(2, 2, 2\) have no names.*build_mesh": Case(
            on_axes(None, None, None, tp_plan=LM_PLAN), THREE_AXES
        ),
        "shard=2, replicate=2.*shard comes before replicate.*in this order": on_axes(
            "shard", "replicate"
        ),
        "tp=2, shard=2.*tp is not the innermost axis.*in this order": on_axes(
            "tp", "shard", tp_plan=LM_PLAN
        ),
        "tp=2.*no axis to shard or replicate over.*build_mesh": (
            lambda model, mesh: parallelize(model, mesh["tp"], LM_PLAN)
        ),
        r"MeshLayout\(replicate=1, shard=4, tp=1\).*build_mesh": (
            lambda model, mesh: parallelize(model, MeshLayout(shard=4))
        ),
        r"2 data ranks \(replicate 1 x shard 2\).*fsdp=True.*replicate=1, shard=1, tp=4": given(
            LM_PLAN, fsdp=False
        ),
    },
    PlanError: {
        "tp=2.*Give a plan.*shard=4, tp=1": given(),
        "tp=2.*Give a plan": given({}),
        r"\['colwise'\].*must be a dict": given(["colwise"]),
        r"'layers\.x\.upp' matches no module.*nearest: .*'layers\.\*\.up'": given(
            plan(layers__x__upp="colwise")
        ),
        r"'layers\.\*\.norm\.weight' on 'layers\.0\.norm'.*has no style.*'local_params'": given(
            {**LM_PLAN, "layers.*.norm.weight": "colwise"}
        ),
        r"'layers\.0\.up' has two rules.*'layers\.\*\.up'.*keep one": given(
            {**LM_PLAN, "layers.0.up": "rowwise"}
        ),
        "'colwize'.*did you mean 'colwise'.*Known: .*rowwise": given(plan(head="colwize")),
        "rule 'head'.*a name or a Style, not ReLU": given(plan(head=nn.ReLU())),
        "module 'norm' as torch's ColwiseParallel.*nn.Linear and nn.Embedding, not": given(
            {**LM_PLAN, "norm": ColwiseParallel()}
        ),
        "rule 3.*a module's path such as.*not int": given({3: "colwise"}),
        r"module 'norm' as Rowwise\(\).*for nn\.Linear, .*not LayerNorm": given(
            plan(norm="rowwise")
        ),
        "out_features 20 is not a multiple of multiple_of=3.*in_features 20": given(
            {"layers.*.up": Colwise(multiple_of=3), "layers.*.down": Rowwise(multiple_of=3)}
        ),
        "output='whole'.*'shard', 'replicate'.*Did you mean": (
            lambda model, mesh: parallelize(model, mesh, {"head": Colwise(output="whole")})
        ),
        "tp_size is '2'.*an int": lambda model, mesh: resolve_plan(model, LM_PLAN, "2"),
        r"can't be held in two ways.*embed\.weight as .*dim 1.*head\.weight as .*dim 0": Case(
            given(plan(embed="embedding_colwise")), build=functools.partial(Lm, tied=True)
        ),
    },
    Parallel3dError: {
        # Models
        r"bound method.*must be an nn\.Module": (
            lambda model, mesh: parallelize(model.forward, mesh, LM_PLAN)
        ),
        "ReLU has no parameters.*nothing to shard": on_data(nn.ReLU, X),
        r"odd is torch\.sparse_coo.*to_dense\(\)": on_data(
            lambda: With(odd=nn.Parameter(torch.eye(3).to_sparse().coalesce()))
        ),
        r"odd is a RecursiveScriptModule.*the nn\.Module it was scripted from": on_data(
            lambda: With(odd=torch.jit.script(nn.Linear(2, 2))), X
        ),
        r"nn\.ModuleList, which has no forward.*pass them as one list": on_data(
            lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        ),
        # Options
        r"'blocks\.\*' matches no module.*there are .*layers\.0": given(
            LM_PLAN, units=["blocks.*"]
        ),
        r"units is 'layers\.\*'.*such as \['layers\.\*'\]": given(LM_PLAN, units="layers.*"),
        r"units is \[Block\(.*name patterns": (
            lambda model, mesh: parallelize(model, mesh, LM_PLAN, units=list(model.layers))
        ),
        r"units: .*'layers', an nn\.ModuleList.*its members, 'layers\.\*'": given(
            LM_PLAN, units=["layers"]
        ),
        r"mp_policy is torch\.bfloat16.*MixedPrecisionPolicy": given(
            LM_PLAN, mp_policy=torch.bfloat16
        ),
        r"param_dtype is torch\.int8.*such as torch\.bfloat16, or None": computing(
            param_dtype=torch.int8
        ),
        r"reduce_dtype is 'float32'.*torch\.bfloat16": computing(reduce_dtype="float32"),
        r"compile is 'inductr'.*a backend of torch\.compile: .*inductor": given(
            LM_PLAN, compile="inductr"
        ),
        "reshard_after_forward is 'no'.*True or False": given(LM_PLAN, reshard_after_forward="no"),
        'activation_checkpointing is \'full\'.*is True here.*"selective", "offload"': given(
            LM_PLAN, activation_checkpointing="full"
        ),
        r"the function .*<lambda>, which can't be called.*\(ctx, op, \*args, \*\*kwargs\)": given(
            LM_PLAN, activation_checkpointing=lambda op: True
        ),
        "activation_checkpointing='offload' is not possible.*\"selective\"": given(
            LM_PLAN, activation_checkpointing="offload", engine="torch"
        ),
    },
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@each_of(CASES)
def test_bad_input(error: type[Parallel3dError], says: str, case: Case) -> None:
    with fake_world(0, case.layout.world_size):
        check(case, error, says, build_mesh(case.layout, device_type="cpu"))


def test_parameters_without_a_size() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    before = [dict(vars(module)) for module in model.modules()]
    with fake_world(0, 4):
        mesh = build_mesh(DATA, device_type="cpu")
        with pytest.raises(Parallel3dError, match=r"0\.weight has no size yet; run a batch"):
            parallelize(model, mesh)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model(X).shape == (3, 4)


def test_parallelize_without_a_process_group() -> None:
    # The first thing that is wrong, not that ranks can't compare.
    with pytest.raises(MeshError, match=r"mesh is None.*build_mesh"):
        parallelize(Lm(), None)


# -- everything but parallelize of a plain model -------------------------------------------------------


def sharded(**options: Any) -> Call:
    """``fully_shard`` of the model with these arguments."""
    return lambda model, mesh: fully_shard(model, **{"mesh": mesh, **options})


def materialized(device: str, build: Callable[[], nn.Module] = lambda: Lm().to("meta")) -> Case:
    return Case(lambda model, mesh: materialize(model, device=device), build=build, inputs=())


def clipped(*arguments: Any) -> Call:
    return lambda model, mesh: optim.clip_grad_norm_(model, *arguments)


CALLS: Table = {
    Parallel3dError: {
        # fully_shard
        r"nn\.ModuleList.*each of its modules, or pass them as one list": (
            lambda model, mesh: fully_shard(model.layers, mesh=mesh)
        ),
        "empty list.*at least one module": lambda model, mesh: fully_shard([], mesh=mesh),
        "3 modules that has one of them twice.*list each once": (
            lambda model, mesh: fully_shard([model.head, model.norm, model.head], mesh=mesh)
        ),
        r"'head\.weight'.*the Parameters themselves": sharded(ignored_params=["head.weight"]),
        r"mp_policy is torch\.bfloat16.*MixedPrecisionPolicy": sharded(mp_policy=torch.bfloat16),
        r"offload_policy is 'cpu'.*CPUOffloadPolicy\(pin_memory": sharded(offload_policy="cpu"),
        "pin_memory is 'cuda'.*True or False": (
            lambda model, mesh: fully_shard(
                model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory="cuda")
            )
        ),
        r"reshard_after_forward is 3.*True \(free.*2 ranks.*give True or False": sharded(
            reshard_after_forward=3
        ),
        # materialize
        r"no parameter or buffer .* is on the meta device.*torch\.device\('meta'\)": (
            lambda model, mesh: materialize(model, device="cpu")
        ),
        r"scale \(With\).*reset_parameters\(\).*_init_weights\(module\)": materialized(
            "cpu", lambda: With(scale=nn.Parameter(torch.ones(3))).to("meta")
        ),
        "device is 'gpu'.*'cpu' or 'cuda'": materialized("gpu"),
        "device is meta.*a device that holds values": materialized("meta"),
        # What surrounds the step
        r"max_norm is -1\.0.*>= 0": clipped(-1.0),
        "max_norm is nan.*>= 0": clipped(float("nan")),
        r"norm_type is 0.*2\.0 or float\('inf'\)": clipped(1.0, 0),
        r"norm_type is 'inf'.*float\('inf'\)": clipped(1.0, "inf"),
        r"Lm is not parallel.*call parallel3d\.parallelize first": (
            lambda model, mesh: optim.accumulate(model, [1, 2])
        ),
    },
    RefusedError: {
        r"Shard\(1\) for parameter layers\.0\.norm\.weight.*\(12,\).*from -1 to 0": sharded(
            shard_placement_fn=lambda p: Shard(1)
        )
    },
    MeshError: {
        r"embed\.weight is plain.*distribute_module": sharded(
            dp_mesh_dims=DataParallelMeshDims(shard="shard")
        ),
        "no axis 'fsdp'.*it has replicate, shard, tp": sharded(
            dp_mesh_dims=DataParallelMeshDims(shard="fsdp")
        ),
        "mesh is 'cpu'.*build_mesh.*or None": sharded(mesh="cpu"),
    },
}


@each_of(CALLS)
def test_bad_call(error: type[Parallel3dError], says: str, case: Case) -> None:
    with fake_world(0, case.layout.world_size):
        check(case, error, says, build_mesh(case.layout, device_type="cpu"))


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
    says = f"parallel already.*{shown}.*plain model, once"
    for options in ({}, {"tp_plan": LM_PLAN}):
        case = Case(given(**options), build=lambda: make(Lm(), single))
        check(case, Parallel3dError, says, single)


def test_calls_of_a_parallel_model(single: DeviceMesh) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return parallelize(Lm(), single, LM_PLAN)

    def with_nan() -> nn.Module:
        model = parallelize(Lm(), single)
        lm_loss(model, tokens(0)).backward()
        model.norm.weight.grad.fill_(float("nan"))
        return model

    calls: list[tuple[type[Parallel3dError], str, Call, dict[str, Any]]] = [
        (
            RefusedStateError,
            "already applied to this FSDPBlock.*once to each unit, inner units first",
            lambda model, mesh: fully_shard(model.layers[0], mesh=mesh),
            {},
        ),
        (
            Parallel3dError,
            "device is cuda.*mesh is on cpu.*leave device out",
            lambda model, mesh: materialize(model, device="cuda"),
            {"build": on_meta, "inputs": ()},
        ),
        (
            Parallel3dError,
            "there is no micro-batch.*at least one",
            lambda model, mesh: list(optim.accumulate(model, iter(()))),
            {},
        ),
        (
            StateError,
            r"the 2\.0-norm .* is nan.*must be finite",
            lambda model, mesh: optim.clip_grad_norm_(model, 1.0, error_if_nonfinite=True),
            {"build": with_nan},
        ),
    ]
    for error, says, call, options in calls:
        case = Case(call, **{"build": lambda: parallelize(Lm(), single), **options})
        check(case, error, says, single)


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
