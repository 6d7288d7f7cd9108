"""Patterns: how a plan's key names modules and parameters."""

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from parallel3d.errors import PlanError

__all__ = ["expand", "has_wildcard", "matches", "nearest", "numberless", "specificity"]

_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def expand(pattern: str) -> list[str]:
    """The patterns a pattern with brace sets stands for, without them.

    ``"layers.*.{q,k,v}_proj"`` is three. A set isn't nested, and no alternative is empty.

    Raises:
        PlanError: braces that are nested, unbalanced or hold an empty alternative; not a string.
    """
    if not isinstance(pattern, str):
        raise PlanError(
            f"a pattern is a module's path such as 'layers.*.wq', not {type(pattern).__name__}"
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)  # literal, alternatives, literal, ...
    if any(brace in literal for literal in parts[::2] for brace in "{}"):
        raise PlanError(
            "its braces are unbalanced or one set is inside another; write a set as {q,k,v}_proj"
        )
    found = [parts[0]]
    for alternatives, literal in zip(parts[1::2], parts[2::2], strict=True):
        choices = [choice.strip() for choice in alternatives.split(",")]
        if not all(choices):
            raise PlanError(f"the set {{{alternatives}}} has an empty alternative")
        found = [f"{head}{choice}{literal}" for head in found for choice in choices]
    return list(dict.fromkeys(found))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without brace sets matches a path, segment by segment; ``""`` is the root.

    ``*`` stands for any characters within one segment, so for a layer's number too; ``?`` for one
    character and ``[...]`` for one of some.
    """
    if pattern == "" or name == "":
        return pattern == name
    # With as many dots in both, each of the pattern's has one: a wildcard that took one is one too few.
    return pattern.count(".") == name.count(".") and fnmatchcase(name, pattern)


def has_wildcard(pattern: str) -> bool:
    """Whether the pattern can match more than one path."""
    return bool(_WILDCARDS.search(pattern))


def specificity(pattern: str) -> tuple[int, int]:
    """Larger for the more specific of two patterns: segments, then characters, without wildcard."""
    literal = [segment for segment in pattern.split(".") if not has_wildcard(segment)]
    return len(literal), len(_WILDCARDS.sub("", pattern))


def numberless(path: str) -> str:
    """A path with ``*`` for each number that is a whole segment: the same for all layers."""
    return _NUMBER.sub("*", path)


def nearest(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """Paths, layers' numbers as ``*``, that look like ``pattern``."""
    # Numbered modules once each, so that one layer's names don't fill the list.
    names = dict.fromkeys(numberless(path) for path in paths if path)
    return difflib.get_close_matches(numberless(pattern), names, count, 0.4)
