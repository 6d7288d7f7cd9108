"""The plans of transformers' own models: what is added, what stays whole, on meta models of odd families."""

import copy
import functools

import pytest
import torch
from _support.hf.all_double import AllDouble
from _support.tp.tp_world import check_parity
from torch import Tensor, nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.errors import PlanError, StateError
from parallel3d.testing.worlds import fake_world, local_world
from parallel3d.tp import VocabParallel, auto_plan, resolve_plan

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP  # noqa: E402

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


def check(model: nn.Module) -> None:
    ids = torch.arange(12).view(2, 6)
    check_parity(model, "auto", 2, ids, call=lambda m, x: m(input_ids=x, use_cache=False).logits)


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
    with AllDouble():  # Cohere's norms cast to float32
        check(made)


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
    with AllDouble(), pytest.warns(UserWarning, match="no multiple of 16 bytes"):
        check(made)


# ---- code that a family's plan was not written for: left whole where it meets parts, or refused ----


CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 33,
}
ATTENTION, MLP = "'model.layers.*.self_attn' stays whole", "'model.layers.*.mlp' stays whole"


def llama(attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    made: nn.Module = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation=attention
    )
    for param in made.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return made


class MixesHeads(LlamaAttention):
    """With scores less their mean over the heads."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        y = self.weights(q @ k.transpose(-1, -2)) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2)), None

    def weights(self, scores: Tensor) -> Tensor:
        return (scores - scores.mean(1, keepdim=True)).softmax(-1)


class MixesHeadsInTraining(MixesHeads):
    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores) if self.training else scores.softmax(-1)


class AsksForValues(MixesHeads):
    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores * 0 if float(scores.abs().max()) > 1e9 else scores)


class CountsFeatures(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.flip(-1) / h.shape[-1])


class ReadsWeights(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h) * self.down_proj.weight.norm()


def with_class(name: str, cls: type) -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        getattr(layer, name).__class__ = cls
    return model


@pytest.mark.parametrize(
    ("name", "cls", "said"),
    [
        ("self_attn", MixesHeads, ATTENTION),
        ("self_attn", MixesHeadsInTraining, ATTENTION),
        ("self_attn", AsksForValues, ATTENTION),
        ("mlp", CountsFeatures, MLP),
        ("mlp", ReadsWeights, MLP),
    ],
)
def test_a_block_of_ones_own_is_left_whole(name: str, cls: type, said: str) -> None:
    model = with_class(name, cls)
    assert said in notes(model)
    check(model)


def test_a_patched_forward_is_ones_own() -> None:
    model = llama()
    theirs = LlamaMLP.forward
    for layer in model.model.layers:
        mlp = layer.mlp

        @functools.wraps(theirs)  # which says that the function were transformers'
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return CountsFeatures.forward(self, x)

        mlp.forward = forward.__get__(mlp)
    assert MLP in notes(model)


def test_a_registered_attention_function_is_ones_own() -> None:
    def mixing(module, query, key, value, mask, **_):
        scores = query @ key.transpose(-1, -2)
        y = (scores - scores.mean(1, keepdim=True)).softmax(-1) @ value
        return y.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("mixing", mixing)
    model = llama("mixing")
    assert ATTENTION in notes(model)
    check(model)
    assert not notes(llama("sdpa"))


def test_hooks_that_change_parts_leave_the_block_whole() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda m, x, y: y / y.norm(dim=-1)[..., None])
    assert ATTENTION in notes(model)
    check(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, x: (x[0].flip(-1),))
    with pytest.raises(PlanError, match="wrong in every layer"):
        resolve_plan(model, "auto", 2)


def test_hooks_that_keep_parts_leave_the_block_whole() -> None:
    model, kept = llama(), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda m, x, y: kept.append(y))
    assert MLP in notes(model)
    check(model)


def test_code_that_sees_whole_tensors_only_may_be_ones_own() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **_: object) -> object:
            logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False)[0] * 2)
            return transformers.modeling_outputs.CausalLMOutput(logits=logits / logits.shape[-1])

    model = llama()
    model.__class__ = Scaled
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda m, x, y: y.flip(-1))
    assert not notes(model)
    check(model)


def test_the_plan_is_the_same_where_ranks_are_simulated() -> None:
    model = llama()
    outside = auto_plan(model, 2)
    with local_world(2):
        assert auto_plan(model, 2) == outside


def test_a_plan_written_for_the_code_is_proven_too() -> None:
    class OwnConfig(transformers.LlamaConfig):
        base_model_tp_plan = transformers.LlamaConfig.base_model_tp_plan

    model = with_class("mlp", CountsFeatures)
    model.config.__class__ = model.model.config.__class__ = OwnConfig
    assert MLP in notes(model)


class Reward(nn.Module):
    """A model around one of transformers', that takes what can't be guessed."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tied, self.backbone, self.score = tied, llama().model, nn.Linear(16, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.backbone(input_ids=batch["ids"], use_cache=False).last_hidden_state
        return x @ self.backbone.embed_tokens.weight.T if self.tied else self.score(x)


def test_the_model_inside_another_is_looked_at() -> None:
    assert "only the models inside Reward were looked at" in notes(Reward(False))
    wrong = Reward(False)
    for layer in wrong.backbone.layers:
        layer.mlp.__class__ = CountsFeatures
    assert "'backbone.layers.*.mlp' stays whole" in notes(wrong)


def test_an_example_shows_the_whole_model() -> None:
    example = (({"ids": torch.ones(1, 4, dtype=torch.long)},), {})
    assert auto_plan(Reward(False), 2, example)["backbone.layers.*.mlp.up_proj"] == "colwise"
    with pytest.raises(PlanError, match=r"reads a parameter of 'backbone.embed_tokens', which is"):
        auto_plan(Reward(True), 2, example)
