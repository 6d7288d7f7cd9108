"""The reference says what a caller needs: every argument of a public function, and every error it raises.

tests/docs/test_sphinx.py shows that each public name is on a page.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import nn

pytest.importorskip("lightning", reason="needs the extra clients, for integrations.lightning")

import parallel3d
from parallel3d import errors
from parallel3d.fsdp import FSDPModule

pytestmark = pytest.mark.slow(every=True)  # slow: it imports the whole package
PACKAGES = ["parallel3d", "parallel3d.mesh", "parallel3d.testing"] + [
    f"parallel3d.{name}"
    for name in parallel3d.__all__
    if isinstance(getattr(parallel3d, name), ModuleType)
]
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.Parallel3dError)
}


def public() -> Iterator[tuple[str, Any]]:
    """Every own class and function of a public ``__all__``, once."""
    found = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            own = (getattr(value, "__module__", None) or "").startswith("parallel3d")
            if own and (inspect.isclass(value) or inspect.isroutine(value)) and value not in found:
                found.add(value)
                yield f"{package}.{name}", value


def functions() -> Iterator[tuple[str, Any, str]]:
    """Name, function, docstring: public functions, constructors, and the methods of FSDPModule."""
    for name, value in public():
        if inspect.isroutine(value):
            yield name, inspect.unwrap(value), inspect.getdoc(value) or ""
        elif is_constructed(value):
            text = (value.__doc__ or "") + (value.__init__.__doc__ or "")
            yield name, value.__init__, text
    for name, method in vars(FSDPModule).items():
        own = not name.startswith("_") and not hasattr(nn.Module, name)
        if own and inspect.isfunction(method):
            text = inspect.getdoc(method) or ""
            setter = (
                name.startswith("set_") and f"``{list(inspect.signature(method).parameters)[1]}``"
            )
            text += (FSDPModule.__doc__ or "") + (setter or "")  # what it sets, its first line says
            yield f"parallel3d.fsdp.FSDPModule.{name}", method, text


def is_constructed(value: type) -> bool:
    """Whether callers make objects of it: no error, no protocol, nothing that a function returns."""
    own = "__init__" in vars(value) and not hasattr(value, "__dataclass_fields__")
    is_result = re.match(r"(What|The [\w ]+ that) ``.*`` (returns|yields)", value.__doc__ or "")
    return (
        own
        and not issubclass(value, Exception)
        and not getattr(value, "_is_protocol", False)
        and not is_result
    )


FUNCTIONS = list(functions())


def test_every_public_name_says_what_it_is() -> None:
    assert not [name for name, value in public() if not (value.__doc__ or "").strip()]


@pytest.mark.parametrize(
    ("function", "text"), [f[1:] for f in FUNCTIONS], ids=[f[0] for f in FUNCTIONS]
)
def test_arguments_and_errors(function: Any, text: str) -> None:
    parameters = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.name != "self" and not p.name.startswith("_") and p.kind != p.VAR_POSITIONAL
    ]
    missing = [name for name in parameters if not described(name, text)]
    assert not missing, "in Args, or as ``name`` in a sentence"
    assert not raised(function) - set(re.findall(r"\w+", text)), "in Raises"


def described(name: str, text: str) -> bool:
    in_args = rf"^\s*(?:[\w*]+, )*\**{name}(?:, [\w*]+)*:"
    return bool(re.search(in_args, text, re.MULTILINE) or re.search(rf"``{name}[`=.]", text))


def raised(function: Any) -> set[str]:
    """Errors of this package that the function's own lines raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [
        n.exc.func
        for n in ast.walk(tree)
        if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)
    ]
    return {getattr(call, "id", "") for call in calls} & ERRORS
