"""Plans derived by tracing: what is split is proven equal, what can't be is refused with the reason."""

import copy
import warnings

import pytest
import torch
from _support.tp.derive_models import Block, FusedAttention, Mlp, Vit
from _support.tp.tp_world import check_parity
from llama import SIZES, Llama
from torch import nn

from parallel3d.errors import PlanError
from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity, fake_world
from parallel3d.tp import (
    Colwise,
    HeadArguments,
    LocalSizes,
    Rowwise,
    VocabParallel,
    auto_plan,
    resolve_plan,
)
from parallel3d.tp.auto.derive import Group, _Derivation, derive_plan
from parallel3d.tp.auto.prove import run_ranks


def test_layers_of_a_kind_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the layer whose number is its number of heads."""
    proven: list[str] = []
    prove = _Derivation._prove

    def counted(self: _Derivation, group: Group) -> object:
        proven.extend(group.downs)
        return prove(self, group)

    monkeypatch.setattr(_Derivation, "_prove", counted)
    model = nn.Sequential(*(Block(16, 2) for _ in range(4)))
    for number, block in enumerate(model):
        block.attn.layer_idx = number
    rules = derive_plan(model, 2).rules
    assert {pattern.split(".")[0] for pattern in rules} == {"*"}
    assert [name.split(".")[0] for name in proven] == ["0", "0"]


def _named(model: nn.Module) -> nn.Module:
    """The model behind something that isn't split, so that its plan has names."""
    return nn.ModuleDict({"m": model})["m"]


@pytest.mark.parametrize("between", ["", "activation", "float32"])
def test_mlp_is_derived(between: str) -> None:
    model = Mlp(between)
    plan_source = derive_plan(model, 2)
    assert plan_source.rules == {"up": Colwise(), "down": Rowwise()}
    assert (
        "reaches down only" in plan_source.why["up"] and "proven equal" in plan_source.why["down"]
    )
    check_parity(
        model.eval(), dict(plan_source.rules), 2, torch.randn(2, 3, 16, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ("norm", r"normalized_shape=\[32\]"),
        ("norm_without_weights", "output 0 differs by"),
        ("batch_norm", "running_mean should contain 16 elements not 32"),
        ("constant", "must match the size"),
        ("parameter", "must match the size"),
        ("softmax", "output 0 differs by"),
        ("mean", "output 0 differs by"),
        ("roll", "output 0 differs by"),
        ("shape", "invalid for input of size"),
        ("weight", "up.weight is read by pow outside its module"),
        ("random", "differs by"),
        ("twice", "its output is read by 2 \\(down, other\\), not by one linear layer only"),
        ("gate", "not enough values to unpack"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(between: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        derive_plan(Mlp(between), 2)
    assert "nothing of it was proven" in str(error.value)


def test_what_cannot_be_split_stays_whole_beside_what_can() -> None:
    model = nn.ModuleList([Mlp(), Mlp("softmax"), Mlp()])

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    three = Three()
    plan_source = derive_plan(three, 2)
    assert set(plan_source.rules) == {f"blocks.{i}.{n}" for i in (0, 2) for n in ("up", "down")}
    assert any("blocks.1.up" in note and "differs" in note for note in plan_source.notes)
    check_parity(three, dict(plan_source.rules), 2, torch.randn(2, 3, 16, dtype=torch.float64))


class OddlyNamed(FusedAttention):
    """What its numbers mean only a trial can tell."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width, count)
        del self.num_heads
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.count, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


def test_sizes_of_a_module_are_made_local_where_its_forward_needs_them() -> None:
    model = OddlyNamed(24, 4)
    plan_source = derive_plan(model, 2, ((torch.randn(2, 5, 24),), {}))
    assert plan_source.rules[""] == LocalSizes(("count",))
    assert plan_source.rules["qkv"] == Colwise(packed=(24, 24, 24))
    check_parity(model, dict(plan_source.rules), 2, torch.randn(2, 3, 24, dtype=torch.float64))
    with pytest.raises(PlanError, match="count is 4, which 3 tp ranks can't share equally"):
        resolve_plan(model, {"": LocalSizes(("count",)), "proj": "rowwise"}, 3)
    with pytest.raises(PlanError, match="heads is None, not an int"):
        resolve_plan(model, {"": LocalSizes(("heads",)), "proj": "rowwise"}, 2)


def test_what_attention_is_given_for_each_head_is_cut() -> None:
    class Biased(FusedAttention):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mask = bias.view(-1, self.num_heads, *bias.shape[1:])
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
            return self.proj(y.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Biased(16, 4)
            self.slopes = nn.Parameter(torch.rand(4, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).triu()
            return self.attn(x, bias=(self.slopes * places).repeat(len(x), 1, 1))

    model = Model()
    plan_source = derive_plan(model, 2, ((torch.randn(2, 5, 16),), {}))
    assert plan_source.rules["attn"] == HeadArguments(4, (("bias", 0),))
    check_parity(model, dict(plan_source.rules), 2, torch.randn(2, 3, 16, dtype=torch.float64))
    assert derive_plan(model, 3, ((torch.randn(2, 5, 16),), {})).rules == plan_source.rules
    with pytest.raises(PlanError, match="4 heads are too few for 5 tp ranks"):
        resolve_plan(model, {"attn": HeadArguments(4, (("bias", 0),))}, 5)
    with pytest.raises(PlanError, match="has no argument 'alibi'; it has x, bias"):
        resolve_plan(model, {"attn": HeadArguments(4, (("alibi", 0),))}, 2)


def test_a_running_mean_of_parts_is_not_the_running_mean() -> None:
    class Watched(FusedAttention):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(x).view(*x.shape[:2], 3, -1, 4)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            self.seen += q.detach().abs().mean()
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.proj(y.transpose(1, 2).flatten(2))

    with pytest.raises(PlanError, match="nothing of it was proven"):
        derive_plan(Watched(), 2, ((torch.randn(2, 5, 16),), {}))


def test_norms_on_heads_have_their_gradients_summed() -> None:
    class QkNorm(FusedAttention):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.norm = nn.RMSNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(x).view(*x.shape[:2], 3, -1, 4)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = nn.functional.scaled_dot_product_attention(self.norm(q), self.norm(k), v)
            return self.proj(y.transpose(1, 2).flatten(2))

    model = QkNorm()
    plan_source = derive_plan(model, 2, ((torch.randn(2, 5, 16),), {}))
    assert plan_source.rules["norm"].tp_grad == "partial"
    check_parity(model, dict(plan_source.rules), 2, torch.randn(2, 3, 16, dtype=torch.float64))


class Lm(nn.Module):
    def __init__(self, tied: bool, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(67, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Mlp("activation") for _ in range(2))
        self.head = nn.Linear(width, 67, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_is_split_and_stays_tied(tied: bool) -> None:
    model = Lm(tied).eval()
    plan_source = derive_plan(model, 2)
    assert plan_source.rules == {
        "blocks.*.up": Colwise(),
        "blocks.*.down": Rowwise(),
        "tokens": VocabParallel(),
        "head": Colwise(output="replicate"),
    }
    check_parity(model, dict(plan_source.rules), 2, torch.randint(67, (2, 5)))


def test_head_whose_table_is_read_without_calling_it_is_left_whole() -> None:
    class Bare(Lm):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = nn.functional.embedding(ids, self.tokens.weight)
            for block in self.blocks:
                x = x + block(x)
            return nn.functional.linear(x, self.tokens.weight)

    plan_source = derive_plan(Bare(False), 2)
    assert set(plan_source.rules) == {"blocks.*.up", "blocks.*.down"}


def test_same_plan_on_meta_inside_a_job_and_for_any_weights() -> None:
    with torch.device("meta"):
        on_meta = Lm(True)
    with fake_world(1, 2):
        inside = derive_plan(Lm(True), 2)
        assert derive_plan(on_meta, 2) == inside
    torch.manual_seed(5)
    assert derive_plan(Lm(True).double(), 2) == inside


def test_same_plan_on_meta_with_buffers_that_have_no_values() -> None:
    """They are random, but the same in the plain module and in its parts."""
    with torch.device("meta"):
        on_meta = Llama(SIZES["nano"])
    assert derive_plan(on_meta, 2) == derive_plan(Llama(SIZES["nano"]), 2)
    assert "layers.*.attention.wq" in derive_plan(on_meta, 2).rules


def test_same_plan_in_any_mode_and_with_frozen_weights() -> None:
    plain = derive_plan(Vit(), 2)
    with torch.inference_mode():
        assert derive_plan(Vit(), 2) == plain
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert derive_plan(Vit(), 2) == plain
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"), torch.no_grad():
        assert derive_plan(Vit().requires_grad_(False), 2) == plain
    assert resolve_plan(Vit(), "auto", 1).tp_size == 1


def test_model_is_not_changed_and_draws_no_random_numbers() -> None:
    model = Vit()
    before = copy.deepcopy(model.state_dict())
    state, forward = torch.get_rng_state(), model.blocks[0].attn.forward
    derive_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.blocks[0].attn.forward == forward
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_that_cannot_be_guessed_needs_an_example() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.mlp(batch["x"])

    with pytest.raises(PlanError, match="must run once, and did not on any input guessed"):
        auto_plan(Two(), 2)
    plan = auto_plan(Two(), 2, example=(({"x": torch.randn(2, 16)},), {}))
    assert plan == {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    with pytest.raises(PlanError, match=r"example is Tensor; it must be \(args, kwargs\)"):
        auto_plan(Two(), 2, example=torch.randn(2, 16))
    with pytest.raises(PlanError, match="did not on the example"):
        auto_plan(Two(), 2, example=((torch.randn(2, 16),), {}))


def test_hidden_sizes_that_do_not_divide() -> None:
    model = Mlp()
    plan_source = derive_plan(model, 3)
    check_parity(model, dict(plan_source.rules), 3, torch.randn(2, 3, 16, dtype=torch.float64))


def test_heads_that_do_not_divide_are_shared_out_whole() -> None:
    plan_source = derive_plan(Vit(), 3)
    assert "blocks.*.attn.qkv" in plan_source.rules
    image = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    check_parity(Vit(), dict(plan_source.rules), 3, image)


def test_heads_that_go_by_another_name_are_shared_out_too() -> None:
    model = OddlyNamed(24, 4)
    plan_source = derive_plan(model, 3, ((torch.randn(2, 5, 24),), {}))
    assert plan_source.rules[""] == LocalSizes(("count",))
    (attribute,) = resolve_plan(model, dict(plan_source.rules), 3).attributes
    assert attribute.values == (2, 1, 1)


def test_reasons_are_in_the_report() -> None:
    report = str(resolve_plan(Lm(False), "auto", 2))
    assert "reaches down only" in report and "proven equal on 2 ranks" in report


def test_ranks_that_fail_or_disagree_end_with_the_error() -> None:
    def fail(axis):
        if axis.rank == 1:
            raise ValueError("of rank 1")
        torch.distributed.all_reduce(torch.ones(1), group=axis.group)

    with pytest.raises(ValueError, match="of rank 1"):
        run_ranks(3, fail)
    with pytest.raises(RuntimeError, match="the ranks disagree about a collective"):
        run_ranks(
            2, lambda a: torch.distributed.all_reduce(torch.ones(a.rank + 1), group=a.group) or 1
        )


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_derived_plan_trains_as_the_plain_model(layout: tuple[int, int, int], tied: bool) -> None:
    def ids(number: int) -> torch.Tensor:
        return torch.randint(67, (2, 5), generator=torch.Generator().manual_seed(number))

    def build() -> nn.Module:
        model = Lm(tied)
        for block in model.blocks:
            block.between = ""
            del block.other, block.norm, block.batch_norm, block.scale
        return model

    assert_parity(build, ids, MeshLayout(*layout), steps=2, fp32=False, tp_plan="auto")


class ThreeHeads(nn.Module):
    """Whose projections are as wide as three sections of 16, which have no part for each of 3 heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_dim))


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (6, 4)])
def test_a_width_that_could_be_packed_but_for_its_heads(heads: int, tp: int) -> None:
    width = heads * 16
    layers = (ThreeHeads(heads, width) for _ in range(2))
    plan = resolve_plan(nn.Sequential(nn.Embedding(16, width), *layers), "auto", tp_size=tp)
    assert f"{heads} groups of heads as" in str(plan)


class OfTheInput(nn.Module):
    """Attention whose head size is that of its whole input, divided by its heads; or its own."""

    def __init__(self, own_size: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.own_size = 4, 4, own_size
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        size = self.head_dim if self.own_size else width // self.heads
        q, k, v = (t.view(rows, length, -1, size) for t in self.qkv(x).chunk(3, -1))
        if not self.own_size:
            q, k, v = (t.view(rows, length, self.heads, size) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out(y.transpose(1, 2).reshape(rows, length, -1 if self.own_size else width))


def test_sizes_of_the_whole_input_are_named() -> None:
    def model(own_size: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), OfTheInput(own_size), nn.Linear(16, 8))

    with pytest.warns(UserWarning, match="(?s)2 of the 4 linear .*qkv.*such as self.head_dim"):
        auto_plan(model(False), 2)
    for more in ({}, {"1": LocalSizes(("heads",))}):
        plan = {"1.qkv": Colwise(packed=3), "1.out": "rowwise", **more}
        with pytest.raises(PlanError, match=r"such as self.head_dim, or write -1\)\.") as caught:
            resolve_plan(model(False), plan, 2)
        assert "tp.LocalSizes" not in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any("qkv" in name or name == "1" for name in auto_plan(model(True), 2))
