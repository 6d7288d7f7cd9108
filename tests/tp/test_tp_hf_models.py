"""The plans of transformers' own models: what is added, what stays whole, on meta models of odd families."""

import copy

import pytest
import torch
from _support.hf.all_double import AllDouble
from _support.tp.tp_world import check_parity, tp_mesh
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.errors import PlanError, StateError
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import VocabParallel, auto_plan, resolve_plan

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.ci

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "pad_token_id": 0,
}


def model(family: str, **fields: object) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **fields})
    with torch.device("meta"):
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def notes(made: nn.Module) -> str:
    return "\n".join(resolve_plan(made, "auto", 2).notes)


def test_transformers_merge_is_ours():
    made = model("llama")
    assert auto_plan(made, 2) == made.tp_plan
    base = auto_plan(made.model, 2)
    assert base == made.model.tp_plan and "embed_tokens" in base


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2", "mixtral", "glm4"])
def test_right_plans_are_taken_as_they_are(family):
    assert not notes(model(family))


def test_an_older_releases_merge_is_completed():
    made = model("llama")
    whole = dict(made._tp_plan)
    made._tp_plan = {k: v for k, v in whole.items() if k == "lm_head"}
    made.model._tp_plan = {}
    assert auto_plan(made, 2) == whole


def test_tied_embeddings_stay_tied():
    made = model("llama", tie_word_embeddings=True)
    with fake_world(0, 2):
        resolve_plan(made, "auto", 2).apply(made, tp_mesh(2))
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert isinstance(made.lm_head.weight, DTensor)


def test_gemmas_scaled_embedding_is_split():
    # Complaint 21, NeMo-Automodel #425: a crash.
    resolved = resolve_plan(model("gemma3_text"), "auto", 2)
    assert resolved.modules[0].name == "model.embed_tokens"
    assert resolved.modules[0].style == VocabParallel()


def test_apertus_activation_gets_its_gradients_summed():
    made = model("apertus")
    assert auto_plan(made, 2)["model.layers.*.mlp.act_fn"] == "replicated_with_grad_allreduce"


def test_norms_of_heads_without_a_rule_are_found():
    made = model("qwen3")
    kept = {k: v for k, v in made._tp_plan.items() if "_norm" not in k}
    made._tp_plan = made.model._tp_plan = {}
    made.model.config.base_model_tp_plan = {k.removeprefix("model."): v for k, v in kept.items()}
    plan = auto_plan(made, 2)
    for name in ("q_norm", "k_norm"):
        assert plan[f"model.layers.*.self_attn.{name}"] == "replicated_with_grad_allreduce"


def test_norms_of_each_head_are_split_with_the_heads():
    made = model("cohere", use_qk_norm=True, num_key_value_heads=4)
    plan = auto_plan(made, 2)
    assert plan["model.layers.*.self_attn.q_norm"] == "local_params"
    assert plan["model.layers.*.self_attn.q_norm.weight"] == "colwise"
    resolved = resolve_plan(made, "auto", 2)
    (norm, *_) = (m for m in resolved.modules if m.name.endswith("q_norm"))
    assert [(p.shape, p.local_shape(2)) for p in norm.params] == [((4, 8), (2, 8))]
    few = model("cohere", use_qk_norm=True, num_key_value_heads=2)
    (note,) = resolve_plan(few, "auto", 4).notes  # two heads' norms for four ranks
    assert "'model.layers.*.self_attn' stays whole on every rank" in note


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("apertus", {}),
        ("doge", {}),
        ("cohere", {"use_qk_norm": True, "num_key_value_heads": 4}),
        ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    ],
)
def test_completed_plans_are_right(family, fields):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **fields})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, p in made.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
    ids = torch.arange(12).view(2, 6)
    with AllDouble():  # Cohere's norms cast to float32
        check_parity(made, "auto", 2, ids, call=lambda m, x: m(input_ids=x, use_cache=False).logits)


def test_doges_attention_stays_whole():
    said = notes(model("doge"))
    assert "'model.layers.*.self_attn' stays whole on every rank, its 5 rules are left out" in said


def test_a_latent_attention_without_its_rule_stays_whole():
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    made = model("minicpm3", **sizes, v_head_dim=8, num_key_value_heads=4)
    assert not [n for n in notes(made).splitlines() if "whole" in n]
    pattern = "model.layers.*.self_attn.kv_a_proj_with_mqa"
    rules = {k.removeprefix("model."): v for k, v in auto_plan(made, 2).items() if k != pattern}
    made._tp_plan = made.model._tp_plan = {}
    made.model.config.base_model_tp_plan = rules
    said = notes(made)
    assert "'model.layers.*.self_attn' stays whole on every rank" in said
    assert "on its part a rank doesn't compute what the plain module does" in said


def test_a_model_around_a_text_model():
    config = transformers.Gemma3Config(text_config=SIZES | {"model_type": "gemma3_text"})
    config.vision_config.num_hidden_layers = 1
    with torch.device("meta"):
        made = transformers.Gemma3ForConditionalGeneration(config)
    plan = auto_plan(made, 2)
    assert plan["model.language_model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.language_model.embed_tokens"] == "embedding_rowwise"
    resolved = resolve_plan(made, "auto", 2)
    assert not any("vision" in m.name for m in resolved.modules)


def test_custom_code_under_a_known_config():
    """Complaint 21, NeMo-Automodel #2243: the family's plan, for a model that computes otherwise."""

    class Custom(transformers.LlamaForCausalLM):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj, nn.LayerNorm(32))

    config = transformers.LlamaConfig(**SIZES)
    with torch.device("meta"):
        made = Custom(config)
    with pytest.raises(PlanError, match=r"q_proj.*Sequential"):
        resolve_plan(made, "auto", 2)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_checkpointed_blocks_write_no_cache(attention):
    """transformers makes a cache unless told not to; recomputed blocks would add to it twice."""
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    made, ids = made.double(), torch.arange(12).view(2, 6)
    plain = copy.deepcopy(made)
    with fake_world(0, 1):
        parallelize(
            made, build_mesh(MeshLayout(), device_type="cpu"), activation_checkpointing=True
        )
        for each in (plain, made):
            each(input_ids=ids, labels=ids).loss.backward()
        wanted = dict(plain.named_parameters())
        for name, param in made.named_parameters():
            assert torch.allclose(get_local_tensor(param.grad), wanted[name].grad), name
        with torch.no_grad():
            cache = made(input_ids=ids).past_key_values
        assert cache.get_seq_length() == 6
        with pytest.raises(StateError, match=r"(past_key_values|cache) holds 6 tokens"):
            made(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize(("family", "width"), [("mixtral", 10), ("mixtral", 13), ("olmoe", 10)])
def test_experts_too_narrow_for_a_grouped_matmul(family: str, width: int) -> None:
    """Of 5, or 7 and 6, channels on a rank, which torch's kernel refuses."""
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "output_router_logits": False,
    }
    config = transformers.AutoConfig.for_model(family, **sizes)
    config._experts_implementation = "grouped_mm"
    made = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(12).view(2, 6)
    with AllDouble(), pytest.warns(UserWarning, match="no multiple of 16 bytes"):
        check_parity(made, "auto", 2, ids, call=lambda m, x: m(input_ids=x, use_cache=False).logits)
