"""Styles: what they refuse and communicate, and what a copy of a parallel module is."""

import copy
import re
from collections import Counter

import pytest
import torch
from _support.tp.tp_models import (
    DIM,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    BranchingEmbedding,
    Counting,
    ExpertWeights,
    GatedMlp,
    Lm,
    Mlp,
    Moe,
    NormedEmbedding,
    NormedLinear,
    ReadingEmbedding,
    ScaledEmbedding,
    Sinks,
    TakingTurns,
    plan_for,
)
from _support.tp.tp_world import chunks, on_rank, on_ranks, same, tp_mesh, use_local_tensors
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequence

from parallel3d._layout.packing import Packing
from parallel3d._util.recorder import record_collectives
from parallel3d.errors import PlanError, StateError
from parallel3d.testing.worlds import fake_world, local_world
from parallel3d.tp import (
    Colwise,
    Experts,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicated,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    parse_style,
    resolve_plan,
)
from parallel3d.tp.styles.base import ParamRule


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---- what is refused ----


def _replaced() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x
    return linear


def _integer() -> nn.Module:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return module


def _with(**attributes: object) -> nn.Module:
    experts = ExpertWeights(8)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


THREE = Experts((("gate_up_proj", Colwise(packed=3)), ("down_proj", Rowwise())))
OWN = r"with its own forward, not .*\."
EXPERTS = plan_for("packed_colwise", "rowwise")["experts"]

REFUSED = [
    (nn.Conv1d(4, 4, 1), "colwise", "is for nn.Linear, nn.Embedding and .* not Conv1d"),
    (nn.Conv2d(4, 4, 1), "colwise", "not Conv2d"),
    (nn.Bilinear(4, 4, 4), "rowwise", "not Bilinear"),
    (nn.EmbeddingBag(8, 4), "embedding", r"not torch.nn.modules.sparse.EmbeddingBag"),
    (_replaced(), "rowwise", "with their own forward"),
    (nn.Linear(4, 4), "embedding", "VocabParallel is for torch.nn.Embedding"),
    (_integer(), "colwise", "weight is torch.int8; only floating-point"),
    (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "colwise", "parametrized"),
    (nn.Embedding(8, 4, max_norm=1.0), "embedding", "max_norm can't be split"),
    (nn.Embedding(8, 4, max_norm=1.0), "colwise", "max_norm can't be split"),
    (nn.Embedding(8, 4, sparse=True), "embedding", "sparse can't be split"),
    (nn.Embedding(8, 4, scale_grad_by_freq=True), "rowwise", "scale_grad_by_freq can't"),
    (nn.Embedding(8, 4), Colwise(input="sequence"), "takes token ids"),
    (nn.BatchNorm1d(4), "sequence_parallel", "for norms over the last dim and dropout"),
    (nn.LayerNorm((3, 4)), "sequence_parallel", "normalizes over the dims"),
    (nn.Linear(4, 4), "sequence_parallel", "not Linear"),
    (nn.LazyLinear(4), "colwise", "has no size yet"),
    (nn.Sequential(nn.Linear(4, 4)), "replicated", "has no parameters of its own"),
    (nn.Linear(4, 16), Colwise(multiple_of=3), "16 is not a multiple of multiple_of=3"),
    # A forward of their own.
    (NormedEmbedding(8, 4), VocabParallel(output="sequence"), "may need the whole sequence"),
    (NormedEmbedding(8, 4), Colwise(), "may need all features"),
    (NormedLinear(8, 4), "colwise", r"Colwise\(output=.replicate.\) gives it all"),
    (NormedLinear(8, 4), "rowwise", r"Rowwise\(input=.replicate.\) gives it all"),
    (BranchingEmbedding(8, 4), "embedding", f"{OWN}BranchingEmbedding"),
    (ReadingEmbedding(8, 4), "embedding", f"{OWN}ReadingEmbedding"),
    # Sections.
    (nn.Linear(4, 12), Colwise(packed=5), "12, which can't be divided into 5 equal sections"),
    (nn.Linear(4, 12), Colwise(packed=(4, 4)), r"\(4, 4\); .* must be positive and add up to 12"),
    (
        nn.Linear(4, 12),
        Colwise(packed=(8, 4), multiple_of=(2, 3)),
        "section 1 of out_features 4 is not a multiple",
    ),
    (nn.Linear(4, 12), Colwise(packed=2, multiple_of=(2, 3, 4)), "is for 3 sections"),
    (nn.Linear(4, 12), Colwise(packed=Packing(0, (((0, 12),),))), "12 rows on 1 ranks"),
    # Inputs and outputs.
    (nn.Linear(2, 2), "all_reduce", "which are used on parts"),
    (Mlp(8), PrepareInput(keywords=("mask",)), "Mlp.forward has no argument 'mask'; it has x"),
    (nn.Linear(4, 4), "mla_kv_a_proj", "nor the model's config has a qk_rope_head_dim"),
    # Experts.
    (nn.Linear(2, 2), "moe_identity_expert", "Linear has parameters, so it is not an identity"),
    (ExpertWeights(9), THREE, "as 3 sections: it has 2 times the others' features"),
    (
        ExpertWeights(8),
        plan_for("colwise", "rowwise")["experts"],
        r"2 times the features .* 'packed_colwise'",
    ),
    (_with(norm=nn.LayerNorm(DIM)), EXPERTS, "modules with parameters inside"),
    (_with(has_post_expert_norm=True), EXPERTS, "a norm on each expert's"),
    (_with(scale=nn.Parameter(torch.ones(3))), EXPERTS, r"scale \(3,\) of .* no rule"),
    (_with(down_proj=nn.Parameter(torch.ones(4, DIM, 5))), EXPERTS, "16 features and"),
    (
        ExpertWeights(8),
        plan_for("replicate", "rowwise")["experts"],
        "every weight of experts must be split",
    ),
    (ExpertWeights(8), "moe_tp_experts", r'gate_up_proj": "packed_colwise"'),
    (ExpertWeights(8), "ep_dispatch_experts", "splits every expert: 'packed_colwise'"),
]


@pytest.mark.parametrize(("module", "style", "said"), REFUSED)
def test_what_is_refused(module, style, said):
    model = nn.Sequential(module)
    before = dict(model.named_parameters())
    with pytest.raises(PlanError) as caught:
        resolve_plan(model, {"0": style}, 4)
    assert re.search(said, str(caught.value))
    assert all(p is before[n] for n, p in model.named_parameters())


def test_options_that_can_not_be():
    for make, said in (
        (lambda: PrepareOutput("sequence", "shard"), "can be partial -> replicate"),
        (lambda: PrepareOutput("shard", "replicate"), "features is the size"),
        (lambda: PrepareOutput("partial", "whole"), "wanted must be one of"),
        (lambda: PrepareInput(keywords=(("mask", "copy"),)), r"\(name, layout\)"),
    ):
        with pytest.raises(PlanError, match=said):
            make()


def test_each_raw_parameter_needs_a_rule():
    plan = {"q": "colwise", "o": "rowwise", "": "local_params", "sinks": "colwise"}
    with pytest.raises(PlanError, match=r"scale of Sinks has no rule: .*with this rank's heads"):
        resolve_plan(Sinks(4, 3), plan, 2)


# ---- inputs that are refused when they come ----


def test_rowwise_says_so_when_it_gets_a_whole_input():
    with fake_world(0, 2):
        model = on_rank(nn.Sequential(nn.Linear(4, 3)), {"0": "rowwise"})
        with pytest.raises(StateError, match=r'Rowwise\(input="replicate"\) splits'):
            model(torch.ones(1, 4))


def test_prepare_input_refuses_a_call_without_its_input():
    with fake_world(0, 2):
        model = on_rank(GatedMlp(8), {"": PrepareInput(), "up": "colwise_rep"})
        with pytest.raises(StateError, match="keyword arguments given: scale"):
            model(scale=2.0)


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_outside_the_vocabulary_is_an_error(bad):
    model = nn.Embedding(7, DIM)
    with local_world(2) as world:
        on_ranks(model, {"": "embedding"}, world)
        with pytest.raises(RuntimeError, match="outside the vocabulary of 7"):
            model(torch.tensor([0, bad]))


def _sequence_model() -> nn.Module:
    plan = {"0": SequenceParallel(input="replicate"), "1": Colwise(input="sequence")}
    return on_rank(nn.Sequential(nn.Identity(), nn.Linear(DIM, 8)), plan)


def test_a_part_of_a_sequence_nothing_has_split_is_an_error():
    with fake_world(0, 2):
        model = _sequence_model()
        with pytest.raises(StateError, match="nothing has split a sequence"):
            model[1](torch.ones(1, 3, DIM))
        assert model(torch.ones(1, 5, DIM)).shape == (1, 5, 4)


def test_a_part_that_is_not_of_the_sequence_split_last_is_an_error():
    with fake_world(1, 2):
        model = _sequence_model()
        model(torch.ones(1, 5, DIM))
        with pytest.raises(StateError, match=r"got 3 rows along dim 1, but .* split last has 5"):
            model[1](torch.ones(1, 3, DIM))


def test_experts_that_give_several_tensors_are_an_error():
    class Two(ExpertWeights):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(*args, **kwargs)
            return y, y

    plan = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise", "": "moe_tp_experts"}
    with fake_world(0, 2):
        model = on_rank(Two(8), plan)
        x, chosen = torch.randn(3, DIM), torch.zeros(3, 2, dtype=torch.long)
        with pytest.raises(StateError, match=r"Two as .* gave a tuple"):
            model(x, chosen, weights=torch.ones(3, 2), scale=1.0)


# ---- rules of parameters ----


def test_an_even_split_is_packed_too():
    rules = Colwise(packed=2).plan(nn.Linear(4, 8), 2)
    assert rules["weight"].packing == Packing(0, (((0, 2), (4, 2)), ((2, 2), (6, 2))))


def test_rules_of_experts():
    rule = plan_for("colwise", "rowwise")["experts"].plan(TakingTurns(5), 2)["gate_up_proj"]
    assert rule.packing == Packing(1, (((0, 6),), ((6, 4),)))
    for hidden in (8, DIM):
        resolved = resolve_plan(Moe(Counting(hidden)), {"experts": EXPERTS}, 2)
        values = {a.name: a.values for a in resolved.attributes}
        assert values == {"intermediate_size": (hidden // 2,) * 2, "gate_up_size": (hidden,) * 2}


def test_biases_of_experts_that_do_not_say_how_they_are_held():
    experts = ExpertWeights(5, transposed=True, bias=True)
    rules = plan_for("packed_rowwise", "colwise")["experts"].plan(experts, 2)
    del experts.is_transposed
    assert plan_for("packed_rowwise", "colwise")["experts"].plan(experts, 2) == rules


def test_biases_of_what_is_split_by_its_input_are_whole():
    assert parse_style("rowwise").param_rule(torch.ones(DIM), 2) == ParamRule(Replicate())
    assert parse_style("rowwise").param_rule(torch.ones(3, DIM), 2) == ParamRule(Shard(1))


def test_what_random_numbers_are_drawn_on_after_it():
    # See parallel3d/tp/random.py: masks differ between ranks on parts and are alike on whole tensors.
    assert PrepareOutput().random_after == "whole"
    assert Colwise(input="sequence", output="replicate").random_after == "whole"
    assert Colwise(output="replicate").random_after == ""
    assert PrepareOutput("replicate", "shard").random_after == "features"
    given = PrepareOutput("replicate", "sequence")
    assert given.random_after == PrepareInputOutput(output=given).random_after == "sequence"
    assert given.splits_sequence and PrepareInputOutput(output=given).splits_sequence
    assert parse_style("moe_tp_experts").random_after == "whole"
    assert parse_style("moe_tp_experts").random_before
    assert parse_style(ColwiseParallel()).random_after == "features"
    assert parse_style(ColwiseParallel(output_layouts=Replicate())).random_after == "whole"
    assert parse_style(RowwiseParallel(output_layouts=Shard(1))).random_after == "sequence"
    assert parse_style(TorchSequence(use_local_output=True)).random_after == "sequence"
    assert parse_style(TorchSequence()).random_after == ""
    assert (
        parse_style(
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        ).random_after
        == ""
    )


# ---- what is applied ----


def test_a_copy_of_a_parallel_model_has_its_own_forwards():
    plain = Mlp(13).double()
    x = floats(2, DIM)
    model = copy.deepcopy(plain)
    with local_world(2) as world:
        plan = {"": PrepareInput(), "up": Colwise(input="gathered"), "down": "rowwise"}
        on_ranks(model, plan, world)
        twin = copy.deepcopy(model)
        for module, other in zip(model.modules(), twin.modules(), strict=True):
            assert other.forward.__self__ is other is not module
        with torch.no_grad():
            model.up.weight.zero_()
        for got in world.per_rank(twin(world.map(lambda r: x.clone()))):
            same(got, plain(x))


def test_a_copy_of_a_scaled_embedding_looks_up_in_its_own_weight():
    model = ScaledEmbedding(8, 4)
    with fake_world(0, 2), torch.no_grad():
        on_rank(model, {"": "embedding"})
        twin = copy.deepcopy(model)
        model.weight.zero_()
        assert twin(torch.tensor([1, 2])).abs().sum() > 0
        assert isinstance(twin, ScaledEmbedding)
        assert type(twin).__name__ == "ScaledEmbedding"


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return self.kept


def test_an_output_that_its_module_keeps_is_not_overwritten():
    with fake_world(0, 2):
        model = on_rank(Keeping(), {"": "all_reduce"})
        y = model(torch.ones(2, DIM, requires_grad=True))
        assert y.data_ptr() != model.kept.data_ptr()


class OneOfThree(nn.Module):
    def forward(self, x: Tensor) -> list[object]:
        return ["first", x * 2, "last"]


def test_what_is_beside_an_output_is_kept():
    with fake_world(0, 2):
        model = on_rank(OneOfThree(), {"": PrepareOutput("replicate", "sequence")})
        first, y, last = model(torch.ones(2, 4, DIM))
        assert (first, last, y.shape) == ("first", "last", (2, 2, DIM))


@pytest.mark.parametrize(("tp", "rows"), [(2, [34, 33]), (4, [17, 17, 17, 16])])
def test_nothing_is_padded_at_rest_nor_in_logits_that_stay_split(tp, rows):
    plain = Lm(67, 8, tied=True).double()
    ids = torch.arange(67)[None]
    wanted, model = plain(ids).detach(), copy.deepcopy(plain)
    with local_world(tp) as world:
        plan = {"embed": "embedding_rowwise", "head": "colwise"}
        resolve_plan(model, plan, tp).apply(model, tp_mesh(tp))
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.shape == (67, DIM)
        use_local_tensors(model, world)
        parts = world.per_rank(model(torch.arange(67)[None]).detach())
    assert [part.shape[-1] for part in parts] == rows
    torch.testing.assert_close(torch.cat(parts, -1), wanted, rtol=1e-12, atol=1e-12)


# ---- what is communicated ----


def _collectives(plan: dict, tokens: Tensor) -> tuple[Counter, Counter]:
    """Collectives of one forward and one backward of a two-block model, by operation."""
    with fake_world(0, 2):
        model, mesh = on_rank(Lm(12, 8), plan), tp_mesh(2)
        with record_collectives(mesh) as forward:
            y = model(tokens)
        with record_collectives(mesh) as backward:
            y.sum().backward()
    assert all(call.axis == "tp" for call in forward.calls + backward.calls)
    return Counter(c.op for c in forward.calls), Counter(c.op for c in backward.calls)


def test_each_region_communicates_once_each_way():
    tokens = torch.arange(8).view(2, 4)
    forward, backward = _collectives(TENSOR_PARALLEL, tokens)
    assert forward == {"all_reduce": 1 + 2, "all_gather": 1}  # embedding, blocks, head
    assert backward == {"all_reduce": 2 + 1}
    apart = {name: style for name, style in TENSOR_PARALLEL.items() if name != "layers.*.mlp"}
    apart |= {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise"}
    assert _collectives(apart, tokens)[1] == {"all_reduce": 2 + 1}  # they read one tensor


def test_sequence_parallel_communicates_the_halves():
    forward, backward = _collectives(SEQUENCE_PARALLEL, torch.arange(10).view(2, 5))
    assert forward == {"reduce_scatter": 1 + 2, "all_gather": 2 + 2}  # the head gathers twice
    assert backward == {"all_gather": 1 + 2, "reduce_scatter": 2 + 1}


def test_parts_helper_cuts_as_torch_does():
    assert [len(c) for c in chunks(torch.arange(5), 0, 4)] == [2, 2, 1, 0]


# ---- a module that the plan forgot among sequence-parallel ones ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.split = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.split(self.before(x))
        return x + self.down(self.up(self.norm(x)))


PLAN = {
    "split": SequenceParallel(input="replicate"),
    "up": Colwise(input="sequence"),
    "down": Rowwise(output="sequence"),
}


def run(plan: dict, length: int, frozen: bool = False) -> nn.Module:
    model = Model()
    model.norm.requires_grad_(not frozen)
    with fake_world(0, 2):
        on_rank(model, plan)
        model(torch.randn(2, length, 8)).sum().backward()
        model(torch.randn(2, length // 2, 8)).sum().backward()  # now whole has the part's length
    return model


@pytest.mark.parametrize("length", [5, 6])
def test_a_forgotten_norm(length: int) -> None:
    with pytest.raises(
        StateError, match=r"'norm' has no style in the plan, but its input \(2, 3, 8\)"
    ):
        run(PLAN, length)


def test_what_is_not_forgotten() -> None:
    run({**PLAN, "norm": SequenceParallel()}, 6)
    run({**PLAN, "norm": Replicated(tp_grad="partial")}, 6)
    run(PLAN, 6, frozen=True)
