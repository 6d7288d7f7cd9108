"""Dry runs as JSON and back, without loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun.result import DryRun

VERSION = 1
_FORMAT = "parallel3d dry run"
_PLAIN = (str, int, float, bool, type(None))


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
        found: DryRun = _reader(DryRun)(data["run"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DryRunError(f"a damaged dry run: {type(error).__name__}: {error}") from error
    return found


def _encoded(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value):
        return {each.name: _encoded(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _encoded(each) for key, each in value.items()}
    if value and is_dataclass(value[0]):
        names = [each.name for each in fields(value[0])]
        rows = [[_encoded(getattr(item, name)) for name in names] for item in value]
        return {"columns": names, "rows": rows}
    return [_encoded(each) for each in value]


@lru_cache(maxsize=64)
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a ``kind``, a type as in annotations, of JSON; it raises a TypeError if that is no such."""
    if is_dataclass(kind):
        made: Any = kind
        return lambda value: _row_reader(made, tuple(value))(value.values())
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (other,) = [_reader(each) for each in inner if each is not type(None)]
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        return _tuple_reader(inner)
    if origin is dict:
        of_value = _reader(inner[1])
        return lambda value: {key: of_value(each) for key, each in value.items()}

    def plain(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"{value!r} is no {kind.__name__}")

    return plain


def _tuple_reader(inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    kind, any_length = inner[0], inner[-1] is Ellipsis
    each = _reader(kind)

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, dict):
            of_row = _row_reader(kind, tuple(value["columns"]))
            return tuple(map(of_row, value["rows"]))
        if not any_length and len(value) != len(inner):
            raise TypeError(f"{value!r} has not {len(inner)} parts")
        return tuple(map(each, value))

    return read


@lru_cache(maxsize=64)
def _row_reader(kind: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    """What makes a ``kind`` of its fields' values, in the order of ``names``."""
    hints = get_type_hints(kind)
    if unknown := set(names) - set(hints):
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    needed = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }
    if missing := needed - set(names):
        raise TypeError(f"{kind.__name__} without {min(missing)!r}")
    readers = [_reader(hints[name]) for name in names]

    def read(row: Any) -> Any:
        return kind(**{n: of(v) for n, of, v in zip(names, readers, row, strict=True)})

    def read_in_order(row: Any) -> Any:
        return kind(*[of(value) for of, value in zip(readers, row, strict=True)])

    if names == tuple(each.name for each in fields(kind))[: len(names)]:
        return read_in_order

    return read
