"""Damage that one rank alone notices: the same error on every rank, and nothing changed."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import check_equal, everything, ours, step
from _support.checkpoint.hostile_checkpoints import (
    cut,
    entry,
    instead,
    link,
    remove,
    signed,
    value,
    write_signed,
)
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.testing import GlooPool

Sizes = tuple[int, int, int]


def build(sizes: Sizes, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ours(MeshLayout(*sizes), seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return everything(model, optimizer) | {"random": torch.get_rng_state()}


def flip(folder: Path, name: str, place: float) -> None:
    """A bit of a file's data."""
    data = bytearray((folder / name).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + int((len(data) - header - 1) * place)] ^= 4
    (folder / name).write_bytes(data)


def bad_state(folder: Path, rank: int) -> None:
    """The last rank's random state is zeros, with the right checksum."""
    index = json.loads((folder / "index.json").read_text())
    name = f"rng.{rank}.cpu"
    chunk = index["tensors"][name]["chunks"][0]
    size = index["tensors"][name]["shape"][0]
    with (folder / chunk[2]).open("r+b") as file:
        file.seek(chunk[3])
        file.write(bytes(size))
    chunk[4] = [zlib.crc32(bytes(size))]
    write_signed(folder, "index.json", json.dumps(index))


def damages(last: int) -> dict[str, tuple[Callable[[Path], object], str]]:
    """Name -> (damage, what the error must name)."""
    name = f"rank-{last:05d}.safetensors"
    weight = "model.head.weight"
    return {
        "gone": (remove(name), name),
        "cut": (cut(name, 0.7), name),
        "empty": (cut(name, 0.0), name),
        "a link": (instead(name, link), name),
        "a pipe": (instead(name, os.mkfifo), name),
        "a folder": (instead(name, os.mkdir), name),
        "the first byte": (lambda folder: flip(folder, name, 0.0), name),
        "a byte": (lambda folder: flip(folder, name, 0.5), name),
        "the last byte": (lambda folder: flip(folder, name, 1.0), name),
        "random state": (lambda folder: bad_state(folder, last), f"rank {last}'s random"),
        "begin": (signed(lambda i: i["tensors"][weight]["chunks"][-1].__setitem__(3, 1)), name),
        "another shape": (entry(weight, shape=[5, 6]), weight),
        "a tensor less": (signed(lambda i: i["tensors"].pop(weight)), "head.weight"),
        "another optimizer": (value("optimizer.groups.0.options", {"lr": 0.1}), "momentum"),
    }


def on_ranks(sizes: Sizes, path: str) -> None:
    good = p3d.checkpoint.save(f"{path}/good", *build(sizes, 1), step=1)
    last = dist.get_world_size() - 1
    model, optimizer = build(sizes, 2)
    before = state(model, optimizer)
    for number, (name, (damage, named)) in enumerate(damages(last).items()):
        folder = Path(path) / str(number) / "step-00000001"
        if dist.get_rank() == 0:
            shutil.copytree(good, folder)
            damage(folder)
        dist.barrier()
        random_before = random.getstate()
        with pytest.raises(CheckpointError) as caught:
            p3d.checkpoint.load(folder, model, optimizer)
        texts: list = [None] * (last + 1)
        dist.all_gather_object(texts, (str(caught.value), type(caught.value)))
        assert len(set(texts)) == 1, (name, texts)
        assert named in texts[0][0], (name, texts)
        check_equal(state(model, optimizer), before)
        assert random.getstate() == random_before
        if name not in ("another shape", "a tensor less", "another optimizer"):
            assert texts[0][1] is CorruptCheckpointError, (name, texts)
            with pytest.raises(CorruptCheckpointError, match="no checkpoint in"):
                p3d.checkpoint.load(folder.parent, model, optimizer)
    p3d.checkpoint.load(good, model, optimizer)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)])
def test_one_error_on_all_ranks(gloo_pool: GlooPool, tmp_path: Path, sizes) -> None:
    gloo_pool.run(on_ranks, sizes, str(tmp_path), world_size=sizes[1] * sizes[2], timeout=60)


def fall_back(sizes: Sizes, path: str) -> None:
    model, optimizer = build(sizes, 1)
    p3d.checkpoint.save(path, model, optimizer, step=1, extra={"position": 7})
    want = state(model, optimizer)
    model, optimizer = build(sizes, 2)
    newest = p3d.checkpoint.save(path, model, optimizer, step=2)
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        flip(newest, f"rank-{last:05d}.safetensors", 0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=f"not the newest, for: .*rank-{last:05d}.safetensors"):
            info = p3d.checkpoint.load(path, model, optimizer)
    else:
        info = p3d.checkpoint.load(path, model, optimizer)
    assert info.step == 1 and info.extra == {"position": 7} and len(info.skipped) == 1
    check_equal(state(model, optimizer), want)


def test_the_one_before_on_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(fall_back, (1, 2, 2), str(tmp_path), world_size=4, timeout=60)
