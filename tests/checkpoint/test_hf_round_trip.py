"""Hugging Face models, onto meshes and back into files: what transformers writes, and what it reads."""

from pathlib import Path

import pytest
import torch
import transformers
from _support.checkpoint.hf_cases import CONFIGS, cases_there_and_back, plain, stored
from _support.hf.tiny import families, tiny_model
from safetensors.torch import load_file

from parallel3d.checkpoint import load_hf, save_hf
from parallel3d.testing import GlooPool

pytestmark = pytest.mark.ci

CASES = [(kind, n % 2 == 0) for n, kind in enumerate(CONFIGS)]
MESHES = [
    pytest.param((1, 2, 2), marks=pytest.mark.slow),
    pytest.param((2, 1, 2), marks=pytest.mark.slow),
    *(pytest.param(sizes, marks=pytest.mark.full) for sizes in ((1, 1, 1), (1, 4, 1))),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each model as transformers saves it, most in several files."""
    folder = tmp_path_factory.mktemp("hf")
    for kind in CONFIGS:
        plain(kind).save_pretrained(
            folder / kind, max_shard_size="5GB" if kind == "tied" else "30KB"
        )
    return folder


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_there_and_back(gloo_pool: GlooPool, root: Path, sizes: tuple[int, int, int]) -> None:
    cases = [(k, m) for k, m in CASES if k != "gpt2" or sizes[2] == 1]
    gloo_pool.run(
        cases_there_and_back, cases, sizes, str(root), world_size=sizes[0] * sizes[1] * sizes[2]
    )
    for kind, _ in cases:
        out = root / f"{kind}-{'x'.join(map(str, sizes))}"
        check_files(out, root / kind)
        check_loads(out, kind)


def check_files(out: Path, like: Path) -> None:
    """The same tensors as in transformers' own folder, under the same names; nothing else is there."""
    found, want = stored(out), stored(like)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    names = {path.name for path in out.iterdir() if not path.name.startswith("model-")}
    assert names == {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert (out / "config.json").read_text() == (like / "config.json").read_text()
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


def check_loads(folder: Path, kind: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    want = plain(kind)
    assert type(model) is type(want)
    for name, value in want.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want(ids).logits)


SINGLE = "model.safetensors"


@pytest.mark.full
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
