"""The house, measured: import circles and layers, the engine's files, what one step runs, lines.

    python tests/house.py

``tests/test_house.py`` holds what it measures to what DESIGN asks.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "parallel3d"

LAYERS: list[set[str]] = [
    {"errors", "_util", "_torch"},
    {"_layout", "mesh", "_trace"},
    {"guards"},
    {"fsdp", "tp"},
    {"cp", "ep", "activations", "audit", "_play"},
    {"optim", "parallelize", "materialize"},
    {"checkpoint", "observability", "testing", "planner", "integrations"},
    {"tools", "doctor", "dryrun", "launch"},
]
"""Of the package's entries: each imports its own layer and those before it."""

FSDP_LAYERS: list[set[str]] = [
    {"api", "layout", "schedule", "placement", "param", "collectives"},
    {"bucket", "records", "gradients", "accumulated", "reduction", "streams", "wire", "coalesced"},
    {"group", "members", "watch", "same_order"},
    {"unit", "context", "events"},
    {"options"},
    {"fully_shard", "state_dict", "module", "interop", "copying", "inspect"},
]
"""The same within ``fsdp``."""


def modules() -> dict[str, Path]:
    """Name within the package (``fsdp.unit``; "" for the package itself) -> its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(module of ours, line) of every import in ``path``, in functions and under TYPE_CHECKING too."""
    known = set(known)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            wanted = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, member in wanted:
            if module != "parallel3d" and not module.startswith("parallel3d."):
                continue
            module = module.removeprefix("parallel3d").removeprefix(".")
            inner = f"{module}.{member}".removeprefix(".")
            target = inner if member is not None and inner in known else module
            if target == inner and member in public(module):
                target = module  # a name that the package gives out, as well as a module
            if target != name:
                yield target, node.lineno


@lru_cache
def public(package: str) -> frozenset[str]:
    """``__all__`` of a package: what is under ``if TYPE_CHECKING``."""
    path = PACKAGE.joinpath(*filter(None, package.split("."))) / "__init__.py"
    body = ast.parse(path.read_text()).body if path.exists() else []
    blocks = (node for node in body if isinstance(node, ast.If))
    imports = (each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom))
    return frozenset(alias.name for each in imports for alias in each.names)


def graph() -> dict[str, dict[str, int]]:
    """Module -> module that it imports -> the line."""
    known = modules()
    return {name: dict(imported(name, path, known)) for name, path in known.items()}


def circles(edges: dict[str, dict[str, int]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges.get(name, ()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for name in edges:
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def wrong_layers(
    edges: dict[str, dict[str, int]], layers: list[set[str]], inside: str = ""
) -> list[str]:
    """Imports of a later layer, and modules that no layer knows.

    Args:
        inside: a package whose entries ``layers`` are of; "" for parallel3d's own.
    """
    level = {name: number for number, names in enumerate(layers) for name in names}
    prefix = f"{inside}." if inside else ""
    wrong = []
    for name, targets in edges.items():
        if not name.startswith(prefix) or name in ("", inside, "__main__"):
            continue
        entry = name.removeprefix(prefix).split(".")[0]
        if entry not in level:
            wrong.append(f"{name}: in no layer")
            continue
        for target, line in targets.items():
            if not target.startswith(prefix) or target in ("", inside):
                continue
            if level.get(target.removeprefix(prefix).split(".")[0], -1) > level[entry]:
                wrong.append(f"{name}:{line} imports {target}")
    return wrong


_PATCHED = re.compile(
    r"\b(register_module_\w+_hook|register_optimizer_step_\w+_hook|wrap_backward|route_data|wrap_operators"
    r"|watch_writes|wrap_steps|excepthook)\(|\bimport gc\b|\bsys\.excepthook = "
)


def watches() -> dict[str, set[str]]:
    """Module of the engine -> what it does to torch, or to the interpreter, in the process as a whole."""
    found = {}
    for name, path in modules().items():
        if name.startswith(("fsdp", "_util")):
            names = {match.group() for match in _PATCHED.finditer(path.read_text())}
            found |= {name: names} if names else {}
    return found


def same_class_names() -> dict[str, list[str]]:
    """Name of a class -> the modules that have one of that name, where there are several."""
    found = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def reaches_inside(edges: dict[str, dict[str, int]]) -> list[str]:
    """Imports by other packages of modules of ``fsdp`` other than ``fsdp.inspect``, and pure ones."""
    allowed = ("fsdp", "fsdp.inspect", "fsdp.layout", "fsdp.schedule")
    return [
        f"{name}:{line} imports {target}"
        for name, targets in edges.items()
        if not name.startswith("fsdp") and name
        for target, line in targets.items()
        if target.startswith("fsdp.") and target not in allowed
    ]


def step() -> dict[str, set[str]]:
    """File of ours -> the functions that a plain FSDP step runs, from the root's forward to ``.grad``.

    The third step of four units on a fake group of eight, on the CPU's path.
    """
    import torch
    from torch import nn

    from parallel3d import MeshLayout, build_mesh, fully_shard
    from parallel3d.testing import fake_world

    ran: dict[str, set[str]] = defaultdict(set)

    def note(frame, event, arg) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            ran[str(Path(file).relative_to(PACKAGE))].add(frame.f_code.co_qualname)

    with fake_world(0, 8):
        mesh = build_mesh(MeshLayout(shard=8), device_type="cpu")
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            if number == 2:
                gc.collect()  # what earlier programs have left would be noted too
                gc.disable()
                sys.setprofile(note)
            try:
                model(torch.ones(2, 64)).sum().backward()
            finally:
                sys.setprofile(None)
                gc.enable()
            optimizer.step()
            optimizer.zero_grad()
    return dict(ran)


def lines(paths: Iterable[Path]) -> int:
    """Of all files together."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def top() -> list[str]:
    """What the package's folder shows, but for second names of what is in ``tools``."""
    hidden = {"__pycache__", "py.typed", "doctor.py", "dryrun.py", "launch.py"}
    return sorted(path.name for path in PACKAGE.iterdir() if path.name not in hidden)


def engine_files() -> list[str]:
    """The engine's files, but for empty ``__init__`` s."""
    return sorted(
        str(path.relative_to(PACKAGE))
        for path in (PACKAGE / "fsdp").rglob("*.py")
        if len(path.read_text().splitlines()) > 1
    )


def main() -> None:
    edges, files = graph(), modules()
    found = circles(edges)
    ran = step()
    print(f"entries at the top: {len(top())}")
    print(f"lines: {lines(files.values()):,} in {len(files)} files")
    longest = sorted(files.values(), key=lambda path: -lines([path]))[:5]
    print("longest files:", *(f"{p.relative_to(PACKAGE)} {lines([p])}" for p in longest))
    print(f"engine: {len(engine_files())} files, {lines((PACKAGE / 'fsdp').rglob('*.py')):,} lines")
    print(f"circles: {len(found)}")
    for circle in found:
        print("   ", *circle)
    for what, wrong in (
        ("imports against the layers", wrong_layers(edges, LAYERS)),
        ("within fsdp", wrong_layers(edges, FSDP_LAYERS, "fsdp")),
        ("imports of fsdp's inside", reaches_inside(edges)),
    ):
        print(f"{what}: {len(wrong)}", *wrong, sep="\n    ")
    total = lines(PACKAGE / name for name in ran)
    functions = sum(map(len, ran.values()))
    print(f"one step: {len(ran)} files, {total:,} lines, {functions} functions")
    for name in sorted(ran, key=lambda name: -len(ran[name])):
        print(f"    {name} ({lines([PACKAGE / name])}): {', '.join(sorted(ran[name]))}")


if __name__ == "__main__":
    main()
