"""Pickles that must not be read as a .metadata: what they do is in their names."""

import copyreg
import functools
import os
import pickle
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from _support.checkpoint.handmade_dcp import Calls, saved, text

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
