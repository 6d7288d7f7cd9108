"""Every program of README.md, docs/ and examples/ under ``dryrun``, ``plan``, ``verify`` and ``doctor``.

dryrun takes a program as it is. plan and verify take a function that builds a model: here it returns the one
that the program gives to ``parallelize``. doctor takes a mesh: here the program's.
"""

import sys
import warnings
from datetime import date
from pathlib import Path
from unittest import mock

import pytest
from _support.tools.programs import (
    Parallelized,
    Program,
    module_with,
    parallelized,
    programs,
    started,
)

from parallel3d.tools.cli import main

PROGRAMS = programs()
NOT_DRY = {
    "weights_to_inference.py": "sends the weights' values to another process, and waits for its answer",
}
"""Program -> why dryrun doesn't apply to it."""
NO_MODEL: dict[str, str] = {}
"""Program -> why there is no model to give to plan and verify."""
FIRST = "minimal.py"  # README's


def sample(left_out: dict[str, str]) -> list[object]:
    """All programs; the first, and another one each day, in the quick run."""
    left = [each for each in PROGRAMS if each.name not in left_out]
    quick = {FIRST, left[date.today().toordinal() % len(left)].name}
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name not in quick))
        for each in left
    ]


def run(*words: str) -> int:
    """The exit code of ``parallel3d *words``, in this process."""
    with mock.patch.object(sys, "argv", ["parallel3d", *words]), pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("program", sample(NOT_DRY))
def test_dryrun(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(program.path_in(tmp_path))
    with started(tmp_path), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = run("dryrun", "--world-size", str(program.ranks), "--", path, *program.options)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "collectives" in out and "loss nan" not in out + err
    assert not [w for w in warned if "FakeTensor" in str(w.message)] and "FakeTensor" not in err


@pytest.mark.parametrize("program", sample(NO_MODEL))
def test_plan_verify_and_doctor(program: Program, tmp_path: Path) -> None:
    found = parallelized(program, tmp_path)
    assert isinstance(found, Parallelized)
    words = [word for axis, n in found.sizes.items() for word in (f"--{axis}", str(n))]
    split = ["--plan", "programs_own:tp_plan"] if found.sizes.get("tp", 1) > 1 else []
    own = module_with("programs_own", build=found.build, tp_plan=found.tp_plan)
    with mock.patch.dict(sys.modules, programs_own=own), started(tmp_path):
        shape = ["--gpu", "h100-80gb-sxm", "--gpus-per-node", "8", "--seq-len", "32"]
        assert run("plan", "--model", "programs_own:build", *shape) == 0
        assert run("verify", "programs_own:build", *words, *split, "--steps", "1") == 0
    assert run("doctor", *words) in (0, 1)  # 1: something is wrong with this machine


def test_what_is_left_out_is_there() -> None:
    assert (NOT_DRY.keys() | NO_MODEL.keys()) <= {each.name for each in PROGRAMS}
