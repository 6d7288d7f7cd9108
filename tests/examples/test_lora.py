"""lora.py on four gloo ranks: what it prints, the adapters of plain peft, and a folder that peft loads."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from parallel3d import checkpoint, materialize
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.ci

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


def program(folder: str, *arguments: str) -> str:
    """Runs the example on this rank, in ``folder``; returns what it prints."""
    argv = mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments])
    with contextlib.chdir(folder), argv, contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE))
    return printed.getvalue()


def plain() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def train(model: torch.nn.Module) -> list[float]:
    """The example's loop in one process, on all its rows; returns the losses of each tenth step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.arange(16 * 65).view(16, 65) % 251
    losses = []
    for _ in range(30):
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[9::10]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("config", marks=pytest.mark.slow),
        pytest.param("folder", marks=pytest.mark.full),
    ],
)
def test_trains_as_plain_peft(gloo_pool: GlooPool, tmp_path: Path, source: str) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    base, arguments = materialize(plain(), device="cpu", seed=1), []
    if source == "folder":
        base.save_pretrained(tmp_path / "base")
        arguments = ["--model", str(tmp_path / "base")]
    printed = gloo_pool.run(program, str(tmp_path), *arguments, world_size=4)
    assert printed[1:] == [""] * 3

    want = get_peft_model(plain(), config)
    if source == "folder":
        checkpoint.load_hf(tmp_path / "base", want)
    else:
        materialize(want, device="cpu", seed=0)
        said = re.findall(r"^    ((?:step|wrote) .*)$", EXAMPLE.read_text(), re.MULTILINE)
        assert [re.sub(r"[\d.]+$", "", x) for x in printed[0].splitlines()] == [
            re.sub(r"[\d.]+$", "", x) for x in said
        ]
        assert numbers(printed[0]) == pytest.approx(numbers("\n".join(said)), abs=2e-3)
    assert numbers(printed[0]) == pytest.approx(train(want), abs=2e-3)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    state = loaded.state_dict()
    assert state.keys() == want.state_dict().keys()
    for name, value in want.state_dict().items():
        if source == "folder" or "lora_" in name:
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)

    if source == "folder":  # and goes on with them
        arguments += ["--adapters", str(tmp_path / "adapters"), "--out", "more"]
        again = gloo_pool.run(program, str(tmp_path), *arguments, world_size=4)
        assert numbers(again[0])[0] < numbers(printed[0])[0] and "wrote more" in again[0]
