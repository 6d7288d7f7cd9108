"""Writes ``docs/tp_collectives.md``: tensor-parallel collectives of a step, beside torch's.

python tests/_support/tp_collectives_table.py
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # under pytest they are there already
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "llama")]

from _support.tp.tp_collective_cases import CASES, RANKS, Totals, compare  # noqa: E402

PAGE = ROOT / "docs" / "tp_collectives.md"

HEAD = f"""\
# Tensor-parallel collectives, compared with torch's

What one training step communicates over `tp`, of {RANKS} ranks, on rank 0 of a fake process group:
calls, and bytes (the larger of each call's input and output). Three times the same styles on the same
modules: by torch's `parallelize_module` (2.13); by it with a `PrepareModuleInput` on each module whose
children read one input, which is the best a plan can say there; and ours, which shares by itself what
reads one tensor. Both are under their `fully_shard`. Our single sum of the norms' gradients (all-reduce,
sequence-parallel) is for each unit; torch's are one a parameter.
Written by `python tests/_support/tp_collectives_table.py`; `tests/tp/test_tp_collectives_equal.py` checks
that it is up to date, and that ours are never more.

| model and plan | collective | torch | bytes | torch, prepared | bytes | ours | bytes |
|---|---|---:|---:|---:|---:|---:|---:|
"""

Results = dict[str, dict[str, Totals]]


def collect() -> Results:
    """Runs all cases."""
    with warnings.catch_warnings():
        # torch warns of a view that the model returns: its own hook, unused here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return {case.name: compare(case) for case in CASES}


def table(results: Results) -> str:
    """The comparison as Markdown."""
    lines = []
    for name, sides in results.items():
        for kind in sorted(set().union(*sides.values())):
            numbers = [n for side in sides.values() for n in side.get(kind, (0, 0))]
            cells = [name, kind, *(f"{n:,}" for n in numbers)]
            lines.append(f"| {' | '.join(cells)} |\n")
            name = ""
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(collect()))
