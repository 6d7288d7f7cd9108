"""Every causal-LM family of transformers with a tensor-parallel plan: its files read and written alike."""

from pathlib import Path

import pytest
import torch
from _support.hf.tiny import families, tiny_model
from safetensors.torch import load_file

from parallel3d.checkpoint import load_hf, save_hf

pytestmark = pytest.mark.full
SINGLE = "model.safetensors"


@pytest.mark.parametrize("family", families())
def test_files_of_a_family(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="500GB")
    save_hf(tmp_path / "ours", model)
    want, found = (load_file(tmp_path / name / SINGLE) for name in ("theirs", "ours"))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    config = "config.json"
    assert (tmp_path / "ours" / config).read_text() == (tmp_path / "theirs" / config).read_text()
    other = tiny_model(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(3)
    load_hf(tmp_path / "theirs", other)
    state = other.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
