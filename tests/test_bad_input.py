"""Bad input to parallelize: the exact error, the value and a way out, an unchanged model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.bad_input import DATA, Call, Case, With, X, check, given
from _support.models import LM_PLAN, Lm
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

from parallel3d import (
    MeshError,
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    PlanError,
    build_mesh,
    parallelize,
    resolve_plan,
)
from parallel3d.testing import fake_world
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


def with_parameter(tensor: torch.Tensor) -> Callable[[], nn.Module]:
    return lambda: With(odd=nn.Parameter(tensor))


CASES = [
    # Meshes
    Case(
        "mesh of unknown axes",
        on_axes("a", "b", "c", tp_plan=LM_PLAN),
        MeshError,
        (r"a=2, b=2, c=2", r"'a', 'b', 'c' are not known", r'axes=\{"a": "shard"'),
        THREE_AXES,
    ),
    Case(
        "mesh of unnamed axes",
        on_axes(None, None, None, tp_plan=LM_PLAN),
        MeshError,
        (r"\(2, 2, 2\) have no names", r"build_mesh"),
        THREE_AXES,
    ),
    Case(
        "shard before replicate",
        on_axes("shard", "replicate"),
        MeshError,
        (r"shard=2, replicate=2", r"shard comes before replicate", r"in this order"),
    ),
    Case(
        "tp not innermost",
        on_axes("tp", "shard", tp_plan=LM_PLAN),
        MeshError,
        (r"tp=2, shard=2", r"tp is not the innermost axis", r"in this order"),
    ),
    Case(
        "mesh of tp alone",
        lambda model, mesh: parallelize(model, mesh["tp"], LM_PLAN),
        MeshError,
        (r"tp=2", r"no axis to shard or replicate over", r"build_mesh"),
    ),
    Case(
        "a layout for a mesh",
        lambda model, mesh: parallelize(model, MeshLayout(shard=4)),
        MeshError,
        (r"MeshLayout\(replicate=1, shard=4, tp=1\)", r"build_mesh"),
    ),
    Case(
        "fsdp=False with data axes",
        given(LM_PLAN, fsdp=False),
        MeshError,
        (r"2 data ranks \(replicate 1 x shard 2\)", r"fsdp=True", r"replicate=1, shard=1, tp=4"),
    ),
    # Plans
    Case("tp without a plan", given(), PlanError, (r"tp=2", r"Give a plan", r"shard=4, tp=1")),
    Case("empty plan", given({}), PlanError, (r"tp=2", r"Give a plan")),
    Case("a list for a plan", given(["colwise"]), PlanError, (r"\['colwise'\]", r"must be a dict")),
    Case(
        "a rule that matches nothing",
        given(plan(layers__x__upp="colwise")),
        PlanError,
        (r"'layers\.x\.upp' matches no module", r"nearest: .*'layers\.\*\.up'"),
    ),
    Case(
        "a rule for a parameter",
        given({**LM_PLAN, "layers.*.norm.weight": "colwise"}),
        PlanError,
        (r"'layers\.\*\.norm\.weight' on 'layers\.0\.norm'", r"has no style", r"'local_params'"),
    ),
    Case(
        "two rules on one module",
        given({**LM_PLAN, "layers.0.up": "rowwise"}),
        PlanError,
        (r"'layers\.0\.up' has two rules", r"'layers\.\*\.up'", r"keep one"),
    ),
    Case(
        "unknown style",
        given(plan(head="colwize")),
        PlanError,
        (r"'colwize'", r"did you mean 'colwise'", r"Known: .*rowwise"),
    ),
    Case(
        "what is no style",
        given(plan(head=nn.ReLU())),
        PlanError,
        (r"rule 'head'", r"a name or a Style, not ReLU"),
    ),
    Case(
        "torch's style on a module it can't split",
        given({**LM_PLAN, "norm": ColwiseParallel()}),
        PlanError,
        (r"module 'norm' as torch's ColwiseParallel", r"nn.Linear and nn.Embedding, not"),
    ),
    Case(
        "a pattern that is no text",
        given({3: "colwise"}),
        PlanError,
        (r"rule 3", r"a module's path such as", r"not int"),
    ),
    Case(
        "style on the wrong module",
        given(plan(norm="rowwise")),
        PlanError,
        (r"module 'norm' as Rowwise\(\)", r"for nn\.Linear, .*not LayerNorm"),
    ),
    Case(
        "heads of another size",
        given({"layers.*.up": Colwise(multiple_of=3), "layers.*.down": Rowwise(multiple_of=3)}),
        PlanError,
        (r"out_features 20 is not a multiple of multiple_of=3", r"in_features 20"),
    ),
    Case(
        "an option of a style",
        lambda model, mesh: parallelize(model, mesh, {"head": Colwise(output="whole")}),
        PlanError,
        (r"output='whole'", r"'shard', 'replicate'", r"Did you mean"),
    ),
    Case(
        "a tp size that is none",
        lambda model, mesh: resolve_plan(model, LM_PLAN, "2"),
        PlanError,
        (r"tp_size is '2'", r"an int"),
    ),
    Case(
        "a tied weight split in two ways",
        given(plan(embed="embedding_colwise")),
        PlanError,
        (r"can't be held in two ways", r"embed\.weight as .*dim 1", r"head\.weight as .*dim 0"),
        build=functools.partial(Lm, tied=True),
    ),
    # Models
    Case(
        "no module",
        lambda model, mesh: parallelize(model.forward, mesh, LM_PLAN),
        Parallel3dError,
        (r"bound method", r"must be an nn\.Module"),
    ),
    Case(
        "a model without parameters",
        given(),
        Parallel3dError,
        (r"ReLU has no parameters", r"nothing to shard"),
        DATA,
        nn.ReLU,
        (X,),
    ),
    Case(
        "sparse parameters",
        given(),
        Parallel3dError,
        (r"odd is torch\.sparse_coo", r"to_dense\(\)"),
        DATA,
        lambda: With(odd=nn.Parameter(torch.eye(3).to_sparse().coalesce())),
        (),
    ),
    Case(
        "a scripted model",
        given(),
        Parallel3dError,
        (r"odd is a RecursiveScriptModule", r"the nn\.Module it was scripted from"),
        DATA,
        lambda: With(odd=torch.jit.script(nn.Linear(2, 2))),
        (X,),
    ),
    Case(
        "a container for a model",
        given(),
        Parallel3dError,
        (r"nn\.ModuleList, which has no forward", r"pass them as one list"),
        DATA,
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        (),
    ),
    # Options
    Case(
        "units that match nothing",
        given(LM_PLAN, units=["blocks.*"]),
        Parallel3dError,
        (r"'blocks\.\*' matches no module", r"there are .*layers\.0"),
    ),
    Case(
        "a string for units",
        given(LM_PLAN, units="layers.*"),
        Parallel3dError,
        (r"units is 'layers\.\*'", r"such as \['layers\.\*'\]"),
    ),
    Case(
        "modules for units",
        lambda model, mesh: parallelize(model, mesh, LM_PLAN, units=list(model.layers)),
        Parallel3dError,
        (r"units is \[Block\(", r"name patterns"),
    ),
    Case(
        "a container for a unit",
        given(LM_PLAN, units=["layers"]),
        Parallel3dError,
        (r"units: .*'layers', an nn\.ModuleList", r"its members, 'layers\.\*'"),
    ),
    Case(
        "a dtype for a policy",
        given(LM_PLAN, mp_policy=torch.bfloat16),
        Parallel3dError,
        (r"mp_policy is torch\.bfloat16", r"MixedPrecisionPolicy"),
    ),
    Case(
        "an integer param_dtype",
        lambda model, mesh: parallelize(
            model, mesh, LM_PLAN, mp_policy=MixedPrecisionPolicy(param_dtype=torch.int8)
        ),
        Parallel3dError,
        (r"param_dtype is torch\.int8", r"such as torch\.bfloat16, or None"),
    ),
    Case(
        "a text for a dtype",
        lambda model, mesh: parallelize(
            model, mesh, LM_PLAN, mp_policy=MixedPrecisionPolicy(reduce_dtype="float32")
        ),
        Parallel3dError,
        (r"reduce_dtype is 'float32'", r"torch\.bfloat16"),
    ),
    Case(
        "an unknown compiler",
        given(LM_PLAN, compile="inductr"),
        Parallel3dError,
        (r"compile is 'inductr'", r"a backend of torch\.compile: .*inductor"),
    ),
    Case(
        "a text for a switch",
        given(LM_PLAN, reshard_after_forward="no"),
        Parallel3dError,
        (r"reshard_after_forward is 'no'", r"True or False"),
    ),
    Case(
        "the name of another library's option",
        given(LM_PLAN, activation_checkpointing="full"),
        Parallel3dError,
        (r"activation_checkpointing is 'full'", r"is True here", r'"selective", "offload"'),
    ),
    Case(
        "a policy that can't be called",
        given(LM_PLAN, activation_checkpointing=lambda op: True),
        Parallel3dError,
        (r"the function .*<lambda>, which can't be called", r"\(ctx, op, \*args, \*\*kwargs\)"),
    ),
    Case(
        "activation offload on torch's engine",
        given(LM_PLAN, activation_checkpointing="offload", engine="torch"),
        Parallel3dError,
        (r"activation_checkpointing='offload' is not possible", r'"selective"'),
    ),
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case) -> None:
    with fake_world(0, case.layout.world_size):
        check(case, build_mesh(case.layout, device_type="cpu"))


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
