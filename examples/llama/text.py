"""Real text as bytes, and the order in which its sequences are trained on."""

import os
import sysconfig
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Samples", "read_text", "shuffled"]

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_text(path: Path | None = None) -> bytes:
    """Reads a file, or all files of a folder one after the other; without a path, the source of the
    Python standard library that runs this (without its tests).

    Returns:
        The same on every machine that has the same files, as they are sorted. No tensor: whoever runs the
        program on fake ones has the real text.

    Raises:
        FileNotFoundError: if ``path`` does not exist.
    """
    if path is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _files_in(stdlib, leave_out=_NOT_SOURCE) if f.suffix == ".py"]
    elif path.is_dir():
        files = [f for f in _files_in(path) if not f.name.startswith(".")]
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"no file or folder at {path}")
    return b"".join(file.read_bytes() for file in sorted(files))


class Samples:
    """A text as sequences side by side, in an order that is a function of (seed, sample number).

    Sample ``n`` is sequence ``order(n % len)`` of epoch ``n // len``: each epoch has every sequence once,
    shuffled anew. So whoever knows how many samples have been consumed knows which comes next, whatever
    the batches were and the ranks that shared them.

    Args:
        text: the bytes.
        seq_len: inputs of a sequence; the targets are these moved by one.
    """

    def __init__(self, text: bytes, seq_len: int, *, seed: int) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.count = (len(text) - 1) // seq_len
        if self.count < 1:
            raise ValueError(f"{len(text)} bytes are no sequence of {seq_len + 1}")
        self.digest = blake2b(text, digest_size=8).hexdigest()

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return self.count

    def batch(self, first: int, size: int) -> Tensor:
        """The samples ``first`` to ``first + size - 1``: int64, (size, seq_len + 1)."""
        starts = [self.sequence_of(n) * self.seq_len for n in range(first, first + size)]
        return torch.tensor([list(self.text[s : s + self.seq_len + 1]) for s in starts])

    def sequence_of(self, sample: int) -> int:
        """Which sequence the sample is."""
        epoch, position = divmod(sample, self.count)
        return shuffled(position, self.count, key=f"{self.seed} {epoch}")


def shuffled(position: int, count: int, *, key: str) -> int:
    """A permutation of ``range(count)`` for each key, without a table of it: where ``position`` goes.

    A Feistel network permutes the least even number of bits that suffice; what falls outside of the
    range goes through it again, until it falls inside.
    """
    bits = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << bits) - 1
    while True:
        left, right = position >> bits, position & mask
        for layer in range(6):
            digest = blake2b(f"{key} {layer} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        position = left << bits | right
        if position < count:
            return position


def _files_in(path: Path, leave_out: Collection[str] = ()) -> Iterator[Path]:
    """All files in a folder, also deeper; hidden folders, and those of these names, are not entered."""
    for folder, folders, files in os.walk(path):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in leave_out]
        yield from (found for name in files if (found := Path(folder, name)).is_file())
