"""The plan a model brings: merged as transformers merges it, looked at, made right or refused."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from _support.tp.tp_world import check_parity, tp_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d import build_mesh, parallelize
from parallel3d.errors import PlanError
from parallel3d.mesh import MeshLayout
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import Colwise, Replicated, VocabParallel, auto_plan, resolve_plan
from parallel3d.tp.auto import prove
from parallel3d.tp.auto.complete import _without_overlaps, merged_plan

# ---- models that look like transformers', without it ----

HEADS, SIZE, DIM = 4, 2, 6


QKVO = [f"layers.*.attn.{name}_proj" for name in "qkvo"]
MLP = ["layers.*.mlp.0", "layers.*.mlp.2"]
STYLES = ["colwise", "colwise", "colwise", "rowwise", "colwise", "rowwise"]
PLAN = dict(zip([*QKVO, *MLP], STYLES, strict=True))


class Config(SimpleNamespace):
    base_model_tp_plan: ClassVar = PLAN


class Attention(nn.Module):
    """Attention with a norm of each head, if it is to have one."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, width) for _ in range(3))
        self.o_proj = nn.Linear(width, DIM)
        self.norm = norm

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, SIZE).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm is not None:
            q = self.norm(q)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn
        self.mlp = nn.Sequential(nn.Linear(DIM, 10), nn.GELU(), nn.Linear(10, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Base(nn.Module):
    """A base model: its plan is in its config."""

    def __init__(self, make: type[nn.Module] | object = Attention, layers: int = 2) -> None:
        super().__init__()
        self.config = Config()
        self.embed_tokens = nn.Embedding(11, DIM)
        self.layers = nn.ModuleList(Layer(make()) for _ in range(layers))  # type: ignore[operator]

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Lm(nn.Module):
    """A model with a head: the head's rule is in its class."""

    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}

    def __init__(self, make: type[nn.Module] | object = Attention, *, tied: bool = False) -> None:
        super().__init__()
        self.config = Config()
        self.model = Base(make)
        self.lm_head = nn.Linear(DIM, 11, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Tensor:
        return self.lm_head(self.model(input_ids))


IDS = torch.arange(12).view(2, 6) % 11


def test_the_rules_of_class_config_and_models_inside_are_merged():
    assert list(merged_plan(Base())) == ["embed_tokens", *PLAN]
    whole = ["model.embed_tokens", *(f"model.{p}" for p in PLAN), "lm_head"]
    assert list(merged_plan(Lm())) == whole

    class Outer(nn.Module):  # not a model of transformers, but it holds one
        def __init__(self) -> None:
            super().__init__()
            self.text = Lm()

    assert list(merged_plan(Outer())) == [f"text.{p}" for p in whole]
    assert not merged_plan(nn.Linear(2, 2))


def test_an_instance_with_its_plan_merged_already_is_taken_as_it_is():
    model = Lm()
    model._tp_plan = {"lm_head": "replicated", "model.embed_tokens": "replicated"}
    plan = merged_plan(model)
    assert plan["lm_head"] == plan["model.embed_tokens"] == "replicated"
    assert plan["model.layers.*.attn.q_proj"] == "colwise"  # what an older release leaves out


def test_it_is_used_and_says_why():
    resolved = resolve_plan(Lm(), "auto", 2)
    styles = {m.name: m.style for m in resolved.modules}
    assert styles["lm_head"] == Colwise(output="replicate")
    assert styles["model.embed_tokens"] == VocabParallel()
    assert {m.why for m in resolved.modules} == {"the model's plan"}
    assert "the model's plan" in str(resolved)


def test_the_dict_is_plain_and_can_be_given_back():
    plan = auto_plan(Lm(), 2)
    assert type(plan) is dict and plan["lm_head"] == "colwise_gather_output"
    again = resolve_plan(Lm(), plan, 2)
    assert again.fingerprint() == resolve_plan(Lm(), "auto", 2).fingerprint()
    edited = resolve_plan(Lm(), {**plan, "lm_head": "replicated"}, 2)
    assert {m.name: m.style for m in edited.modules}["lm_head"] == Replicated()


def test_rules_that_match_nothing_are_a_note_in_the_models_plan_only():
    model = Lm()
    model.model.config.base_model_tp_plan = {**PLAN, "layers.*.moe": "colwise"}
    resolved = resolve_plan(model, "auto", 2)
    assert "match nothing here: model.layers.*.moe" in resolved.notes[0]
    with pytest.raises(PlanError, match="matches no module"):
        resolve_plan(model, merged_plan(model), 2)
    assert "model.layers.*.moe" not in auto_plan(model, 2)


def test_a_plan_that_matches_nothing_at_all():
    model = Lm()
    model._tp_plan, model.lm_head = {}, None
    model.model = Base()
    model.model.config.base_model_tp_plan = {"blocks.*.q": "colwise"}
    model.model.embed_tokens = None
    with pytest.raises(
        PlanError, match=r"names 'model.blocks.\*.q', of which this model has nothing"
    ):
        resolve_plan(model, "auto", 2)


def test_of_two_rules_the_more_specific_holds():
    model = Lm()
    rules = {"layers.*.attn.*": "replicated", "layers.0.attn.q_proj": "colwise"}
    model.model.config.base_model_tp_plan = {**PLAN, **rules}
    plan = auto_plan(model, 2)
    assert plan["model.layers.*.attn.q_proj"] == "colwise"  # as transformers' numbers are
    assert not {"model.layers.*.attn.*", "model.layers.0.attn.q_proj"} & plan.keys()
    model.model.config.base_model_tp_plan = {**rules, **dict(zip(MLP, STYLES[4:], strict=True))}
    plan = merged_plan(model)
    assert _without_overlaps(
        plan, ["model.layers.0.attn.q_proj", "model.layers.1.attn.q_proj"]
    ) == {
        "model.layers.1.attn.q_proj": "replicated",
        "model.layers.0.attn.q_proj": "colwise",
    }


@pytest.mark.parametrize("wrong", ["Auto", "hf", ""])
def test_other_strings_are_refused(wrong):
    with pytest.raises(PlanError, match=f'the plan is {wrong!r}.*or "auto"'):
        resolve_plan(Lm(), wrong, 2)  # type: ignore[arg-type]


def test_a_model_without_a_plan_that_can_not_be_derived():
    with pytest.raises(PlanError):
        resolve_plan(nn.Sequential(nn.ReLU()), "auto", 2)


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_right(tied):
    check_parity(Lm(tied=tied), "auto", 2, IDS)  # type: ignore[arg-type]


def test_tied_weights_stay_one_parameter():
    model = Lm(tied=True)
    with fake_world(0, 2):
        resolve_plan(model, "auto", 2).apply(model, tp_mesh(2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, DTensor)


def test_parallelize_takes_it():
    model = Lm()
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(shard=2, tp=2), device_type="cpu")
        parallelize(model, mesh, "auto")
        weight = model.model.layers[0].attn.q_proj.weight
        assert "tp" in weight.device_mesh.mesh_dim_names


# ---- plans that are not right ----


class Scaled(nn.Module):
    """One number for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.alpha) * x + x


def with_norm(make: object) -> object:
    return lambda: Attention(make())  # type: ignore[operator]


@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(SIZE), lambda: nn.LayerNorm(SIZE), Scaled])
def test_what_acts_on_each_head_gets_its_gradient_summed(make):
    torch.manual_seed(0)
    model = Lm(with_norm(make))
    plan = auto_plan(model, 2)
    assert plan["model.layers.*.attn.norm"] == "replicated_with_grad_allreduce"
    resolved = resolve_plan(model, "auto", 2)
    (note,) = resolved.notes
    assert "'model.layers.*.attn.norm' gets" in note and "'model.layers.*.attn.q_proj'" in note
    (why,) = {m.why for m in resolved.modules if m.name.endswith("norm")}
    assert why.startswith("added: it acts on each rank's part")
    check_parity(model, "auto", 2, IDS)  # type: ignore[arg-type]


class Wrong(Attention):
    """What it does with q is not the same with a part of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.full = nn.RMSNorm(HEADS * SIZE)
        self.bias = nn.Linear(DIM, HEADS)
        self.per_head = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        if self.how == "norm of all heads":
            q = self.full(q)
        elif self.how == "mean of all heads":
            q = q - q.mean(-1, keepdim=True)
        scores = self.heads(q) @ k.transpose(-1, -2)
        if self.how == "whole bias":
            scores = scores + self.bias(x).transpose(1, 2).unsqueeze(-1)
        elif self.how == "a number for each head":
            scores = scores * self.per_head
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        if self.how == "norm of the output":
            y = self.full(y)
        elif self.how == "mean of the output":
            y = y - y.mean(-1, keepdim=True)
        return self.o_proj(y)


WRONG = [
    "norm of all heads",
    "mean of all heads",
    "whole bias",
    "a number for each head",
    "norm of the output",
    "mean of the output",
]


@pytest.mark.parametrize("how", WRONG)
def test_a_block_whose_plan_can_not_be_right_stays_whole(how):
    model = Lm(lambda: Wrong(how))
    resolved = resolve_plan(model, "auto", 2)
    split = ["model.layers.0.mlp.0", "model.layers.0.mlp.2", "model.layers.1.mlp.0"]
    names = [m.name for m in resolved.modules]
    assert names == ["model.embed_tokens", *split, "model.layers.1.mlp.2", "lm_head"]
    (note,) = resolved.notes
    assert "'model.layers.*.attn' stays whole on every rank, its 4 rules are left out" in note
    assert "on its part a rank doesn't compute what the plain module does" in note
    check_parity(model, "auto", 2, IDS)  # type: ignore[arg-type]


def test_a_plan_that_is_wrong_in_every_layer_is_refused():
    model = Lm(lambda: Wrong("mean of all heads"))
    model.model.config.base_model_tp_plan = {p: PLAN[p] for p in QKVO}
    with pytest.raises(
        PlanError, match=r"wrong in every layer: 'model.layers.\*.attn' stays whole"
    ):
        resolve_plan(model, "auto", 2)


def test_a_sum_of_gradients_that_are_whole():
    model = Lm(with_norm(lambda: nn.RMSNorm(SIZE)))
    whole = dict.fromkeys(QKVO[:3], "colwise_gather_output") | {QKVO[3]: "rowwise_split_input"}
    norm = {"layers.*.attn.norm": "replicated_with_grad_allreduce"}
    model.model.config.base_model_tp_plan = {**PLAN, **whole, **norm}
    resolved = resolve_plan(model, "auto", 2)
    (note,) = resolved.notes
    assert "'model.layers.*.attn.norm' is not needed" in note
    assert "model.layers.0.attn.q_proj" in {m.name for m in resolved.modules}
    check_parity(model, "auto", 2, IDS)  # type: ignore[arg-type]


def test_a_head_that_is_not_gathered_is_refused():
    model = Lm()
    model._tp_plan = {"lm_head": "colwise"}
    with pytest.raises(PlanError, match="the model's output is each rank's part, of 'lm_head'"):
        resolve_plan(model, "auto", 2)


def test_a_row_parallel_layer_with_nothing_split_before_it():
    model = Lm()
    model.model.config.base_model_tp_plan = {p: PLAN[p] for p in (QKVO[3], *MLP)}
    resolved = resolve_plan(model, "auto", 2)
    assert "wants each rank's part, but its input is whole" in resolved.notes[0]
    assert not [m.name for m in resolved.modules if "attn" in m.name]


class Asks(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(x.sum().item() > -1e9))


class Refuses(Attention):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not on the CPU")


def test_a_model_that_can_not_be_run_is_taken_as_it_is():
    resolved = resolve_plan(Lm(Refuses), "auto", 2)
    assert len(resolved.modules) == 14
    (note,) = resolved.notes
    assert "taken as it is: the model can't be run to look at it" in note
    assert "not on the CPU" in resolved.unchecked[0]
    asks = resolve_plan(Lm(Asks), "auto", 2)
    assert len(asks.modules) == 14 and not asks.notes


def test_large_layers_are_proven_narrow(monkeypatch):
    """Of the features that are not split a proof holds few, whatever a model's size."""
    monkeypatch.setattr(prove, "_NARROW", 2)
    model = Lm(with_norm(lambda: nn.RMSNorm(SIZE)))
    assert auto_plan(model, 2)["model.layers.*.attn.norm"] == "replicated_with_grad_allreduce"
    attention = model.model.layers[0].attn
    ends = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), True), "o_proj": False}
    held = 3 * (8 * 2 + 8) + 2 * 8 + 2 + SIZE  # narrow weights, and biases
    assert prove.cost(attention, ends) == held < sum(p.numel() for p in attention.parameters())
    (note,) = resolve_plan(Lm(lambda: Wrong("mean of all heads")), "auto", 2).notes
    assert "'model.layers.*.attn' stays whole" in note


def test_looking_at_it_changes_nothing():
    model = Lm(with_norm(lambda: nn.RMSNorm(SIZE)))
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    auto_plan(model, 2)
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])


def test_a_model_that_takes_something_else_is_looked_at_with_what_it_says():
    class Vectors(Base):
        main_input_name = "vectors"
        dummy_inputs: ClassVar = {"vectors": torch.zeros(1, 3, DIM)}

        def __init__(self) -> None:
            super().__init__(with_norm(lambda: nn.RMSNorm(SIZE)))
            del self.embed_tokens

        def forward(self, vectors: Tensor) -> Tensor:
            for layer in self.layers:
                vectors = layer(vectors)
            return vectors

    assert auto_plan(Vectors(), 2)["layers.*.attn.norm"] == "replicated_with_grad_allreduce"
