"""``.. public:: parallel3d.fsdp``: the reference of everything in that package's ``__all__``.

Packages export lazily, from modules that nobody should import by name, so autodoc's ``automodule`` would find
the names in the wrong place or not at all. Here each name is documented under the package that exports it:
first a table, then each. What several packages export is described under the first of them, and the others
refer to it; what is torch's own is named as such, without torch's text.
"""

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = "parallel3d"
logger = logging.getLogger(__name__)
PAGES = sorted(page.stem for page in (Path(__file__).parents[1] / "api").glob("*.rst"))
PACKAGES = (ROOT, *(f"{ROOT}.{page}" for page in PAGES if page != ROOT))
"""The packages that have a page, the root first."""


def public_names(package: str) -> list[str]:
    """What ``package`` exports, packages left out: they have pages of their own."""
    module = importlib.import_module(package)
    return [n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)]


def documented_under(package: str, name: str) -> str:
    """The full name of where ``name`` of ``package`` is described: the first package that exports it."""
    value = getattr(importlib.import_module(package), name)
    for other in PACKAGES:
        if other == package:
            break
        exported = importlib.import_module(other)
        if name in exported.__all__ and getattr(exported, name) is value:
            return f"{other}.{name}"
    return f"{package}.{name}"


def is_torchs(value: Any) -> bool:
    """Whether ``value`` is a class or function that torch defines."""
    return getattr(value, "__module__", None) is not None and value.__module__.startswith("torch.")


def is_data(value: Any) -> bool:
    return not (inspect.isclass(value) or inspect.isroutine(value))


def kind(value: Any) -> str:
    """The reference's word for it: exception, class, data or function."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "data" if is_data(value) else "function"


class Public(SphinxDirective):
    """The directive; its argument is the package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = importlib.import_module(package)
        names = sorted(public_names(package), key=lambda n: (kind(getattr(module, n)), n.lower()))
        own = [n for n in names if not is_torchs(getattr(module, n))]
        lines = [".. list-table::", "   :widths: 30 70", ""]
        for name in own:
            lines += [
                f"   * - :py:obj:`{name} <{package}.{name}>`",
                f"     - {summary(module, name)}",
            ]
        lines.append("")
        for name in names:
            lines += [*self._entry(package, name, getattr(module, name)), ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)

    def _entry(self, package: str, name: str, value: Any) -> Iterator[str]:
        full = f"{package}.{name}"
        where = documented_under(package, name)
        role = {"function": "func", "exception": "exc", "data": "data"}.get(kind(value), "class")
        if is_torchs(value):
            yield from (
                f".. py:{kind(value)}:: {full}",
                "",
                f"   ``{_public_path(value)}``, torch's own.",
            )
        elif where != full:
            yield from (f".. py:{kind(value)}:: {full}", "", f"   See :py:{role}:`{where}`.")
        elif is_data(value):
            yield from (
                f".. py:data:: {full}",
                "",
                *_indented(_comment_of(module_of(package, name), name)),
            )
        elif role in ("class", "exc"):
            yield from (f".. auto{kind(value)}:: {full}", "   :members:", "   :inherited-members:")
        else:
            yield f".. autofunction:: {full}"


def summary(module: ModuleType, name: str) -> str:
    """The first sentence that describes it, on one line."""
    value = getattr(module, name)
    if is_data(value):
        text = " ".join(_comment_of(module_of(module.__name__, name), name))
    else:
        text = inspect.getdoc(value) or ""
    paragraph = " ".join(text.split("\n\n")[0].split()).removesuffix("::")
    return re.split(r"(?<=[.:;]) (?=[A-Z`]|$)", paragraph)[0].rstrip(":;")


def module_of(package: str, name: str) -> str:
    """The module that ``package`` takes ``name`` from."""
    return vars(importlib.import_module(package))["_exports"][name]


def _comment_of(module: str, name: str) -> list[str]:
    """The string below the assignment of ``name``."""
    found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
    if found is None:
        logger.warning("%s.%s: no string below it says what it is", module, name)
    return found or []


def _indented(lines: list[str]) -> list[str]:
    return [f"   {line}" for line in lines]


def _public_path(value: Any) -> str:
    """The shortest path of ``torch.distributed`` that has it."""
    for path in ("torch.distributed.fsdp", "torch.distributed.fsdp.api"):
        if getattr(importlib.import_module(path), value.__name__, None) is value:
            return f"{path}.{value.__name__}"
    return f"{value.__module__}.{value.__name__}"


def only_ours(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Of a class's members those that are written in this package, with a docstring."""
    if what not in ("class", "exception"):
        return None
    function = inspect.unwrap(obj.fget if isinstance(obj, property) else obj) if obj else obj
    origin = getattr(function, "__module__", None) or ""
    if isinstance(obj, enum.Enum):
        return None
    return True if not origin.startswith(ROOT) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("public", Public)
    app.connect("autodoc-skip-member", only_ours)
    return {"parallel_read_safe": True}
