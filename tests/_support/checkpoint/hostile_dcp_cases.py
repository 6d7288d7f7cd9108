"""DCP folders that must not be loaded: what is done to a whole one, by name."""

import copyreg
import functools
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from _support.checkpoint.handmade_dcp import FILES, Calls, Folder, saved, text

Sentinel = Path
InPickle = Callable[[Sentinel], bytes]


def touch(sentinel: Sentinel) -> str:
    return f"touch {sentinel}"


def code(sentinel: Sentinel) -> str:
    return f"open({str(sentinel)!r}, 'w').close()"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


EXTENSION = "EXT1"


def _extension(s: Sentinel) -> bytes:
    copyreg.add_extension("posix", "system", 240)
    pickle.loads(b"\x80\x02\x82\xf0.")  # it is in pickle's cache then, which asks no find_class
    return b"\x80\x02\x82\xf0" + text(touch(s)) + b"\x85R."


def forget_extension() -> None:
    """Else all pickles that name it have its number."""
    with suppress(ValueError):
        copyreg.remove_extension("posix", "system", 240)


def _torch_load(s: Sentinel) -> bytes:
    file = s.with_suffix(".pkl")
    torch.save(Calls(os.system, touch(s)), file)
    return pickle.dumps(Calls(functools.partial(torch.load, weights_only=False), str(file)))


METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"

PICKLES: dict[str, InPickle] = {
    "os.system": lambda s: pickle.dumps(Calls(os.system, touch(s))),
    "os.system, protocol 5": lambda s: pickle.dumps(Calls(os.system, touch(s)), 5),
    "eval": lambda s: pickle.dumps(Calls(eval, code(s))),
    "Popen": lambda s: pickle.dumps(Calls(subprocess.Popen, ["touch", str(s)])),
    "torch.load": _torch_load,
    "a dotted name from torch": lambda s: (
        b"\x80\x04" + text("torch") + text("os.system") + b"\x93" + text(touch(s)) + b"\x85R."
    ),
    "STACK_GLOBAL": lambda s: (
        b"\x80\x04" + text("posix") + text("system") + b"\x93" + text(touch(s)) + b"\x85R."
    ),
    "INST": lambda s: b"(" + text(touch(s)) + b"ios\nsystem\n.",
    "BUILD with __setstate__": lambda s: (
        METADATA
        + b")\x81}"
        + text("__setstate__")
        + _global("os", "system")
        + b"sb"
        + text(touch(s))
        + b"b."
    ),
    "BUILD of a class": lambda s: METADATA + b"N}" + text("__reduce__") + b"Ns\x86b.",
    EXTENSION: _extension,
    "BINPERSID": lambda s: text(touch(s)) + b"Q.",
    "nothing": lambda s: b"",
    "a memo of 32 GB": lambda s: b"}r\xff\xff\xff\xff.",
    "a string of 2**62 bytes": lambda s: b"\x8d" + (2**62).to_bytes(8, "little") + b"abc.",
    "bytearray of 2**40": lambda s: b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"abc.",
    "200,000 tuples in one another": lambda s: b")" + b"\x85" * 200_000 + b".",
    "a zip file": lambda s: saved({"a": torch.zeros(3)}),
}


# Those that pickle.loads executes: the sentinel is there then.
RUN = (
    *("os.system", "os.system, protocol 5", "eval", "Popen", "a dotted name from torch"),
    *("STACK_GLOBAL", "INST", "BUILD with __setstate__", "EXT1", "torch.load"),
)


WEIGHT, BIAS = "model.lin.weight", "model.lin.bias"
MOMENT = "optimizer.state.lin.weight.exp_avg"
LR = "optimizer.param_groups.0.lr"

InFolder = Callable[[Folder, Sentinel], None]
OnDisk = Callable[[Path, Sentinel], None]


# -- a table of contents that isn't right ---------------------------------------------------------------


def place(name: str = WEIGHT, **changes: Any) -> InFolder:
    def change(f: Folder, s: Sentinel) -> None:
        for key, value in changes.items():
            now = getattr(f.place(name), key)
            setattr(f.place(name), key, value(now) if callable(value) else value)

    return change


def blob(make: Callable[[Sentinel], Any], name: str = LR) -> InFolder:
    """Puts another record in place of a value's."""

    def change(f: Folder, s: Sentinel) -> None:
        f.metadata.storage_data[f.index(name)] = f.append(make(s))

    return change


def _all_dtypes(f: Folder, s: Sentinel) -> None:
    """Of the records too."""
    f.tensor(BIAS).properties.dtype = torch.int32
    for chunk, rows in enumerate((3, 2)):
        value = torch.arange(rows, dtype=torch.int32)
        f.metadata.storage_data[f.index(BIAS, chunk)] = f.append(value)


def _overlap(f: Folder, s: Sentinel) -> None:
    chunk = f.tensor(WEIGHT).chunks[1]
    f.metadata.storage_data[MetadataIndex(WEIGHT, [2, 0])] = f.metadata.storage_data.pop(
        f.index(WEIGHT, 1)
    )
    chunk.offsets = torch.Size([2, 0])


def chunks(change: Callable[[list[ChunkStorageMetadata]], Any]) -> InFolder:
    return lambda f, s: change(f.tensor(WEIGHT).chunks)


def _box(f: Folder, offsets: list[int], sizes: list[int]) -> None:
    f.tensor(WEIGHT).chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _without(name: str) -> InFolder:
    def change(f: Folder, s: Sentinel) -> None:
        del f.metadata.state_dict_metadata[name]
        del f.metadata.planner_data[name]

    return change


def _renamed(f: Folder, s: Sentinel) -> None:
    content = f.metadata.state_dict_metadata
    content[MOMENT.replace("avg", "avf")] = content.pop(MOMENT)
    index = f.index(MOMENT)
    f.metadata.storage_data[MetadataIndex(MOMENT.replace("avg", "avf"), index.offset)] = (
        f.metadata.storage_data.pop(index)
    )


def _set(**values: Any) -> InFolder:
    return lambda f, s: [setattr(f.metadata, k, v) for k, v in values.items()] and None


def lying_storage(numel: int, name: str = "") -> bytes:
    """A record whose description says more numbers than are there; in a dict if it has a ``name``."""
    import io
    import zipfile

    value = torch.arange(9.0).view(3, 3)
    content = saved({name: value} if name else value)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("data.pkl"):
                data = data.replace(b"K\x09", b"M" + numel.to_bytes(2, "little"))
            new.writestr(info.filename, data)
    return out.getvalue()


TABLES: dict[str, InFolder] = {
    "a call in the planner's data": lambda f, s: f.metadata.planner_data.update(
        x=Calls(os.system, touch(s))
    ),
    "a call in the places": lambda f, s: f.metadata.storage_data.update(
        {f.index(WEIGHT): Calls(os.system, touch(s))}
    ),
    "a call as a value": blob(lambda s: Calls(os.system, touch(s))),
    "a call as betas": blob(
        lambda s: (Calls(exec, code(s)), 0.9), "optimizer.param_groups.0.betas"
    ),
    "a call as a tensor": blob(lambda s: Calls(os.system, touch(s)), WEIGHT),
    "no tensor as a tensor": blob(lambda s: [1.0], WEIGHT),
    "a value without end": blob(lambda s: _endless()),
    "a storage larger than its record": blob(lambda s: lying_storage(900), WEIGHT),
    "a tensor of other sizes": blob(lambda s: torch.zeros(4, 3), WEIGHT),
    "..": place(relative_path="../outside"),
    "an absolute path": place(relative_path=lambda now: "/etc/hostname"),
    "no path": place(relative_path=""),
    "a path with a zero byte": place(relative_path="a\0b"),
    "a path that isn't there": place(relative_path="__7_0.distcp"),
    "a path that is a number": place(relative_path=1),
    "the table itself": place(relative_path=".metadata", offset=0, length=100),
    "a negative offset": place(offset=-1),
    "a negative length": place(length=-1),
    "an offset beyond the end": place(offset=2**40),
    "an offset that is no number": place(offset="0"),
    "ten bytes short": place(length=lambda now: now - 10),
    "an extension": place(transform_descriptors=["stream.zstd"]),
    "another shape": lambda f, s: setattr(f.tensor(WEIGHT), "size", torch.Size([6, 3])),
    "another dtype": lambda f, s: setattr(f.tensor(WEIGHT).properties, "dtype", torch.float64),
    "another dtype everywhere": _all_dtypes,
    "chunks that overlap": _overlap,
    "a chunk too many": lambda f, s: f.tensor(WEIGHT).chunks.append(
        ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([1, 3]))
    ),
    "a chunk missing": chunks(lambda c: c.pop()),
    "no chunks": chunks(lambda c: c.clear()),
    "a chunk outside": lambda f, s: _box(f, [4, 0], [2, 3]),
    "a chunk of other sizes": lambda f, s: _box(f, [3, 0], [1, 6]),
    "a weight missing": _without(WEIGHT),
    "options missing": _without("optimizer.param_groups.0.params"),
    "a name changed": _renamed,
    "a chunk nowhere": lambda f, s: f.metadata.storage_data.pop(f.index(WEIGHT, 1)) and None,
    "two tensors at one place": lambda f, s: f.metadata.storage_data.update(
        {f.index(MOMENT): f.place(WEIGHT)}
    ),
    "no table": _set(state_dict_metadata=None),
    "no places": _set(storage_data=None),
}


def _endless() -> Any:
    value: Any = [1.0]
    for _ in range(60):
        value = [value, value]
    return value


# -- files ----------------------------------------------------------------------------------------------


def cut(file: str, share: float) -> OnDisk:
    def change(path: Path, s: Sentinel) -> None:
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[: int(share * len(content))])

    return change


def _outside(path: Path, s: Sentinel) -> Path:
    """A file that would do, but lies elsewhere."""
    away = path.parent / "away"
    away.mkdir()
    shutil.move(path / FILES[0], away / FILES[0])
    return away


def _link(path: Path, s: Sentinel) -> None:
    (path / FILES[0]).symlink_to(_outside(path, s) / FILES[0])


def _linked_metadata(path: Path, s: Sentinel) -> None:
    shutil.move(path / ".metadata", path.parent / "table")
    (path / ".metadata").symlink_to(path.parent / "table")


def _replaced(file: str, make: Callable[[Path], Any]) -> OnDisk:
    def change(path: Path, s: Sentinel) -> None:
        (path / file).unlink()
        make(path / file)

    return change


def flip(file: str, seed: int) -> OnDisk:
    """One bit, anywhere but in padding."""

    def change(path: Path, s: Sentinel) -> None:
        content = bytearray((path / file).read_bytes())
        generator = random.Random(seed)
        places = [at for at, byte in enumerate(content) if byte not in b"\0ZFB"]
        content[generator.choice(places)] ^= 1 << generator.randrange(8)
        (path / file).write_bytes(content)

    return change


DISK: dict[str, OnDisk] = {
    **{f"{n} cut at {x}": cut(n, x) for n in (*FILES, ".metadata") for x in (0, 0.7)},
    "a link to outside": _link,
    "a table that is a link to outside": _linked_metadata,
    "a folder in place of a file": _replaced(FILES[0], Path.mkdir),
    "a pipe in place of a file": _replaced(FILES[0], os.mkfifo),
    "a folder in place of the table": _replaced(".metadata", Path.mkdir),
    "a pipe in place of the table": _replaced(".metadata", os.mkfifo),
    "no table there": _replaced(".metadata", lambda path: None),
    "no file there": _replaced(FILES[1], lambda path: None),
    "a link to itself": _replaced(FILES[0], lambda path: path.symlink_to(path)),
    "an empty folder": lambda path, s: [each.unlink() for each in path.iterdir()] and None,
    "no folder": lambda path, s: shutil.rmtree(path),
    "zeros": lambda path, s: (
        (path / FILES[0]).write_bytes(bytes((path / FILES[0]).stat().st_size)) and None
    ),
    "files swapped": lambda path, s: _swap(path),
}


def _swap(path: Path) -> None:
    first, second = ((path / name).read_bytes() for name in FILES)
    (path / FILES[0]).write_bytes(second)
    (path / FILES[1]).write_bytes(first)


# May hit what doesn't matter: then the right values are loaded.
FLIPS: dict[str, OnDisk] = {
    f"{file} flipped {seed}": flip(file, seed)
    for file, count in ((FILES[0], 6), (FILES[1], 4), (".metadata", 20))
    for seed in range(count)
}
