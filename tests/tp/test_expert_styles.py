"""Mixture-of-experts layers: each expert split over tp, the parts summed once."""

import pytest
import torch
from _support.tp.expert_models import COUNT, ExpertWeights, Moe
from _support.tp.tp_models import DIM
from _support.tp.tp_world import check_parity, tp_mesh
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError, StateError
from parallel3d.testing import fake_world
from parallel3d.tp import (
    Colwise,
    Experts,
    parse_style,
    resolve_plan,
)
from parallel3d.tp.styles.base import ParamRule


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class TakingTurns(ExpertWeights):
    is_concatenated = False

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = y[..., ::2], y[..., 1::2]
        return gate, up


def plan_for(up: str, down: str) -> dict:
    rules = (("gate_up_proj", parse_style(up)), ("down_proj", parse_style(down)))
    return {"experts": Experts(rules), "experts.identity": "moe_identity_expert"}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("hidden", [8, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_split_over_tp(tp, hidden, bias):
    plan = plan_for("packed_colwise", "rowwise")
    check_parity(Moe(ExpertWeights(hidden, bias=bias)), plan, tp, floats(7, DIM))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hidden", [5, DIM // 2])  # square: only is_transposed tells the dims apart
def test_experts_held_the_other_way(tp, bias, hidden):
    plan = plan_for("packed_rowwise", "colwise")
    experts = ExpertWeights(hidden, transposed=True, bias=bias)
    check_parity(Moe(experts), plan, tp, floats(7, DIM))


def test_biases_of_experts_that_do_not_say_how_they_are_held():
    experts = ExpertWeights(5, transposed=True, bias=True)
    rules = plan_for("packed_rowwise", "colwise")["experts"].plan(experts, 2)
    del experts.is_transposed
    assert plan_for("packed_rowwise", "colwise")["experts"].plan(experts, 2) == rules


def test_an_identity_with_parameters_is_refused():
    with pytest.raises(PlanError, match="Linear has parameters, so it is not an identity"):
        resolve_plan(nn.Sequential(nn.Linear(2, 2)), {"0": "moe_identity_expert"}, 2)


@pytest.mark.parametrize("style", ["colwise", "packed_colwise"])
def test_experts_whose_gate_and_up_take_turns(style):
    # As transformers marks them: a packed style there would be silently wrong.
    check_parity(Moe(TakingTurns(8, bias=True)), plan_for(style, "rowwise"), 4, floats(7, DIM))
    rule = plan_for(style, "rowwise")["experts"].plan(TakingTurns(5), 2)["gate_up_proj"]
    assert rule.packing == Packing(1, (((0, 6),), ((6, 4),)))


def test_experts_with_one_projection_up():
    class Plain(ExpertWeights):
        def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
            return y, y

    experts = Plain(7)
    experts.gate_up_proj = nn.Parameter(torch.randn(COUNT, 7, DIM))
    check_parity(Moe(experts), plan_for("colwise", "rowwise"), 2, floats(7, DIM))


def test_sections_must_be_as_many_as_there_are():
    rules = (("gate_up_proj", Colwise(packed=3)), ("down_proj", parse_style("rowwise")))
    with pytest.raises(PlanError, match="as 3 sections: it has 2 times the others' features"):
        resolve_plan(Moe(ExpertWeights(9)), {"experts": Experts(rules)}, 2)


def test_one_after_the_other_must_be_said_where_the_module_does_not():
    with pytest.raises(PlanError, match=r"2 times the features .* 'packed_colwise'"):
        resolve_plan(Moe(ExpertWeights(8)), plan_for("colwise", "rowwise"), 2)


class Counting(ExpertWeights):
    """Reads in its forward how wide an expert is; the model is as wide."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.intermediate_size, self.hidden_size, self.top_k = hidden, DIM, hidden
        self.gate_up_size = 2 * hidden
        self.num_routed = hidden  # a number of something else, by its name

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        assert self.num_routed
        y = y.reshape(-1, self.gate_up_size)
        gate, up = y.split(self.intermediate_size, -1)
        return gate, up


@pytest.mark.parametrize("hidden", [8, DIM])
def test_how_wide_an_expert_is_becomes_what_the_rank_holds(hidden):
    plan = plan_for("packed_colwise", "rowwise")
    check_parity(Moe(Counting(hidden)), plan, 2, floats(7, DIM))
    resolved = resolve_plan(Moe(Counting(hidden)), plan, 2)
    values = {a.name: a.values for a in resolved.attributes}
    assert values == {"intermediate_size": (hidden // 2,) * 2, "gate_up_size": (hidden,) * 2}


def _with(**attributes: object) -> nn.Module:
    experts = ExpertWeights(8)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


@pytest.mark.parametrize(
    ("experts", "up", "said"),
    [
        (_with(norm=nn.LayerNorm(DIM)), "packed_colwise", "modules with parameters inside"),
        (_with(has_post_expert_norm=True), "packed_colwise", "a norm on each expert's"),
        (_with(scale=nn.Parameter(torch.ones(3))), "packed_colwise", r"scale \(3,\) of .* no rule"),
        (_with(down_proj=nn.Parameter(torch.ones(4, DIM, 5))), "packed_colwise", "16 features and"),
        (ExpertWeights(8), "replicate", "every weight of experts must be split"),
    ],
)
def test_experts_that_are_refused(experts, up, said):
    with pytest.raises(PlanError, match=said):
        resolve_plan(Moe(experts), plan_for(up, "rowwise"), 2)


def test_biases_of_what_is_split_by_its_input_are_whole():
    assert parse_style("rowwise").param_rule(torch.ones(DIM), 2) == ParamRule(Replicate())
    assert parse_style("rowwise").param_rule(torch.ones(3, DIM), 2) == ParamRule(Shard(1))


def test_experts_that_give_several_tensors_are_an_error():
    class Two(ExpertWeights):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(*args, **kwargs)
            return y, y

    plan = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise", "": "moe_tp_experts"}
    with fake_world(0, 2):
        model = resolve_plan(Two(8), plan, 2).apply(Two(8), tp_mesh(2))
        for name, p in list(model._parameters.items()):
            if p is not None:
                model._parameters[name] = nn.Parameter(p.to_local())
        x, chosen = torch.randn(3, DIM), torch.zeros(3, 2, dtype=torch.long)
        with pytest.raises(StateError, match=r"Two as .* gave a tuple"):
            model(x, chosen, weights=torch.ones(3, 2), scale=1.0)


def test_experts_without_rules_say_which_to_give():
    with pytest.raises(PlanError, match=r'experts.gate_up_proj": "packed_colwise"'):
        resolve_plan(Moe(ExpertWeights(8)), {"experts": "moe_tp_experts"}, 2)


def test_the_names_of_expert_parallelism_are_refused():
    with pytest.raises(PlanError, match="splits every expert: 'packed_colwise'"):
        resolve_plan(Moe(ExpertWeights(8)), {"experts": "ep_dispatch_experts"}, 2)
