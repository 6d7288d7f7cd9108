"""A tiny model of every causal-LM family of transformers whose config ships a tensor-parallel plan.

The sizes come from the fields of each family's config class, not from a list of families: a field
named in ``SIZES`` gets its size there, a list with one value a layer is cut down to the layers in
which something new occurs, and only what can't be told so is in ``ODDITIES``.
"""

import functools
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

__all__ = ["VARIANTS", "families", "is_moe", "tiny_config", "tiny_model"]

HIDDEN, HEADS, HEAD_DIM, LENGTH = 32, 4, 8, 12

# Field of a config -> its tiny size. Only fields a family has, and that are not None, are set.
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "swa_head_dim": HEAD_DIM,
    "intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 40,
    "ffn_hidden_size": 48,
    "shared_intermediate_size": 24,
    "moe_intermediate_size": 20,
    "expert_ffn_hidden_size": 20,
    "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "max_position_embeddings": 64,
    "model_max_length": 64,
    "original_max_position_embeddings": 64,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "zero_expert_num": 2,
    # which layers are dense, where a number says it
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "global_attn_every_n_layers": 2,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    # windows
    "sliding_window": 4,
    "sliding_window_size": 4,
    "attention_chunk_size": 4,
    "keep_window_size": 4,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "block_size": 4,
    "n_groups": 2,
    # the rest
    "o_groups": 2,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "gated_norm_rank": 4,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "dim_model_base": 16,
    "num_layers_per_stack": 1,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 2,
    "heads_per_ngram": 2,
    "ple_embed_dim": 8,
    # randomness would be another on each side
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "classifier_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Fields whose default None says "from another field", or that a family can't do without.
NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)

# What a variant changes: "base" is what most sizes of most families look like, "odd" what breaks.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {"vocab_size": 64, "tie_word_embeddings": False, "kv_heads": 2},
    "odd": {"vocab_size": 67, "tie_word_embeddings": True, "kv_heads": 1},
}

# Switches that "odd" sets the other way round: what a family's default config leaves out.
SWITCHES = (
    "attention_bias",
    "attention_out_bias",
    "conv_bias",
    "lm_head_bias",
    "mlp_bias",
    "qk_layernorm",
    "qkv_bias",
    "use_bias",
    "use_parallel_residual",
    "use_qk_norm",
)

# What the fields don't tell: model_type, or with a variant -> fields.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ODDITIES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
    "doge/odd": {"is_moe": True, "num_experts": 16},
    "dots3_note_text": {
        "head_dim": 12,
        "per_layer_config": {
            1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 12}
        },
    },
    "dots1": {"n_shared_experts": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text/base": {
        "per_layer_config": {1: {"head_dim": 16}},
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    "gemma4_text/odd": {
        "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text": {"per_layer_config": {1: {"head_dim": 16}}},
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "use_mamba_kernels": False,
    },
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 2],
    },
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"moe_layers": [1]},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "crop_size": 28,
            "image_size": 28,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "input_size": 8,
        },
    },
    "qwen2/odd": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "phimoe": {"router_jitter_noise": 0.5},  # with 0 it chooses without a gradient
    "qwen4_exp_text": {"ple_layer_ids": [1], "eos_token_id": 2},
}


def families() -> list[str]:
    """model_types of causal LMs with a tensor-parallel plan, each text model once.

    A composite (text and vision) config whose text config is a family of its own (``gemma3`` and
    ``gemma3_text``) is the same text model, and counts as the latter.
    """
    found = []
    for name in CAUSAL_LMS:
        if name not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[name]
        text = config.sub_configs.get("text_config")
        if getattr(text, "model_type", None) in CAUSAL_LMS:
            continue
        if config.base_model_tp_plan:
            found.append(name)
    return found


def is_moe(name: str) -> bool:
    """Whether the family's plan has routed experts."""
    plan = CONFIG_MAPPING[name].base_model_tp_plan
    return any("expert" in rule and "shared_expert" not in rule for rule in plan)


@functools.cache
def _own_fields(name: str) -> dict[str, Any]:
    common = set(PretrainedConfig().to_dict()) - {"tie_word_embeddings"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = CONFIG_MAPPING[name]().to_dict()
    default.pop("model_type", None)
    return {k: v for k, v in default.items() if k not in common or k.endswith("token_id")}


def tiny_config(name: str, variant: str = "base") -> PretrainedConfig:
    """The family's config with tiny sizes in which every kind of its layers occurs."""
    fields = _own_fields(name)
    variables = VARIANTS[variant]
    tiny = {
        k: size
        for k, size in SIZES.items()
        if fields.get(k) is not None or (k in fields and k in NEEDED)
    }
    if fields.get("head_dim") and fields.get("head_dim") == fields.get("qk_rope_head_dim"):
        tiny["head_dim"] = tiny["qk_rope_head_dim"]
    tiny |= _few_layers(fields)
    for k in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if fields.get(k) is not None:
            tiny[k] = variables["vocab_size"]
    for k in ("num_key_value_heads", "swa_num_key_value_heads"):
        if k in fields:
            grouped = _is_grouped(fields, k)
            tiny[k] = variables["kv_heads"] if grouped else HEADS
    if "tie_word_embeddings" in fields:
        tiny["tie_word_embeddings"] = variables["tie_word_embeddings"]
    if variant == "odd":
        tiny |= {k: not fields[k] for k in SWITCHES if k in fields}
        if "output_router_logits" in fields:
            tiny["output_router_logits"] = True  # and so the loss that balances experts
    tiny |= ODDITIES.get(name, {}) | ODDITIES.get(f"{name}/{variant}", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[name](**tiny)


def _is_grouped(fields: dict[str, Any], k: str) -> bool:
    """Whether the family's attention can share a key-value head between heads: latent attention
    has as many as heads."""
    return "kv_lora_rank" not in fields


def _few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Number of layers, and the lists with a value a layer, cut to layers that differ."""
    count_name = next((k for k in ("num_hidden_layers", "num_layers") if k in fields), None)
    count = fields[count_name] if count_name else 0
    lists = {k: v for k, v in fields.items() if _is_per_layer(v, count)}
    if not lists:
        return {count_name: 3} if count_name else {}
    kept = _covering(list(zip(*lists.values(), strict=True)))
    cut: dict[str, Any] = {k: [v[i] for i in kept] for k, v in lists.items()}
    for k in cut:
        if k in SIZES:
            cut[k] = [SIZES[k]] * len(kept)
    if count_name:
        cut[count_name] = len(kept)
    return cut


def _is_per_layer(value: Any, count: int) -> bool:
    """Whether ``value`` is a list with a value for each layer, not one of layers' indices."""
    return isinstance(value, list) and len(value) == count > 1 and value != list(range(count))


def _covering(layers: list[tuple[Any, ...]]) -> list[int]:
    """Indices of few layers (at least two) in which every value that occurs in one place occurs."""
    missing = {(i, repr(v)) for layer in layers for i, v in enumerate(layer)}
    kept: list[int] = []
    while missing or len(kept) < 2:
        gains = [
            len(missing & {(i, repr(v)) for i, v in enumerate(layer)}) if n not in kept else -1
            for n, layer in enumerate(layers)
        ]
        best = max(range(len(layers)), key=lambda n: gains[n])
        kept.append(best)
        missing -= {(i, repr(v)) for i, v in enumerate(layers[best])}
    return sorted(kept)


def tiny_model(name: str, variant: str = "base", *, seed: int = 0) -> PreTrainedModel:
    """A float64 model of the family with random weights; the same for the same arguments."""
    config = tiny_config(name, variant)
    torch.manual_seed(seed)
    kind = getattr(transformers, CAUSAL_LMS[name])
    base = variant == "base"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind._from_config(
            config,
            attn_implementation="eager" if base or not kind._supports_sdpa else "sdpa",
            experts_implementation="eager" if base else None,
        )
    _randomize(model)
    return model.double().train()


def _randomize(model: nn.Module) -> None:
    """Weights of a size at which every part of the model matters; none at a neutral 0 or 1."""
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn_like(param) * 0.1)
