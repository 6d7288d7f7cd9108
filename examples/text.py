"""Real text as bytes, and batches that are a function of (seed, step) alone."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["batch_of", "read_text"]

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_text(path: Path | None = None) -> Tensor:
    """Reads a file, or all files of a folder one after the other; without a path, the source of the
    Python standard library that runs this (without its tests).

    Returns:
        uint8, (bytes,): the same on every machine that has the same files, as they are sorted.

    Raises:
        FileNotFoundError: if ``path`` does not exist.
    """
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        files = [f for f in path.rglob("*.py") if not _NOT_SOURCE & set(f.relative_to(path).parts)]
    elif path.is_dir():
        files = [f for f in path.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(path))]
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"no file or folder at {path}")
    text = bytearray(b"".join(file.read_bytes() for file in sorted(files)))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def batch_of(text: Tensor, batch_size: int, seq_len: int, *, seed: int, step: int) -> Tensor:
    """Draws the global batch of one step: every rank of every mesh draws the same one.

    Returns:
        int64, (batch_size, seq_len + 1): the inputs and, moved by one, the targets.
    """
    # The CPU generator uses the low 32 bits of a seed only.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
    start = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
    return text[start + torch.arange(seq_len + 1)].long()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
