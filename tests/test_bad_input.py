"""Bad input to parallelize: the exact error, the value and a way out, an unchanged model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.bad_input import DATA, Call, Case, Table, With, X, check, each_of, given
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
