"""Numbers and names in words, for warnings, the summary and the report."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["counted", "in_bytes", "in_seconds", "pattern_of", "some"]


def counted(number: int, noun: str) -> str:
    """``1 gather``, ``2,000 gathers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def in_bytes(size: float) -> str:
    """``3.2 GiB``, ``41 MiB``, ``12 bytes``: three figures."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= 0.9995 * factor:
            return f"{_figures(size / factor)} {unit}"
    return f"{size:.0f} bytes" if size != 1 else "1 byte"


def in_seconds(seconds: float) -> str:
    """``2.31 s``, ``41.5 ms``, ``870 us``."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * factor:
            return f"{_figures(seconds / factor)} {unit}"
    return f"{_figures(seconds * 1e6)} us"


def _figures(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def pattern_of(name: str) -> str:
    """``layers.*.attention`` for ``layers.3.attention``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few different ones, and how many more there are."""
    each = [name or "(no unit)" for name in dict.fromkeys(names)]
    left = len(each) - most
    return ", ".join(each[:most]) + (f" and {left} more" if left > 0 else "")
