"""Bad input: the exact error, a message with the value and a way out, and an unchanged model."""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LM_PLAN, Lm, lm_loss, tokens
from snapshot import Snapshot
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
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
from parallel3d.fsdp.bucket import Bucket
from parallel3d.testing import fake_world, local_world
from parallel3d.tp import Colwise, Rowwise

Call = Callable[[nn.Module, DeviceMesh], Any]

TWO_BY_TWO = MeshLayout(shard=2, tp=2)
DATA = MeshLayout(shard=4)
TP = MeshLayout(tp=4)
THREE_AXES = MeshLayout(replicate=2, shard=2, tp=2)

implementation = sys.modules[parallelize.__module__]  # its name is also the function's


@dataclass(frozen=True)
class Case:
    """One wrong call.

    Attributes:
        call: what is done with the model, on a mesh of ``layout``.
        error: the exact class of the error.
        says: patterns that its message must match: the value, and a way out.
        build: makes the model.
        inputs: of its forward, compared before and after.
    """

    name: str
    call: Call
    error: type[Parallel3dError]
    says: tuple[str, ...]
    layout: MeshLayout = TWO_BY_TWO
    build: Callable[[], nn.Module] = Lm
    inputs: tuple[torch.Tensor, ...] = (tokens(0),)


def check(case: Case, mesh: DeviceMesh) -> None:
    """Makes the call; see ``Case``."""
    torch.manual_seed(0)
    model = case.build()
    before = Snapshot(model, *case.inputs)
    with pytest.raises(Parallel3dError) as caught:
        case.call(model, mesh)
    assert type(caught.value) is case.error
    for pattern in case.says:
        assert re.search(pattern, str(caught.value), re.DOTALL), (pattern, str(caught.value))
    before.check()


def given(tp_plan: Any = None, **options: Any) -> Call:
    """``parallelize`` with these arguments."""
    return lambda model, mesh: parallelize(model, mesh, tp_plan, **options)


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


# Models


class With(nn.Module):
    """Linears around a parameter, buffer or module of the test's choice."""

    def __init__(self, **extra: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        for name, value in extra.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def with_parameter(tensor: torch.Tensor) -> Callable[[], nn.Module]:
    return lambda: With(odd=nn.Parameter(tensor))


def tied_blocks() -> Lm:
    """Two blocks that share a weight: the second's ``fully_shard`` fails, half-way through."""
    model = Lm(layers=3)
    model.layers[1].up.weight = model.layers[0].up.weight
    return model


def nested() -> Lm:
    model = Lm()
    model.layers[0].up = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 20))
    return model


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))

CASES = [
    # Meshes
    Case(
        "mesh of unknown axes",
        on_axes("a", "b", "c", tp_plan=LM_PLAN),
        MeshError,
        (r"a=2, b=2, c=2", r"'a' is not known", r"build_mesh\(MeshLayout"),
        THREE_AXES,
    ),
    Case(
        "mesh of unnamed axes",
        on_axes(None, None, None, tp_plan=LM_PLAN),
        MeshError,
        (r"\?=2", r"not known", r"build_mesh"),
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
        given(plan(head__weight="colwise")),
        PlanError,
        (r"'head\.weight' is a parameter", r"names the module that owns it"),
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
        "another library's style",
        given(plan(head=ColwiseParallel())),
        PlanError,
        (r"rule 'head'", r"a name or a Style, not ColwiseParallel"),
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
        (r"module 'norm' as Rowwise\(\)", r"for nn\.Linear .*not LayerNorm"),
    ),
    Case(
        "more tp ranks than rows",
        given(LM_PLAN),
        PlanError,
        (r"'embed'", r"num_embeddings 3 is too small for 4 tp ranks", r"the largest tp is 3"),
        TP,
        functools.partial(Lm, vocab=3),
        (tokens(0, vocab=3),),
    ),
    Case(
        "heads that tp can't share",
        given({"layers.*.up": Colwise(multiple_of=4), "layers.*.down": Rowwise(multiple_of=4)}),
        PlanError,
        (r"20 is 5 groups of 4", r"2 tp ranks can't share", r"tp sizes that work: 1, 5"),
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
        (r"tp_size '2'", r"an int"),
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
        "complex parameters",
        given(),
        Parallel3dError,
        (r"odd is torch\.complex64", r"torch\.view_as_real"),
        DATA,
        with_parameter(torch.ones(2, dtype=torch.complex64)),
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
    Case(
        "a weight that two blocks share",
        given(),
        Parallel3dError,
        (r"up\.weight is tied", r"must be in one unit", r"as one list"),
        DATA,
        tied_blocks,
    ),
    # Options
    Case(
        "units that match nothing",
        given(LM_PLAN, units=["blocks.*"]),
        Parallel3dError,
        (r"'blocks\.\*' matches no module", r"there are .*layers\.0"),
    ),
    Case(
        "units inside each other",
        given(LM_PLAN, units=["layers.*", "layers.*.up"]),
        Parallel3dError,
        (r"layers\.0\.up lies inside layers\.0", r"match only one"),
    ),
    Case(
        "a string for units",
        given(LM_PLAN, units="layers.*"),
        Parallel3dError,
        (r"the string 'layers\.\*'", r"such as \['layers\.\*'\]"),
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
        (r"nn\.ModuleList, which has no forward", r"each of its modules"),
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
        (r"activation_checkpointing is 'full'", r"True or False"),
    ),
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
        (r"3 modules in which one stands twice", r"list each once"),
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
        "fully_shard without a mesh",
        lambda model, mesh: fully_shard(model, mesh=None),
        MeshError,
        (r"mesh is None", r"build_mesh"),
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
        (r"the model \(With\)", r"no reset_parameters\(\)", r"_init_weights\(module\)"),
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


LAYOUTS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("zero", lambda: MeshLayout(shard=0), (r"shard=0", r"1 or more")),
    ("negative", lambda: MeshLayout(tp=-2), (r"tp=-2", r"-1 for what the world size leaves")),
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


def test_there_are_enough_cases() -> None:
    assert len(CASES) + len(LAYOUTS) >= 30


# Models that are parallel already: real numbers on a world of one rank


@pytest.fixture
def single(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield build_mesh(MeshLayout(), device_type="cpu")
    dist.destroy_process_group()


def made_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["tp"], {"layers.0.up": ColwiseParallel()})


PARALLEL: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], str]] = {
    "ours": (lambda model, mesh: parallelize(model, mesh, LM_PLAN), r"it is a FSDPLm"),
    "our fully_shard of a block": (
        lambda model, mesh: [fully_shard(model.layers[1], mesh=mesh), model][1],
        r"layers\.1 is a FSDPBlock",
    ),
    "torch's fully_shard": (
        lambda model, mesh: torch_fully_shard(model, mesh=mesh["shard"]),
        r"it is a FSDPLm",
    ),
    "DDP": (lambda model, mesh: DistributedDataParallel(model), r"is a DistributedDataParallel"),
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
    check(Case("", again, Parallel3dError, says, build=build), single)


def test_fully_shard_of_what_is_tied_to_another_unit(single: DeviceMesh) -> None:
    def build() -> nn.Module:
        model = Lm(tied=True)
        fully_shard(model.embed, mesh=single)
        return model

    says = (r"weight is tied to one that the unit Embedding already has", r"as one list")
    call = lambda model, mesh: fully_shard(model.head, mesh=mesh)  # noqa: E731
    check(Case("", call, Parallel3dError, says, build=build), single)


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
    check(Case("", call, Parallel3dError, says, build=build), single)


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


def test_parallelize_without_a_process_group() -> None:
    # The first thing that is wrong, not that ranks can't compare.
    with pytest.raises(MeshError, match=r"mesh is None.*build_mesh"):
        parallelize(Lm(), None)


# Failures half-way: the model goes back to what it was


class Broken(RuntimeError):
    """Not one of ours: memory, a bug, an interrupt."""


def failing_on_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Broken(f"call {number}")
        return function(*args, **kwargs)

    return wrapped


def annotated() -> Lm:
    """A model with things of its own that wrapping must not lose."""
    model = Lm(layers=3)
    model.register_buffer("steps", torch.zeros(3))
    model.layers[0].up.weight.no_decay = True  # a mark on a parameter
    model.head.weight.requires_grad_(False)
    model.names = ["a"]
    model.layers[1].forward = functools.partial(type(model.layers[1]).forward, model.layers[1])
    lm_loss(model, tokens(1)).backward()
    return model


# Three blocks, embedding, tail, root; with and without tensor parallelism before.
@pytest.mark.parametrize("number", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("layout", [DATA, TWO_BY_TWO, MeshLayout()], ids=str)
def test_failure_in_any_fully_shard_is_rolled_back(monkeypatch, number: int, layout) -> None:
    failing = failing_on_call(number, implementation.fully_shard)
    monkeypatch.setattr(implementation, "fully_shard", failing)
    check_rolled_back(layout, compile="eager", activation_checkpointing=True)


@pytest.mark.parametrize("number", [1, 3])
def test_failure_in_compile_is_rolled_back(monkeypatch, number: int) -> None:
    monkeypatch.setattr(torch, "compile", failing_on_call(number, torch.compile))
    check_rolled_back(TWO_BY_TWO, compile="eager", activation_checkpointing=True)


# Buckets: one for each block, one for the embedding, two for the tail, whose head is half frozen.
@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_failure_inside_fully_shard_is_rolled_back(monkeypatch, number: int) -> None:
    monkeypatch.setattr(Bucket, "build", failing_on_call(number, Bucket.build))
    check_rolled_back(TWO_BY_TWO)


def test_failure_in_a_style_is_rolled_back(monkeypatch) -> None:
    monkeypatch.setattr(Rowwise, "install", failing_on_call(2, Rowwise.install))
    check_rolled_back(TWO_BY_TWO)


def test_interrupt_is_rolled_back(monkeypatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rowwise, "install", interrupted)
    check_rolled_back(TWO_BY_TWO, error=KeyboardInterrupt)


def check_rolled_back(
    layout: MeshLayout, error: type[BaseException] = Broken, **options: Any
) -> None:
    model = annotated()
    calls: list[nn.Module] = []
    handle = model.layers[2].register_forward_hook(lambda module, *_: calls.append(module))
    before = Snapshot(model, tokens(0))
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        with pytest.raises(error):
            parallelize(model, mesh, LM_PLAN, **options)
    before.check()
    # The user's handle still belongs to the hook.
    calls.clear()
    handle.remove()
    model(tokens(0))
    assert not calls


def test_a_rolled_back_model_can_be_made_parallel(monkeypatch, single: DeviceMesh) -> None:
    model = Lm()
    expected = model(tokens(0))
    failing = failing_on_call(3, implementation.fully_shard)
    with monkeypatch.context() as patched:
        patched.setattr(implementation, "fully_shard", failing)
        with pytest.raises(Broken):
            parallelize(model, single, LM_PLAN)
    assert parallelize(model, single, LM_PLAN) is model
    torch.testing.assert_close(model(tokens(0)), expected)


def test_fully_shard_that_fails_changes_nothing(single: DeviceMesh) -> None:
    # The parameter that can't be is the last of three modules'.
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), With(odd=nn.Parameter(torch.ones(2) * 1j))]
    model = nn.Sequential(*layers)
    before = Snapshot(model, X)
    with pytest.raises(Parallel3dError, match=r"odd is torch\.complex.*ignored_params"):
        fully_shard(list(model), mesh=single)
    before.check()


def test_snapshot_sees_changes() -> None:
    """The helper itself: each of these changes is one it must notice."""

    def attribute(model: Lm) -> None:
        model.norm.extra = 1

    def hook(model: Lm) -> None:
        model.layers[0].register_forward_pre_hook(lambda *_: None)

    def load_hook(model: Lm) -> None:
        model.register_load_state_dict_post_hook(lambda *_: None)

    def value(model: Lm) -> None:
        model.head.bias.data[3] += 1e-6

    def parameter(model: Lm) -> None:
        model.head.bias = nn.Parameter(model.head.bias.detach())

    def mark(model: Lm) -> None:
        model.head.bias._layout = object()

    def frozen(model: Lm) -> None:
        model.head.bias.requires_grad_(False)

    def cls(model: Lm) -> None:
        model.norm.__class__ = type("FSDPLayerNorm", (nn.LayerNorm,), {})

    def forward(model: Lm) -> None:
        model.layers[1].forward = lambda x: F.relu(x)

    for change in (attribute, hook, load_hook, value, parameter, mark, frozen, cls, forward):
        model = Lm()
        before = Snapshot(model, tokens(0))
        before.check()
        change(model)
        with pytest.raises(AssertionError):
            before.check()
