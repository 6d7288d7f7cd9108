"""Dry runs as JSON and back, without loss."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from parallel3d.dryrun.result import DryRun
from parallel3d.errors import DryRunError

__all__ = ["VERSION", "from_json", "to_json"]

VERSION = 1
_FORMAT = "parallel3d dry run"


def to_json(run: DryRun) -> str:
    """One line of JSON, which ``from_json`` reads.

    Many equal things, such as operations, are a table: ``{"columns": [...], "rows": [[...], ...]}``. A later
    version of this package reads it; values that are new there get their defaults.
    """
    data = {"format": _FORMAT, "version": VERSION, "run": _encoded(run)}
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str | bytes) -> DryRun:
    """The dry run that ``to_json`` wrote.

    Raises:
        DryRunError: it is no such text, or of a version that this one doesn't know.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DryRunError(f"this is no dry run: no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DryRunError(f'this is no dry run: JSON without "format": {_FORMAT!r}')
    if data.get("version") != VERSION:
        raise DryRunError(
            f"a dry run of version {data.get('version')!r}; this parallel3d reads version {VERSION}: "
            "write it again with this one"
        )
    try:
        found: DryRun = _decoded(data["run"], DryRun)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DryRunError(f"a damaged dry run: {type(error).__name__}: {error}") from error
    return found


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _encoded(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _encoded(each) for key, each in value.items()}
    if not isinstance(value, tuple | list):
        return value
    if value and is_dataclass(value[0]):
        names = [each.name for each in fields(value[0])]
        rows = [[_encoded(getattr(item, name)) for name in names] for item in value]
        return {"columns": names, "rows": rows}
    return [_encoded(each) for each in value]


def _decoded(value: Any, kind: Any) -> Any:
    """``value`` as ``kind`` says it is."""
    if is_dataclass(kind):
        return _made(kind, value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (kind,) = [each for each in inner if each is not type(None)]
        return None if value is None else _decoded(value, kind)
    if origin is tuple:
        return _items(value, inner)
    if origin is dict:
        return {key: _decoded(each, inner[1]) for key, each in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _items(value: Any, inner: tuple[Any, ...]) -> tuple[Any, ...]:
    kind = inner[0]
    if isinstance(value, dict):
        names = value["columns"]
        build = _maker(kind, names)
        return tuple(build(row) for row in value["rows"])
    if inner[-1] is not Ellipsis and len(value) != len(inner):
        raise TypeError(f"{value!r} has not {len(inner)} parts")
    return tuple(_decoded(each, kind) for each in value)


def _maker(kind: Any, names: list[str]) -> Any:
    """What makes a ``kind`` of a row whose columns have these names."""
    hints = get_type_hints(kind)
    _check_names(kind, set(names), hints)

    def build(row: list[Any]) -> Any:
        pairs = zip(names, row, strict=True)
        return kind(**{name: _decoded(value, hints[name]) for name, value in pairs})

    return build


def _made(kind: Any, value: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    _check_names(kind, set(value), hints)
    return kind(**{name: _decoded(each, hints[name]) for name, each in value.items()})


def _check_names(kind: Any, names: set[str], hints: dict[str, Any]) -> None:
    if unknown := names - set(hints):
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    needed = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }
    if missing := needed - names:
        raise TypeError(f"{kind.__name__} without {min(missing)!r}")
