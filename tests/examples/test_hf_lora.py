"""hf_lora.py on four gloo ranks: the losses and adapters of plain peft, and a folder that peft loads."""

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

from parallel3d.testing import GlooPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_lora.py"


def program(folder: str, *arguments: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Runs the example on this rank, in ``folder``; returns what it prints, and the adapters at the end."""
    argv = mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments])
    with contextlib.chdir(folder), argv, contextlib.redirect_stdout(io.StringIO()) as printed:
        values = runpy.run_path(str(EXAMPLE))
    return printed.getvalue(), values["state"]


def plain() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def train(model: torch.nn.Module) -> list[float]:
    """The example's loop on the rows of both data ranks; returns the losses of the first's."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = (torch.arange(16 * 65).view(16, 65) % 251).chunk(2)
    losses = []
    for _ in range(10):
        each = [model(input_ids=rows, labels=rows).loss for rows in data]
        torch.stack(each).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(each[0].item())
    return losses


@pytest.mark.parametrize("source", [pytest.param("config", marks=pytest.mark.slow), "folder"])
def test_trains_as_plain_peft(gloo_pool: GlooPool, tmp_path: Path, source: str) -> None:
    model = plain()
    arguments = []
    if source == "folder":
        torch.manual_seed(1)  # other values than those of the seed
        model = AutoModelForCausalLM.from_config(model.config)
        model.save_pretrained(tmp_path / "base")
        arguments = [str(tmp_path / "base")]
        plain()  # the state in which the example makes the adapters
    ranks = gloo_pool.run(program, str(tmp_path), *arguments, world_size=4)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    want = get_peft_model(model, config)
    losses = train(want)
    got = [float(x) for x in re.findall(r"loss (\d+\.\d+)", ranks[0][0])]
    assert got == pytest.approx(losses, abs=1e-4) and losses[-1] < losses[0]
    trained = {n: p.detach() for n, p in want.named_parameters() if p.requires_grad}
    for _, state in ranks:
        assert state.keys() == trained.keys()
        for name, value in trained.items():
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)
    base = plain() if source == "config" else AutoModelForCausalLM.from_pretrained(arguments[0])
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").state_dict()
    for name in trained:
        assert torch.equal(loaded[name], ranks[0][1][name]), name


def test_is_short() -> None:
    assert EXAMPLE.read_text().count("\n") <= 60
