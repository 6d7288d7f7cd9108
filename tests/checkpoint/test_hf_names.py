"""What fits and what doesn't: names, shapes, dtypes, ties; on a plain model."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from _support.checkpoint.hf_cases import contents, on_meta, plain
from llama import Llama, LlamaConfig
from safetensors.torch import load_file, save_file
from torch import nn

from parallel3d import CheckpointError
from parallel3d.checkpoint import load_hf, save_hf

pytestmark = pytest.mark.ci

SINGLE = "model.safetensors"


def as_ours(name: str) -> str:
    """A name of examples/llama/llama.py's as Hugging Face's."""
    parts = {
        "tok_embeddings": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "feed_forward": "mlp",
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
    return ".".join(parts.get(part, part) for part in name.split("."))


def our_llama() -> Llama:
    return Llama(LlamaConfig(32, 2, 4, 2, 40, 61, 32, norm_eps=1e-6)).eval()


def test_a_model_with_names_of_its_own(tmp_path: Path) -> None:
    """The logits of Hugging Face's model, and back."""
    theirs, ours = plain("llama"), our_llama()
    theirs.save_pretrained(tmp_path / "a")
    assert load_hf(tmp_path / "a", ours, names=as_ours) == ([], [])
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits)
    names = {name: as_ours(name) for name, _ in ours.named_parameters()}
    save_hf(tmp_path / "b", ours, names=names)
    found, want = load_file(tmp_path / "b" / SINGLE), load_file(tmp_path / "a" / SINGLE)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_names_that_make_no_sense(tmp_path: Path) -> None:
    plain("llama").save_pretrained(tmp_path)
    for names, match in [
        ({"layer.0.attention.wq.weight": "x"}, "nearest: 'layers.0.attention.wq.weight'"),
        ({"norm.weight": "output.weight"}, "the same name 'output.weight'"),
        (lambda name: None, "it must give a name"),
        (3, "give a mapping or a function"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            load_hf(tmp_path, our_llama(), names=names)


def test_missing_and_unexpected(tmp_path: Path) -> None:
    state = plain("llama").state_dict()
    state["model.norm.wight"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / SINGLE)
    model = plain("llama", seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path, model)
    assert "not in the files: 'model.norm.weight' (nearest: 'model.norm.wight')" in str(
        caught.value
    )
    assert "but not in the model: 'model.norm.wight'" in str(caught.value)
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
    left = load_hf(tmp_path, model, strict=False)
    assert left == (["model.norm.weight"], ["model.norm.wight"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, (before if name == "model.norm.weight" else state)[name]), name


def test_missing_on_meta_is_initialised(tmp_path: Path) -> None:
    state = plain("llama").state_dict()
    del state["model.norm.weight"]
    save_file(state, tmp_path / SINGLE)
    model = on_meta("llama")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight'"):
        load_hf(tmp_path, model)
    assert all(p.is_meta for p in model.parameters())
    load_hf(tmp_path, model, strict=False)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    want = contents(plain("llama"))
    assert all(torch.equal(v, want[n]) for n, v in contents(model).items() if "model.norm" not in n)


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(3, 5), "bias": torch.zeros(4, dtype=torch.int64)}
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path, nn.Linear(3, 4))
    assert "'weight' is (4, 3) in the model and (3, 5) in the files" in str(caught.value)
    assert "'bias' is torch.float32 in the model and torch.int64 in the files" in str(caught.value)
    quantized = {"weight": torch.zeros(4, 3).to(torch.float8_e4m3fn), "bias": torch.zeros(4)}
    save_file(quantized, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="float8_e4m3fn in the files, which can't be cast"):
        load_hf(tmp_path, nn.Linear(3, 4))


def test_casts(tmp_path: Path) -> None:
    model = plain("llama")
    save_hf(tmp_path / "half", model, dtype=torch.bfloat16)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    other = plain("llama", seed=1)
    load_hf(tmp_path / "half", other)
    for name, value in model.state_dict().items():
        assert torch.equal(half.state_dict()[name], value.bfloat16())
        assert torch.equal(other.state_dict()[name], value.bfloat16().float())


def test_ties(tmp_path: Path) -> None:
    """One name or both, but not two values."""
    model = plain("tied")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / SINGLE)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert head not in state
    for names in ([embedding], [head], [head, embedding]):
        tied = {name: state[embedding].clone() for name in names}
        rest = {name: value for name, value in state.items() if name != embedding}
        save_file(rest | tied, tmp_path / SINGLE)
        other = plain("tied", seed=1)
        load_hf(tmp_path, other)
        assert torch.equal(other.lm_head.weight, model.lm_head.weight)
        assert other.lm_head.weight is other.model.embed_tokens.weight
    tied[head][7, 3] += 1
    save_file(rest | tied, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"differ .*whose weights are tied"):
        load_hf(tmp_path, other)


def test_a_head_that_only_one_side_has(tmp_path: Path) -> None:
    """The prefix ``model.`` comes and goes, as with ``from_pretrained``."""
    whole = plain("llama")
    whole.model.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    other = plain("llama", seed=1)
    assert load_hf(tmp_path / "base", other, strict=False) == (["lm_head.weight"], [])
    for name, value in whole.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)
    base = plain("llama", seed=2).model
    assert load_hf(tmp_path / "whole", base, strict=False) == ([], ["lm_head.weight"])
    for name, value in whole.model.state_dict().items():
        assert torch.equal(base.state_dict()[name], value)


def test_buffers(tmp_path: Path) -> None:
    """Persistent ones, whatever their dtype; an integer too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model(torch.randn(5, 3))
    save_hf(tmp_path, model)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load_hf(tmp_path, other)
    assert all(torch.equal(v, other.state_dict()[n]) for n, v in model.state_dict().items())


def test_an_operation_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in an error, whichever way it is met."""
    from transformers import conversion_mapping, core_model_loading

    class Doubled(core_model_loading.ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}

        reverse_op = property(lambda self: self)

    def mapping(*_, **__):
        return [core_model_loading.WeightConverter("up_proj.weight", "up_proj.weight", [Doubled()])]

    model = plain("llama")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    with pytest.raises(CheckpointError, match=r"\(Doubled\) can't be followed: it calls mul"):
        load_hf(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"\(Doubled\) can't be followed: it calls mul"):
        save_hf(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()
