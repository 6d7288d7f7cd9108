"""Runs every causal-LM family of transformers that has a tensor-parallel plan; writes ``docs/families.md``.

    python tests/_support/hf/families_table.py                # all; about ten minutes on two cores
    python tests/_support/hf/families_table.py llama doge     # some; only prints

Exits with 1 where a family is unequal or failed, or refused without being in ``refused.txt``, with cp in
``refused_cp.txt``, with ep in ``refused_ep.txt``.
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
    Case,
    Outcome,
    compare_cases,
    ep_cases,
    merged,
    refused_families,
)
from _support.hf.tiny import families, is_moe, tiny_model  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
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

*ep*: MoE families with [experts on an axis of their own](expert_parallel.md): *base* on (1, 4, 1) with ep 2
and on (1, 2, 2) with ep 4, *odd* on (2, 2, 1) with ep 2 where that variant has experts; equal on all, or
refused with the reason.

{counts}

| family | kind | {columns} | cp | ep | held | note |
|---|---|{rule}---|---|---|---|
"""

DENSE = Outcome("-")
COLUMNS = ("tp", "cp", "ep")


def main(names: list[str]) -> int:
    refused, rows, bad = refused_families(), [], []
    counts: Counter[tuple[str, str]] = Counter()
    with GlooPool(4) as pool:
        for name, (found, cp, ep) in in_turn(pool, names or families()):
            all_found = worst(found)
            kind = "MoE" if is_moe(name) else "dense"
            counts[kind, all_found.verdict] += 1
            if all_found.verdict != ("refused" if name in refused else "equal"):
                bad.append(name)
            for axis, outcome in (("cp", cp), ("ep", ep)):
                if is_wrong(axis, name, outcome):
                    bad.append(f"{name} ({axis})")
                if outcome is not DENSE:
                    counts[axis, outcome.verdict] += 1
            cells = [outcome.verdict for outcome in (*found, cp, ep)]
            notes = dict.fromkeys(outcome.note for outcome in found if outcome.note)
            shorter = [short(axis, o.note) for axis, o in (("cp", cp), ("ep", ep)) if o.note]
            held = f"{max(outcome.held for outcome in found):.2f}"
            said = "; ".join([*notes, *shorter, *notes_of(name)]).replace("|", "/")[:300]
            rows.append("| " + " | ".join([name, kind, *cells, held, said]) + " |")
            print(rows[-1], flush=True)
    told = "\n".join(
        f"- {kind}: " + ", ".join(f"{n} {v}" for (k, v), n in sorted(counts.items()) if k == kind)
        for kind in ("dense", "MoE", "cp", "ep")
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


def is_wrong(axis: str, name: str, outcome: Outcome) -> bool:
    """Whether a family's cell of cp or ep is not what its file of refused families says."""
    expected = "refused" if name in refused_families(f"refused_{axis}.txt") else "equal"
    return outcome is not DENSE and outcome.verdict != expected


def cases_of(name: str, column: str) -> list[Case]:
    """What a family is run as for the columns of its plan ("tp"), cp or ep."""
    if column == "ep":
        return ep_cases(name)
    return [(name, *case) for case in ((CP_CASE,) if column == "cp" else CASES)]


def worst(outcomes: list[Outcome]) -> Outcome:
    order = ("failed", "unequal", "refused", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome.verdict), default=DENSE)


def in_turn(pool, names):
    """Each name with its outcomes: a list for "tp", one for cp and ep. Some families at once, since making
    groups takes longest."""
    for first in range(0, len(names), AT_ONCE):
        few = names[first : first + AT_ONCE]
        outcomes = run_some(pool, few)
        if outcomes is None:  # one broke the run: each by itself
            outcomes = {}
            for name in few:
                outcomes |= run_some(pool, [name]) or {}
        for name in few:
            found, cp, ep = (
                [outcomes.get(case, BROKEN) for case in cases_of(name, column)]
                for column in COLUMNS
            )
            yield name, (found, worst(cp), worst(ep))


def run_some(pool, names) -> dict[Case, Outcome] | None:
    """Case -> outcome; None where the run as a whole failed."""
    outcomes = {}
    every = [case for name in names for column in COLUMNS for case in cases_of(name, column)]
    for size in (2, 4):
        cases = [case for case in every if prod(case[2][:4]) == size]
        if not cases:
            continue
        try:
            found = merged(pool.run(compare_cases, cases, world_size=size, timeout=600.0))
        except WorkerError as error:
            print(error, file=sys.stderr)
            return None
        outcomes.update(zip(cases, found, strict=True))
    return outcomes


def short(axis: str, note: str) -> str:
    """Why an axis is refused, without advice and folders."""
    why = note.removeprefix("context parallelism: ").split(", but each rank has")[0]
    why = why.split(", which is not made")[0]
    why = why.split("known to hold experts: ")[-1].split("; ep divides")[0]
    return f"{axis}: " + re.sub(r"/\S*/([^/\s]+\.py)", r"\1", why.split("; each rank has")[0])


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
