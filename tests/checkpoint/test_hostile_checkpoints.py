"""Damaged and hostile checkpoints: an error that leaves everything as it was, or exactly what was saved."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from _support.checkpoint.bounded import everything, in_time
from _support.checkpoint.hostile_checkpoints import CASES, DATA, FILES, HARMLESS
from torch import nn

import parallel3d as p3d
from parallel3d.errors import CheckpointError, CorruptCheckpointError


class Counter(nn.Module):
    """With a state of its own, which it looks at late."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"count": 1, "kept": torch.ones(3)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state = state
        if state["count"] < 0:
            raise ValueError("a negative count")


class Victim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.b, self.c = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.c.weight = self.b.weight
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x))
        return self.b(x) + self.c(x)


def made(seed: int) -> tuple[Victim, torch.optim.Optimizer]:
    """After a step, so that all state is there."""
    torch.manual_seed(seed)
    model = Victim()
    model.counter.state = {"count": seed, "kept": torch.full((3,), float(seed))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    random.seed(seed)
    numpy.random.seed(seed)
    return model, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and all that it holds but the generators' states."""
    model, optimizer = made(1)
    extra = {"position": 34, "tensor": torch.arange(6.0), "new": None}
    run = tmp_path_factory.mktemp("good")
    path = p3d.checkpoint.save(run, model, optimizer, step=1, extra=extra)
    return path, everything(model, optimizer)[:2]


@pytest.fixture
def damaged(good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(good[0], tmp_path / "run" / "step-00000001")
    return tmp_path / "run" / "step-00000001"


@pytest.fixture(autouse=True)
def ends_in_time() -> Iterator[None]:
    with in_time():
        yield


victim: dict[str, tuple[Victim, torch.optim.Optimizer]] = {}


def check(folder: Path, want: Any) -> str | None:
    """Loads: the error's text, or None where all came as it was saved."""
    model, optimizer = victim.get("made") or made(2)
    before = everything(model, optimizer)
    victim["made"] = model, optimizer  # the next one's too, if nothing changes
    try:
        info = p3d.checkpoint.load(folder, model, optimizer)
    except CheckpointError as error:
        assert everything(model, optimizer) == before
        assert not Path("EXECUTED").exists()
        return str(error)
    del victim["made"]
    assert not Path("EXECUTED").exists()
    assert everything(model, optimizer)[:2] == want
    assert info.step == 1 and info.extra["position"] == 34
    assert torch.equal(info.extra["tensor"], torch.arange(6.0))
    return None


@pytest.mark.parametrize("case", CASES)
def test_damage_is_an_error(good, damaged: Path, case: str) -> None:
    CASES[case](damaged)
    problem = check(damaged, good[1])
    assert problem is not None
    assert len(problem) < 1000 and "Traceback" not in problem
    if case.startswith(FILES):
        assert case.split(" ")[0] in problem


@pytest.mark.parametrize("case", HARMLESS)
def test_what_does_not_matter(good, damaged: Path, case: str) -> None:
    HARMLESS[case](damaged)
    assert check(damaged, good[1]) is None


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits(good, damaged: Path, name: str) -> None:
    """Everywhere an error, but in the safetensors header and what lies between tensors, which isn't read."""
    data = (damaged / name).read_bytes()
    generator = random.Random(name)
    places = [0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(40))]
    header = 8 + int.from_bytes(data[:8], "little") if name == DATA else 0
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << generator.randrange(8)
        (damaged / name).write_bytes(flipped)
        problem = check(damaged, good[1])
        if place < header:
            assert problem is None
        elif name != "COMPLETE":
            assert problem is not None and name in problem
    (damaged / name).write_bytes(data)
    assert check(damaged, good[1]) is None


TORN = [case for case in CASES if case.startswith(FILES) and "a pipe" not in case] + [
    "rng cpu is zeros"
]


@pytest.mark.parametrize("case", TORN)
def test_the_one_before_is_loaded(good, damaged: Path, case: str) -> None:
    run = damaged.parent
    model, optimizer = made(3)
    newest = p3d.checkpoint.save(run, model, optimizer, step=2)
    CASES[case](newest)
    model, optimizer = made(2)
    with pytest.warns(UserWarning, match="loaded step-00000001, not the newest, for: "):
        info = p3d.checkpoint.load(run, model, optimizer)
    assert everything(model, optimizer)[:2] == good[1]
    ((path, why),) = info.skipped
    assert path == newest and str(newest) in why


def test_all_are_torn(damaged: Path) -> None:
    os.truncate(damaged / DATA, 5)
    model, optimizer = made(2)
    with pytest.raises(
        CorruptCheckpointError, match=r"no checkpoint in .* can be read:\n.*5 bytes"
    ):
        p3d.checkpoint.load(damaged.parent, model, optimizer)
