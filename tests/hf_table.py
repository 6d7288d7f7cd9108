"""Runs every causal-LM family of transformers that has a tensor-parallel plan, and writes ``docs/families.md``.

    python tests/hf_table.py                # all; about ten minutes on two cores
    python tests/hf_table.py llama doge     # some; only prints

Exits with 1 where a family is unequal or failed, or refused without being in ``tests/hf/refused.txt``.
"""

import os
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hf")]

_HEAD = """# Families of transformers' causal LMs under `tp_plan="auto"`

Written by `python tests/hf_table.py` ({versions}). A tiny random model of each family whose config ships a
tensor-parallel plan, in float64, plain and parallel: logits, loss, every gradient, and the weights after a
step of SGD. *equal*: all within 1e-8 of each tensor's own largest value. *base*: 4 heads, 2 of keys and
values, 64 ids, embedding and head apart. *odd*: 1 head of keys and values, 67 ids, tied, other kernels.
The mesh is (replicate, shard, tp). *held*: share of the parameters that a tp rank holds, at tp 2. A text
model that is a family of its own and part of a composite one (`gemma3_text` in `gemma3`) counts once.

{counts}

| family | kind | {columns} | held | note |
|---|---|{rule}---|---|
"""


def main(names: list[str]) -> int:
    import torch
    import transformers
    from side_by_side_hf import MESHES, refused_families
    from tiny import VARIANTS, families, is_moe

    from parallel3d.testing import GlooPool

    columns = [(variant, mesh) for mesh in MESHES for variant in VARIANTS]
    refused, rows, bad = refused_families(), [], []
    counts: Counter[tuple[str, str]] = Counter()
    with GlooPool(4) as pool:
        for name in names or families():
            found = run_family(pool, name, columns)
            worst = next(
                (v for v in ("failed", "unequal", "refused") if v in [o.verdict for o in found]),
                "equal",
            )
            kind = "MoE" if is_moe(name) else "dense"
            counts[kind, worst] += 1
            if worst not in ("equal", "refused") or (worst == "refused") != (name in refused):
                bad.append(name)
            cells = [outcome.verdict for outcome in found]
            notes = dict.fromkeys(outcome.note for outcome in found if outcome.note)
            held = f"{max(outcome.held for outcome in found):.2f}"
            said = "; ".join([*notes, *notes_of(name)]).replace("|", "/")[:300]
            rows.append("| " + " | ".join([name, kind, *cells, held, said]) + " |")
            print(rows[-1], flush=True)
    told = "\n".join(
        f"- {kind}: " + ", ".join(f"{n} {v}" for (k, v), n in sorted(counts.items()) if k == kind)
        for kind in ("dense", "MoE")
    )
    print(told)
    if not names:
        head = _HEAD.format(
            versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
            counts=told,
            columns=" | ".join(f"{mesh} {variant}" for variant, mesh in columns),
            rule="---|" * len(columns),
        )
        PAGE.write_text(head + "\n".join(rows) + "\n")
    if bad:
        print(f"wrong: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def run_family(pool, name, columns):
    """The outcomes on all meshes; what breaks a whole run is a failure of each of its cases."""
    from side_by_side_hf import Outcome, compare_cases, merged

    from parallel3d.testing import WorkerError

    found = {}
    for size in (2, 4):
        cases = [(name, v, m) for v, m in columns if m[0] * m[1] * m[2] == size]
        try:
            outcomes = merged(pool.run(compare_cases, cases, world_size=size, timeout=300.0))
        except WorkerError as error:
            outcomes = [Outcome("failed", str(error).splitlines()[0])] * len(cases)
        found.update(zip([case[1:] for case in cases], outcomes, strict=True))
    return [found[column] for column in columns]


def notes_of(name: str) -> list[str]:
    """What resolving the plan had to do."""
    import re

    from tiny import tiny_model

    from parallel3d.errors import PlanError
    from parallel3d.tp import resolve_plan

    try:
        notes = resolve_plan(tiny_model(name), "auto", 2).notes
    except PlanError:
        return []
    shown = [note for note in notes if "match nothing here" not in note]
    return list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", note) for note in shown))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(sys.argv[1:]))
