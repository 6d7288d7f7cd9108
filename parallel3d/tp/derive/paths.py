"""Names of modules, rules for those alike, and words for inputs."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.tp.patterns import matches
from parallel3d.tp.styles import Style

__all__ = ["describe", "inside", "join", "pattern_of", "with_patterns"]


def with_patterns(
    styles: Mapping[str, Style], why: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, str | Style], dict[str, str]]:
    """Rules for modules that differ only in numbers as one rule, where it then matches no others."""
    rules: dict[str, str | Style] = {}
    reasons: dict[str, str] = {}

    @functools.cache
    def one_style(pattern: str) -> bool:
        alike = [styles.get(name) for name in modules if matches(pattern, name)]
        return len(alike) > 1 and all(style == alike[0] for style in alike)

    for name, style in styles.items():
        patterns = (pattern_of(name), pattern_of(name, 1))
        key = next(filter(one_style, patterns), name)
        if key not in rules:
            rules[key], reasons[key] = style, why[name]
    return rules, reasons


def pattern_of(name: str, most: int = 0) -> str:
    """``name`` with its numbers, or the first ``most`` of them, as wildcards."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=most)


def inside(name: str, owner: str) -> str:
    return name if not owner else name[len(owner) + 1 :]


def join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


def describe(example: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Shapes and types of an example's tensors, and its other values' types."""

    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(show, value))})"
        return (
            repr(value)
            if isinstance(value, (int, float, str, type(None)))
            else type(value).__name__
        )

    args, kwargs = example
    return ", ".join([*map(show, args), *(f"{k}={show(v)}" for k, v in kwargs.items())])
