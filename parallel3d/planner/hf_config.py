"""Makes a ModelSpec of a Hugging Face config: an object, a dict, a config.json, or a known model's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.planner.arguments import check_size, nearest, own_data
from parallel3d.planner.decoder import GATED, Decoder, ExpertsSpec, spec_from_shapes
from parallel3d.planner.model_spec import ModelSpec

# What families call the same size.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = ("n_positions", "max_position_embeddings", "max_seq_len")
_COUNT = ("num_local_experts", "num_experts")
# A value above 0 (1 for experts) of one of these: not a dense decoder.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER = {
    "kv_lora_rank": "latent attention (MLA)",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_num_key_heads": "linear attention",
}
_ELSEWHERE = "spec_from_module reads any model: build it on the meta device and give it that"
_ACTIVATIONS = {"relu2": "relu2", "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu"}
_FOUR_TIMES = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "bloom")
# Keys of a family that are not fields of ``Decoder``.
_NO_OPTIONS = ("defaults", "refuse", "position_extra", "experts")


def spec_from_hf_config(config: Any, *, name: str | None = None) -> ModelSpec:
    """Returns the spec of the decoder that a Hugging Face config describes, with exactly its parameters; its
    blocks are all dense, or all have experts.

    Needs neither torch nor transformers. Sliding windows are ignored: attention is taken as causal over the
    whole sequence.

    Args:
        config: a ``PretrainedConfig``, its dict, the path of a ``config.json`` (or of its folder), or the
            name of a model in ``models.toml`` (``known_models()``).
        name: name of the spec; by default the config's.

    Raises:
        PlanningError: no such name or file, a family that isn't in ``families.toml``, a model that isn't a
            decoder (encoder-decoder, several modalities), experts in some blocks only, or missing sizes.
    """
    if isinstance(config, (str, PathLike)):
        return _from_text(config, name)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise PlanningError(
            f"config is a {type(config).__name__}; it must be a PretrainedConfig, a dict, a path of a "
            "config.json or a model's name"
        )
    called = name or config.get("_name_or_path") or config.get("model_type") or "model"
    return _from_dict(config, str(called), "Hugging Face config")


def known_models() -> dict[str, dict[str, Any]]:
    """Returns the entries of ``models.toml`` by full and short name: config or shapes, parameters, source."""
    return dict(_models())


@lru_cache(maxsize=1)
def _models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, entry in own_data("models.toml").items():
        short = entry.pop("names", [])
        found.update({each: {**entry, "name": name} for each in [name, *short]})
    return found


_families = lru_cache(maxsize=1)(partial(own_data, "families.toml"))


def _from_text(text: str | PathLike[str], name: str | None) -> ModelSpec:
    """Returns the spec of the model with this name in ``models.toml``, or of the config at this path."""
    entry = _models().get(text.lower()) if isinstance(text, str) else None
    if entry is not None:
        called, source = name or entry["name"], f"models.toml: {entry['source']}"
        if "shapes" in entry:
            return spec_from_shapes(**entry["shapes"], name=called, source=source)
        return _from_dict(entry["config"], called, source)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        last = str(text).lower().rpartition("/")[2]
        if last in _models():  # as on the hub: mistralai/Mistral-7B-v0.1
            return _from_text(last, name)
        near = nearest(last, _models())
        raise PlanningError(
            f"{str(text)!r} is no file and no model that is known by name; the nearest: {near}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanningError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise PlanningError(f"{path} holds a {type(config).__name__}; a config is an object")
    called = name or config.get("_name_or_path") or path.resolve().parent.name
    return _from_dict(config, str(called), str(path))


def _from_dict(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    family = _family_of(config)
    told = family.get("defaults", {}) | {k: v for k, v in config.items() if v is not None}
    for key in family.get("refuse", ()):
        if told.get(key):
            raise PlanningError(f"{key} is {told[key]!r}, which can't be read here; {_ELSEWHERE}")
    hidden, heads = _size(told, _HIDDEN), _size(told, _HEADS)
    if told.get("word_embed_proj_dim", hidden) != hidden:
        raise PlanningError(
            f"word_embed_proj_dim is {told['word_embed_proj_dim']} and hidden_size {hidden}: projections "
            f"around the blocks can't be read here; {_ELSEWHERE}"
        )
    kv = _size(told, ("num_key_value_heads",), 1 if told.get("multi_query") else heads)
    if heads % kv:
        raise PlanningError(f"num_key_value_heads is {kv}; it must divide the {heads} heads")
    if hidden % heads and "head_dim" not in told:
        raise PlanningError(
            f"{heads} heads don't divide hidden_size, {hidden}, and there is no head_dim"
        )
    times_hidden = "expansion_ratio" in told or told.get("model_type") in _FOUR_TIMES
    if times_hidden and not any(key in told for key in _FFN):
        told["intermediate_size"] = _size(told, ("expansion_ratio",), 4) * hidden
    experts = _experts(told, family["experts"]) if "experts" in family else None
    options = {option: value for option, value in family.items() if option not in _NO_OPTIONS}
    for option, value in options.items():
        if isinstance(value, str) and value.startswith("."):
            options[option] = bool(told.get(value[1:], False))
    options.setdefault("norm_bias", options.get("norm") == "layernorm")
    if family.get("positions") == "learned":
        options["position_rows"] = _size(told, _POSITIONS) + family.get("position_extra", 0)
    decoder = Decoder(
        layers=_size(told, _LAYERS),
        hidden=hidden,
        heads=heads,
        kv=kv,
        dim=_size(told, ("head_dim",), hidden // heads),
        ffn=experts.ffn if experts else _size(told, _FFN),
        experts=experts,
        vocab=_size(told, ("vocab_size",)),
        tied=bool(told.get("tie_word_embeddings", False)),
        **{**options, "mlp": _mlp(told, family)},
    )
    return replace(decoder.spec(name, source), seq_len=longest(told))


def _experts(told: Mapping[str, Any], keys: Mapping[str, Any]) -> ExpertsSpec:
    """Returns the experts of every block from the config ``told``; ``keys`` maps "ffn" and "shared" to the
    names that these sizes have in configs of this family."""
    if told.get("mlp_only_layers") or told.get("decoder_sparse_step", 1) != 1:
        raise PlanningError(
            f"mlp_only_layers is {told.get('mlp_only_layers')!r} and decoder_sparse_step "
            f"{told.get('decoder_sparse_step', 1)}: only models whose blocks all have experts can be read"
        )
    count, chosen = _size(told, _COUNT), _size(told, ("num_experts_per_tok",))
    if chosen > count:
        raise PlanningError(f"num_experts_per_tok is {chosen}; there are {count} experts")
    shared = _size(told, (keys["shared"],)) if "shared" in keys else 0
    return ExpertsSpec(count, chosen, _size(told, (keys["ffn"],)), shared, shared_gate=shared > 0)


def longest(config: Mapping[str, Any]) -> int:
    """Returns the longest sequence that ``config`` allows; 0: it doesn't say."""
    lengths = (config[key] for key in _POSITIONS if isinstance(config.get(key), int))
    return max(next(lengths, 0), 0)


def _family_of(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, families = config.get("model_type"), _families()
    has_experts = "experts" in families.get(str(kind), {})
    problems = [
        f"is a mixture of experts ({key} is {config[key]}) of a family that isn't known here; "
        for key in _EXPERTS
        if isinstance(config.get(key), int) and config[key] > 1 and not has_experts
    ]
    problems += [
        f"has {what} ({k} is {config[k]}); " for k, what in _OTHER.items() if config.get(k)
    ]
    if config.get("is_encoder_decoder"):
        problems.append("is an encoder-decoder; ")
    if isinstance(config.get("text_config"), Mapping) or "vision_config" in config:
        problems.append("has more than text; give config.text_config for its language model, or ")
    if problems:
        raise PlanningError(f"{kind} {problems[0]}{_ELSEWHERE}")
    if kind not in families:
        raise PlanningError(
            f"model_type is {kind!r}, a family that isn't known here; the nearest: "
            f"{nearest(str(kind), families)}; {_ELSEWHERE}"
        )
    return families[kind]


def _size(told: Mapping[str, Any], keys: tuple[str, ...], default: int = 0) -> int:
    for key in keys:
        if key in told:
            return check_size(key, told[key])
    if default:
        return default
    others = f" (nor {', '.join(keys[1:])})" if keys[1:] else ""
    raise PlanningError(f"the config has no {keys[0]}{others}")


def _mlp(told: Mapping[str, Any], family: Mapping[str, Any]) -> str:
    """Returns the kind of MLP: the family's, but with the activation function that the config names."""
    usual = family.get("mlp", "swiglu")
    keys = ("hidden_act", "activation_function", "hidden_activation")
    function = next((told[key] for key in keys if told.get(key)), "")
    if usual in GATED:
        return "geglu" if "gelu" in function else usual
    known = (ours for theirs, ours in _ACTIVATIONS.items() if function.startswith(theirs))
    return next(known, usual)
