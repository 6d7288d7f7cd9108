"""A process that dies while it removes an old checkpoint leaves nothing that counts, and nothing for ever."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint import load, save


@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "old one"])
def test_the_next_save_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    model = torch.nn.Linear(2, 2)
    save(tmp_path, model, step=1)
    with monkeypatch.context() as patch:  # the files stay, as where the process dies
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        save(tmp_path, model, step=step, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is damaged
        info = load(tmp_path, model)
    assert info.step == step and not info.skipped
    save(tmp_path, model, step=3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
