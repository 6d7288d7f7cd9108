"""examples/trainer.py prints what it shows, goes on where it was stopped, and trains a folder's model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "trainer.py"


def printed(folder: Path, *more: str) -> list[str]:
    words = re.search(r"^    torchrun (.*)$", PROGRAM.read_text(), re.MULTILINE)
    assert words is not None
    command = [sys.executable, "-m", "torch.distributed.run", *words[1].split(), *more]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command[command.index("examples/trainer.py")] = str(PROGRAM)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("more", [False, True])  # True: only with -m full
def test_trainer(tmp_path: Path, more: bool) -> None:
    text = PROGRAM.read_text()
    assert text.count("\n") <= 120
    shown = re.findall(r"^    (step .*)$", text, re.MULTILINE)
    assert len(shown) == 4
    assert printed(tmp_path) == shown
    if not more:
        return
    shutil.rmtree(tmp_path / "out" / "checkpoint-40")
    assert printed(tmp_path, "--tp", "1") == shown[2:]  # on another mesh

    from _support.integrations.hf import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path / "out" / "model")
    (tmp_path / "data").write_text('{"prompt": "w4 w5", "answer": "w6"}\n' * 3)
    options = ["--model", "out/model", "--data", "data", "--out", "other", "--steps", "10"]
    (line,) = printed(tmp_path, *options)
    assert line.startswith("step 10: loss ")
    assert (tmp_path / "other" / "model" / "tokenizer.json").exists()
