"""Runs every causal-LM family of transformers that has a tensor-parallel plan; writes ``docs/families.md``.

    python tests/_support/hf/families_table.py                # all; about ten minutes on two cores
    python tests/_support/hf/families_table.py llama doge     # some; only prints

Exits with 1 where a family is unequal or failed, or refused without being in ``refused.txt``, with cp in
``refused_cp.txt``.
"""

import re
import sys
import warnings
from collections import Counter
from math import prod
from pathlib import Path

import torch
import transformers

from parallel3d.errors import PlanError
from parallel3d.testing import GlooPool, WorkerError
from parallel3d.tp import resolve_plan

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":  # under pytest it is there already
    sys.path.insert(0, str(ROOT / "tests"))

from _support.hf.side_by_side_hf import (  # noqa: E402
    CASES,
    CP_CASE,
    Outcome,
    compare_cases,
    merged,
    refused_families,
)
from _support.hf.tiny import families, is_moe, tiny_model  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
ALL_CASES = (*CASES, CP_CASE)
AT_ONCE = 6  # families in one run of the pool
BROKEN = Outcome("failed", "its processes ended or hung")

_HEAD = """# Families of transformers' causal LMs under `tp_plan="auto"`

Written by `python tests/_support/hf/families_table.py` ({versions}).
A tiny random model of each family whose config ships a tensor-parallel plan, in float64, plain and parallel:
logits, loss, every gradient, and the weights after a step of SGD. *equal*: all within 1e-8 of each tensor's
own largest value. *base*: 4 heads, 2 of keys and values, 64 ids, embedding and head apart. *odd*: 1 head of
keys and values, 67 ids, tied, biases the other way round, the loss that balances experts, other kernels. The
mesh is (replicate, shard, tp). *held*: the largest share of the parameters that a tp rank holds, at tp 2. A
text model that is a family of its own and part of a composite one (`gemma3_text` in `gemma3`) counts once.

*cp*: *base* on two ranks of [context parallelism](context_parallel.md), which share each sequence; equal, or
refused with the reason: what mixes positions outside attention can't run on parts of sequences.

{counts}

| family | kind | {columns} | cp | held | note |
|---|---|{rule}---|---|---|
"""


def main(names: list[str]) -> int:
    refused, rows, bad = refused_families(), [], []
    refused_cp = refused_families("refused_cp.txt")
    counts: Counter[tuple[str, str]] = Counter()
    with GlooPool(4) as pool:
        for name, (*found, cp) in in_turn(pool, names or families()):
            worst = next(
                (v for v in ("failed", "unequal", "refused") if v in [o.verdict for o in found]),
                "equal",
            )
            kind = "MoE" if is_moe(name) else "dense"
            counts[kind, worst] += 1
            if worst not in ("equal", "refused") or (worst == "refused") != (name in refused):
                bad.append(name)
            if cp.verdict not in ("equal", "refused") or (cp.verdict == "refused") != (
                name in refused_cp
            ):
                bad.append(f"{name} (cp)")
            counts["cp", cp.verdict] += 1
            cells = [outcome.verdict for outcome in (*found, cp)]
            notes = dict.fromkeys(outcome.note for outcome in found if outcome.note)
            notes |= dict.fromkeys([short(cp.note)] if cp.note else [])
            held = f"{max(outcome.held for outcome in found):.2f}"
            said = "; ".join([*notes, *notes_of(name)]).replace("|", "/")[:300]
            rows.append("| " + " | ".join([name, kind, *cells, held, said]) + " |")
            print(rows[-1], flush=True)
    told = "\n".join(
        f"- {kind}: " + ", ".join(f"{n} {v}" for (k, v), n in sorted(counts.items()) if k == kind)
        for kind in ("dense", "MoE", "cp")
    )
    print(told)
    if not names:
        head = _HEAD.format(
            versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
            counts=told,
            columns=" | ".join(f"{mesh} {variant}" for variant, mesh in CASES),
            rule="---|" * len(CASES),
        )
        PAGE.write_text(head + "\n".join(rows) + "\n")
    if bad:
        print(f"wrong: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def in_turn(pool, names):
    """Each name with its outcomes, in CASES' order. Some at once, since making groups takes longest."""
    for first in range(0, len(names), AT_ONCE):
        few = names[first : first + AT_ONCE]
        outcomes = run_some(pool, few)
        if outcomes is None:  # one broke the run: each by itself
            outcomes = {name: (run_some(pool, [name]) or {}).get(name) for name in few}
        for name in few:
            yield name, outcomes[name] or [BROKEN] * len(ALL_CASES)


def run_some(pool, names):
    """Name -> outcomes; None where the run as a whole failed."""
    outcomes = {}
    for size in (2, 4):
        cases = [(name, *case) for name in names for case in ALL_CASES if prod(case[1]) == size]
        try:
            found = merged(pool.run(compare_cases, cases, world_size=size, timeout=600.0))
        except WorkerError as error:
            print(error, file=sys.stderr)
            return None
        outcomes.update(zip(cases, found, strict=True))
    return {name: [outcomes[name, *case] for case in ALL_CASES] for name in names}


def short(note: str) -> str:
    """Why context parallelism is refused, without advice and folders."""
    why = note.removeprefix("context parallelism: ").split(", but each rank has")[0]
    return "cp: " + re.sub(r"/\S*/([^/\s]+\.py)", r"\1", why.split("; each rank has")[0])


def notes_of(name: str) -> list[str]:
    """What resolving the plan had to do."""
    try:
        notes = resolve_plan(tiny_model(name), "auto", 2).notes
    except PlanError:
        return []
    shown = [note for note in notes if "match nothing here" not in note]
    return list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", note) for note in shown))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    sys.exit(main(sys.argv[1:]))
