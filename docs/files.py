"""Writes docs/files.md: a line for each file of the package, from its docstring.

python docs/files.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"

HEAD = """# Files

Written by `python docs/files.py` from the docstrings; `tests/docs/test_files.py` checks that it is up to
date. [How the engine works](engine.md) says in which order to read the engine.
"""


def first_sentence(path: Path) -> str:
    """Of the file's docstring; its first line where that goes on."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return (paragraph if end < 0 else paragraph[: end + 1]).replace("|", "\\|")


def page() -> str:
    """In Markdown: a table for each folder."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted((ROOT / "parallel3d").rglob("*.py")):
        folders.setdefault(path.parent, []).append(path)
    parts = [HEAD]
    for folder in sorted(folders):
        rows = []
        for path in folders[folder]:
            says = first_sentence(path)
            if says:
                rows.append(f"| `{path.name}` | {says} |\n")
        if rows:
            title = folder.relative_to(ROOT)
            parts.append(f"## {title}\n\n| file | what |\n|---|---|\n{''.join(rows)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
