"""torch's own ParallelStyle objects in a plan, alone and beside our styles."""

import functools

import pytest
import torch
from _support.tp.tp_models import DIM, Lm, Mlp
from _support.tp.tp_world import on_rank, tp_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from parallel3d._layout.param_layout import ParamLayout, get_param_layout
from parallel3d.errors import PlanError, StateError
from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import Colwise, Rowwise, VocabParallel, parse_style, resolve_plan
from parallel3d.tp import PrepareInput as OurPrepareInput

LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2)]


def check(build, plan: dict, layout: tuple[int, int, int], length: int = 4) -> None:
    def batch(sample: int) -> Tensor:
        generator = torch.Generator().manual_seed(sample)
        return torch.randint(12, (2, length), generator=generator)

    found = assert_parity(build, batch, MeshLayout(*layout), steps=2, fp32=False, tp_plan=plan)
    assert found


TORCH = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.mlp.gate": ColwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
MIXED = {
    "embed": "embedding_rowwise",
    "layers.0.mlp.gate": "colwise",
    "layers.0.mlp.up": Colwise(),
    "layers.0.mlp.down": "rowwise",
    "layers.1.mlp.gate": ColwiseParallel(),
    "layers.1.mlp.up": "colwise",  # what torch's gate and our up put out is multiplied
    "layers.1.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(use_local_output=True),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.mlp.gate": ColwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("plan", [TORCH, MIXED, SEQUENCE], ids=["torch", "mixed", "sequence"])
def test_plans_with_torchs_styles(plan, layout):
    check(functools.partial(Lm, 12, 8), plan, layout)


OURS_BETWEEN = {
    **SEQUENCE,
    "layers.*.norm": "sequence_parallel",
    "layers.*.mlp": OurPrepareInput("sequence"),
    "layers.*.mlp.gate": Colwise(input="gathered"),
    "layers.*.mlp.up": Colwise(input="gathered"),
    "layers.1.mlp.down": Rowwise(output="sequence"),
    "layers.0.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
del OURS_BETWEEN["layers.*.mlp.down"]


def test_our_styles_take_the_parts_that_torchs_have_made():
    check(functools.partial(Lm, 12, 8), OURS_BETWEEN, (1, 1, 2))


@pytest.mark.parametrize(
    "plan",
    [
        SEQUENCE,
        {**SEQUENCE, "embed": VocabParallel(output="sequence")},
        {**OURS_BETWEEN, "layers.0.mlp.down": Rowwise(output="sequence")},
    ],
    ids=["torch", "our parts", "torch splits"],
)
def test_a_sequence_that_ranks_cannot_share_is_an_error(plan):
    # Fault k: torch takes the parts of a sequence of 5 for parts of one of 6. Ours take any length.
    with pytest.raises(StateError, match=r"a sequence of 5 can't be shared equally by 2"):
        check(functools.partial(Lm, 12, 8), plan, (1, 1, 2), length=5)


def test_tied_weights_stay_tied_under_torchs_styles():
    # parallelize_module makes two parameters of one.
    model = Lm(12, 8, tied=True)
    with fake_world(1, 2):
        resolve_plan(model, TORCH, 2).apply(model, tp_mesh(2))
        weight = model.head.weight
        assert weight is model.embed.weight
        assert isinstance(weight, DTensor) and weight.placements == (Shard(0),)
        assert get_param_layout(weight) == ParamLayout("dtensor")
    check(functools.partial(Lm, 12, 8, tied=True), TORCH, (1, 2, 2))


def test_frozen_parameters_stay_frozen():
    # torch's SequenceParallel makes parameters that require gradients of all it is given.
    model = nn.Sequential(nn.LayerNorm(DIM).requires_grad_(False), Mlp(8).requires_grad_(False))
    plan = {
        "0": SequenceParallel(),
        "1.up": ColwiseParallel(input_layouts=Shard(1)),
        "1.down": RowwiseParallel(),
    }
    with fake_world(0, 2):
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        params = list(model.parameters())
        assert all(isinstance(p, DTensor) and not p.requires_grad for p in params)
        assert not any(p.is_meta for p in params)
        assert model(torch.ones(2, 2, DIM)).shape == (2, 4, DIM)


class Passes(ParallelStyle):
    """A style of somebody's own, which leaves parameters alone."""

    def _apply(self, module, device_mesh):
        module.register_forward_hook(lambda module, args, output: 2 * output)
        return module


class Splits(ColwiseParallel):
    """Not as its base says."""

    def _partition_linear_fn(self, name, module, device_mesh):
        RowwiseParallel._partition_linear_fn(self, name, module, device_mesh)


class Takes(ParallelStyle):
    def _apply(self, module, device_mesh):
        module.weight = nn.Parameter(module.weight[:1])
        return module


def test_a_style_of_somebodys_own_that_leaves_parameters_alone():
    model = Mlp(8)
    x = torch.ones(2, DIM)
    with fake_world(0, 2), torch.no_grad():
        want = 2 * model(x)
        resolved = resolve_plan(model, {"": Passes()}, 2)
        assert str(resolved).count("test_torch_styles.Passes") == 1
        assert " at 0x" not in resolved.fingerprint()
        resolved.apply(model, tp_mesh(2))
        torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("style", [Splits(), Takes()], ids=["splits", "takes"])
def test_a_style_that_does_to_parameters_what_was_not_foreseen_leaves_the_model_alone(style):
    model = Mlp(8)
    before = list(model.parameters())
    with fake_world(0, 2):
        resolved = resolve_plan(model, {"down": Rowwise(), "up": style}, 2)
        with pytest.raises(PlanError, match="something that was not foreseen"):
            resolved.apply(model, tp_mesh(2))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert type(model.down) is nn.Linear and not model.up._forward_pre_hooks


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"up": ColwiseParallel()}, "dim 0 of weight is 13, which 2 .* our style 'colwise' can"),
        ({"down": RowwiseParallel()}, "dim 1 of weight is 13, which 2 .* our style 'rowwise' can"),
        ({"": ColwiseParallel()}, "is for nn.Linear and nn.Embedding, not Mlp"),
        ({"": SequenceParallel()}, "Mlp has modules inside"),
    ],
)
def test_what_torchs_styles_can_not_do_is_refused(plan, said):
    # Fault j: torch takes 13 features on 2 ranks and fails in the forward.
    with pytest.raises(PlanError, match=said):
        resolve_plan(Mlp(13), plan, 2)


def test_one_parameter_can_not_be_a_dtensor_here_and_local_there():
    plan = {"embed": VocabParallel(), "head": ColwiseParallel()}
    with pytest.raises(PlanError, match=r"split along dim 0, head.weight as .* \(a DTensor\)"):
        resolve_plan(Lm(12, 8, tied=True), plan, 2)
    with pytest.raises(PlanError, match=r"embed.weight shares its parameter with head.weight"):
        resolve_plan(Lm(12, 8, tied=True), {"head": ColwiseParallel()}, 2)


def test_other_positional_arguments_reach_the_module():
    # Fault m: torch's ColwiseParallel gives its module the first input only; ours gives all.
    class Scaled(nn.Linear):
        def forward(self, input, scale=1.0, *, shift=0.0):
            return super().forward(input) * scale + shift

    with fake_world(0, 2), torch.no_grad():
        ours, torchs = Scaled(4, 4), Scaled(4, 4)
        x = torch.ones(2, 4)
        on_rank(ours, {"": "colwise_gather_output"})
        assert torch.equal(ours(x, 3.0, shift=1.0), 3 * ours(x) + 1)
        resolve_plan(torchs, {"": ColwiseParallel()}, 2).apply(torchs, tp_mesh(2))
        assert torch.equal(torchs(x, 3.0), torchs(x))


def test_the_report_says_it_is_torchs():
    report = str(resolve_plan(Lm(12, 8), TORCH, 2))
    assert "torch's ColwiseParallel(input_layouts=(Replicate(),)" in report
    assert str(parse_style(ColwiseParallel())).startswith("torch's ColwiseParallel")


def test_preparing_an_output():
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Linear(8, DIM))
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "1": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }
    with fake_world(0, 2):
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        assert model(torch.ones(3, 4, DIM)).shape == (3, 4, DIM)
