"""Ways to damage a checkpoint, by accident and on purpose: each is a function of its folder."""

import hashlib
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DATA = "rank-00000.safetensors"
Json = dict[str, Any]
Damage = Callable[[Path], None]


class Bomb:
    """Unpickling it makes the file ``EXECUTED`` in the current folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch EXECUTED",)


def signed(
    index: Callable[[Json], object] | None = None, info: Callable[[Json], object] | None = None
) -> Damage:
    """Edits JSON files, and signs them again as a clever attacker would."""

    def damage(folder: Path) -> None:
        for name, edit in (("index.json", index), ("checkpoint.json", info)):
            if edit is not None:
                content = json.loads((folder / name).read_text())
                edit(content)
                write_signed(folder, name, json.dumps(content))

    return damage


def text_of(name: str, edit: Callable[[str], str]) -> Damage:
    """Edits a JSON file's text, signed again."""
    return lambda folder: write_signed(folder, name, edit((folder / name).read_text()))


def write_signed(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    marker = json.loads((folder / "COMPLETE").read_text())
    marker["sha256"][name] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "COMPLETE").write_text(json.dumps(marker))


def marker(edit: Callable[[Json], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "COMPLETE").read_text())
        edit(content)
        (folder / "COMPLETE").write_text(json.dumps(content))

    return damage


def chunk(name: str, place: int, value: Any) -> Damage:
    """Sets a field (offsets, sizes, file, begin, crc) of a tensor's first chunk."""

    def edit(index: Json) -> None:
        index["tensors"][name]["chunks"][0][place] = value

    return signed(index=edit)


def entry(name: str, **fields: Any) -> Damage:
    return signed(index=lambda index: index["tensors"][name].update(fields))


def chunks(*boxes: tuple[list[int], list[int]]) -> Damage:
    """Cuts the 6 x 4 weight into ``boxes`` (offsets, sizes), one after the other in the file."""

    def edit(index: Json) -> None:
        found = index["tensors"]["model.a.weight"]
        at = found["chunks"][0][3]
        found["chunks"] = []
        for offsets, sizes in boxes:
            found["chunks"].append([offsets, sizes, DATA, at, [0]])
            at += 4 * sizes[0] * sizes[1]

    return signed(index=edit)


def value(where: str, new: Any) -> Damage:
    """Sets what is at ``where``, a path with dots, of checkpoint.json."""

    def edit(info: Json) -> None:
        *path, last = where.split(".")
        at: Any = info
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = new

    return signed(info=edit)


def without(where: str) -> Damage:
    def edit(info: Json) -> None:
        *path, last = where.split(".")
        at: Any = info
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        del at[last]

    return signed(info=edit)


def data_of(name: str, new: bytes | None) -> Damage:
    """Replaces a tensor's bytes in the file (None: zeros), and their checksum."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        found = index["tensors"][name]["chunks"][0]
        at = found[3]
        with (folder / DATA).open("r+b") as file:
            whole = file.read()
            ends = sorted(c[3] for e in index["tensors"].values() for c in e["chunks"] if c[3] > at)
            size = (ends[0] if ends else len(whole)) - at
            content = bytes(size) if new is None else (new * size)[:size]
            file.seek(at)
            file.write(content)
        found[4] = [zlib.crc32(content)]
        write_signed(folder, "index.json", json.dumps(index))

    return damage


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * share))

    return damage


def longer(name: str) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b"\0" * 8)

    return damage


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else in a file's place."""

    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"moved-{name}")
        make(folder / name)

    return damage


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / f"moved-{path.name}")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


def pickled_zip(path: Path) -> None:
    torch.save({"model": Bomb()}, path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)  # sparse


def signed_pickle(folder: Path) -> None:
    data = pickle.dumps(Bomb(), protocol=0)
    write_signed(folder, "checkpoint.json", data.decode("latin1"))


def renamed_file(new: str) -> Damage:
    """The data under another name, which the index has too."""

    def edit(index: Json) -> None:
        index["files"] = {new: index["files"][DATA]}
        for found in index["tensors"].values():
            for each in found["chunks"]:
                each[2] = new

    def damage(folder: Path) -> None:
        signed(index=edit)(folder)
        if "/" not in new:
            (folder / DATA).rename(folder / new)
        else:
            (folder / DATA).rename(folder.parent / Path(new).name)

    return damage


def absolute(folder: Path) -> None:
    renamed_file(str(folder.parent / "rank-00000.safetensors"))(folder)


def swapped(first: str, second: str) -> Damage:
    """Two tensors' entries exchanged."""

    def edit(index: Json) -> None:
        tensors = index["tensors"]
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return signed(index=edit)


def deep(count: int, ends: tuple[str, str] = ("[", "]")) -> str:
    return ends[0] * count + ends[1] * count


def bricks(index: Json) -> None:
    """A tensor of very many boxes in two columns, staggered, and a hole: slow to compare by pairs."""
    rows = 10_000
    boxes = [([row, 0], [2, 1]) for row in range(0, rows, 2)]
    boxes += [([row, 1], [2, 1]) for row in range(1, rows - 2, 2)]
    index["tensors"]["model.extra"] = {
        "dtype": "U8",
        "shape": [rows, 2],
        "chunks": [[o, s, DATA, 0, [0]] for o, s in boxes],
    }


def state(key: str, new: Any, name: str = "a.weight") -> Damage:
    return signed(info=lambda info: info["optimizer"]["state"][name].update({key: new}))


def group(edit: Callable[[Json], object]) -> Damage:
    return signed(info=lambda info: edit(info["optimizer"]["groups"][0]))


def with_groups(edit: Callable[[list], object]) -> Damage:
    return signed(info=lambda info: edit(info["optimizer"]["groups"]))


def tied(alias: str, name: Any) -> Damage:
    return signed(info=lambda info: info["model"]["ties"].update({alias: name}))


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()
