"""Writes ``docs/collectives.md`` and ``docs/tp_collectives.md``: what a step communicates, beside torch's.

python tests/_support/collectives_table.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "llama")]

from _support.fsdp import collective_cases  # noqa: E402
from _support.tp import tp_collective_cases  # noqa: E402

for cases in (collective_cases, tp_collective_cases):
    cases.PAGE.write_text(cases.table(cases.collect()))
