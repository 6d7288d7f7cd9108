"""weights_to_inference.py: prints what its first lines say; its engine gets the model that save_hf writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "weights_to_inference.py"


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_prints_what_it_says() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = EXAMPLE.read_text().split("and prints\n\n")[1].split("\n\n")[0]
    said = [line.strip() for line in document.splitlines()]
    for line, found in zip(said, done.stdout.splitlines(), strict=True):
        assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), found), (line, found)
    assert said[-1] == "save_hf and from_pretrained: the same"


def test_is_short() -> None:
    assert EXAMPLE.read_text().count("\n") <= 120
