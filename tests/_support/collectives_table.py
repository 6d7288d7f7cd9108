"""Writes ``docs/collectives.md``: what a step communicates, beside torch's ``fully_shard``.

python tests/_support/collectives_table.py
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # under pytest it is there already
    sys.path.insert(0, str(ROOT / "tests"))

from _support.fsdp.collective_cases import CASES, NONE, Totals, compare  # noqa: E402

PAGE = ROOT / "docs" / "collectives.md"

HEAD = """\
# Collectives, compared with torch's

What one training step communicates under `parallel3d.fsdp` and under torch's `fully_shard` (2.13), on
rank 0 of a fake process group: forward and backward of a language model of two blocks in fp32, each
block a unit and the root, unless the first column says otherwise. Calls, and bytes (the larger of each
call's input and output), torch's before ours. They are those of the first step and of the second alike.
Written by `python tests/_support/collectives_table.py`; `tests/fsdp/test_collectives_equal.py` checks
that it is up to date.

| model and policy | (replicate, shard, tp) | collective | over | torch | bytes | ours | bytes | why |
|---|---|---|---|---:|---:|---:|---:|---|
"""


Results = dict[str, list[tuple[Totals, Totals]]]
"""By case: ours and torch's, of each step."""


def collect() -> Results:
    """Runs all cases."""
    with warnings.catch_warnings():
        # torch warns of a view that the model returns: its own hook, unused here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return {case.name: compare(case) for case in CASES}


def table(results: Results) -> str:
    """The comparison as Markdown."""
    lines = []
    for case in CASES:
        ours, torchs = results[case.name][0]
        name, sizes = case.name, str(case.sizes)
        for key in sorted({*ours, *torchs}, key=str):
            kind, axis = key
            left, right = torchs.get(key, NONE), ours.get(key, NONE)
            why = case.smaller.get(key) or case.torchs_fault.get(key)
            why = why or ("equal" if left == right else "UNEXPLAINED")
            cells = [name, sizes, kind, axis or "-"]
            cells += [f"{number:,}" for number in (*left, *right)]
            lines.append(f"| {' | '.join([*cells, why])} |\n")
            name = sizes = ""
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(collect()))
