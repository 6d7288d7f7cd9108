"""spec_from_hf_config: exact parameter counts, and plain words about what can't be read."""

import json
import subprocess
import sys

import pytest

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, known_models, predict, spec_from_hf_config

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {
    "n_layer": 3,
    "n_embd": 96,
    "n_head": 6,
    "n_positions": 64,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
OLD_HIDDEN = {"hidden_size": 96, "vocab_size": 320}
PLAIN = "llama qwen2 phi phi3 olmo olmo2 starcoder2 cohere cohere2 granite smollm3 exaone4 arcee"
FAMILIES = [
    *((kind, SMALL) for kind in PLAIN.split()),
    *((kind, SMALL | {"head_dim": 16}) for kind in ("nemotron", "glm", "glm4", "helium")),
    *(
        (k, SMALL | {"head_dim": 32})
        for k in ("llama", "gemma", "gemma2", "gemma3_text", "seed_oss")
    ),
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", SMALL | {"head_dim": 24}),
    ("qwen3", SMALL | {"head_dim": 32, "attention_bias": True}),
    ("stablelm", SMALL | {"use_qkv_bias": True}),
    ("gpt_neox", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    *((kind, OLD) for kind in ("gpt2", "gpt_bigcode")),
    ("gpt2", OLD | {"n_inner": 100}),
    ("gptj", OLD | {"rotary_dim": 8}),
    ("codegen", OLD | {"n_head": 8, "rotary_dim": 8}),
    (
        "gpt_neo",
        OLD_HIDDEN | {"num_layers": 2, "num_heads": 6, "attention_types": [[["global"], 2]]},
    ),
    ("mpt", {"n_layers": 3, "d_model": 96, "n_heads": 6, "vocab_size": 320}),
    ("bloom", OLD_HIDDEN | {"n_layer": 3, "n_head": 6}),
    (
        "opt",
        OLD_HIDDEN
        | {"num_hidden_layers": 3, "word_embed_proj_dim": 96}
        | {"num_attention_heads": 6, "ffn_dim": 200},
    ),
    ("mixtral", SMALL | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("qwen2_moe", SMALL | EXPERTS | {"shared_expert_intermediate_size": 72}),
    ("qwen3_moe", SMALL | EXPERTS | {"head_dim": 32}),
    ("olmoe", SMALL | {"num_experts": 6, "num_experts_per_tok": 2}),
]


def built(kind: str, values: dict):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**values)
    with torch.device("meta"):
        return config, transformers.AutoModelForCausalLM.from_config(config)


QUICK = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "gptj", "phi", "phi3"}
QUICK |= {"mixtral", "qwen2_moe", "qwen3_moe", "olmo2", "mpt", "bloom", "opt", "cohere", "glm4"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        pytest.param(*family, id=family[0], marks=() if family[0] in QUICK else pytest.mark.full)
        for family in FAMILIES
    ],
)
def test_as_many_parameters_as_the_real_model(kind, values):
    config, model = built(kind, values)
    real = sorted(tuple(sorted(p.shape)) for p in model.parameters())
    spec = spec_from_hf_config(config)
    ours = sorted(tuple(sorted(p.shape)) for u in spec.units for p in u.count * u.parameters)
    assert ours == real
    assert spec.numel == sum(p.numel() for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert spec.tied == tied


@pytest.mark.parametrize("name", sorted({entry["name"] for entry in known_models().values()}))
def test_known_models_have_their_published_counts(name):
    assert spec_from_hf_config(name).numel == known_models()[name]["parameters"]
    assert known_models()[name]["source"]


def test_reads_a_file_its_folder_and_a_dict(tmp_path):
    config = known_models()["llama-3.1-8b"]["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for given in (str(path), path, tmp_path, dict(config)):
        assert spec_from_hf_config(given).numel == 8_030_261_248
    assert spec_from_hf_config(path).name == tmp_path.name
    assert spec_from_hf_config(path, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("llama-3.1-80b", "llama-3.1-8b"),
        ({"model_type": "deepseek", "n_routed_experts": 8}, "mixture of experts.*spec_from_module"),
        (
            {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "mlp_only_layers": [0]},
            "mlp_only_layers is \\[0\\].*all have experts",
        ),
        (
            {"model_type": "mixtral", **SMALL, "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3; there are 2",
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gemma3", "text_config": {}}, "config.text_config"),
        ({"model_type": "lama"}, "llama"),
        ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads"),
        ({"model_type": "llama", "hidden_size": -1}, "-1"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
        (3, "int"),
    ],
)
def test_says_what_it_cannot_read(config, says):
    with pytest.raises(PlanningError, match=says):
        spec_from_hf_config(config)


def test_a_file_that_is_no_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(PlanningError, match="list"):
        spec_from_hf_config(path)
    path.write_text("{")
    with pytest.raises(PlanningError, match="no JSON"):
        spec_from_hf_config(path)


def test_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from parallel3d.planner import spec_from_hf_config as f; f('llama-3-8b'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_the_hub() -> None:
    assert spec_from_hf_config("mistralai/Mixtral-8x7B-v0.1") == spec_from_hf_config("mixtral-8x7b")


def test_experts_are_used_in_part() -> None:
    """46.7 B parameters, of which a token goes through 12.9 B (arXiv:2401.04088); work is by these."""
    mixtral = spec_from_hf_config("mixtral-8x7b")
    assert mixtral.active_numel / 1e9 == pytest.approx(12.9, abs=0.05)
    config = known_models()["mixtral-8x7b"]["config"]
    plain = {key: value for key, value in config.items() if "experts" not in key}
    dense = spec_from_hf_config({**plain, "model_type": "mistral", "intermediate_size": 2 * 14336})
    assert dense.numel == pytest.approx(mixtral.active_numel, rel=1e-3)
    assert dense.active_numel == dense.numel
    work = Workload(seq_len=4096, micro_batch=2)
    one, other = (
        predict(m, MeshLayout(), Cluster.of("h100", 1, 1), work) for m in (mixtral, dense)
    )
    assert one.time.model_flops == pytest.approx(other.time.model_flops, rel=1e-3)
    # Products of fewer rows for each expert, and tokens that are copied to and fro, take longer.
    assert (
        1 < one.time.terms["matmul forward"].value / other.time.terms["matmul forward"].value < 1.2
    )
    assert (
        one.time.terms["elementwise forward"].value > other.time.terms["elementwise forward"].value
    )
    assert one.memory.terms["parameters"].value == 4 * mixtral.numel


def test_every_expert_is_split_over_tp() -> None:
    mixtral = spec_from_hf_config("mixtral-8x7b")
    work = Workload(seq_len=4096, micro_batch=1)
    cluster = Cluster.of("h100", 1, 8)
    whole, split = (predict(mixtral, MeshLayout(1, 8 // n, n), cluster, work) for n in (1, 8))
    for term in ("matmul forward", "matmul backward"):
        assert split.time.terms[term].value < whole.time.terms[term].value / 6
    assert split.memory.terms["optimizer"].value == pytest.approx(8 * mixtral.numel / 8, rel=0.01)
    assert split.time.terms["tensor parallel"].value > 0
    assert split.mfu_6n < split.mfu * 1.1  # by active parameters
