"""Folders and files that are wrong, or hostile: one error that says so, and a model that is as before."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from parallel3d import CheckpointError, CorruptCheckpointError
from parallel3d.checkpoint import load_hf
from parallel3d.checkpoint.format.files import DTYPES, header_of, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(small().state_dict(), tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files and an index."""
    state = small().state_dict()
    files = {name: f"model-0000{1 + int(name[0])}-of-00002.safetensors" for name in state}
    for file in set(files.values()):
        save_file({n: v for n, v in state.items() if files[n] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tmp_path


def refused(folder: Path, match: str, *, corrupt: bool = True, **options) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match) as caught:
        load_hf(folder, model, **options)
    assert (type(caught.value) is CorruptCheckpointError) == corrupt
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


def loads(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    assert load_hf(folder, model) == ([], [])
    want = small().state_dict()
    assert all(torch.equal(value, want[n]) for n, value in model.state_dict().items())


def remap(folder: Path, **files: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {name.replace("_", "."): file for name, file in files.items()}
    (folder / INDEX).write_text(json.dumps(index))


def header(folder: Path, change) -> None:
    """Rewrites the single file's header."""
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    said = json.loads(data[8 : 8 + length])
    text = change(said)
    text = text if isinstance(text, bytes) else json.dumps(said if text is None else text).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_whole_ones_load(folder: Path) -> None:
    loads(folder)


def test_sharded_ones_load(sharded: Path) -> None:
    loads(sharded)


def test_an_index_of_megabytes_that_ends_with_a_line(sharded: Path) -> None:
    """As that of a model of 700 GB, and as transformers writes it."""
    index = json.loads((sharded / INDEX).read_text()) | {"metadata": {"more": "x" * (2 << 20)}}
    (sharded / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    loads(sharded)


def test_links_inside_and_as_the_hubs_cache_has_them(sharded: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub/snapshots/abc", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, path in enumerate(p for p in sharded.iterdir() if p.is_file()):
        path.rename(blobs / str(n))
        (snapshot / path.name).symlink_to(f"../../blobs/{n}")
    loads(snapshot)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/../../x", "", "..", "a\\..\\b", "a\0b"]
)
def test_names_outside(sharded: Path, name: str) -> None:
    remap(sharded, **{"0_weight": name})
    refused(sharded, "outside of it|missing, or no file")


def test_a_link_outside(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "weights"
    file = sharded / "model-00001-of-00002.safetensors"
    file.rename(other)
    file.symlink_to(other)
    refused(sharded, "is a link to .*, outside")


def test_a_folder_through_a_link_outside(sharded: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    (sharded / "model-00001-of-00002.safetensors").rename(other / "a.safetensors")
    (sharded / "sub").symlink_to(other)
    remap(sharded, **{"0_weight": "sub/a.safetensors", "0_bias": "sub/a.safetensors"})
    refused(sharded, "outside of its folder")


def test_no_folder_and_nothing_in_it(tmp_path: Path) -> None:
    refused(tmp_path / "none", "is not a folder.*snapshot_download", corrupt=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, r"holds no model.safetensors.*pytorch_model.bin", corrupt=False)


def test_index(sharded: Path) -> None:
    for text in (
        "",
        "[]",
        "{}",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 1}}',
        "\xff",
        "[" * 10**5,
    ):
        (sharded / INDEX).write_text(text, encoding="latin-1")
        refused(sharded, "not an index of safetensors files")


def test_index_names_what_is_not_there(sharded: Path) -> None:
    remap(sharded, **{"0_weight": "model-00002-of-00002.safetensors"})
    refused(sharded, r"says that model-00002-of-00002.safetensors holds '0.weight'")
    remap(sharded, **{"0_weight": "gone.safetensors"})
    refused(sharded, "gone.safetensors is missing")


@pytest.mark.parametrize("left", [0, 4, 8, 20, -1])
def test_cut_short(folder: Path, left: int) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:left])
    refused(folder, "cut short|the file at|not a safetensors file")


def test_longer(folder: Path) -> None:
    with open(folder / SINGLE, "ab") as file:
        file.write(b"more")
    refused(folder, "its tensors end at byte")


def _move(said: dict, by: int) -> None:
    said["0.bias"]["data_offsets"] = [by + x for x in said["0.bias"]["data_offsets"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda said: b"{",
        lambda said: b"\xff\xfe",
        lambda said: b"[]",
        lambda said: b"[" * 10**5,
        lambda said: json.dumps(said).replace('"0.bias"', '"0.weight"').encode(),
        lambda said: said["0.bias"].pop("dtype") and None,
        lambda said: said["0.bias"].update(shape=[6]),
        lambda said: said["0.bias"].update(shape=[-5]),
        lambda said: said["0.bias"].update(shape=[5.0]),
        lambda said: said["0.bias"].update(shape="5"),
        lambda said: said["0.bias"].update(dtype="F64"),
        lambda said: said["0.bias"].update(dtype=3),
        lambda said: said["0.bias"].update(data_offsets=[20, 0]),
        lambda said: said["0.bias"].update(data_offsets=[1 << 70, (1 << 70) + 20]),
        lambda said: _move(said, 4),
        lambda said: _move(said, -4),
        lambda said: said.update({"0.bias": 5}),
    ],
)
def test_headers(folder: Path, change) -> None:
    header(folder, change)
    refused(folder, "header")


def test_a_header_longer_than_any(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
    refused(folder, "not a safetensors file")


def test_no_ordinary_file(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    refused(folder, "no file")


def test_a_dtype_torch_does_not_have(folder: Path) -> None:
    header(folder, lambda said: said["0.bias"].update(dtype="F6_E2M3"))
    refused(folder, "F6_E2M3", corrupt=False)


def test_the_library_reads_what_we_write_and_the_reverse(tmp_path: Path) -> None:
    values = {
        name: torch.arange(6).to(torch.uint8).repeat(8).view(dtype).reshape(2, -1)
        for name, dtype in DTYPES.items()
        if dtype not in (torch.bool, torch.complex64)
    } | {"none": torch.zeros(0, 3), "one": torch.tensor(3.5), "ünï": torch.ones(1)}
    said = {name: (v.dtype, tuple(v.shape)) for name, v in values.items()}
    data = b"".join(bytes(v.reshape(-1).view(torch.uint8).tolist()) for v in values.values())
    (tmp_path / "a").write_bytes(header_of(said) + data)
    with safe_open(tmp_path / "a", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "made_by": "parallel3d"}
        for name, value in values.items():
            found = opened.get_tensor(name)
            assert found.dtype == value.dtype and found.shape == value.shape, name
            assert torch.equal(found.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
    save_file(values, tmp_path / "b")
    ours = read_header(tmp_path / "b", "b")
    assert {n: (s.dtype, s.shape) for n, s in ours.items()} == said
