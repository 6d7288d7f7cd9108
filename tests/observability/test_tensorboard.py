"""Curves can be read back."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from parallel3d.errors import Parallel3dError
from parallel3d.observability import TensorBoard
from parallel3d.observability.sinks import scalars


def test_scalars() -> None:
    record = {
        "step": 3,
        "time": 5.0,
        "loss": 1.5,
        "exposed_seconds": {"shard": 0.25},
        "stragglers": [{"text": "x"}],
        "note": "no number",
    }
    assert dict(scalars(record)) == {"loss": 1.5, "exposed_seconds/shard": 0.25, "stragglers": 1.0}


def test_numbers_of_other_kinds() -> None:
    """numpy's, say, are Python's by their abstract types only."""
    assert dict(scalars({"half": Fraction(1, 2)})) == {"half": 0.5}


def test_every() -> None:
    with pytest.raises(Parallel3dError, match="every is 0"):
        TensorBoard("x", every=0)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Parallel3dError, match="needs the package tensorboard"):
        TensorBoard(tmp_path).start({})


def test_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, every=2)
    sink.start({"mesh": {"shard": 2}})
    for step in range(3):
        sink.write(
            {"step": step, "time": 1e9 + step, "loss": 3.0 - step, "exposed_seconds": {"tp": 0.5}}
        )
    sink.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    points = found.Scalars("loss")
    assert [(p.step, p.value, p.wall_time) for p in points] == [
        (0, 3.0, 1e9),
        (1, 2.0, 1e9 + 1),
        (2, 1.0, 1e9 + 2),
    ]
    assert [p.value for p in found.Scalars("exposed_seconds/tp")] == [0.5] * 3
