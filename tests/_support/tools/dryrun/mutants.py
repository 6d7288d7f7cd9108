"""The engine's code of streams with one wait, or one reference that keeps memory alive, taken out."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

FILES = {
    "parallel3d.fsdp.streams": "StreamComm _InFlight _On",
    "parallel3d.fsdp.reduction": "AllReduce Comm ReduceScatter sum_over_tp",
    "parallel3d.fsdp.wire": "",
    "parallel3d.fsdp.collectives": "ScatterWork",
    "parallel3d.fsdp.options.hfsdp": "",
    "parallel3d.fsdp.options.comm_hooks": "",
    "parallel3d.fsdp.options.gather_extension": "",
    "parallel3d.activations.offload": "",
    "parallel3d.cp.collectives": "Rotation",
}
"""Modules with code of streams, and the names in them that it is in; ``""``: all."""

WAITS = ("wait_stream", "wait_event", "synchronize", "wait")
KEPT = {  # what keeps memory alive, and what it becomes
    "flight.held.append(job.tensor)": "pass",
    "bucket.gathering = event, inputs": "bucket.gathering = event, None",
    "self.source: list[torch.Tensor] | None = job.inputs": "self.source = []",
    "moved.append(found)": "found.release()",
}


@dataclass(frozen=True)
class Mutant:
    """One line of a function that is replaced by another.

    Attributes:
        module, function: where the line is; ``function`` is its qualified name.
        number: which of the function's equal lines it is. line: its text.
        becomes: what it is replaced by.
    """

    module: str
    function: str
    line: str
    number: int
    becomes: str

    def __str__(self) -> str:
        number = f" ({self.number + 1})" if self.number else ""
        return (
            f"{self.module.removeprefix('parallel3d.fsdp.')}.{self.function}: {self.line}{number}"
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the body the function runs without the line."""
        module = importlib.import_module(self.module)
        source = inspect.getsource(module).splitlines()
        function = _functions(module)[self.function]
        lines = dict(_places(module))[self.function]
        places = [at - 1 for at in lines if _bare(source[at - 1]) == self.line]
        at = places[self.number]
        indent = source[at][: len(source[at]) - len(source[at].lstrip())]
        source[at] = indent + self.becomes
        changed = compile("\n".join(source), module.__file__ or "?", "exec")
        code = function.__code__
        function.__code__ = _code_of(changed, self.function)
        try:
            yield
        finally:
            function.__code__ = code


def mutants() -> list[Mutant]:
    """Returns all of them, in the order of the files."""
    found: list[Mutant] = []
    for name, within in FILES.items():
        module = importlib.import_module(name)
        places = _places(module)
        for at, text in enumerate(inspect.getsource(module).splitlines(), 1):
            line = _bare(text)
            becomes = KEPT.get(line) or ("pass" if _is_wait(line) else None)
            function = next((name for name, lines in places if at in lines), "")
            if becomes and function and (not within or function.split(".")[0] in within.split()):
                number = sum(
                    m.module == name and m.function == function and m.line == line for m in found
                )
                found.append(Mutant(name, function, line, number, becomes))
    return found


def _bare(text: str) -> str:
    return text.partition("  #")[0].strip()


def _is_wait(line: str) -> bool:
    if not any(name in line for name in WAITS):
        return False
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):
        return False
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in WAITS
    )


def _functions(module: Any) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}

    def add(owner: Any, prefix: str) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
                found[prefix + name] = value
            elif isinstance(value, type) and value.__module__ == module.__name__ and not prefix:
                add(value, f"{name}.")

    add(module, "")
    return found


def _places(module: Any) -> list[tuple[str, range]]:
    """The functions' qualified names, and the lines that each has."""
    found = []
    for name, function in _functions(module).items():
        code = function.__code__
        last = max((number for _, _, number in code.co_lines() if number), default=0)
        found.append((name, range(code.co_firstlineno, last + 1)))
    return found


def _code_of(code: CodeType, name: str) -> CodeType:
    for part in name.split("."):
        (code,) = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part]
    return code
