"""Patterns: wildcards, brace sets, which of two is the more specific; rules on parameters."""

import pytest
import torch
from torch import Tensor, nn

from parallel3d.errors import PlanError
from parallel3d.tp import Colwise, Replicated, resolve_plan
from parallel3d.tp.resolve import expand, matches, nearest, numberless, specificity


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        ("a.b", ["a.b"]),
        ("", [""]),
        ("l.*.{q,k,v}_proj", ["l.*.q_proj", "l.*.k_proj", "l.*.v_proj"]),
        ("{a,b}.{c,d}", ["a.c", "a.d", "b.c", "b.d"]),
        ("{attn.q, mlp.up}", ["attn.q", "mlp.up"]),
        ("{q,q}", ["q"]),
        ("{q}_proj", ["q_proj"]),
    ],
)
def test_brace_sets(pattern, simple):
    assert expand(pattern) == simple


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("{q,{k,v}}_proj", "one set is inside another"),
        ("{q,k_proj", "unbalanced"),
        ("q,k}_proj", "unbalanced"),
        ("}q{", "unbalanced"),
        ("{}_proj", "{} has an empty alternative"),
        ("{q,}_proj", "{q,} has an empty alternative"),
        (3, "not int"),
    ],
)
def test_bad_brace_sets(pattern, said):
    with pytest.raises(PlanError) as caught:
        expand(pattern)
    assert said in str(caught.value)


def test_matching_is_segment_by_segment():
    assert matches("layers.*.mlp", "layers.12.mlp")
    assert matches("layers.*.mlp", "layers.first.mlp")
    assert matches("layers.[0-3].w?", "layers.2.w1")
    assert not matches("layers.*", "layers.0.mlp")
    assert not matches("layers.*mlp", "layers.0.mlp")
    assert matches("", "") and not matches("*", "")


def test_numberless_takes_whole_segments_only():
    assert numberless("layers.0.experts.12.w1") == "layers.*.experts.*.w1"
    assert numberless("0.conv1d") == "*.conv1d"


def test_specificity():
    order = ["*", "layers.*.*", "layers.*.q*", "layers.*.q_proj", "layers.0.q_proj"]
    mixed = [order[i] for i in (3, 0, 4, 2, 1)]
    assert sorted(mixed, key=specificity) == order
    # Whole segments first, then characters.
    assert specificity("a.b.*") > specificity("a_longer_name.*.*")
    assert specificity("layers.*.q_*") > specificity("layers.*.q*")


def test_nearest_shows_each_layer_once():
    paths = [f"layers.{i}.{name}" for i in range(30) for name in ("q_proj", "k_proj", "norm")]
    assert set(nearest("layers.3.g_proj", paths, 2)) == {"layers.*.q_proj", "layers.*.k_proj"}


# ---- in a plan ----


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.o_proj = nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.zeros(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))


QKV = {"layers.*.{q,k,v}_proj": "colwise", "layers.*.o_proj": "rowwise"}


def test_a_set_is_three_rules():
    resolved = resolve_plan(Model(), QKV, 2)
    assert [m.name for m in resolved.modules[:4]] == [
        f"layers.0.{name}_proj" for name in ("q", "k", "v", "o")
    ]
    assert {m.pattern for m in resolved.modules} == set(QKV)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"layers.*.{q,k,g}_proj": "colwise"},
            r"rule 'layers.\*.{q,k,g}_proj': 'layers.\*.g_proj' matches no module.*nearest: .*q_proj",
        ),
        (
            {"{": "colwise", "layers.*.q_prj": "colwise", "layers.*.o_proj": "rowise"},
            r"3 problems(.|\n)*rule '{': its braces are unbalanced(.|\n)*did you mean 'rowwise'",
        ),
        ({**QKV, "layers.0.q_proj": "colwise"}, "has two rules"),
        (
            {"layers.0.q_proj.weight": "colwise", "layers.0.q_proj.bias": "replicated"},
            "its parameters have different rules",
        ),
        (
            {**QKV, "layers.*.sinks": "colwise"},
            r"'layers.\*.sinks' on 'layers.0': 'layers.0', a Attention, has no style.*'local_params'",
        ),
        (
            {"layers.*": Replicated(), "layers.*.sinks": "colwise"},
            r"takes no rules for single parameters \(sinks\)",
        ),
        (
            {"layers.*": "local_params", "layers.*.sinks": "colwise", "*.0.sinks": "colwise"},
            "parameter 'layers.0.sinks' has two rules",
        ),
        ({"layers.*.sink?": "colwise"}, "matches no module"),  # "mlp.*" are modules
    ],
)
def test_problems(plan, said):
    model = Model()
    before: dict[str, Tensor] = dict(model.named_parameters())
    with pytest.raises(PlanError, match=said):
        resolve_plan(model, plan, 2)
    assert all(p is before[n] for n, p in model.named_parameters())


def test_weight_of_a_linear_means_the_linear():
    resolved = resolve_plan(Model(), {"layers.*.q_proj.weight": "colwise"}, 2)
    assert resolved.modules[0].name == "layers.0.q_proj"
    assert resolved.modules[0].style == Colwise()
    assert [p.name for p in resolved.modules[0].params] == ["weight", "bias"]
    both = {"layers.*.q_proj.{weight,bias}": "colwise"}
    assert resolve_plan(Model(), both, 2).fingerprint() == resolved.fingerprint()


def test_a_parameter_with_a_rule_in_its_modules_style():
    plan = {**QKV, "layers.*": "local_params", "layers.*.sinks": "colwise"}
    resolved = resolve_plan(Model(), plan, 2)
    (layer, _) = (m for m in resolved.modules if m.name.count(".") == 1)
    assert [(p.name, p.local_shape(2)) for p in layer.params] == [("sinks", (2,))]


def test_a_wildcard_at_the_end_is_for_modules():
    assert len(resolve_plan(Model(), {"layers.*.*_proj": "colwise_rep"}, 2).modules) == 8
