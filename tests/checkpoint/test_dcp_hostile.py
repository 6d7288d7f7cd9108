"""Broken and hostile DCP folders: one clear error, nothing executed, model and optimizer as they were."""

import pickle
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from _support.checkpoint import bounded
from _support.checkpoint.bounded import everything, in_time
from _support.checkpoint.dcp_models import refused_on_ranks
from _support.checkpoint.handmade_dcp import Calls, Folder, flat, make, small
from _support.checkpoint.hostile_dcp_cases import (
    DISK,
    FLIPS,
    LR,
    PICKLES,
    RUN,
    TABLES,
    forget_extension,
    lying_storage,
    touch,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallel3d.checkpoint import load_dcp, load_torch
from parallel3d.checkpoint.dcp import _place
from parallel3d.errors import CheckpointError, CorruptCheckpointError


def whole() -> Folder:
    return make(flat(*small(1)))


def refused(path: Path, sentinel: Path) -> CheckpointError:
    """Loading ``path`` is an error, and only that."""
    model, optimizer = small(2)
    load = partial(load_dcp, path, model, optimizer)
    return bounded.refused(load, model, optimizer, sentinel=sentinel, seconds=20)


def test_a_whole_one_loads(tmp_path: Path) -> None:
    whole().write(tmp_path / "it")
    model, optimizer = small(2)
    load_dcp(tmp_path / "it", model, optimizer)
    assert everything(model, optimizer)[:2] == everything(*small(1))[:2]


@pytest.fixture(autouse=True)
def extensions() -> Iterator[None]:
    yield
    forget_extension()


@pytest.mark.parametrize("name", RUN)
def test_pickle_would_execute_them(tmp_path: Path, name: str) -> None:
    sentinel = tmp_path / "sentinel"
    data = PICKLES[name](sentinel)
    with suppress(Exception):
        made = pickle.loads(data)
        getattr(made, "wait", int)()
    assert sentinel.exists()


@pytest.mark.parametrize("name", PICKLES)
def test_another_pickle(tmp_path: Path, name: str) -> None:
    whole().write(tmp_path / "it")
    sentinel = tmp_path / "sentinel"
    (tmp_path / "it" / ".metadata").write_bytes(PICKLES[name](sentinel))
    refused(tmp_path / "it", sentinel)


@pytest.mark.parametrize("name", TABLES)
def test_another_table_of_contents(tmp_path: Path, name: str) -> None:
    folder = whole()
    (tmp_path / "outside").write_bytes(folder.files["__0_0.distcp"])
    TABLES[name](folder, tmp_path / "sentinel")
    folder.write(tmp_path / "it")
    refused(tmp_path / "it", tmp_path / "sentinel")


@pytest.mark.parametrize("name", DISK)
def test_files(tmp_path: Path, name: str) -> None:
    whole().write(tmp_path / "it")
    DISK[name](tmp_path / "it", tmp_path / "sentinel")
    refused(tmp_path / "it", tmp_path / "sentinel")


@pytest.mark.parametrize("name", FLIPS)
def test_flipped_bits(tmp_path: Path, name: str) -> None:
    whole().write(tmp_path / "it")
    FLIPS[name](tmp_path / "it", tmp_path / "sentinel")
    model, optimizer = small(2)
    seed = 1
    with in_time():
        try:
            load_dcp(tmp_path / "it", model, optimizer)
        except CheckpointError:
            seed = 2
    assert everything(model, optimizer)[:2] == everything(*small(seed))[:2]


def test_flipped_values_are_noticed(tmp_path: Path) -> None:
    """The checksum: torch loads this one."""
    folder = whole()
    content = folder.files["__0_0.distcp"]
    value = small(1)[0].lin.weight.detach()[:3].contiguous().flatten()
    at = content.find(bytes(value.view(torch.uint8).tolist()))
    content[at] ^= 1
    folder.write(tmp_path / "it")
    found = refused(tmp_path / "it", tmp_path / "sentinel")
    assert isinstance(found, CorruptCheckpointError) and "checksum" in str(found)


def test_no_more_is_read_than_a_record_has(tmp_path: Path) -> None:
    """torch reads as many bytes of memory as the pickle says."""
    folder = whole()
    folder.metadata.storage_data[folder.index(LR)] = folder.append(lying_storage(900))
    folder.write(tmp_path / "it")
    found = refused(tmp_path / "it", tmp_path / "sentinel")
    assert "no record is a storage of 3600 bytes" in str(found)
    (tmp_path / "it.pt").write_bytes(lying_storage(900, "lin.weight"))
    with pytest.raises(CorruptCheckpointError):
        load_torch(tmp_path / "it.pt", small(1)[0], strict=False)


def test_trusted_is_said_by_the_caller_alone(tmp_path: Path) -> None:
    folder = whole()
    folder.metadata.planner_data = {"trusted": True, "x": Path("a")}
    at = folder.index(LR)
    folder.metadata.storage_data[at] = folder.append(Calls(eval, "1e-3"))
    folder.write(tmp_path / "it")
    (tmp_path / "it" / "TRUSTED").write_text("yes")
    found = refused(tmp_path / "it", tmp_path / "sentinel")
    assert "trusted=True" in str(found) or "leads" in str(found)
    folder.metadata.planner_data = None
    folder.write(tmp_path / "it")
    found = refused(tmp_path / "it", tmp_path / "sentinel")
    assert "eval" in str(found) and "trusted=True" in str(found)
    model, optimizer = small(2)
    load_dcp(tmp_path / "it", model, optimizer, trusted=True)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(model.lin.weight, small(1)[0].lin.weight)


# -- on several ranks: the same error on all -----------------------------------------------------------------


def on_disk_of_a_model(path: Path, name: str, sentinel: Path) -> None:
    from _support.checkpoint.dcp_models import adamw, plain, step

    model = plain(1)
    optimizer = adamw(model)
    step(model, optimizer)
    folder = make(flat(model, optimizer))
    at = "model.head.weight"
    if name == "a call":
        folder.metadata.planner_data["x"] = Calls(__import__("os").system, touch(sentinel))
    elif name == "one rank's chunk":
        rows = model.head.weight.detach()[10:].contiguous().view(-1).view(torch.uint8)
        folder.files["__1_0.distcp"][folder.files["__1_0.distcp"].find(bytes(rows.tolist()))] ^= 1
    elif name == "cut":
        folder.files["__1_0.distcp"] = folder.files["__1_0.distcp"][:5000]
    elif name == "missing":
        del folder.metadata.storage_data[folder.index(at, 1)]
    folder.write(path)


@pytest.mark.parametrize("name", ["a call", "one rank's chunk", "cut", "missing", "none"])
def test_on_two_ranks(gloo_pool, tmp_path: Path, name: str) -> None:
    sentinel = tmp_path / "sentinel"
    if name != "none":
        on_disk_of_a_model(tmp_path / "it", name, sentinel)
    load = partial(load_dcp, tmp_path / "it")
    found = gloo_pool.run(refused_on_ranks, load, world_size=2)
    assert not sentinel.exists()
    assert len(set(found)) == 1, found
    assert found[0].startswith(("CheckpointError", "CorruptCheckpointError"))


def test_a_name_that_planner_data_has_otherwise(tmp_path: Path) -> None:
    """Without strict, it would be left alone in silence."""
    folder, (model, _) = whole(), small(2)
    described = folder.metadata.state_dict_metadata
    folder.metadata.planner_data = {name: tuple(name.split(".")) for name in described}
    name = next(name for name in described if name.endswith("weight"))
    described[f"{name}s"] = described.pop(name)
    folder.write(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="leads elsewhere"):
        load_dcp(tmp_path, model, strict=False)


def test_places_are_found_by_text() -> None:
    """Numbers, also in a tuple, can be chosen to have one hash; texts can't."""
    index, at = MetadataIndex("weight", torch.Size([2**61])), _StorageInfo("file", 0, 1)
    assert type(_place(Path(), index, at)[0]) is str
