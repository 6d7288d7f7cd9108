"""Draws docs/screens/*.svg: what the commands print on a terminal, with the command that was run.

    python docs/pictures/screens.py [FOLDER [NAME...]]

Every screen is the output of the real command, cut after ``MOST`` lines. plan and launch take seconds and
give the same on every machine; dryrun, audit and doctor take up to a minute each.
"""

import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap

from rich import _export_format
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
COLUMNS, MOST = 96, 25
SCREENS = {
    "plan": "parallel3d plan --model llama-3.1-70b --gpu h100-80gb-sxm --nodes 32 "
    "--seq-len 8192 --global-batch 1024",
    "dryrun": "parallel3d dryrun --world-size 64 -- examples/llama/train.py --replicate 2 --shard 4 --tp 8 "
    "--size 8b --seq-len 8192 --batch 8 --mixed-precision --sequence-parallel",
    "audit": "parallel3d audit --relation plain --replicate 2 --tp 2 check:build_model "
    "--input check:make_batch --loss check:loss --plan check:WRONG",
    "doctor": "torchrun --nproc-per-node 4 -m parallel3d doctor --shard 2 --tp 2",
    "launch": "parallel3d launch --to slurm --nodes 4 --gpus-per-node 8 --tp 8 --time 12:00:00 "
    "-- train.py --lr 3e-4",
}
"""Name -> command. check.py is the one that docs/verify.md shows, with its fault."""
# rich's frame without its fonts, which are on the network; textLength keeps columns straight in any font.
FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", _export_format.CONSOLE_SVG_FORMAT, flags=re.S)
FRAME = FRAME.replace("Fira Code,", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono,")


def printed(command: str, folder: Path) -> list[str]:
    """The lines that ``command`` prints, with colours; 1 is audit's exit code for a difference."""
    modules = {"parallel3d": "parallel3d", "torchrun": "torch.distributed.run"}
    program, *words = shlex.split(command)
    paths = map(str, (ROOT, ROOT / "examples" / "llama", folder))
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-m", modules[program], *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        sys.exit(f"{command}\nended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip("\n").splitlines()


def draw(name: str, command: str, lines: list[str], folder: Path) -> None:
    """The command and its first lines; of a long output the last line says how much is left out."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    typed = wrap(f"$ {command}", COLUMNS - 2, subsequent_indent="    ", break_on_hyphens=False)
    first = Text(" \\\n".join(typed), style="bold")
    shown = Text("\n").join([first, *map(Text.from_ansi, lines)])
    rows = list(shown.wrap(console, COLUMNS))
    if len(rows) > MOST:
        left = len(rows) - MOST + 1
        rows[MOST - 1 :] = [Text(f"... {left} more lines", style="dim")]
    for row in rows:
        row.rstrip()
        console.print(row, no_wrap=True)
    svg = console.export_svg(title=f"parallel3d {name}", code_format=FRAME, unique_id=name)
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(line.rstrip() for line in svg.splitlines())
    (folder / f"{name}.svg").write_text(text + "\n", encoding="utf-8")


def main(folder: Path, names: list[str]) -> None:
    """Command line."""
    with TemporaryDirectory() as work:
        check = re.search(
            r"```python\n(# check\.py\n.*?)```", (DOCS / "verify.md").read_text(), re.S
        )
        assert check is not None, "docs/verify.md shows no check.py"
        Path(work, "check.py").write_text(check[1])
        Path(work, "examples").symlink_to(ROOT / "examples")
        for name in names:
            draw(name, SCREENS[name], printed(SCREENS[name], Path(work)), folder)


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "screens"
    main(given, sys.argv[2:] or list(SCREENS))
