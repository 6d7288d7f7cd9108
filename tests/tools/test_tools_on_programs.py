"""Every program of README.md, docs/ and examples/ under ``dryrun``, ``plan``, ``verify`` and ``doctor``.

dryrun takes a program as it is. plan and verify take a function that builds a model: here it returns the one
that the program gives to ``parallelize``. doctor takes a mesh: here the program's.
"""

import sys
import warnings
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
    "torch.allclose(": "it compares values",
    "hf_tensors(": "it hands the weights' values to an engine",
    **(BY_VALUES := {"torch.where(": "its experts take rows by their values"}),
}
"""Words of a program -> why dryrun doesn't apply to it."""
NEEDS = {"from peft": "peft", "integrations.transformers": "accelerate"}
"""Words of a program -> the library that it needs."""
DRY = [each for each in PROGRAMS if not any(words in each.text for words in NOT_DRY)]
DRY.sort(key=lambda each: each.name != "minimal.py")  # README's is in each run
PARALLELIZED = [  # not fully_shard alone; plan runs the model on the meta device
    each
    for each in PROGRAMS
    if "parallelize(" in each.text and not any(words in each.text for words in BY_VALUES)
]


def skip_without_libraries(program: Program) -> None:
    for words, package in NEEDS.items():
        if words in program.text:
            pytest.importorskip(package)


def run(*words: str) -> int:
    """The exit code of ``parallel3d *words``, in this process."""
    with mock.patch.object(sys, "argv", ["parallel3d", *words]), pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("program", DRY, ids=lambda each: each.name)
def test_dryrun(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    skip_without_libraries(program)
    path = str(program.path_in(tmp_path))
    with started(tmp_path), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = run("dryrun", "--world-size", str(program.ranks), "--", path, *program.options)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "collectives" in out and "loss nan" not in out + err
    assert not [w for w in warned if "FakeTensor" in str(w.message)] and "FakeTensor" not in err


@pytest.mark.parametrize("program", PARALLELIZED, ids=lambda each: each.name)
def test_plan_verify_and_doctor(program: Program, tmp_path: Path) -> None:
    skip_without_libraries(program)
    found = parallelized(program, tmp_path)
    assert isinstance(found, Parallelized)
    words = [word for axis, n in found.sizes.items() for word in (f"--{axis}", str(n))]
    split = ["--plan", "programs_own:tp_plan"] if found.sizes.get("tp", 1) > 1 else []
    own = module_with("programs_own", meta=found.meta, build=found.build, tp_plan=found.tp_plan)
    with mock.patch.dict(sys.modules, programs_own=own), started(tmp_path):
        shape = ["--gpu", "h100-80gb-sxm", "--gpus-per-node", "8", "--seq-len", "16"]
        assert run("plan", "--model", "programs_own:meta", *shape) == 0
        assert (
            run(
                "audit", "--relation", "plain", "programs_own:build", *words, *split, "--steps", "1"
            )
            == 0
        )
    assert run("doctor", *words) in (0, 1)  # 1: something is wrong with this machine


def test_few_are_left_out() -> None:
    left_out = [each.name for each in PROGRAMS if each not in DRY or each not in PARALLELIZED]
    assert len(left_out) <= 5 < len(PROGRAMS) // 5, left_out
    for words in NOT_DRY:
        assert any(words in each.text for each in PROGRAMS), words
