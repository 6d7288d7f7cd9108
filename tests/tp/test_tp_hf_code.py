"""Code that a family's plan was not written for: left whole where it meets parts, or refused."""

import functools

import pytest
import torch
from _support.tp.tp_world import check_parity
from torch import Tensor, nn

from parallel3d.errors import PlanError
from parallel3d.testing.worlds import local_world
from parallel3d.tp import auto_plan, resolve_plan

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP  # noqa: E402

pytestmark = pytest.mark.ci

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


def notes(model: nn.Module) -> str:
    return "\n".join(resolve_plan(model, "auto", 2).notes)


def check(model: nn.Module) -> None:
    ids = torch.arange(12).view(2, 6)
    check_parity(model, "auto", 2, ids, call=lambda m, x: m(input_ids=x, use_cache=False).logits)


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
