"""Families of Hugging Face models that plans are derived for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity


def perturbed(model: nn.Module) -> nn.Module:
    """Without dropout, and with no weight that is exactly what it began as."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    for param in model.parameters():
        param.data.add_(torch.randn(param.shape) * 0.05)
    return model


def token_ids(number: int) -> torch.Tensor:
    return torch.randint(2, 67, (2, 7), generator=torch.Generator().manual_seed(number))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BIG = {"intermediate_size": 32, "max_position_embeddings": 32}

# Class, its config, and whether its attention is split.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT, True),
    "opt": (
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
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
    "stablelm": ("StableLmForCausalLM", SIZES | _BIG | {"num_key_value_heads": 2}, True),
    "persimmon": ("PersimmonForCausalLM", SIZES | _BIG, True),
    "biogpt": ("BioGptForCausalLM", SIZES | _BIG, True),
    "bert": ("BertForMaskedLM", SIZES | _BIG, True),
    "roberta": ("RobertaForMaskedLM", SIZES | _BIG, True),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        SIZES | _BIG | {"pad_token_id": 0},
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


def family(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    cls, sizes, _ = FAMILIES[name]
    kind = getattr(transformers, cls)

    def build() -> nn.Module:
        return perturbed(kind(kind.config_class(vocab_size=67, use_cache=False, **sizes)))

    return build


def labels_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def check_family(name: str, layout: tuple[int, int, int]) -> None:
    build = family(name)
    assert_parity(
        build, token_ids, MeshLayout(*layout), loss=labels_loss, steps=2, fp32=False, tp_plan="auto"
    )
