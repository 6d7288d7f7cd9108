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


def at_path(where: str, edit: Callable[[Any, Any], object]) -> Damage:
    """Calls ``edit(holder, key)`` for what is at ``where``, a path with dots, of checkpoint.json."""

    def walk(info: Json) -> None:
        *path, last = where.split(".")
        at: Any = info
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        edit(at, int(last) if isinstance(at, list) else last)

    return signed(info=walk)


def value(where: str, new: Any) -> Damage:
    return at_path(where, lambda holder, key: holder.__setitem__(key, new))


def without(where: str) -> Damage:
    return at_path(where, lambda holder, key: holder.pop(key))


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


W, M = "model.a.weight", "optimizer.a.weight.exp_avg"
NAN = float("nan")
FILES = ("COMPLETE", "checkpoint.json", "index.json", DATA)

CASES: dict[str, Damage] = {}

# -- files: torn, gone, of another kind

for _name in FILES:
    CASES[f"{_name} is gone"] = remove(_name)
    CASES[f"{_name} is a folder"] = instead(_name, os.mkdir)
    CASES[f"{_name} is a link"] = instead(_name, link)
    CASES[f"{_name} is a pipe"] = instead(_name, os.mkfifo)
    CASES[f"{_name} is a pickle"] = instead(_name, pickled)
    CASES[f"{_name} is torch.save's"] = instead(_name, pickled_zip)
    CASES[f"{_name} is of 4 TiB"] = instead(_name, huge)
    CASES[f"{_name} is longer"] = longer(_name)
    for _share in (0.0, 0.1, 0.5, 0.99):
        CASES[f"{_name} is cut at {_share}"] = cut(_name, _share)

CASES |= {
    "marker of another format": marker(lambda m: m.update(format="parallel3d checkpoint 2")),
    "marker's format a number": marker(lambda m: m.update(format=1)),
    "marker without digests": marker(lambda m: m.pop("sha256")),
    "marker's digests a list": marker(lambda m: m.update(sha256=[1])),
    "marker's digest null": marker(lambda m: m["sha256"].update({"index.json": None})),
    "marker a list": lambda folder: (folder / "COMPLETE").write_text("[]") and None,
    "a signed pickle": signed_pickle,
}

# -- JSON

for _file in ("index.json", "checkpoint.json"):
    CASES[f"{_file} empty"] = text_of(_file, lambda text: "")
    CASES[f"{_file} a list"] = text_of(_file, lambda text: "[]")
    CASES[f"{_file} an empty object"] = text_of(_file, lambda text: "{}")
    CASES[f"{_file} null"] = text_of(_file, lambda text: "null")
    CASES[f"{_file} very deep"] = text_of(_file, lambda text: deep(200_000))
    CASES[f"{_file} deep"] = text_of(_file, lambda text: deep(900))
    CASES[f"{_file} with more after it"] = text_of(_file, lambda text: text + "{}")
    CASES[f"{_file} a huge number"] = text_of(_file, lambda text: "9" * 10_000)
    CASES[f"{_file} other letters"] = text_of(_file, lambda text: "\ufeff" + text)
CASES |= {
    "step twice": text_of(
        "checkpoint.json", lambda t: t.replace('"step": 1', '"step": 2, "step": 1', 1)
    ),
    "a tensor twice": text_of(
        "index.json", lambda t: t.replace('"objects"', '"files": {}, "objects"', 1)
    ),
}

# -- index: signed again

for _what, _bad in {
    "negative": -1,
    "a float": 0.0,
    "huge": 1 << 70,
    "large": 1 << 61,
    "true": True,
    "null": None,
    "NaN": NAN,
    "a string": "0",
    "a list": [0],
    "a deep list": [[[[]]]],
}.items():
    CASES[f"begin {_what}"] = chunk(W, 3, _bad)
    CASES[f"an offset {_what}"] = chunk(W, 0, [_bad, 0])
    CASES[f"a size {_what}"] = chunk(W, 1, [_bad, 4])
    CASES[f"a shape {_what}"] = entry(W, shape=[_bad, 4])
    CASES[f"a checksum {_what}"] = chunk(W, 4, [_bad])
    CASES[f"a file's size {_what}"] = signed(
        index=lambda index, bad=_bad: index["files"].update({DATA: bad})
    )

CASES |= {
    "begin elsewhere": chunk(W, 3, 8),
    "begin at the end": signed(
        index=lambda i: i["tensors"][W]["chunks"][0].__setitem__(3, i["files"][DATA])
    ),
    "a field less": signed(index=lambda i: i["tensors"][W]["chunks"][0].pop()),
    "a dim less": chunk(W, 0, [0]),
    "a dim more": chunk(W, 1, [6, 4, 1]),
    "no checksum": chunk(W, 4, []),
    "too many checksums": chunk(W, 4, [0, 0]),
    "file a number": chunk(W, 2, 7),
    "file a list": chunk(W, 2, [DATA]),
    "file not listed": chunk(W, 2, "rank-00001.safetensors"),
    "another block size": signed(index=lambda i: i.update(block=1)),
    "no block size": signed(index=lambda i: i.pop("block")),
    "files a list": signed(index=lambda i: i.update(files=[DATA])),
    "tensors a list": signed(index=lambda i: i.update(tensors=[])),
    "no objects": signed(index=lambda i: i.pop("objects")),
    "a tensor null": signed(index=lambda i: i["tensors"].update({W: None})),
    "a tensor gone": signed(index=lambda i: i["tensors"].pop(W)),
    "a state gone": signed(index=lambda i: i["tensors"].pop(M)),
    "a tensor more": signed(index=lambda i: i["tensors"].update({"model.z": i["tensors"].pop(W)})),
    "a name with dunders": signed(
        index=lambda i: i["tensors"].update({"model.__class__": i["tensors"].pop(W)})
    ),
    "another dtype": entry(W, dtype="I32"),
    "a wider dtype": entry(W, dtype="F64"),
    "an unknown dtype": entry(W, dtype="float32"),
    "dtype a list": entry(W, dtype=["F32"]),
    "dtype of a name": entry(W, dtype="__class__"),
    "another shape": entry(W, shape=[4, 6]),
    "a larger shape": entry(W, shape=[7, 4]),
    "no chunks": entry(W, chunks=[]),
    "chunks an object": entry(W, chunks={}),
    "too many dims": entry(W, shape=[1] * 100_000),
    "too many empty dims": entry(W, shape=[0] + [1 << 61] * 60, chunks=[]),
    "chunks with a hole": chunks(([0, 0], [2, 4]), ([4, 0], [2, 4])),
    "chunks that overlap, of the right volume": chunks(([0, 0], [4, 4]), ([3, 0], [2, 4])),
    "chunks that overlap and leave a hole": chunks(
        ([0, 0], [3, 2]), ([0, 2], [3, 2]), ([2, 0], [3, 2]), ([3, 2], [3, 2])
    ),
    "a chunk twice": chunks(([0, 0], [3, 4]), ([0, 0], [3, 4])),
    "a chunk beyond": chunks(([0, 0], [3, 4]), ([4, 0], [3, 4])),
    "very many boxes": signed(index=bricks),
    "two tensors of the same bytes": signed(
        index=lambda i: i["tensors"]["model.b.weight"].update(
            chunks=[[[0, 0], [4, 6], *i["tensors"][W]["chunks"][0][2:]]]
        )
    ),
    "two entries exchanged": swapped(W, "model.a.bias"),
}

# -- paths

CASES |= {
    "a path upwards": renamed_file("../rank-00000.safetensors"),
    "a path within": renamed_file("./rank-00000.safetensors"),
    "an absolute path": absolute,
    "a file with a line's end": renamed_file("rank-00000.safetensors\n"),
    "a file with other digits": renamed_file(f"rank-{chr(0x660) * 5}.safetensors"),
    "a file of another name": renamed_file("weights.bin"),
}

# -- checkpoint.json: signed again

for _key in ("step", "versions", "ranks", "rng", "model", "extra", "model.only", "model.ties",
             "model.extra_state", "optimizer", "optimizer.groups", "optimizer.state"):  # fmt: skip
    CASES[f"without {_key}"] = without(_key)
    CASES[f"{_key} is 1.5"] = value(_key, 1.5)
    CASES[f"{_key} is true"] = value(_key, True)
    CASES[f"{_key} is a deep list"] = value(_key, [[[[[[[[]]]]]]]])

CASES |= {
    "step a string": value("step", "1"),
    "step negative": value("step", -1),
    "step huge": value("step", 1 << 80),
    "step NaN": value("step", NAN),
    "mesh a number": value("mesh", 3),
    "mesh of strings": value("mesh", {"shard": "2"}),
    "versions of numbers": value("versions", {"torch": 2}),
    "only something": value("model.only", "all"),
    "only trainable": value("model.only", "trainable"),
    "seed a string": value("rng.step_seed", {"seed": "1", "step": 1, "micro_batch": 1}),
    "seed negative": value("rng.step_seed", {"seed": -1, "step": 1, "micro_batch": 1}),
    "seed without a step": value("rng.step_seed", {"seed": 1}),
    "a tie to nothing": tied("model.d.weight", "model.missing"),
    "a tie to a list": tied("model.d.weight", [W]),
    "a tie to optimizer state": tied("model.d.weight", M),
    "a tie of rng": tied("rng.0.cpu", W),
    "a tie of a stored tensor": tied("model.a.bias", "model.norm.bias"),
    "a tie to itself": tied("model.c.weight", "model.c.weight"),
    "ties to each other": signed(
        info=lambda i: i["model"].update(
            ties={"model.c.weight": "model.d.weight", "model.d.weight": "model.c.weight"}
        )
    ),
    "a tie to another shape": tied("model.c.weight", W),
}

# -- values

for _what, _bad in {
    "a kind that isn't": {"$module": "os"},
    "a class": {"$class": "os.system"},
    "two kinds": {"$dtype": "float32", "$tuple": []},
    "a kind and more": {"$tuple": [], "x": 1},
    "more and a kind": {"x": 1, "$tuple": []},
    "no dtype": {"$dtype": "load"},
    "a dunder dtype": {"$dtype": "__class__"},
    "a module for a dtype": {"$dtype": "_dynamo"},
    "a dtype of a list": {"$dtype": ["float32"]},
    "a scalar too large": {"$scalar": ["int64", 1 << 80]},
    "a scalar too large for its dtype": {"$scalar": ["uint8", 256]},
    "a scalar of a string": {"$scalar": ["float32", "1e3"]},
    "a scalar of a list": {"$scalar": ["float32", [1.0] * 1000]},
    "a scalar of no dtype": {"$scalar": ["load", 1.0]},
    "a float scalar of int64": {"$scalar": ["int64", 1.5]},
    "a scalar alone": {"$scalar": 3},
    "a tuple of a string": {"$tuple": "abc"},
    "a tuple of a number": {"$tuple": 3},
    "a dict of triples": {"$dict": [[1, 2, 3]]},
    "a dict of strings": {"$dict": ["ab"]},
    "a dict with a list as key": {"$dict": [[[1], 2]]},
    "a dict with a key twice": {"$dict": [[1, 2], [1, 3]]},
    "a counter of a number": {"$counter": 3},
    "a counter of an object": {"$counter": {"a": 1}},
    "a counter of triples": {"$counter": [[1, 2, 3]]},
    "a counter of strings": {"$counter": [["a", "b"]]},
    "a counter of booleans": {"$counter": [["a", True]]},
    "a counter of lists": {"$counter": [["a", [1]]]},
    "a counter of scalars": {"$counter": [["a", {"$scalar": ["int64", 1]}]]},
    "a counter with a list as key": {"$counter": [[[1], 2]]},
    "a counter with a key twice": {"$counter": [[1, 2], [1, 3]]},
    "bytes that aren't": {"$bytes": "*"},
    "bytes of a number": {"$bytes": 1},
    "a complex of strings": {"$complex": ["1", "2"]},
    "a complex of one": {"$complex": [1.0]},
    "a tensor that isn't stored": {"$tensor": "extra['missing']"},
    "a model's tensor": {"$tensor": W},
    "an optimizer's tensor": {"$tensor": M},
    "the random state": {"$tensor": "rng.0.cpu"},
    "a tensor twice": {"$tensor": "extra['tensor']"},
    "a tensor of a list": {"$tensor": [W]},
    "a tensor of null": {"$tensor": None},
    "a very deep value": [[[[[[[[[[[[]]]]]]]]]]]],
}.items():
    if _what != "a very deep value":
        CASES[f"extra has {_what}"] = value("extra.new", _bad)
        CASES[f"extra state has {_what}"] = value("model.extra_state.counter.new", _bad)
        CASES[f"options have {_what}"] = value("optimizer.groups.0.options.new", _bad)
        CASES[f"state has {_what}"] = state("new", _bad)


def _nested(count: int) -> list:
    found: list = []
    for _ in range(count):
        found = [found]
    return found


CASES |= {
    "extra too deep": value("extra.new", _nested(300)),
    "extra state too deep": value("model.extra_state.counter.new", _nested(300)),
    "options too deep": value("optimizer.groups.0.options.new", _nested(300)),
    "extra of a special list": value("extra", {"$tuple": []}),
    "extra state of no module": value("model.extra_state.missing", {"count": 1}),
    "extra state refused by its module": value("model.extra_state.counter.count", -1),
    "extra state without a key": without("model.extra_state.counter.count"),
}

# -- optimizer

CASES |= {
    "options with params": group(lambda g: g["options"].update(params=[])),
    "options with a number as key": group(lambda g: g.update(options={"$dict": [[1, 2]]})),
    "options a list": group(lambda g: g.update(options=[])),
    "options a tuple": group(lambda g: g.update(options={"$tuple": []})),
    "kind a number": group(lambda g: g.update(kind=3)),
    "kind a list": group(lambda g: g.update(kind=["Adam"])),
    "kind a dunder": group(lambda g: g.update(kind="__class__")),
    "no lr": group(lambda g: g["options"].pop("lr")),
    "lr a string": group(lambda g: g["options"].update(lr="0.1")),
    "lr a list": group(lambda g: g["options"].update(lr=[0.1])),
    "betas a number": group(lambda g: g["options"].update(betas=0.9)),
    "betas of three": group(lambda g: g["options"].update(betas={"$tuple": [0.9, 0.9, 0.9]})),
    "amsgrad a string": group(lambda g: g["options"].update(amsgrad="yes")),
    "params of numbers": group(lambda g: g.update(params=[0, 1])),
    "params a string": group(lambda g: g.update(params="a.weight")),
    "a parameter less": group(lambda g: g["params"].pop()),
    "a parameter twice": group(lambda g: g["params"].append(g["params"][0])),
    "a parameter more": group(lambda g: g["params"].append("z.weight")),
    "another parameter": group(lambda g: g["params"].__setitem__(0, "z.weight")),
    "no groups": with_groups(lambda groups: groups.clear()),
    "a group of null": with_groups(lambda groups: groups.append(None)),
    "the group twice": with_groups(lambda groups: groups.append(groups[0])),
    "another parameter's state": state("exp_avg", {"$tensor": "optimizer.b.weight.exp_avg"}),
    "its own state twice": state("exp_avg", {"$tensor": "optimizer.a.weight.exp_avg_sq"}),
    "a parameter as state": state("exp_avg", {"$tensor": W}),
    "a missing state": state("exp_avg", {"$tensor": "optimizer.a.weight.missing"}),
    "state of no parameter": signed(
        info=lambda i: i["optimizer"]["state"].update({"z": i["optimizer"]["state"]["a.bias"]})
    ),
    "state a list": value("optimizer.state.norm", []),
    "state of another shape": entry(M, shape=[4, 6], chunks=[]),
}

# -- random states, with right checksums

for _kind in ("cpu", "python", "python_gauss", "numpy", "numpy_rest"):
    CASES[f"rng {_kind} is all ones"] = data_of(f"rng.0.{_kind}", b"\xff")
    CASES[f"rng {_kind} is gone"] = signed(
        index=lambda index, name=f"rng.0.{_kind}": index["tensors"].pop(name)
    )
    CASES[f"rng {_kind} of another dtype"] = entry(f"rng.0.{_kind}", dtype="F32")
CASES |= {
    "rng cpu is zeros": data_of("rng.0.cpu", None),
    "rng cpu is of no bytes": entry("rng.0.cpu", shape=[0], chunks=[]),
}

# -- what may be as it will, for the values are the same

HARMLESS: dict[str, Damage] = {
    "no ties": value("model.ties", {}),
    "more files": lambda folder: pickled(folder / "evil.pkl"),
    "a folder more": lambda folder: (folder / "rank-00007.safetensors").mkdir(),
    "a tensor of nobody": signed(
        index=lambda i: i["tensors"].update({"other": {"dtype": "F32", "shape": [0], "chunks": []}})
    ),
    "more keys": value("other", {"$module": "os"}),
    "objects": signed(index=lambda i: i["objects"].update({"x": {"$module": "os"}})),
}
