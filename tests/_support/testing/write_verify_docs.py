"""Writes the runs and the table of docs/verify.md, when run as a script from the root."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "verify.md"


def example(text: str) -> str:
    """The file of the example."""
    found = re.search(r"```python\n# check\.py\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def run_example(folder: Path, text: str, plan: str) -> str:
    """What the command prints of it, in ``folder``."""
    from typer.testing import CliRunner

    from parallel3d.tools.cli.app import app

    (folder / "check.py").write_text(example(text))
    sys.modules.pop("check", None)
    words = (
        "audit --relation plain --replicate 2 --tp 2 check:build_model --input check:make_batch "
        "--loss check:loss"
    )
    result = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, [*words.split(), "--plan", f"check:{plan}"]
    )
    assert result.exit_code == (plan != "PLAN"), result.output
    return result.stdout


def written(text: str, shown: dict[str, str]) -> str:
    """``text`` with what the runs show, the count and the table."""
    from _support.testing.verify_faults import FAULTS, table

    for name, output in shown.items():
        pattern = rf"(<!-- {name} -->\n```\n).*?(```)"
        text = re.sub(pattern, lambda m, o=output: m[1] + o + m[2], text, flags=re.S)
    count = f"names the right module in all {len(FAULTS)} of {len(FAULTS)}"
    text = re.sub(r"names the right module in all \d+ of \d+", count, text)
    return re.sub(
        r"(<!-- faults -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}{table()}\n{m[2]}",
        text,
        flags=re.S,
    )


def main() -> None:
    """Runs the example and writes."""
    import os
    import tempfile

    text = DOCS.read_text()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        shown = {plan: run_example(Path(name), text, plan) for plan in ("PLAN", "WRONG")}
    DOCS.write_text(written(text, shown))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / p) for p in ("tests", "examples/llama")]
    main()
