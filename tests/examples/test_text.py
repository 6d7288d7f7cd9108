"""The example's data: the same bytes and batches on every rank."""

from pathlib import Path

import pytest
import torch
from text import batch_of, read_text


def test_a_folder_is_its_files_sorted(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("one ")
    (tmp_path / ".hidden").write_text("no")
    assert bytes(read_text(tmp_path).tolist()) == b"one two"
    assert bytes(read_text(tmp_path / "b.txt").tolist()) == b"two"


def test_python_source_by_default() -> None:
    text = read_text()
    assert len(text) > 1_000_000 and b"def " in bytes(text[:100_000].tolist())


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_text(tmp_path / "nowhere")


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    one = batch_of(text, 4, 8, seed=1, step=3)
    assert one.shape == (4, 9)
    assert torch.equal(one, batch_of(text, 4, 8, seed=1, step=3))
    assert not torch.equal(one, batch_of(text, 4, 8, seed=1, step=4))
    assert not torch.equal(one, batch_of(text, 4, 8, seed=2, step=3))
    assert torch.equal(one[:, 1:] - one[:, :-1], torch.ones(4, 8, dtype=torch.long))
