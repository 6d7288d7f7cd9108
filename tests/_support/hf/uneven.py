"""Causal LMs of transformers of odd sizes, as many heads as a test wants."""

from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"hidden_size": 24, "intermediate_size": 13, "num_hidden_layers": 2}
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 8, "attn_pdrop": 0.0}
GPT2 |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0}


def uneven_lm(name: str = "llama", heads: int = 4, kv: int = 2, **fields: Any) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": kv}
    sizes = GPT2 if name == "gpt2" else sizes
    config = CONFIG_MAPPING[name](**{"vocab_size": 67, "pad_token_id": 0, **sizes, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch(sample: int) -> Tensor:
    return torch.randint(67, (2, 5), generator=torch.Generator().manual_seed(sample))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss
