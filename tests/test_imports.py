"""Imports point one way: mesh knows neither fsdp nor tp, these not each other, none knows who joins them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parallel3d"

# Which packages each may import, beside the modules of parallel3d itself that begin with an underscore.
MAY = {
    "mesh": set(),
    "guards": {"mesh"},
    "fsdp": {"mesh", "guards"},
    "tp": {"mesh"},
    "optim": {"mesh", "fsdp"},
    "testing": {"mesh", "audit", "checkpoint", "cp", "fsdp", "optim", "parallelize", "seeding"},
    "launch": {"mesh"},
}
ANYWHERE = {"errors", "__version__"}


def imported(path: Path) -> set[str]:
    """The parts of ``parallel3d`` that a file imports, in functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            whole = (
                [f"parallel3d.{alias.name}" for alias in node.names]
                if node.module == "parallel3d"
                else [node.module or ""]
            )
        elif isinstance(node, ast.Import):
            whole = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in whole if name.startswith("parallel3d.")}
    return found


@pytest.mark.parametrize("package", MAY)
def test_packages_import_in_one_direction(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        others = {n for n in imported(path) if not n.startswith("_") or n.startswith("__")}
        assert others - ANYWHERE <= MAY[package] | {package}, path


def test_shared_modules_import_no_package() -> None:
    """So that packages do not meet through them; ``parallelize``'s and the planner's are excepted."""
    for path in PACKAGE.glob("_*.py"):
        if path.name not in ("__init__.py", "_preflight.py", "_play.py"):
            assert not imported(path) & MAY.keys(), path


@pytest.mark.slow(every=True)
def test_private_names_of_torch_are_in_one_place() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE / "_torch":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                parts = (node.module or "").split(".") + [alias.name for alias in node.names]
                private = [p for p in parts if p.startswith("_")]
                assert not private, f"{path}:{node.lineno}: {private}"
