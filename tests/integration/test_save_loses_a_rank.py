"""A rank dies while all save in the background: the others learn it, wherever they wait for each other."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from parallel3d.checkpoint import save
from parallel3d.testing import GlooPool
from parallel3d.testing.gloo_pool import WorkerError


def save_and_die(folder: str) -> None:
    """Rank 0 dies at the rename, where the others wait for its word, some of them through each other."""
    if dist.get_rank() == 0:
        os.rename = lambda *args, **options: os._exit(9)
    save(folder, torch.nn.Linear(2, 2), step=1, async_=True).result()


def die_and_save_again(folder: str) -> None:
    """The others save once more without having asked how the first save ended: rank 0 won't come to it."""
    if dist.get_rank() == 0:
        os.rename = lambda *args, **options: os._exit(9)
    save(folder, torch.nn.Linear(2, 2), step=1, async_=True)
    save(folder, torch.nn.Linear(2, 2), step=2, async_=True)


@pytest.mark.parametrize("job", [save_and_die, die_and_save_again])
def test_nobody_waits_for_ever(
    gloo_pool: GlooPool, tmp_path: Path, job: Callable[[str], None]
) -> None:
    with pytest.raises(WorkerError) as caught:
        gloo_pool.run(job, str(tmp_path), world_size=8, timeout=30)
    assert not caught.value.unfinished
    assert set(caught.value.failures) == set(range(8)) and caught.value.failures[0].died
