"""Short programs of examples/: each prints what it shows at its top, and goes on where it was stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _support.docs.notebook import NOTEBOOK, kept, run
from _support.examples import EXAMPLES, MOST_LINES, ROOT, printed, shown

FINETUNE, PRETRAIN = EXAMPLES / "finetune_hf.py", EXAMPLES / "slurm" / "pretrain.py"
SBATCH = PRETRAIN.with_suffix(".sbatch")
END = 3
SHORT = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("slurm/*")]


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.name)
def test_each_is_one_short_file_that_says_how_to_start_it(path: Path) -> None:
    assert path.read_text().count("\n") <= MOST_LINES
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".py":
        words, _ = shown(path)
        assert name in words
    else:
        assert f"sbatch {name}" in path.read_text()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.full),
    ],
)
def test_finetune_hf(tmp_path: Path, more: bool) -> None:
    """As shown; once more from step 20; and from the folder that it has written, with a tokenizer."""
    words, lines = shown(FINETUNE)
    assert len(lines) >= 4 and printed(words, tmp_path) == lines
    if not more:
        return
    shutil.rmtree(tmp_path / "out" / "step-00000040")
    assert printed(words, tmp_path) == lines[2:]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    ids = torch.tensor([[*b"1+1=2", END]])
    with torch.no_grad():
        answer = model(input_ids=ids).logits[0, 3:5]
    want = torch.nn.functional.cross_entropy(answer, ids[0, 4:]).item()
    write_tokenizer(tmp_path / "out" / "model")
    (tmp_path / "data").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    options = ["--model", "out/model", "--data", "data", "--out", "other", "--steps", "10"]
    (line,) = printed([*words, *options, "--lr", "0"], tmp_path)
    assert float(re.findall(r"loss (\d+\.\d+)", line)[0]) == pytest.approx(want, abs=0.01)
    assert (tmp_path / "other" / "model" / "tokenizer.json").exists()


def write_tokenizer(folder: Path) -> None:
    """One for digits and signs; its ids are those of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {chr(i): i for i in range(32, 127)} | {"<end>": END}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)


@pytest.mark.slow
def test_pretrain(tmp_path: Path) -> None:
    words, lines = shown(PRETRAIN)
    assert len(lines) == 3 and printed(words, tmp_path) == lines


@pytest.mark.slow
def test_moe(tmp_path: Path) -> None:
    """It prints what it shows, and the folder that it writes loads in plain transformers."""
    from transformers import AutoModelForCausalLM

    path = EXAMPLES / "moe.py"
    words, lines = shown(path)
    assert path.read_text().count("\n") <= 80
    assert len(lines) == 4 and printed(words, tmp_path) == lines
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3_moe")
    ids = torch.arange(65)[None]
    assert model(input_ids=ids, labels=ids).loss < 0.67  # that of the last step, and less


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_weights_to_inference(tmp_path: Path) -> None:
    """Its engine gets the model that save_hf writes."""
    pytest.importorskip("transformers")
    path = EXAMPLES / "weights_to_inference.py"
    document = path.read_text().split("and prints\n\n")[1].split("\n\n")[0]
    said = [line.strip() for line in document.splitlines()]
    for line, found in zip(said, printed(shown(path)[0], tmp_path), strict=True):
        assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), found), (line, found)
    assert said[-1] == "save_hf and from_pretrained: the same"


def test_readme_shows_minimal() -> None:
    """README's block, which the tests run on eight gloo processes, is the file."""
    path, readme = EXAMPLES / "minimal.py", (ROOT / "README.md").read_text()
    program = path.read_text().partition('"""\n\n')[2]
    assert f"```python\n{program}```" in readme
    assert program.count("\n") <= 40
    words, lines = shown(path)
    assert f"`{' '.join(words)}` prints" in readme and "```text\n" + "\n".join(lines) in readme


@pytest.mark.slow
def test_notebook_prints_what_it_shows() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert run(cells) == kept(cells), "run python tests/_support/docs/notebook.py"


STUBS = {
    "scontrol": """\
if [ "$1" = show ]; then echo localhost; else echo "$*" >> requeued; fi
""",
    "srun": """\
while [[ "$1" == --* ]]; do shift; done
for i in 0 1; do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 "$@" &
    echo $! >> tasks
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status"
""",
}
"""Stand for SLURM's: two tasks on this machine, whose numbers of processes are in the file ``tasks``."""


@pytest.mark.slow
def test_sbatch_file(tmp_path: Path) -> None:
    """Its tasks are the ranks; it is put back into the queue after USR1, and not when all steps are done."""
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    tools = tmp_path / "bin"
    tools.mkdir()
    python = f'exec "{sys.executable}" "$@"\n'
    for name, text in (STUBS | {"python": python}).items():
        (tools / name).write_text(f"#!/bin/bash\n{text}")
        (tools / name).chmod(0o755)
    job = str(10_000 + os.getpid())  # the port is made of it
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "2",
    }

    def batch(steps: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SBATCH), "--steps", str(steps)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with batch(100_000) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step 20:"):
                for task in (tmp_path / "tasks").read_text().split():
                    os.kill(int(task), signal.SIGUSR1)
        assert process.wait(60) == 0, seen
    assert any("stopped after step" in line for line in seen), seen
    assert (tmp_path / "requeued").read_text() == f"requeue {job}\n"
    step = int(max((tmp_path / "out").glob("step-*")).name.removeprefix("step-"))
    with batch(max(step + 1, 60)) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and f"goes on after step {step}" in out, out
    if step < 60:  # as without the stop
        assert shown(PRETRAIN)[1][-1] in out
    assert (tmp_path / "requeued").read_text() == f"requeue {job}\n"
