"""Resolution of plans: strict, complete in its complaints, printable; and what apply leaves."""

import copy

import pytest
import torch
from _support.tp.tp_world import tp_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d._layout.param_layout import ParamLayout, get_param_layout
from parallel3d.errors import MeshError, PlanError
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import (
    STYLE_NAMES,
    Colwise,
    PrepareInput,
    Replicated,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    parse_style,
    resolve_plan,
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.RMSNorm(8)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.wq": "colwise",
    "layers.*.wo": "rowwise",
    "head": "colwise_gather_output",
}


def problems(model: nn.Module, plan: dict, tp: int = 2, **kwargs) -> str:
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(PlanError) as caught:
        resolve_plan(model, plan, tp, **kwargs)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    return str(caught.value)


# ---- names and patterns ----


def test_every_name_stands_for_a_style():
    assert parse_style("colwise_rep") == parse_style("colwise_gather_output")
    assert parse_style("rowwise_rep") == Rowwise(input="replicate")
    assert parse_style("replicated_with_grad_allreduce") == Replicated("partial")
    assert parse_style(Colwise()) == STYLE_NAMES["colwise"]


def test_unknown_names_say_the_nearest():
    assert "did you mean 'colwise'?" in problems(Model(), {"head": "colwize"})
    assert "a style is a name or a Style, not int" in problems(Model(), {"head": 3})


def test_a_wrong_field_says_the_nearest():
    with pytest.raises(PlanError, match=r"input must be one of .* Did you mean 'replicate'"):
        Colwise(input="replicated")  # type: ignore[arg-type]


def test_the_empty_pattern_is_the_root():
    assert resolve_plan(nn.Linear(2, 2), {"": "colwise"}, 2).modules[0].name == ""
    assert "matches no module" in problems(nn.Linear(2, 2), {"*": "colwise"})


# ---- strictness ----


def test_an_unmatched_rule_shows_the_nearest_names():
    said = problems(Model(), {"layers.*.wk": "colwise"})
    assert "'layers.*.wk' matches no module and no parameter; nearest: 'layers.*.w" in said
    assert "nearest: 'conv.weight'" in problems(Model(), {"conv.weigt": "colwise"})
    assert "the model has the modules 'embed', 'layers'" in problems(Model(), {"zzz": "colwise"})


def test_an_unmatched_rule_is_a_note_when_not_strict():
    resolved = resolve_plan(Model(), {**PLAN, "layers.*.wk": "colwise"}, 2, strict=False)
    assert "matches no module" in resolved.notes[0]
    assert "Note: rule 'layers.*.wk'" in str(resolved)
    # What is wrong rather than missing stays an error.
    assert "has 12" not in problems(Model(), {"conv": "colwise"}, strict=False)


def test_an_empty_plan():
    assert "the plan is empty" in problems(Model(), {})
    assert resolve_plan(Model(), {}, 1).modules == ()


def test_tp_size_below_one():
    assert "tp_size is 0; it must be an int" in problems(Model(), PLAN, 0)


# ---- modules and sizes ----


def test_modules_that_read_their_childrens_weights_are_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    resolved = resolve_plan(layer, {"linear1": "colwise", "linear2": "rowwise"}, 2)
    assert [m.why for m in resolved.modules if m.name == ""] == [
        "calls the modules inside it in inference too"
    ]
    attention = nn.MultiheadAttention(8, 2)
    assert "NonDynamicallyQuantizableLinear" in problems(attention, {"out_proj": "rowwise"})


def test_whole_heads():
    resolved = resolve_plan(nn.Linear(4, 18), {"": Colwise(multiple_of=3)}, 6)
    assert resolved.modules[0].params[0].local_shape(6) == (3, 4)
    resolved = resolve_plan(nn.Linear(4, 18), {"": Colwise(multiple_of=3)}, 4)
    packing = resolved.modules[0].params[0].rule.packing
    assert packing is not None and packing.lengths == (6, 6, 3, 3)


def test_a_gathered_input_needs_prepare_input_around_it():
    plan = {"layers.*.wq": Colwise(input="gathered")}
    assert "no module around it has the style PrepareInput" in problems(Model(), plan)
    beside = {"layers.0.wq": Colwise(input="gathered"), "layers.1": PrepareInput()}
    assert "module 'layers.0.wq'" in problems(Model(), beside)
    resolve_plan(Model(), {**plan, "layers.*": PrepareInput()}, 2)


def test_parts_of_a_sequence_need_something_that_splits_it():
    plan = {"layers.*.norm": "sequence_parallel"}
    assert "no style of the plan splits it" in problems(Model(), plan)
    resolve_plan(Model(), {**plan, "embed": VocabParallel(output="sequence")}, 2)


# ---- shared parameters ----


def test_a_tied_embedding_gets_the_style_that_matches():
    resolved = resolve_plan(Model(tied=True), {"head": "colwise_rep"}, 2)
    assert [(m.name, m.style) for m in resolved.modules] == [
        ("embed", VocabParallel()),
        ("head", Colwise(output="replicate")),
    ]
    assert "'embed' shares its weight with 'head'" in resolved.notes[0]
    plan = {"layers.0.norm": SequenceParallel(input="replicate"), "head": Colwise("sequence")}
    assert resolve_plan(Model(tied=True), plan, 2).modules[0].style == VocabParallel()


def test_a_tied_head_gets_the_style_that_matches():
    resolved = resolve_plan(Model(tied=True), {"embed": "embedding_rowwise"}, 2)
    assert [(m.name, m.style, m.why) for m in resolved.modules] == [
        ("embed", VocabParallel(), ""),
        ("head", Colwise(output="replicate"), "tied to 'embed'"),
    ]
    assert "'head' shares its weight with 'embed'" in resolved.notes[0]
    said = problems(Model(tied=True), {"embed": VocabParallel(output="sequence")})
    assert "head.weight shares its parameter with embed.weight" in said


def test_two_tied_embeddings_are_split_alike():
    model = nn.ModuleDict({"a": nn.Embedding(7, 4), "b": nn.Embedding(7, 4)})
    model["b"].weight = model["a"].weight
    resolved = resolve_plan(model, {"b": "embedding_rowwise"}, 2)
    assert [m.style for m in resolved.modules] == [VocabParallel()] * 2


def test_one_parameter_split_in_two_ways():
    plan = {"embed": "colwise", "head": "colwise"}
    said = problems(Model(tied=True), plan)
    assert "embed.weight as split along dim 1, head.weight as split along dim 0" in said


def test_a_shared_parameter_whose_other_owner_has_no_rule():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    said = problems(model, {"0": "colwise"})
    assert "1.weight shares its parameter with 0.weight" in said
    resolve_plan(model, {"0": "replicated"}, 2)
    said = problems(model, {"0": "replicated_with_grad_allreduce"})
    assert "1.weight, 1.bias" not in said and "1.weight shares its parameter" in said


def test_a_module_used_twice_is_one_module():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert len(resolve_plan(model, {"*": "colwise"}, 2).modules) == 1
    assert "has two rules" in problems(model, {"a": "colwise", "b": "colwise"})


# ---- the resolved plan ----


def test_the_fingerprint_is_of_what_is_done():
    whole = resolve_plan(Model(), PLAN, 2).fingerprint()
    turned = dict(reversed(PLAN.items()))
    assert resolve_plan(copy.deepcopy(Model()), turned, 2).fingerprint() == whole
    assert resolve_plan(Model(), {**PLAN, "head": "colwise"}, 2).fingerprint() != whole
    assert resolve_plan(Model(), PLAN, 4).fingerprint() != whole


def test_it_resolves_on_the_meta_device():
    with torch.device("meta"):
        model = Model()
    resolved = resolve_plan(model, PLAN, 2)
    assert resolved.fingerprint() == resolve_plan(Model(), PLAN, 2).fingerprint()
    with fake_world(0, 2):
        resolved.apply(model, tp_mesh(2))
        assert model.head.weight.is_meta and model.head.weight.to_local().shape == (6, 8)


def test_apply_places_marks_and_keeps():
    model = Model()
    model.layers[0].wo.bias.requires_grad_(False)
    model.head.weight.no_decay = True
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    with fake_world(3, 4):
        assert resolve_plan(model, PLAN, 4).apply(model, tp_mesh(4)) is model
        assert list(model.state_dict()) == keys
        placed = {
            "embed.weight": Shard(0),
            "layers.0.wq.bias": Shard(0),
            "layers.0.wo.weight": Shard(1),
            "layers.0.wo.bias": Replicate(),
        }
        for name, placement in placed.items():
            param = model.get_parameter(name)
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
            assert param.placements == (placement,) and param.device_mesh.mesh_dim_names == ("tp",)
            assert param.shape == values[name].shape
            assert get_param_layout(param) == ParamLayout("local", "whole")
        assert not isinstance(model.conv.weight, DTensor)
        assert torch.equal(
            model.layers[0].wo.weight.to_local(), values["layers.0.wo.weight"][:, 9:]
        )
        assert torch.equal(model.head.weight.to_local(), values["head.weight"][9:])
        assert not model.layers[0].wo.bias.requires_grad and model.layers[1].wo.bias.requires_grad
        assert model.head.weight.no_decay
        assert "the model is parallel already: embed.weight" in problems(model, PLAN)


def test_partial_gradients_are_marked():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1": Colwise(input="sequence"),
        "2": Rowwise(output="sequence"),
    }
    resolved = resolve_plan(model, plan, 2)
    assert "weight (4, 4) -> (4, 2), bias (4,) -> (4,) [gradient summed]" in str(resolved)
    with fake_world(0, 2):
        resolved.apply(model, tp_mesh(2))
        marks = {n: get_param_layout(p).tp_grad for n, p in model.named_parameters()}
    partial = [name for name, mark in marks.items() if mark == "partial"]
    assert partial == ["0.weight", "0.bias", "2.bias"]


def test_one_rank_changes_nothing():
    model = Model()
    before = dict(model.named_parameters())
    with fake_world(0, 1):
        resolve_plan(model, PLAN, 1).apply(model, tp_mesh(1))
    assert all(p is before[n] for n, p in model.named_parameters())
    assert "forward" not in model.head.__dict__


def test_apply_refuses_other_meshes_and_models():
    resolved = resolve_plan(Model(), PLAN, 2)
    with fake_world(0, 4):
        with pytest.raises(MeshError, match="resolved for 2 tp ranks, but the mesh has 4"):
            resolved.apply(Model(), tp_mesh(4))
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        with pytest.raises(MeshError, match="needs 'tp'"):
            resolved.apply(Model(), flat)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        with pytest.raises(PlanError, match="another model: module 'embed'"):
            resolved.apply(nn.Sequential(nn.Linear(2, 2)), mesh)
        model = Model()
        model.head = nn.Linear(8, 12, bias=False)
        weight = model.embed.weight
        with pytest.raises(PlanError, match="module 'head' is missing"):
            resolved.apply(model, mesh)
        assert model.embed.weight is weight
