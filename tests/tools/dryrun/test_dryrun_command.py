"""parallel3d dryrun: a script as one rank, and two ranks compared."""

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from parallel3d.tools.cli.app import app
from parallel3d.tools.dryrun import from_json

SCRIPT = """
import sys
import torch
from torch import distributed as dist
import parallel3d as p3d

mesh = p3d.build_mesh(p3d.MeshLayout(replicate=1, shard=2, tp=int(sys.argv[1])))
model = p3d.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), mesh, {PLAN})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("the script's own output")
for step in range(1000):
    loss = model(torch.randn(2, 8)).sum()
    loss.backward()
    optimizer.step()
    {MORE}
"""
PLAN = '{"0": "colwise", "1": "rowwise"}'


def script(tmp_path, more="pass"):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("{PLAN}", PLAN).replace("{MORE}", more))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["dryrun", *map(str, arguments)])


def test_json_is_alone_on_stdout(tmp_path):
    result = run("--world-size", 4, "--rank", 3, "--steps", 3, "--json", "--", script(tmp_path), 2)
    assert result.exit_code == 0, result.output
    found = from_json(result.stdout)
    assert (found.rank, found.world_size, found.steps) == (3, 4, 3)
    assert found.mesh == {"replicate": 1, "shard": 2, "tp": 2}
    assert "the script's own output" in result.stderr


def test_page_trace_and_summary(tmp_path):
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    result = run(
        "--world-size", 4, "--html", page, "--trace", trace, script(tmp_path), 2
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "rank 0 of 4" in result.stdout and "reduce_scatter" in result.stdout
    assert "2 steps" in result.stdout and "collectives of step 1" in result.stdout  # the second
    assert "rank 0 of 4" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False])
def test_two_ranks_are_compared(tmp_path, monkeypatch, both):
    """The other one in a process of its own; a collective that only one of them makes is found."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    more = "dist.all_reduce(loss.detach())" if both else "dist.get_rank() or dist.barrier()"
    result = run("--world-size", 4, "--against", 3, "--steps", 2, "--", script(tmp_path, more), 2)
    if both:
        assert result.exit_code == 0, result.output
        assert "ranks 0 and 3 communicate alike" in result.stdout
        assert "all ranks" in result.stdout and "none " not in result.stdout
    else:
        assert result.exit_code == 1, result.output
        text = " ".join(result.stdout.split())
        assert "ranks 0 and 3 communicate differently" in text and "barrier" in text


RACING = """
import torch
side = torch.cuda.Stream()
x = torch.randn(8)
{}
with torch.cuda.stream(side):
    y = x * 2
"""
READING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
while True:
    loss = model(torch.randn(1, 2)).sum()
    loss.backward()
    {}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("check", "text", "line", "says"),
    [
        ("streams", RACING, "", "1 race between streams; mul reads it on stream 'side'; t.py:7"),
        ("streams", RACING, "side.wait_stream(torch.cuda.current_stream())", "no races between"),
        (
            "capture",
            READING,
            "print(loss.item())",
            "1 obstacle to the capture of a step in a CUDA graph; the host reads a value (item); t.py:8",
        ),
        ("capture", READING, "", "a step can be captured in a CUDA graph"),
    ],
)
def test_what_is_found_is_told_and_ends_with_1(tmp_path, check, text, line, says):
    (tmp_path / "t.py").write_text(text.format(line))
    done = run(f"--check-{check}", "--world-size", 1, "--", tmp_path / "t.py")
    assert done.exit_code == says.startswith("1 "), done.output
    for words in says.split("; "):
        assert words in done.output


def test_mistakes_are_one_line(tmp_path):
    missing = run("--world-size", 4, tmp_path / "nothing.py")
    assert missing.exit_code == 2 and "nothing.py" in missing.stderr
    deciding = run("--world-size", 4, "--", script(tmp_path, "if loss > 3: break"), 2)
    assert deciding.exit_code == 2
    assert "train.py:15" in deciding.stderr and "decides" in deciding.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", 4), "rank=4"),
        (("--nodes", 2, "--gpus-per-node", 8), "--nodes 2 x --gpus-per-node 8 = 16"),
        (("--gpu", "h1000"), "h100"),
        (("--html", "nowhere/r.html"), "there is no folder nowhere"),
        (("--trace", "."), "--trace . is a folder"),
        (("--against", 4), "--against 4: it must be a rank from 0 to 3"),
        (("--against", 0), "--against 0 is the same rank as --rank 0"),
    ],
)
def test_what_can_not_be_shown_is_said_before_the_program_runs(tmp_path, options, words):
    """Which may take a minute."""
    result = run("--world-size", 4, *options, "--", script(tmp_path), 2)
    assert result.exit_code == 2 and words in result.stderr
    assert "the script's own output" not in result.stderr
