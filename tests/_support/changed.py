"""``pytest --changed``: the test files that a change concerns, for a loop of seconds.

A test file is run if it has changed, if it imports a changed file of ``tests/_support`` by whatever way, or
if it imports a changed module of the package, names it, or names a class or function of it. What imports
the module is not followed further: all tests reach the engine. Names that most tests have say nothing and are
left out. It is a choice for a first look; ``pytest -n auto`` and ``.ci/run`` choose none.
"""

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
IMPORT = re.compile(
    r"^ *(?:from (parallel3d[\w.]*|_support[\w.]*) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE
)
"""Of our own modules' names: groups are the module and the names, or the modules."""
COMMON = 40
"""A name in more test files than this is left out."""


def changed_since(ref: str) -> set[Path]:
    """The Python files that differ from ``ref``, and new ones."""
    commands = (
        ["git", "diff", "--name-only", ref],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = [
        subprocess.run(c, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for c in commands
    ]
    return {ROOT / name for each in names for name in each if name.endswith(".py")}


def concerned(changed: Iterable[Path]) -> set[Path]:
    """The test files to run after changes of these files."""
    files, changed = set(TESTS.rglob("test_*.py")), set(changed)
    found = files & changed
    for path in changed:
        if path.is_relative_to(TESTS / "_support"):
            found |= {file for file in files if _reaches(file, path, frozenset())}
        elif path.is_relative_to(ROOT / "parallel3d"):
            found |= _of_module(path, files)
    return found


def _of_module(path: Path, files: set[Path]) -> set[Path]:
    """Those that import the module at ``path``, or name it or something that it defines."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    defined = ast.parse(path.read_text()).body if path.exists() else []
    names = {path.stem} | {
        node.name for node in defined if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    found = {file for file in files if module in _imports(file)}
    for name in names:
        if name.startswith("_"):
            continue
        having = {
            file for file in files if re.search(rf"(\b|_){name}(\b|_)", _text(file) + file.stem)
        }
        found |= having if len(having) <= COMMON else set()
    return found


def _reaches(file: Path, path: Path, seen: frozenset[Path]) -> bool:
    """Whether ``file`` imports ``path``, directly or by other files of ``tests/_support``."""
    for module in _imports(file):
        support = TESTS.joinpath(*module.split(".")).with_suffix(".py")
        if support == path:
            return True
        if support not in seen and support.exists() and _reaches(support, path, seen | {file}):
            return True
    return False


@cache
def _text(file: Path) -> str:
    return file.read_text()


@cache
def _imports(file: Path) -> set[str]:
    """The modules that ``file`` imports, and names in them, which may be modules."""
    found = set()
    for module, names, modules in IMPORT.findall(_text(file)):
        found |= set(re.findall(r"[\w.]+", modules)) | {module} - {""}
        found |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    return found
