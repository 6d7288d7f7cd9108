"""Public names that are imported on first access.

``import parallel3d`` must add almost nothing to ``import torch``. Most of what it would load is torch's own:
DTensor alone imports sympy, which takes half a second. A package lists its exports once, as type checkers
read them: ``from ... import name as name`` under ``if TYPE_CHECKING``.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package whose ``_exports`` (name -> module that defines it) and submodules are imported on access."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self._exports:
            value = getattr(importlib.import_module(self._exports[name]), name)
            vars(self)[name] = value
            return value
        path = f"{self.__name__}.{name}"
        # ``parallel3d.mesh.layout`` works without an import of its own.
        if not name.startswith("__") and find_spec(path) is not None:
            return importlib.import_module(path)
        from difflib import get_close_matches

        names = vars(self).get("__all__", [])
        nearest = get_close_matches(name, names, n=3, cutoff=0.5) or names
        raise AttributeError(
            f"module {self.__name__!r} has no {name!r}; the nearest of its names: {', '.join(nearest)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Keeps a function in its place when Python sets the module of the same name (``fully_shard``)."""
        if isinstance(value, ModuleType) and self._exports.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*(name for name in vars(self) if name.startswith("__")), *vars(self)["__all__"]]


def export_lazily(package: str) -> None:
    """Gives the calling package, of this ``__name__``, what its source imports under ``if TYPE_CHECKING``.

    These names are its ``__all__``; each is imported on first access.
    """
    module = sys.modules[package]
    where: dict[str, str] = {}
    for block in ast.parse(inspect.getsource(module)).body:
        for node in block.body if isinstance(block, ast.If) else ():
            assert isinstance(node, ast.ImportFrom) and node.module is not None
            where |= {alias.name: node.module for alias in node.names}
    vars(module)["__all__"] = sorted(where)
    vars(module)["_exports"] = {name: at for name, at in where.items() if at != package}
    module.__class__ = _LazyPackage


class _Aliases(MetaPathFinder, Loader):
    """Imports ``parallel3d.tools.dryrun`` under the name ``parallel3d.dryrun``."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        for alias, real in self._aliases.items():
            if name == alias or name.startswith(f"{alias}."):
                return spec_from_loader(name, self, origin=real + name[len(alias) :])
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # importlib has set the alias's


def alias_packages(package: str, aliases: Mapping[str, str]) -> None:
    """Makes packages importable, and attributes of ``package``, under a second name.

    Args:
        package: ``__name__`` of the calling package.
        aliases: second name -> first name, both relative to ``package``.
    """
    absolute = {f"{package}.{alias}": f"{package}.{name}" for alias, name in aliases.items()}
    sys.meta_path.insert(0, _Aliases(absolute))  # before the finder of files
