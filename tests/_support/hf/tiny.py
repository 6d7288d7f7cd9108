"""A tiny model of every causal-LM family of transformers whose config ships a tensor-parallel plan.

The sizes come from the fields of each family's config class, not from a list of families: a field
named in ``SIZES`` (of ``tiny.toml``) gets its size there, a list with one value a layer is cut down to the
layers in which something new occurs, and only what can't be told so is in ``ODDITIES``.
"""

import functools
import tomllib
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

HEADS, LENGTH = 4, 12

_DATA = tomllib.loads((Path(__file__).parent / "tiny.toml").read_text())
SIZES: dict[str, Any] = _DATA["sizes"]
NEEDED, SWITCHES = _DATA["fields"]["needed"], _DATA["fields"]["switches"]
ODDITIES: dict[str, dict[str, Any]] = _DATA["oddities"]
for _fields in ODDITIES.values():
    if layers := _fields.get("per_layer_config"):
        _fields["per_layer_config"] = {int(layer): sizes for layer, sizes in layers.items()}

# What a variant changes: "base" is what most sizes of most families look like, "odd" what breaks.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {"vocab_size": 64, "tie_word_embeddings": False, "kv_heads": 2},
    "odd": {"vocab_size": 67, "tie_word_embeddings": True, "kv_heads": 1},
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
