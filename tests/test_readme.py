"""The README's file tree is the tree."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Paths of the tree in the README."""
    block = (ROOT / "README.md").read_text().split("## Files")[1].split("```")[1]
    paths, folders = set(), []
    for line in filter(None, block.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        if not name.endswith("/"):
            paths.add("".join(folders))
    return paths


def test_every_source_file_is_listed() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("parallel3d", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" or path.parent == ROOT / "parallel3d"
    }
    assert {p for p in listed() if p.endswith(".py")} == found
