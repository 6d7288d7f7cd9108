"""What save is given beside the model: values of all kinds, schedulers, optimizers, averages."""

import math
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
from _support.checkpoint.small_models import exactly
from torch import nn

import parallel3d as p3d
from parallel3d.checkpoint import load, save
from parallel3d.checkpoint.saving import _checksum
from parallel3d.errors import CheckpointError


def through(tmp_path: Path, extra: Any) -> Any:
    save(tmp_path, nn.Linear(1, 1), step=1, extra=extra)
    return load(tmp_path, nn.Linear(1, 1)).extra


VALUES: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "numbers": [0, -1, 1 << 63, -(10**4000), 2**53 + 1],
    "floats": [0.1, -0.0, 1e-320, 1.7976931348623157e308, math.nan, math.inf, -math.inf],
    "complex": [1 + 2j, complex(math.inf, -0.0)],
    "strings": ["", "ä€\U0001f600", "\0\n\"\\", "\ud800", "$tensor"],
    "bytes": [b"", bytes(range(256))],
    "tuples": ((), (1,), ((1, 2), [3, (4,)])),
    "dicts": {"": 1, "$scalar": 2, "a": {"$tensor": "model.weight"}},
    "keys": {1: "a", "1": "b", 2.5: "c", (1, "x"): "d", None: "e", b"k": "f", -0.5: {True: 1}},
    "counters": [Counter("abca"), Counter(), Counter({3: -1, "$a": 0.5, (1, 2): 10**30})],
    "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.bool],
    "scalars": [
        torch.tensor(v, dtype=d)
        for v, d in [
            (1, torch.int64), (2**62 + 1, torch.int64), (255, torch.uint8), (True, torch.bool),
            (0.1, torch.float32), (0.1, torch.float64), (0.1, torch.bfloat16), (0.1, torch.float16),
            (math.inf, torch.float32), (-0.0, torch.float64), (0.5, torch.float8_e4m3fn),
            (math.nan, torch.float32), (2**64 - 1, torch.uint64), (1 + 1j, torch.complex64),
        ]
    ],
    "tensors": [
        torch.arange(6).reshape(2, 3), torch.zeros(0, 3), torch.tensor([math.nan, -0.0]),
        torch.arange(12.0).reshape(3, 4).T, torch.ones(2, 2, dtype=torch.bfloat16),
        torch.tensor([True, False]), torch.ones(3).to(torch.float8_e5m2), torch.ones(1, 1, 1),
        torch.arange(10)[::3], torch.tensor([1 + 2j]), torch.ones(5, dtype=torch.float16),
    ],
    "many the same": [torch.ones(2)] * 3,
    "names that meet": {"a']['b": torch.ones(1), "a": {"b": torch.zeros(1)}},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(tmp_path: Path, name: str) -> None:
    exactly(through(tmp_path, {"value": VALUES[name]})["value"], VALUES[name])


def test_extra_itself(tmp_path: Path) -> None:
    exactly(through(tmp_path / "a", {}), {})
    exactly(through(tmp_path / "b", None), {})
    exactly(through(tmp_path / "c", {1: 2, "$x": 3}), {1: 2, "$x": 3})
    found = through(tmp_path / "d", OrderedDict(a=numpy.float32(0.5), b=numpy.int64(3)))
    exactly(found, {"a": 0.5, "b": 3})


@pytest.mark.parametrize("wrong", [[1], "a", 3])
def test_extra_is_no_dict(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra is .*; it must be a dict"):
        save(tmp_path / "run", nn.Linear(1, 1), step=1, extra=wrong)
    assert not (tmp_path / "run").exists()
    save(tmp_path / "run", nn.Linear(1, 1), step=1)
    with pytest.raises(CheckpointError, match=r"extra is .*; it must be a dict"):
        load(tmp_path / "run", nn.Linear(1, 1), extra=wrong)


def _deep(count: int) -> list:
    found: list = []
    for _ in range(count):
        found = [found]
    return found


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Odd(), r"extra\['it'\] is a .*Odd, which a checkpoint can't hold"),
        ([1, {"x": {3}}], r"extra\['it'\]\[1\]\['x'\] is a builtins.set"),
        ({Odd(): 1}, r"a key of extra\['it'\] is a .*Odd"),
        (_deep(100), "more than 64 deep"),
        (Counter(a="b"), r"extra\['it'\]\['a'\] is a str; a Counter's counts are numbers"),
        (Counter(a=True), "is a bool; a Counter"),
        (Counter({Odd(): 1}), r"a key of extra\['it'\] is a .*Odd"),
        ([1 << 20_000], "an integer of 20001 bits"),
        (numpy.zeros(3), "numpy.ndarray"),
        ({float("nan"): 1}, "a key of .* is NaN"),
        (print, "builtin_function_or_method"),
        (torch.ones(2, dtype=torch.complex128), "complex128, which safetensors files can't hold"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
)
def test_what_can_not_be_kept(tmp_path: Path, value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        save(tmp_path / "run", nn.Linear(1, 1), step=1, extra={"it": value})
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_at_most_64_deep(tmp_path: Path) -> None:
    exactly(through(tmp_path, {"it": _deep(60)}), {"it": _deep(60)})


def test_tensors_to_read_into(tmp_path: Path) -> None:
    stored = {"a": {"x": torch.arange(4.0), "n": 3}, "b": [torch.ones(2)]}
    save(tmp_path, nn.Linear(1, 1), step=1, extra=stored)
    mine = torch.zeros(4)
    found = load(tmp_path, nn.Linear(1, 1), extra={"a": {"x": mine}}).extra
    assert found["a"]["x"] is not stored["a"]["x"] and torch.equal(mine, torch.arange(4.0))
    assert found["a"]["x"].data_ptr() == mine.data_ptr()
    assert torch.equal(found["b"][0], torch.ones(2)) and found["a"]["n"] == 3
    mine.zero_()
    for wrong, named in [
        ({"a": {"y": mine}}, r"has no tensor extra\['a'\]\['y'\]"),
        ({"a": {"x": torch.zeros(5)}}, r"extra\['a'\]\['x'\] is float32 of shape \(4,\)"),
        ({"a": {"x": mine.double()}}, "float64"),
    ]:
        with pytest.raises(CheckpointError, match=named):
            load(tmp_path, nn.Linear(1, 1), extra=wrong)
    assert not mine.any()


SCHEDULERS = {  # a Counter in its state, a loss, lists of others' states
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(tmp_path: Path, kind: str) -> None:
    """Learning rates go on as if there had been no stop."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def train(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))
        return [*model.weight.flatten().tolist(), *(g["lr"] for g in optimizer.param_groups)]

    parts = made()
    for _ in range(3):
        train(*parts)
    save(tmp_path, parts[0], parts[1], step=3, extra={"scheduler": parts[2].state_dict()})
    grad = [p.grad.clone() for p in parts[0].parameters()]
    want = [train(*parts) for _ in range(4)]
    again = made()
    info = load(tmp_path, again[0], again[1])
    again[2].load_state_dict(info.extra["scheduler"])
    for param, value in zip(again[0].parameters(), grad, strict=True):
        param.grad = value
    assert [train(*again) for _ in range(4)] == want


def test_random_states_go_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    random.seed(4)
    numpy.random.seed(5)
    random.gauss(0, 1)  # one is kept for the next call
    numpy.random.standard_normal()
    save(tmp_path, nn.Linear(1, 1), step=1)

    def draw() -> list[Any]:
        return [
            *torch.rand(3).tolist(), random.random(), random.gauss(0, 1),
            numpy.random.standard_normal(), numpy.random.rand(),
        ]  # fmt: skip

    want = draw()
    info = load(tmp_path, nn.Linear(1, 1))
    assert info.rng == "restored" and draw() == want


def test_the_last_step_seed_comes_back(tmp_path: Path) -> None:
    from parallel3d.mesh.seeding import last_step_seed

    p3d.seed_step(seed=(1 << 64) + 3, step=5, micro_batch=1)
    torch.rand(3)
    save(tmp_path, nn.Linear(1, 1), step=5)
    want = torch.rand(3)
    p3d.seed_step(seed=9, step=9)
    load(tmp_path, nn.Linear(1, 1))
    assert torch.equal(torch.rand(3), want)
    last = last_step_seed()
    assert last is not None and (last.seed, last.step, last.micro_batch) == ((1 << 64) + 3, 5, 1)


def test_checksums_of_buffers_are_of_their_values() -> None:
    """Of a copy, where a buffer's memory isn't contiguous (or on a GPU): it was read after it was freed."""
    for buffer in (torch.randn(7, 5), torch.randn(5, 7).t(), torch.randn(7, 6)[:, 1:]):
        assert _checksum(buffer) == crc32(buffer.numpy().tobytes())
