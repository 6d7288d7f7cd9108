"""What all ranks raise is printed once, by real processes under ``parallel3d run``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel3d as p3d
from parallel3d.testing import fake_world

ROOT = Path(p3d.__file__).parents[1]

ATTEMPTS = """
import sys

import torch
from torch import nn

import parallel3d as p3d
from parallel3d.mesh import failures


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def attempt(name, action):
    torch.distributed.barrier()
    failures._KEY = name
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(f"={name}=")
        sys.excepthook(type(error), error, error.__traceback__)


def interrupted():
    raise KeyboardInterrupt


def on_second(error):
    if torch.distributed.get_rank() == 1:
        raise error


mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
with torch.device("meta"):
    scale = p3d.parallelize(nn.Sequential(Scale(), Scale()), mesh)
linear = nn.Linear(4, 4)
with torch.no_grad():
    [param.fill_(1.0) for param in linear.parameters()]
model = p3d.parallelize(linear, mesh)
attempt("mesh", lambda: p3d.build_mesh(p3d.MeshLayout(shard=3), device_type="cpu"))
attempt("plan", lambda: p3d.parallelize(nn.Linear(4, 4), mesh, tp_plan={"nothing": "colwise"}))
attempt("materialize", lambda: p3d.materialize(scale))
attempt("no meta", lambda: p3d.materialize(model))
attempt("load", lambda: p3d.checkpoint.load("nowhere", model))
attempt("save", lambda: p3d.checkpoint.save("run", model, None, step=torch.distributed.get_rank()))
extra = {"x": [print, 1][torch.distributed.get_rank()]}
attempt("save one", lambda: p3d.checkpoint.save("run", model, None, step=1, extra=extra))
attempt("own", lambda: on_second(p3d.StateError("of one rank")))
attempt("interrupt", interrupted)
attempt("meta", lambda: scale(torch.ones(4)))
torch.distributed.barrier()
failures._KEY = "last"
p3d.build_mesh(p3d.MeshLayout(tp=5), device_type="cpu")
"""


@pytest.mark.slow
def test_what_all_ranks_raise_is_printed_once(tmp_path: Path) -> None:
    program = tmp_path / "attempts.py"
    program.write_text(ATTEMPTS)
    run = subprocess.run(
        [sys.executable, "-m", "parallel3d", "run", "--nproc-per-node", "2", str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    noted = re.findall(r"=([a-z ]+)=$", run.stderr, re.MULTILINE)
    expected = ["interrupt", "load", "materialize", "mesh", "meta", "own", "plan", "save"]
    assert sorted(noted) == sorted([*expected, "no meta", "save one"]), run.stderr
    last = [line for line in run.stderr.splitlines() if "but the world has 2 ranks" in line]
    assert len(last) == 2, run.stderr  # of "mesh", and the one that ends the program
    assert run.returncode == 1


def test_worlds_made_one_after_another_leave_the_hook_as_it_was() -> None:
    before = sys.excepthook
    for rank in range(3):
        with fake_world(rank, 4):
            pass
    assert sys.excepthook is before


def test_a_fake_rank_prints_its_error() -> None:
    """There is no other process that would."""
    before = sys.excepthook
    with fake_world(3, 4):
        hook = sys.excepthook
        with pytest.raises(p3d.MeshError):
            p3d.build_mesh(p3d.MeshLayout(shard=3), device_type="cpu")
        assert sys.excepthook is hook
    assert sys.excepthook is before
