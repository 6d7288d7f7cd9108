"""Small files that describe large things: refused before there is memory for them, and in no time."""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.bounded import refused
from _support.checkpoint.handmade_dcp import Folder, flat, make, small, text
from _support.checkpoint.hostile_checkpoints import write_signed
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import parallel3d as p3d
from parallel3d.checkpoint import load_dcp, load_hf, load_torch
from parallel3d.errors import CheckpointError


def both(**more: Any) -> dict[str, Any]:
    model, optimizer = small(1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def with_pickle(data: bytes) -> Callable[[Path], None]:
    """A file of torch.save's with ``data`` as its description."""

    def write(path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(both(), buffer)
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
            for info in old.infolist():
                is_it = info.filename.endswith("data.pkl")
                new.writestr(info.filename, data if is_it else old.read(info))

    return write


def with_keys(keys: list[bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(key + b"N" for key in keys) + b"u."


def saved(value: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def nested(depth: int, kind: bytes) -> bytes:
    """Lists in lists, tuples in tuples, dicts in dicts; as values of a dict's."""
    if kind == b"\x85":
        inner = b")" + kind * depth
    elif kind == b"a":
        inner = b"]" * depth + b"a" * (depth - 1)
    else:
        inner = b"}" + (b"X\x01\x00\x00\x00a}") * depth + b"s" * depth
    return b"\x80\x02}" + text("a") + inner + b"s."


def sparse(path: Path) -> None:
    """A zip whose directory is said to have 8 GiB."""
    size, at = 8 << 30, 64
    end64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes(4) + bytes(8)
    end64 += (1).to_bytes(8, "little") * 2 + size.to_bytes(8, "little") + at.to_bytes(8, "little")
    locator = b"PK\x06\x07" + bytes(4) + (at + size).to_bytes(8, "little") + b"\x01\0\0\0"
    end = b"PK\x05\x06" + bytes(4) + b"\xff\xff" * 2 + b"\xff" * 8 + bytes(2)
    with path.open("wb") as file:
        file.write(b"PK\x03\x04" + bytes(60))
        file.seek(at + size)
        file.write(end64 + locator + end)


def all_expanded(path: Path) -> None:
    value = both()
    for state in value["optimizer"]["state"].values():
        for key in state:
            state[key] = torch.zeros(1).expand(2**28)
    torch.save(value, path)


def one_storage_often(path: Path) -> None:
    """Options that are a megabyte each, and all the same one, seen from another place each."""
    value = both()
    whole = torch.zeros(1 << 20, dtype=torch.uint8)
    group = value["optimizer"]["param_groups"][0]
    group["more"] = [whole[i:] for i in range(2000)]
    torch.save(value, path)


def groups_often(path: Path) -> None:
    """One group, again and again, with very many parameters."""
    value = both()
    group = {**value["optimizer"]["param_groups"][0], "params": list(range(20_000))}
    value["optimizer"]["param_groups"] = [group] * 20_000
    torch.save(value, path)


def states_often(path: Path) -> None:
    value = both()
    state = {f"k{i}": 0 for i in range(5_000)}
    value["optimizer"]["state"] = dict.fromkeys(range(5_000), state)
    torch.save(value, path)


def one_list_often(path: Path) -> None:
    value = both()
    long = list(range(50_000))
    value["optimizer"]["param_groups"][0].update({f"o{i}": long for i in range(5000)})
    torch.save(value, path)


FILES: dict[str, Callable[[Path], None]] = {
    "keys of a megabyte of dots": with_pickle(with_keys([text("." * 1_000_000)])),
    "a long key of many": lambda path: torch.save(
        {"k" * 1_000_000: {str(i): 0 for i in range(10_000)}}, path
    ),
    "many keys of dots": with_pickle(with_keys([text("." * 1900 + str(i)) for i in range(300)])),
    "deep lists": with_pickle(nested(200_000, b"a")),
    "deep tuples": with_pickle(nested(300_000, b"\x85")),
    "deep dicts": with_pickle(nested(100_000, b"s")),
    "a huge integer": with_pickle(with_keys([b"\x8b\xff\xff\xff\x7f"])),
    "a huge text": with_pickle(b"\x80\x02X\xff\xff\xff\x7fabc."),
    "a huge text of 8 bytes": with_pickle(b"\x80\x02\x8d" + b"\xff" * 7 + b"\x7fabc."),
    "a directory of 8 GiB": sparse,
    "all state expanded": all_expanded,
    "an expanded weight of another shape": saved(
        {"model": {**both()["model"], "lin.weight": torch.zeros(1).expand(2**28)}}
    ),
    "too many dims": saved({"lin.weight": torch.zeros([1] * 64 + [2])}),
    "one storage often": one_storage_often,
    "a group often": groups_often,
    "a state often": states_often,
    "a list often": one_list_often,
}


@pytest.mark.parametrize("name", FILES)
def test_load_torch(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / "it.pt")
    model, optimizer = small(2)
    load = partial(load_torch, tmp_path / "it.pt", model, optimizer)
    error = refused(load, model, optimizer)
    assert "Traceback" not in str(error) and "RecursionError" not in str(error)


def test_one_name_of_two_things(tmp_path: Path) -> None:
    """By dots in a key, and by dicts: neither is taken; what the model doesn't have doesn't matter."""
    value = {"model": both()["model"], "model.lin.weight": torch.zeros(5, 3), "a": {1: 2, "1": 3}}
    torch.save(value, tmp_path / "it.pt")
    model, optimizer = small(2)
    error = refused(partial(load_torch, tmp_path / "it.pt", model), model, optimizer)
    assert "'model.lin.weight' twice" in str(error)
    del value["model.lin.weight"]
    torch.save(value, tmp_path / "it.pt")
    load_torch(tmp_path / "it.pt", model)


# -- folders of torch.distributed.checkpoint -----------------------------------------------------------------


def whole() -> Folder:
    return make(flat(*small(1)))


def one_list_of_chunks(folder: Folder) -> None:
    """Of very many tensors."""
    chunks = [([i], [1]) for i in range(5000)]
    folder.describe("model.more", torch.float32, [5000], chunks)
    content = folder.metadata.state_dict_metadata
    content |= dict.fromkeys((f"model.more{n}" for n in range(4999)), content["model.more"])
    folder.metadata.planner_data = None


def huge_shape(folder: Folder) -> None:
    tensor = folder.tensor("model.lin.weight")
    tensor.size = torch.Size([2**61] * 64)
    tensor.chunks = [ChunkStorageMetadata(torch.Size([0] * 64), tensor.size)]


def long_name(folder: Folder) -> None:
    content = folder.metadata.state_dict_metadata
    content["." * 1_000_000] = content["model.lin.weight"]
    folder.metadata.planner_data = None


FOLDERS: dict[str, Callable[[Folder], None]] = {
    "one list of chunks": one_list_of_chunks,
    "a huge shape": huge_shape,
    "a long name": long_name,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_load_dcp(tmp_path: Path, name: str) -> None:
    folder = whole()
    FOLDERS[name](folder)
    folder.write(tmp_path / "it")
    model, optimizer = small(2)
    refused(partial(load_dcp, tmp_path / "it", model, optimizer), model, optimizer)


def test_a_table_that_is_a_hole(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate((1 << 31) - 1)
    model, optimizer = small(2)
    error = refused(partial(load_dcp, tmp_path, model, optimizer), model, optimizer)
    assert "not a complete pickle" in str(error)


# -- Hugging Face's and our own ------------------------------------------------------------------------------


def header(path: Path, said: Any) -> None:
    content = json.dumps(said).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(16))


def test_a_header_of_40000_dims(tmp_path: Path) -> None:
    shape = [(1 << 62) - 1] * 40_000
    said = {"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}
    header(tmp_path / "model.safetensors", said)
    model, optimizer = small(2)
    error = refused(partial(load_hf, tmp_path, nn.Linear(2, 2)), model, optimizer)
    assert "40000 dims" in str(error)


def test_an_index_of_8_gib(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(8 << 30)
    model, optimizer = small(2)
    error = refused(partial(load_hf, tmp_path, nn.Linear(2, 2)), model, optimizer)
    assert "8589934592 bytes" in str(error)


def ours(tmp_path: Path, **extra: Any) -> Path:
    return p3d.checkpoint.save(tmp_path / "run", *small(1), step=1, extra=extra)


@pytest.mark.parametrize("name", ["index.json", "checkpoint.json", "COMPLETE"])
def test_our_json_that_is_a_hole(tmp_path: Path, name: str) -> None:
    folder = ours(tmp_path)
    os.truncate(folder / name, (1 << 31) - 1)
    model, optimizer = small(2)
    error = refused(partial(p3d.checkpoint.load, folder, model, optimizer), model, optimizer)
    assert name in str(error) and "2147483647 bytes" in str(error)


def test_a_key_twice_among_many(tmp_path: Path) -> None:
    folder = ours(tmp_path)
    keys = [f'"{number}":0' for number in range(100_000)]
    write_signed(folder, "index.json", "{" + ",".join([*keys, keys[-1]]) + "}")
    model, optimizer = small(2)
    error = refused(partial(p3d.checkpoint.load, folder, model, optimizer), model, optimizer)
    assert "the key '99999' twice" in str(error)


def test_extra_of_3_gib(tmp_path: Path) -> None:
    """Whole on each rank is what nobody has asked for; with a tensor to read into it is read."""
    folder = ours(tmp_path, x=torch.zeros(4), y=torch.ones(3))
    index = json.loads((folder / "index.json").read_text())
    data, size, block = "rank-00000.safetensors", 3 << 30, 4 << 20
    begin = (folder / data).stat().st_size
    crc = [zlib.crc32(bytes(block))] * (size // block)
    chunk = [[0], [size], data, begin, crc]
    index["tensors"]["extra['x']"] = {"dtype": "U8", "shape": [size], "chunks": [chunk]}
    index["files"][data] = begin + size
    os.truncate(folder / data, begin + size)
    write_signed(folder, "index.json", json.dumps(index))
    model, optimizer = small(2)
    error = refused(partial(p3d.checkpoint.load, folder, model, optimizer), model, optimizer)
    assert "extra['x']" in str(error) and "1 GiB" in str(error) and "extra={...}" in str(error)
    given = {"x": torch.empty(size, dtype=torch.uint8, device="meta"), "y": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="meta"):
        p3d.checkpoint.load(folder, model, optimizer, extra=given)


def test_extra_is_verified_before_there_is_memory_for_it(tmp_path: Path) -> None:
    folder = ours(tmp_path, x=torch.zeros(128 << 20, dtype=torch.uint8))
    index = json.loads((folder / "index.json").read_text())
    ((_, _, data, begin, _),) = index["tensors"]["extra['x']"]["chunks"]
    with (folder / data).open("r+b") as file:
        file.seek(begin)
        file.write(b"\x01")
    model, optimizer = small(2)
    error = refused(partial(p3d.checkpoint.load, folder, model, optimizer), model, optimizer)
    assert "are not those that were saved" in str(error)


def test_a_newer_format_is_called_newer(tmp_path: Path) -> None:
    """And what is older isn't taken in its place."""
    older = ours(tmp_path)
    folder = p3d.checkpoint.save(older.parent, *small(1), step=2)
    marker = json.loads((folder / "COMPLETE").read_text())
    marker["format"] = "parallel3d checkpoint 2"
    (folder / "COMPLETE").write_text(json.dumps(marker))
    model, optimizer = small(2)
    for path in (folder, folder.parent):
        load = partial(p3d.checkpoint.load, path, model, optimizer)
        error = str(refused(load, model, optimizer))
        assert "newer version of parallel3d" in error and "format is 2" in error
    marker["format"] = "another"
    (folder / "COMPLETE").write_text(json.dumps(marker))
    with pytest.warns(UserWarning, match="not the newest"):
        p3d.checkpoint.load(folder.parent, model, optimizer)
