"""A plan written by hand computes what the plain model does, or is refused when it is resolved."""

import re

import pytest
import torch
from _support.tp.attention_styles import (
    DIM,
    REFUSED,
    RIGHT,
    GroupedBySize,
    Mlp,
    MlpFused,
    Net,
    NumHeads,
    SelfH,
    SelfHeads,
    TwoLayers,
    plan_of,
)
from _support.tp.tp_world import check_parity
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.errors import PlanError
from parallel3d.tp import (
    Colwise,
    LocalSizes,
    Replicated,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    resolve_plan,
)
from parallel3d.tp.auto import check

IDS = torch.arange(10).view(2, 5)


def refused(model: nn.Module, plan: dict, tp: int = 2, **options: object) -> str:
    with pytest.raises(PlanError) as caught:
        resolve_plan(model, plan, tp, **options)
    return str(caught.value)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", RIGHT)
def test_right(kind, tp):
    torch.manual_seed(0)
    check_parity(Net(kind), plan_of(kind), tp, IDS)


class Louder(NumHeads):
    """Its gradients are a million times as large, and so is their rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e6


def test_rounding_of_a_gradient_that_is_zero():
    """A key's bias changes no attention: its gradient is rounding, and other rounding on each rank."""
    torch.manual_seed(0)
    resolve_plan(Net(Louder), plan_of(Louder), 4)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind, tp):
    said = refused(Net(kind), plan_of(kind), tp)
    assert said.startswith("1 problem ")  # once for both layers
    assert re.search(REFUSED[kind], said), said


@pytest.mark.parametrize("kind", [SelfHeads, SelfH, NumHeads])
def test_the_rules_that_are_said_to_be_right_are(kind):
    torch.manual_seed(0)
    name = {SelfHeads: "heads", SelfH: "h", NumHeads: "num_heads"}[kind]
    plan = {**plan_of(kind), "layers.*": LocalSizes((name,))}
    check_parity(Net(kind), plan, 2, IDS)


def test_key_and_value_heads_that_would_be_cut_inside():
    """Two of them on four ranks, in a model that says neither how many there are nor their size."""
    torch.manual_seed(0)
    check_parity(Net(GroupedBySize), plan_of(GroupedBySize), 2, IDS)
    assert "on 4 ranks it raises" in refused(Net(GroupedBySize), plan_of(GroupedBySize), 4)


class Pair(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = (
            nn.Linear(8, 16),
            nn.Sequential(*between),
            nn.Linear(16, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def test_a_linear_that_reads_a_part_is_named_first():
    said = refused(Pair(), {"up": "colwise"})
    plain = (
        "'down' reads the output of 'up', of which each rank has a part, as if it were whole. Give 'down' "
        "the style 'rowwise', or 'up' 'colwise_gather_output'. As the plan is, on 2 ranks it raises"
    )
    assert plain in said and "LocalSizes" not in said
    for plan in ({"up": "colwise", "down": "rowwise"}, {"up": "colwise_gather_output"}):
        assert resolve_plan(Pair(), plan, 2).modules
    attention = {n: s for n, s in plan_of(NumHeads).items() if s != "rowwise"}
    said = refused(Net(NumHeads), attention)
    assert re.search(
        r"o' reads the output of .*q', .*k', .*v', of which .* or those 'colwise_gath", said
    )
    assert "LocalSizes" not in said


def test_sizes_are_asked_for_only_where_attributes_are_read():
    said = refused(Pair(nn.Softmax(-1)), {"up": "colwise", "down": "rowwise"})
    assert "leave them whole" in said and "LocalSizes" not in said


# ---- what can't be proven ----


class Two(Net):
    """Of which no input can be guessed."""

    def forward(self, ids: Tensor, scale: dict) -> Tensor:
        return super().forward(ids) * scale["x"]


def test_a_model_that_can_not_be_run():
    for kind in (SelfHeads, SelfH, TwoLayers, MlpFused):
        said = refused(Two(kind), plan_of(kind))
        assert "it can't be shown that ranks may compute on parts" in said
        assert (
            "checks=Checks(example=((input,), {}))" in said
            and "LocalSizes" in said
            and '"auto"' in said
        )
    assert "reads self.h" in refused(Two(SelfH), plan_of(SelfH))
    for kind, why in ((NumHeads, "by its 8 heads"), (Mlp, "must be by element")):
        (reads, said) = resolve_plan(Two(kind), plan_of(kind), 2).unchecked
        assert "which weights the model reads" in reads
        assert why in said and "example=" in said
    told = {**plan_of(SelfHeads), "layers.*": LocalSizes(("heads",))}
    resolved = resolve_plan(Two(SelfHeads), told, 2)
    assert "by the sizes that the plan gives" in resolved.unchecked[1]
    assert str(resolved).splitlines()[-1] == f"Not checked: {resolved.unchecked[1]}"


def test_an_example_is_run():
    example = ((IDS,), {"scale": {"x": 2.0}})
    assert not resolve_plan(Two(NumHeads), plan_of(NumHeads), 2, example=example).unchecked
    assert "output 0 differs" in refused(Two(SelfHeads), plan_of(SelfHeads), example=example)
    assert "did not on the example" in refused(
        Two(NumHeads), plan_of(NumHeads), example=((IDS,), {})
    )


def test_layers_too_large_to_compare(monkeypatch):
    monkeypatch.setattr(check, "_MOST_PROVEN", 100)
    (said,) = resolve_plan(Net(NumHeads), plan_of(NumHeads), 2).unchecked
    assert "by its 8 heads" in said and "too many to compare" in said
    assert "too many to compare" in refused(Net(SelfHeads), plan_of(SelfHeads))
    assert not resolve_plan(Net(Mlp), plan_of(Mlp), 2).unchecked  # seen to be by element


def test_a_layer_that_does_not_run():
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = NumHeads(), SelfHeads()

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.shape[1] < 100 else self.other(x)

    plan = {
        f"layers.*.{part}.{name}": style
        for part in ("one", "other")
        for name, style in NumHeads.plan.items()
    }
    said = refused(Net(Either), plan)
    assert (
        said.startswith("1 problem") and "other: q, k, v -> o" in said and "weren't called" in said
    )


# ---- weights read outside their modules ----


class ReadsTable(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(x, self.embed.weight)


def test_a_split_weight_that_the_root_reads():
    plan = {**plan_of(Mlp), "embed": "embedding"}
    said = refused(ReadsTable(Mlp), plan)
    assert "embed.weight is split over tp by 'embed'" in said and "outside its module" in said
    torch.manual_seed(0)
    check_parity(ReadsTable(Mlp), plan_of(Mlp), 2, IDS)
    resolve_plan(ReadsTable(Mlp), {**plan, "embed": Replicated()}, 2)


def test_a_split_weight_of_a_layer_that_the_root_reads():
    class Penalized(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.layers[0].a.weight.square().sum()

    said = refused(Penalized(Mlp), plan_of(Mlp))
    assert "layers.0.a.weight is split over tp by 'layers.0.a'" in said


# ---- parts of a sequence ----

SEQUENCE = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.{a,b}": Colwise(input="sequence"),
    "layers.*.c": Rowwise(output="sequence"),
    "head": Colwise(input="sequence", output="replicate"),
}


def test_a_part_of_the_sequence_given_to_a_layer_that_takes_it_whole():
    torch.manual_seed(0)
    check_parity(Net(Mlp), SEQUENCE, 2, IDS)
    plan = {**SEQUENCE, "layers.*.a": Colwise(input="sequence"), "layers.*.b": "colwise"}
    del plan["layers.*.{a,b}"]
    said = refused(Net(Mlp), plan)
    assert said.startswith("1 problem") and "'layers.*.b' as Colwise() takes its input" in said
    assert "'embed' as VocabParallel(output='sequence') puts out, parts of the sequence" in said
    said = refused(Net(Mlp), {**SEQUENCE, "head": "colwise_rep"})
    assert "'head' as Colwise(output='replicate') takes its input to be whole" in said


def test_parts_that_a_norm_has_gathered():
    class Ends(Net):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__(kind)
            self.norm = nn.LayerNorm(DIM)
            self.head = nn.Sequential(self.norm, nn.Linear(DIM, 16))

    torch.manual_seed(0)
    plan = {**SEQUENCE, "norm": SequenceParallel(output="replicate"), "head.1": "colwise_rep"}
    del plan["head"]
    check_parity(Ends(Mlp), plan, 2, IDS)
    said = refused(Ends(Mlp), {**plan, "norm": "sequence_parallel"})
    assert "SequenceParallel() puts out, parts of the sequence" in said


# ---- other layers ----


def test_a_rotation_between_layers_is_no_part_of_them():
    """The mixing is within each layer's tokens, so features stay by themselves, but it must be proven."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).cumsum(1))

    torch.manual_seed(0)
    check_parity(Net(Pooled), {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, 2, IDS)


def test_an_output_that_is_left_split_is_told():
    resolved = resolve_plan(Net(Mlp), {**plan_of(Mlp), "head": "colwise"}, 2)
    (said,) = resolved.unchecked
    assert "'head'" in said and "reaches the model's output" in said


def test_nothing_is_run_on_one_rank(monkeypatch):
    monkeypatch.setattr(Net, "forward", None)
    assert not resolve_plan(Net(SelfHeads), plan_of(SelfHeads), 1).unchecked
