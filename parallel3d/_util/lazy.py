"""Public names that are imported on first access.

``import parallel3d`` must add almost nothing to ``import torch``. Most of what it would load is torch's own:
DTensor alone imports sympy, which takes half a second. A package lists its exports twice: under ``if
TYPE_CHECKING`` as type checkers read them, ``from ... import name as name``, and under its ``else`` as a
dict, which is there without sources too. ``tests/test_lazy.py`` compares the two.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec, resolve_name
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """Class of a package that imports its exports (``_exports``: name -> module) and submodules on access."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self._exports:
            value = getattr(importlib.import_module(self._exports[name]), name)
            vars(self)[name] = value
            return value
        path = f"{self.__name__}.{name}"
        # ``parallel3d.mesh.layout`` works without an import of its own.
        if not name.startswith("__") and "__path__" in vars(self) and find_spec(path) is not None:
            return importlib.import_module(path)
        from difflib import get_close_matches

        names = vars(self).get("__all__", [])
        nearest = get_close_matches(name, names, n=3, cutoff=0.5) or names
        raise AttributeError(
            f"module {self.__name__!r} has no {name!r}; the nearest of its names: {', '.join(nearest)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignores Python's setting of a submodule that has the name of an export (``fully_shard``)."""
        if not (isinstance(value, ModuleType) and name in self._exports):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*(name for name in vars(self) if name.startswith("__")), *vars(self)["__all__"]]


def export_lazily(package: str, exports: Mapping[str, str]) -> None:
    """Gives a package names that are imported on first access; they are its ``__all__``.

    Args:
        package: ``__name__`` of the calling package.
        exports: module -> the names that it defines, with spaces between. A module that begins with a dot
            is relative to the package; "." is the package itself, the names then its subpackages.
    """
    module = sys.modules[package]
    where = {n: resolve_name(at, package) for at, names in exports.items() for n in names.split()}
    vars(module)["__all__"] = sorted(where)
    vars(module)["_exports"] = {name: at for name, at in where.items() if at != package}
    module.__class__ = _LazyPackage


def export_as(module: str, package: str) -> None:
    """Gives the module named ``module``, a second name of ``package``, the exports of that package."""
    named, real = sys.modules[module], importlib.import_module(package)
    vars(named).update({each: vars(real)[each] for each in ("__all__", "_exports")})
    named.__class__ = _LazyPackage
