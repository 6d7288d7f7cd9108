"""A ViT as people write it, and Hugging Face models without a plan: derived, equal to the plain model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derive_models import Vit
from torch import nn

from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import auto_plan

LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2)]


def _perturbed(model: nn.Module) -> nn.Module:
    """Without dropout, and with no weight that is exactly what it began as."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    for param in model.parameters():
        param.data.add_(torch.randn(param.shape) * 0.05)
    return model


def _image(number: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def _ids(number: int) -> torch.Tensor:
    return torch.randint(2, 67, (2, 7), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vit_equals_the_plain_model(layout: tuple[int, int, int]) -> None:
    options = {"steps": 2, "fp32": False, "tp_plan": "auto"}
    assert_parity(lambda: _perturbed(Vit()), _image, MeshLayout(*layout), **options)


def test_vit_on_four_ranks() -> None:
    options = {"steps": 2, "fp32": False, "tp_plan": "auto"}
    assert_parity(lambda: _perturbed(Vit()), _image, MeshLayout(1, 1, 4), **options)


# ---- Hugging Face ----

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BIG = {"intermediate_size": 32, "max_position_embeddings": 32}

# Class, its config, and whether its attention is split.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT, True),
    "opt": (
        "OPTForCausalLM",
        _SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
        True,
    ),
    "gptj": ("GPTJForCausalLM", _GPT | {"rotary_dim": 4}, True),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT | {"multi_query": False}, True),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        True,
    ),
    "stablelm": ("StableLmForCausalLM", _SIZES | _BIG | {"num_key_value_heads": 2}, True),
    "persimmon": ("PersimmonForCausalLM", _SIZES | _BIG, True),
    "biogpt": ("BioGptForCausalLM", _SIZES | _BIG, True),
    "bert": ("BertForMaskedLM", _SIZES | _BIG, True),
    "roberta": ("RobertaForMaskedLM", _SIZES | _BIG, True),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        _SIZES | _BIG | {"pad_token_id": 0},
        True,
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", _GPT, True),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4}, True),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        False,
    ),
    "mpt": ("MptForCausalLM", {"d_model": 16, "n_layers": 2, "n_heads": 4}, True),
}


def _family(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    cls, sizes, _ = FAMILIES[name]
    kind = getattr(transformers, cls)

    def build() -> nn.Module:
        return _perturbed(kind(kind.config_class(vocab_size=67, use_cache=False, **sizes)))

    return build


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _check(name: str, layout: tuple[int, int, int]) -> None:
    build = _family(name)
    assert_parity(build, _ids, MeshLayout(*layout), loss=_loss, steps=2, fp32=False, tp_plan="auto")


@pytest.mark.parametrize(
    ("name", "layout"),
    [*(("gpt2", layout) for layout in LAYOUTS), ("opt", LAYOUTS[1]), ("bert", LAYOUTS[2])],
)
def test_hugging_face_model_without_a_plan_equals_the_plain_model(
    name: str, layout: tuple[int, int, int]
) -> None:
    _check(name, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_all_families_without_a_plan_equal_the_plain_model(
    name: str, layout: tuple[int, int, int]
) -> None:
    _check(name, layout)


@pytest.mark.parametrize("name", ["gpt2", "stablelm", "bloom", "t5"])
def test_attention_is_split_where_it_can_be(name: str) -> None:
    plan = auto_plan(_family(name)(), 2)
    assert any("attn" in p or "attention" in p.lower() for p in plan) == FAMILIES[name][2]
    assert any("mlp" in p or "Dense" in p for p in plan)


def test_hugging_face_vit_equals_the_plain_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**_SIZES, intermediate_size=32, image_size=8, patch_size=4)
    assert_parity(
        lambda: _perturbed(transformers.ViTModel(config, add_pooling_layer=False)),
        _image,
        MeshLayout(1, 1, 2),
        loss=lambda model, x: model(x).last_hidden_state.square().mean(),
        steps=2,
        fp32=False,
        tp_plan="auto",
    )
