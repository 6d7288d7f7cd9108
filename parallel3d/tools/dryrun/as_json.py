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


def to_json(run: DryRun) -> str:
    """Returns the dry run ``run`` as one line of JSON, which ``from_json`` reads.

    A tuple of records, such as operations, is a table: ``{"columns": [...], "rows": [[...], ...]}``.
    Later versions of this package read it too; fields that are new there get their defaults.
    """
    data = {"format": _FORMAT, "version": VERSION, "run": _encoded(run)}
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str | bytes) -> DryRun:
    """Returns the dry run that ``to_json`` wrote.

    Raises:
        DryRunError: ``text`` is not a dry run, or is of a version that this one doesn't know.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DryRunError(f"this is not a dry run: no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DryRunError(f'this is not a dry run: JSON without "format": {_FORMAT!r}')
    if data.get("version") != VERSION:
        raise DryRunError(
            f"a dry run of version {data.get('version')!r}; this parallel3d reads version {VERSION}: "
            "write it again with this one"
        )
    try:
        return decoded(DryRun, data["run"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DryRunError(f"a damaged dry run: {type(error).__name__}: {error}") from error


def _encoded(value: Any) -> Any:
    """Returns records as dicts and tuples of records as tables."""
    if is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple) and value and is_dataclass(value[0]):
        names = [field.name for field in fields(value[0])]
        rows = [[_encoded(getattr(item, name)) for name in names] for item in value]
        return {"columns": names, "rows": rows}
    return value


def decoded(kind: Any, value: Any) -> Any:
    """Makes a ``kind``, a type as in annotations, from JSON values.

    Raises:
        TypeError: ``value`` is not of that type.
    """
    return _decoder(kind)(value)


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        record: Any = kind
        return lambda value: _row_decoder(record, tuple(value))(value.values())
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (other,) = [_decoder(each) for each in inner if each is not type(None)]
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        of_item, size = _decoder(inner[0]), None if inner[-1] is Ellipsis else len(inner)

        def items(value: Any) -> tuple[Any, ...]:
            if isinstance(value, dict):
                return tuple(map(_row_decoder(inner[0], tuple(value["columns"])), value["rows"]))
            if size is not None and len(value) != size:
                raise TypeError(f"{value!r} has not {size} items")
            return tuple(map(of_item, value))

        return items
    if origin is dict:
        of_value = _decoder(inner[1])
        return lambda value: {key: of_value(item) for key, item in value.items()}

    def plain(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"{value!r} is no {kind.__name__}")

    return plain


@lru_cache(maxsize=64)
def _row_decoder(kind: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    """Returns what makes a ``kind`` from its fields' values in the order of ``names``."""
    hints = get_type_hints(kind)
    if unknown := set(names) - set(hints):
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    if missing := needed - set(names):
        raise TypeError(f"{kind.__name__} without {min(missing)!r}")
    decoders = [_decoder(hints[name]) for name in names]

    def decode(row: Any) -> Any:
        values = [of_value(value) for of_value, value in zip(decoders, row, strict=True)]
        return kind(**dict(zip(names, values, strict=True)))

    return decode
