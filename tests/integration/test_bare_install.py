"""The package as a user installs it, without any extra and with [cli], in an environment with nothing else.

An environment with the tests' packages has what the package forgot to ask for. It takes minutes: CI runs it
with ``-m full``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("gloo")]

PROGRAM = """
import sys
import torch
from torch import nn
import parallel3d as p3d

for name in ("typer", "rich", "transformers"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is there: this is no empty environment")

mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1), device_type="cpu")
torch.manual_seed(0)
model = p3d.parallelize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.ones(3, 4)).sum().backward()
    p3d.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
before = [p.full_tensor().clone() for p in model.parameters()]
p3d.checkpoint.save(sys.argv[1], model, optimizer, step=2, extra={"seen": 6})
future = p3d.checkpoint.save(sys.argv[1], model, optimizer, step=3, async_=True)
future.result()
with torch.no_grad():
    for p in model.parameters():
        p.zero_()
info = p3d.checkpoint.load(sys.argv[1], model, optimizer)
assert info.step == 3 and p3d.checkpoint.latest(sys.argv[1]) == info.path
assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters()))
model.state_dict()
torch.distributed.destroy_process_group()
"""


def run(*command: str | Path, limit: float = 300) -> str:
    """Its output. Nothing of this environment is seen, nor of the repository but what is installed."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [os.fspath(word) for word in command],
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "NumPy" not in done.stderr, done.stderr[-4000:]  # torch misses it, at length
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's Python: the package alone, with what it depends on as constraints.txt pins it."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder)
    install(folder / "bin" / "python", ROOT)
    return folder / "bin" / "python"


def install(python: Path, what: Path | str) -> None:
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, limit=900)


def torchrun(python: Path, *command: str | Path) -> str:
    return run(
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command
    )


def check_train(python: Path, folder: Path) -> None:
    """Two ranks, a checkpoint, and a resume on one."""
    options = ("--size", "nano", "--batch", "4", "--checkpoint", folder, "--save-every", "2")
    first = torchrun(python, ROOT / "examples" / "llama" / "train.py", "--steps", "4", *options)
    assert "done: 4 steps" in first and len(list(folder.iterdir())) == 2
    second = run(
        python, ROOT / "examples" / "llama" / "train.py", "--steps", "6", *options, "--async-save"
    )
    assert "continues " in second and "4 steps" in second and "done: 6 steps" in second


def test_without_any_extra(bare: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun(bare, program, tmp_path / "own")
    check_train(bare, tmp_path / "run")


def test_with_cli(bare: Path, tmp_path: Path) -> None:
    """After the other: the same environment, and more in it."""
    install(bare, f"{ROOT}[cli]")
    check_train(bare, tmp_path / "run")
    said = run(bare, "-m", "parallel3d", "plan", "--help")
    assert "--gpu" in said
