"""Attention whose heads tp doesn't divide: no head is cut, and the numbers are the plain layer's."""

import copy
from dataclasses import replace

import pytest
import torch
from _support.tp.head_models import (
    DIM,
    GRID,
    KINDS,
    NORMS,
    SIZE,
    SPLIT,
    CountsByAttribute,
    CountsByConfig,
    CountsByShape,
    Interleaved,
    Latent,
    Projections,
    Sections,
    Sinks,
)
from _support.tp.tp_world import check_parity, real_world, tp_mesh
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d._layout.heads import share_out
from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError
from parallel3d.parallelize import parallelize
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import (
    Colwise,
    LocalSizes,
    PlannedAttribute,
    PrepareInput,
    Replicated,
    ResolvedPlan,
    Rowwise,
    SequenceParallel,
    local_attributes,
    resolve_plan,
)
from parallel3d.tp.local_attributes import reads_of
from parallel3d.tp.styles.linear import GroupedKv

ORDINARY = [(4, 1, 2), (6, 3, 2), (7, 7, 3), (10, 5, 3), (6, 2, 4), (6, 6, 4), (3, 3, 4)]


def lengths(plan: ResolvedPlan) -> dict[str, tuple[int, ...]]:
    """Name of a parameter -> rows on each rank, where they aren't ``torch.chunk``'s."""
    return {
        f"{m.name}.{p.name}".lstrip("."): p.rule.packing.lengths
        for m in plan.modules
        for p in m.params
        if p.rule.packing is not None
    }


def styles(plan: ResolvedPlan) -> dict[str, object]:
    return {m.name: m.style for m in plan.modules}


# ---- the same numbers ----


@pytest.mark.parametrize(("heads", "kv", "tp"), GRID)
def test_attention_equals_the_plain_layer_on_simulated_ranks(heads, kv, tp):
    torch.manual_seed(heads)
    model = CountsByShape(heads, kv)
    check_parity(model, model.plan, tp, torch.randn(2, 5, DIM).double())


def on_real_ranks(kind: type, cases: list[tuple[int, int]], tp: int) -> None:
    for heads, kv in cases:
        torch.manual_seed(heads)
        x = torch.randn(2, 5, DIM).double()
        model = kind(heads, kv)
        check_parity(model, model.plan, tp, x, on=real_world)


# torch's simulated ranks can't reshape by sizes that differ by rank in all the ways that models do.
@pytest.mark.parametrize(
    "tp", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [ORDINARY, pytest.param(GRID, marks=pytest.mark.full)], ids=len)
def test_attention_equals_the_plain_layer_on_real_ranks(gloo_pool, kind, tp, grid):
    cases = [(heads, kv) for heads, kv, ranks in grid if ranks == tp]
    gloo_pool.run(on_real_ranks, kind, cases, tp, world_size=tp)


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 1, 2), (6, 2, 4), (6, 6, 4)])
@pytest.mark.parametrize("length", [5, 7, 1])
def test_parts_of_a_sequence_that_tp_does_not_divide(heads, kv, tp, length):
    model = nn.Sequential(nn.Identity(), CountsByShape(heads, kv))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1": PrepareInput(layout="sequence"),
        "1.{q,k,v}": Colwise(input="gathered"),
        "1.[qk]_norm": "replicated_with_grad_allreduce",
        "1.o": Rowwise(output="sequence"),
    }
    x = torch.randn(2, length, DIM).double()
    check_parity(model, plan, tp, x, sequence_out=True)


# ---- who holds what ----


def test_share_out():
    assert share_out(6, 4) == (2, 2, 1, 1)
    assert share_out(8, 4) == (2, 2, 2, 2)
    assert share_out(7, 3) == (3, 2, 2)
    assert share_out(2, 4) == (1, 1, 0, 0)


def test_heads_that_divide_change_nothing():
    resolved = resolve_plan(CountsByShape(4, 2), {**SPLIT, **NORMS}, 2)
    assert not lengths(resolved) and not resolved.attributes and not resolved.notes
    assert {name: styles(resolved)[name] for name in "qkvo"} == {
        "q": Colwise(), "k": Colwise(), "v": Colwise(), "o": Rowwise(),
    }  # fmt: skip


def test_no_head_is_cut_where_only_the_width_divides():
    # 24 rows on 4 ranks would be 6 each; a head has 4.
    resolved = resolve_plan(CountsByShape(6, 6), {**SPLIT, **NORMS}, 4)
    assert set(lengths(resolved)) == {
        "q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "o.weight",
    }  # fmt: skip
    assert set(lengths(resolved).values()) == {(8, 8, 4, 4)}
    assert "(8, 8, 4, 4) by rank" in str(resolved)


def test_query_heads_go_with_their_key_and_value_heads():
    assert lengths(resolve_plan(CountsByAttribute(6, 3), SPLIT, 2)) == {
        "q.weight": (16, 8), "k.weight": (8, 4), "v.weight": (8, 4), "o.weight": (16, 8),
    }  # fmt: skip


def test_fewer_key_and_value_heads_than_ranks_are_whole_at_rest():
    resolved = resolve_plan(CountsByAttribute(8, 2), SPLIT, 4)
    style = GroupedKv(kv_heads=2, heads=((0,), (0,), (1,), (1,)))
    assert styles(resolved) == {"q": Colwise(), "k": style, "v": style, "o": Rowwise()}
    (rule,) = [p.rule for m in resolved.modules if m.name == "k" for p in m.params]
    assert rule.describe() == "whole with its gradient summed"
    said = str(resolved)
    assert "Attribute: n_rep 4 -> 2" in said and "Attribute: n_heads 8 -> 2" in said
    assert "ranks share key and value heads: 2 for 8 query heads" in said


def test_heads_that_ranks_share_unevenly_are_repeated():
    resolved = resolve_plan(CountsByAttribute(6, 2), SPLIT, 4)
    style = styles(resolved)["k"]
    assert isinstance(style, GroupedKv) and style.heads == ((0, 0), (0, 1), (1,), (1,))
    assert lengths(resolved) == {"q.weight": (8, 8, 4, 4), "o.weight": (8, 8, 4, 4)}
    assert {a.name: a.values for a in resolved.attributes} == {
        "n_heads": (2, 2, 1, 1),
        "n_kv_heads": (2, 2, 1, 1),
        "n_rep": (1, 1, 1, 1),
        "q_width": (8, 8, 4, 4),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_heads_than_ranks_leave_the_layer_whole(kind):
    model = kind(3, 3)
    resolved = resolve_plan(model, model.plan, 4)
    assert any("every rank computes the whole layer" in note for note in resolved.notes)
    for name, style in styles(resolved).items():
        if isinstance(style, Colwise):
            assert style.output == "replicate", name
        if isinstance(style, Rowwise):
            assert style.input == "replicate", name
        assert style != Replicated("partial"), name


def _with_table_of_heads() -> nn.Module:
    model = CountsByShape(4, 2)
    model.k_norm = nn.RMSNorm((2, SIZE))
    return model


@pytest.mark.parametrize(
    ("make", "plan", "tp", "said"),
    [
        # What query heads of two ranks attend to can't be both's part of one weight.
        (lambda: Sections(4, 1), None, 2, "4 heads (1 of keys and values) are too few for 2"),
        (
            lambda: CountsByConfig(4, 4),
            SPLIT,
            2,
            "its forward reads self.config.n_heads, which all",
        ),
        # A rank's heads of keys would meet another head's row of the weight.
        (
            _with_table_of_heads,
            {**SPLIT, "k_norm": "local_params", "k_norm.weight": "colwise"},
            4,
            "a parameter of (2, 4) has no part for each head",
        ),
    ],
)
def test_what_leaves_the_layer_whole(make, plan, tp, said):
    model = make()
    resolved = resolve_plan(model, plan or model.plan, tp)
    (note,) = resolved.notes
    assert "every rank computes the whole layer" in note and said in note
    assert all(
        getattr(style, "output", "replicate") == "replicate" for style in styles(resolved).values()
    )


def test_an_unknown_layer_is_left_whole_only_where_it_does_not_divide():
    class Unknown(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(DIM, width) for _ in range(3))
            self.o = nn.Linear(width, DIM)

    assert not resolve_plan(Unknown(12), SPLIT, 4).notes
    (note,) = resolve_plan(Unknown(13), SPLIT, 4).notes
    assert "no number of heads fits its sizes; looked for num_heads" in note


def test_an_output_projection_in_a_module_beside_the_others():
    class Projected(Projections):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.num_attention_heads = 6

    block = nn.ModuleDict(
        {
            "self": Projected(),
            "output": nn.ModuleDict({"dense": nn.Linear(24, DIM)}),
            "mlp": nn.ModuleDict({"up": nn.Linear(DIM, 24), "down": nn.Linear(24, DIM)}),
        }
    )
    plan = {
        "block.self.{q,k,v}": "colwise",
        "block.output.dense": "rowwise",
        "block.mlp.up": "colwise",
        "block.mlp.down": "rowwise",
    }
    found = lengths(resolve_plan(nn.ModuleDict({"block": block}), plan, 4))
    assert found["block.output.dense.weight"] == (8, 8, 4, 4)
    assert not any("mlp" in name for name in found)


def test_an_mlp_with_a_config_is_no_attention():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"num_attention_heads": 3, "head_dim": 4})()
            self.gate, self.up, self.down = nn.Linear(4, 13), nn.Linear(4, 13), nn.Linear(13, 4)

    plan = {"{gate,up}": "colwise", "down": "rowwise"}
    resolved = resolve_plan(Mlp(), plan, 4)
    assert not resolved.notes and not lengths(resolved)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Interleaved, {"query_key_value.weight": (24, 24, 12, 12), "dense.weight": (8, 8, 4, 4)}),
        (Latent, {"q_b_proj.weight": (12, 12, 6, 6), "kv_b_proj.weight": (12, 12, 6, 6),
                  "g_proj.weight": (2, 2, 1, 1), "o_proj.weight": (4, 4, 2, 2)}),
        (Sections, {"qkv_proj.weight": (24, 24, 12, 12), "o_proj.weight": (8, 8, 4, 4),
                    "sinks": (2, 2, 1, 1)}),
        (Sinks, {"q.weight": (8, 8, 4, 4), "sinks": (2, 2, 1, 1)}),
    ],
)  # fmt: skip
def test_other_projections(kind, wanted):
    model = kind(6, 6)
    assert wanted.items() <= lengths(resolve_plan(model, model.plan, 4)).items()


def test_sizes_that_a_plan_names_become_each_ranks():
    plan = {**SPLIT, "": LocalSizes(("n_heads", "n_kv_heads", "q_width"))}
    resolved = resolve_plan(CountsByAttribute(6, 6), plan, 4)
    values = {a.name: a.values for a in resolved.attributes}
    assert values["n_heads"] == (2, 2, 1, 1) and values["q_width"] == (8, 8, 4, 4)


def test_a_layer_that_cannot_even_be_whole_is_refused():
    model = CountsByShape(3, 3)
    model.extra = nn.Embedding(8, 4)
    with pytest.raises(PlanError, match=r"can't be shared by 4 ranks \(3 heads .*'extra' has"):
        resolve_plan(model, {**SPLIT, "extra": "embedding_rowwise"}, 4)


def test_packings_of_the_plan_are_kept():
    packed = Colwise(packed=Packing(0, (((0, 4),), ((4, 8),), ((12, 8),), ((20, 4),))))
    plan = {"{q,k,v}": packed, "o": Rowwise(packed=replace(packed.packed, dim=1)), **NORMS}
    resolved = resolve_plan(CountsByShape(6, 6), plan, 4)
    assert styles(resolved)["q"] == packed
    x = torch.randn(2, 5, DIM).double()
    check_parity(CountsByShape(6, 6), plan, 4, x)


def test_a_style_that_does_not_fit_its_module_is_a_problem():
    plan = {**Sections.plan_of(6, 6), "qkv_proj": Colwise(packed=(24, 24, 20))}
    with pytest.raises(PlanError, match=r"packed is \(24, 24, 20\); .* add up to 72"):
        resolve_plan(Sections(6, 6), plan, 4)


# ---- attributes ----


def test_attributes_are_set_on_the_modules_that_compute():
    model = CountsByAttribute(8, 2)
    other = copy.deepcopy(model)
    with fake_world(1, 4):
        resolve_plan(model, SPLIT, 4).apply(model, tp_mesh(4))
    assert (model.n_heads, model.n_kv_heads, model.n_rep) == (2, 1, 2)
    assert model.q_width == 2 * SIZE
    assert (other.n_heads, other.n_kv_heads, other.n_rep) == (8, 2, 4)


def test_attributes_are_as_before_when_wrapping_fails():
    class Fails(CountsByAttribute):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "n_rep" and value == 2 and self is model:
                raise RuntimeError("no")
            super().__setattr__(name, value)

    model = Fails(8, 2)
    with fake_world(0, 4), pytest.raises(RuntimeError, match="no"):
        parallelize(model, tp_mesh(4), SPLIT)
    assert (model.n_heads, model.n_kv_heads, model.n_rep) == (8, 2, 4)


def test_attributes_are_part_of_the_fingerprint():
    resolved = resolve_plan(CountsByAttribute(8, 2), SPLIT, 4)
    assert replace(resolved, attributes=()).fingerprint() != resolved.fingerprint()


def test_local_attributes():
    model = CountsByShape(4, 2)
    model.flag = True
    values = {"head_dim": (2, 1), "flag": (0, 0), "missing": (1, 1)}
    assert local_attributes("a", model, values) == [PlannedAttribute("a", "head_dim", 4, (2, 1))]
    assert local_attributes("a", model, {"head_dim": (4, 4)}) == []


def test_reads_of():
    assert reads_of(CountsByShape(4, 2)) == {"head_dim", "q", "k", "v", "o", "q_norm", "k_norm"}
    assert "config.n_heads" in (reads_of(CountsByConfig(4, 2)) or ())
    made: dict[str, type] = {}
    exec(  # a class without a source
        "import torch.nn as nn\nclass M(nn.Module):\n def forward(self, x): return self.q", made
    )
    assert reads_of(made["M"]()) is None


def test_a_window_as_wide_as_the_layer_is_no_width():
    class Window(CountsByAttribute):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.sliding_window = self.head_dim_of_all = 24

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, -self.sliding_window :])

    names = {a.name for a in resolve_plan(Window(), SPLIT, 4).attributes}
    assert names == {"n_heads", "n_kv_heads", "q_width"}


# ---- a layer with queries only, which attends to an earlier layer's keys and values (Gemma 3n) ----


class Layer(nn.Module):
    """Repeats its key and value heads by a number it keeps, as transformers' models do."""

    def __init__(self, heads: int, kv: int, borrows: bool) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = SIZE, heads // kv
        self.q = nn.Linear(DIM, heads * SIZE)
        self.o = nn.Linear(heads * SIZE, DIM)
        if not borrows:
            self.k = nn.Linear(DIM, kv * SIZE)
            self.v = nn.Linear(DIM, kv * SIZE)

    def forward(
        self, x: Tensor, lent: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q(x).view(shape).transpose(1, 2)
        if lent is None:
            lent = tuple(p(x).view(shape).transpose(1, 2) for p in (self.k, self.v))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in lent)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2)), lent


class Lends(nn.Module):
    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(heads, kv, False), Layer(heads, kv, True)])

    def forward(self, x: Tensor) -> Tensor:
        lent = None
        for layer in self.layers:
            x, lent = layer(x, lent)
        return x


PLAN = {f"layers.*.{name}": style for name, style in SPLIT.items()}


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 1, 2), (4, 2, 2), (8, 2, 4)])
def test_it_gets_as_many_heads_as_the_keys_it_borrows(heads: int, kv: int, tp: int) -> None:
    model = Lends(heads, kv)
    plan = resolve_plan(model, PLAN, tp)
    groups = {a.module: a.values for a in plan.attributes if a.name == "num_key_value_groups"}
    assert groups.get("layers.0") == groups.get("layers.1")
    check_parity(model, PLAN, tp, torch.randn(2, 5, DIM).double())


class LayeredConfig:
    """As transformers' configs of models whose layers differ: some numbers are in no layer's name."""

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("read it from a layer's config")


def test_a_number_that_the_config_does_not_tell_is_found_elsewhere() -> None:
    model = Lends(4, 2)
    for layer in model.layers:
        layer.config = LayeredConfig()
    assert resolve_plan(model, PLAN, 2).modules
