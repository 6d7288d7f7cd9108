"""Public names that are imported when they are first asked for.

``import parallel3d`` must cost next to nothing beside ``import torch``, and most of what it would load is
torch's own: DTensor alone brings sympy, for half a second and more. A package says twice what it exports,
under ``if TYPE_CHECKING`` for readers and type checkers and to ``export_lazily`` for Python.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package whose ``_exports`` (name -> module that has it) and modules come when asked for."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there yet."""
        if name in self._exports:
            value = getattr(importlib.import_module(self._exports[name]), name)
            vars(self)[name] = value
            return value
        path = f"{self.__name__}.{name}"
        # ``parallel3d.mesh.layout`` without an import of its own: as if all had been imported at once.
        if not name.startswith("__") and find_spec(path) is not None:
            return importlib.import_module(path)
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        """An import of ``fsdp.fully_shard`` puts the module there, where the function has its place."""
        if isinstance(value, ModuleType) and self._exports.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._exports})

    def _unknown(self, name: str) -> str:
        from difflib import get_close_matches

        names = vars(self).get("__all__", [])
        nearest = get_close_matches(name, names, n=3, cutoff=0.5) or names
        return f"module {self.__name__!r} has no {name!r}; the nearest of its names: {', '.join(nearest)}"


def export_lazily(package: str, exports: Mapping[str, str]) -> None:
    """Lets ``package`` have the names of ``exports`` without loading what they are in.

    Args:
        package: ``__name__`` of the package that calls this.
        exports: module, without ``parallel3d.`` -> the names it has, separated by spaces.
    """
    module = sys.modules[package]
    root = package.partition(".")[0]
    where = {name: f"{root}.{at}" for at, names in exports.items() for name in names.split()}
    vars(module)["_exports"] = where
    module.__class__ = _LazyPackage


class _Aliases(MetaPathFinder, Loader):
    """Finds ``parallel3d.dryrun``, which users import, where it is: in ``parallel3d.tools.dryrun``."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases

    def _real(self, name: str) -> str | None:
        for alias, at in self._aliases.items():
            if name == alias or name.startswith(f"{alias}."):
                return at + name[len(alias) :]
        return None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if self._real(name) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        real = self._real(spec.name)
        assert real is not None
        module = importlib.import_module(real)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # importlib has put the alias's there


def alias_packages(package: str, aliases: Mapping[str, str]) -> None:
    """Makes packages importable, and attributes of ``package``, under a second name.

    Args:
        package: ``__name__`` of the package that calls this.
        aliases: second name -> where the package is, both relative to ``package``.
    """
    whole = {f"{package}.{name}": f"{package}.{at}" for name, at in aliases.items()}
    sys.meta_path.insert(0, _Aliases(whole))  # before the finder of files, for modules inside
