"""LoRA of the peft library on transformers' models, by their own plans and by a user's."""

import functools
from contextlib import nullcontext

import pytest
from torch import Tensor, nn

pytest.importorskip("peft")

import torch
from _support.hf.all_double import AllDouble
from _support.hf.uneven import batch, loss, uneven_lm
from peft import IA3Config, LoraConfig, get_peft_model

from parallel3d import (
    MeshLayout,
    Parallel3dError,
    PlanError,
    build_mesh,
    materialize,
    parallelize,
)
from parallel3d.testing import GlooPool, assert_parity, fake_world
from parallel3d.tp import Colwise, VocabParallel, resolve_plan
from parallel3d.tp.random import _BITS, _MARK

pytestmark = pytest.mark.ci

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "down_proj"]


def build(targets, model: dict, **lora) -> nn.Module:
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, **lora)
    built = get_peft_model(uneven_lm(**model), config)
    with torch.no_grad():
        for name, param in built.named_parameters():
            if "lora_" in name:  # B is zero at first, and A's gradient then
                param.copy_(torch.randn(param.shape) * 0.3)
    return built


def parity(targets, model: dict, lora: dict, mesh: tuple[int, int, int], plan="auto") -> None:
    make = functools.partial(build, targets, model, **lora)
    with nullcontext() if model.get("name") == "gpt2" else AllDouble():
        layout = MeshLayout(*mesh)
        assert_parity(make, batch, layout, tp_plan=plan, loss=loss, steps=2, fp32=False)


CASES = {
    "all": (ALL, {}, {}),
    "some, bias": (SOME, {"attention_bias": True}, {"lora_bias": True}),
    "shared keys": (ALL, {"kv": 1}, {}),
    "too few heads": (ALL, {"heads": 1, "kv": 1}, {}),
    "some layers": (ALL, {"name": "qwen2"}, {"layers_to_transform": [1]}),
    "tied, embedding": (["embed_tokens", "q_proj"], {"tie_word_embeddings": True}, {}),
    "conv1d": (["c_attn", "c_proj", "c_fc"], {"name": "gpt2"}, {"fan_in_fan_out": True}),
    "head": (["lm_head", "v_proj"], {"name": "qwen3", "head_dim": 6}, {"use_rslora": True}),
}


QUICK = ("all", "too few heads", "conv1d")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in CASES]
)
def test_auto(case: str) -> None:
    parity(*CASES[case], (1, 1, 2))


@pytest.mark.slow
def test_on_three_axes() -> None:
    parity(SOME, {}, {}, (2, 2, 2))


@pytest.mark.slow
def test_uneven_heads_on_real_ranks(gloo_pool: GlooPool) -> None:
    gloo_pool.run(parity, ALL, {"heads": 3, "kv": 3}, {}, (1, 1, 2), world_size=2)


@pytest.mark.slow
def test_a_users_plan() -> None:
    """A rule for a LoRA layer, or for its base layer, is enough; the check of plans compares both."""
    plan = {
        "*.*.model.layers.*.self_attn.{q,k,v}_proj": "colwise",
        "*.*.model.layers.*.self_attn.o_proj": "rowwise",
        "*.*.model.layers.*.mlp.{gate,up}_proj.base_layer": "colwise",
        "*.*.model.layers.*.mlp.down_proj.base_layer": "rowwise",
    }
    parity(ALL, {}, {}, (1, 1, 2), plan)


def test_summary_names_the_layers() -> None:
    plan = resolve_plan(build(ALL, {}), "auto", 2)
    assert "Colwise: q_proj, k_proj, v_proj, gate_proj, up" in plan.summary()
    assert "q_proj.lora_B.default" in str(plan)


def test_adapters_on_meta_are_initialised_as_peft_does() -> None:
    """So that the model is the base model at first, which the base's own ``_init_weights`` would not make."""
    with torch.device("meta"):
        base = uneven_lm()
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        model = materialize(parallelize(model, mesh, "auto"), device="cpu", seed=0)
        zero = {
            "lora_A": False,
            "lora_B": True,
            "lora_embedding_A": True,
            "lora_embedding_B": False,
        }
        for name, param in model.named_parameters():
            kind = next((kind for kind in zero if f".{kind}." in name), "")
            assert (not param.full_tensor().any()) == zero.get(kind, False), name


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"]),
        LoraConfig(target_modules=SOME, init_lora_weights="pissa"),
    ],
)
def test_adapters_on_meta_that_are_not_known(config) -> None:
    config.init_lora_weights = True  # which peft computes at once, not on meta
    with torch.device("meta"):
        model = get_peft_model(uneven_lm(), config)
    if isinstance(config, LoraConfig):
        config.init_lora_weights = "pissa"
    with pytest.raises(Parallel3dError, match=r"k_proj.ia3_l.*peft|q_proj.lora_A.*peft"):
        materialize(model, device="cpu")


def test_a_head_with_adapters_and_loss_parallel() -> None:
    with (
        fake_world(0, 2),
        pytest.raises(PlanError, match=r"head 'base_model.model.lm_head' is a.*peft"),
    ):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        parallelize(build(["lm_head"], {}), mesh, "auto", loss_parallel=True)


def test_dropout_is_of_the_input() -> None:
    """Whole before a layer split by output features, parts before one split by input features; for a second
    adapter too, after the first has put out something else."""
    model = build(["up_proj", "down_proj"], {}, lora_dropout=0.5)
    more = LoraConfig(r=2, target_modules=["up_proj", "down_proj"], lora_dropout=0.5)
    model.add_adapter("more", more)
    model.base_model.set_adapter(["default", "more"])
    seen: dict[str, set[bool]] = {}
    with fake_world(0, 2):
        model = parallelize(model, build_mesh(MeshLayout(1, 1, 2), device_type="cpu"), "auto")
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and "lora" in name:
                parts = seen.setdefault(name.split(".")[-3], set())
                run = module.forward  # no hook, which would see a part
                module.forward = lambda x, run=run, parts=parts: (parts.add(on_parts()), run(x))[1]
        loss(model.train(), batch(0))
    assert seen == {"up_proj": {False}, "down_proj": {True}}


def on_parts() -> bool:
    return torch.default_generator.initial_seed() >> _BITS == _MARK >> _BITS


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            LoraConfig(target_modules=SOME, use_dora=True),
            "q_proj.*DoraLinearVariant, which can't be",
        ),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "k_proj.*peft.tuners.ia3"),
        (LoraConfig(target_modules=SOME, modules_to_save=["lm_head"]), "lm_head.*ModulesToSave"),
    ],
)
def test_refused(config, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        resolve_plan(get_peft_model(uneven_lm(), config), "auto", 2)
    resolve_plan(
        get_peft_model(uneven_lm(), config), {"*.*.model.layers.*.mlp.up_proj": "colwise_rep"}, 2
    )


def with_invocation(sample: int) -> Tensor:
    ids = batch(sample)
    ids[0, 1:3] = ids[1, 2:4] = torch.tensor([7, 2])
    return ids


def test_activated_lora() -> None:
    """Adapters from some tokens on, whose places peft gives the layers by hooks of one forward."""
    lora = {"alora_invocation_tokens": [7, 2], "task_type": "CAUSAL_LM"}
    make = functools.partial(build, ALL, {}, **lora)
    with AllDouble():
        layout = MeshLayout(1, 1, 2)
        assert_parity(make, with_invocation, layout, tp_plan="auto", loss=loss, steps=1, fp32=False)


def test_activated_lora_of_a_split_sequence_is_refused() -> None:
    model = build(ALL, {}, alora_invocation_tokens=[7, 2], task_type="CAUSAL_LM")
    layers = "base_model.model.model"
    plan = {
        f"{layers}.embed_tokens": VocabParallel(output="sequence"),
        f"{layers}.layers.*.mlp.up_proj": Colwise(input="sequence"),
    }
    with pytest.raises(PlanError, match="aLoRA picks tokens by their places in the whole sequence"):
        resolve_plan(model, plan, 2)
