"""examples/one_process.ipynb: its cells run one after another in one namespace, without Jupyter.

python tests/_support/docs/notebook.py    # runs it, and writes what each cell prints into it
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[3] / "examples" / "one_process.ipynb"


def run(cells: list[dict[str, Any]]) -> list[str]:
    """What each cell of code prints."""
    names: dict[str, Any] = {"__name__": "notebook"}
    printed = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            printed.append(out.getvalue())
    return printed


def kept(cells: list[dict[str, Any]]) -> list[str]:
    """What each cell of code printed when the notebook was written."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in code]


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, run(notebook["cells"]), strict=True), 1):
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell.update(execution_count=number, outputs=[stream] if lines else [])
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
