"""What may go wrong, what finds it, and what each rank is told: the table of docs/guards.md."""

from collections.abc import Callable
from dataclasses import dataclass

from _support.guards import jobs

DIGEST, DEBUG, WATCH = "always: the digest", "`guards.debug`", "`guards.watch`"
MAJORITY = "rank 2 differs from the majority"


@dataclass(frozen=True)
class Case:
    """One kind.

    Attributes:
        kind: what goes wrong, on rank 2 unless it says another.
        job: what all ranks run.
        error: class of the exception that the other ranks get.
        texts: what is in its message, on each of them.
        odd: (class, text) of the odd rank's; None if it is told the same.
        dying: the rank that is killed.
    """

    kind: str
    finder: str
    job: Callable[..., None]
    error: str
    texts: tuple[str, ...]
    odd: tuple[str, str] | None = None
    dying: int | None = None


def _digest(kind: str, job: Callable[[], None], *texts: str) -> Case:
    return Case(kind, DIGEST, job, "AgreementError", (MAJORITY, *texts))


def _debug(
    kind: str, job: Callable[[], None], *texts: str, odd: tuple[str, str] | None = None
) -> Case:
    return Case(kind, DEBUG, job, "AgreementError", (MAJORITY, *texts), odd)


def _watch(
    kind: str,
    job: Callable[[], None],
    *texts: str,
    odd: tuple[str, str] | None = None,
    dying: int | None = None,
) -> Case:
    return Case(kind, WATCH, job, "PeerFailureError", texts, odd, dying)


ALL = "ranks 0-1, 3"
CASES = [
    _digest(
        "another tensor-parallel plan",
        jobs.other_plan,
        "units in order: layers.0, layers.1, layers.2 on ranks 0-1, 3; layers.0 on rank 2",
        "layers.1.up.weight: trained (20, 12) torch.float32",
    ),
    _digest(
        "another shape",
        jobs.other_shape,
        "layers.0.up.weight: trained (20, 12)",
        "trained (24, 12)",
    ),
    _digest("another dtype", jobs.other_dtype, "torch.float32, R", "torch.bfloat16, R"),
    _digest(
        "a parameter frozen after `parallelize`",
        jobs.frozen_afterwards,
        "layers.1.up.weight: trained (20, 12)",
        "frozen (20, 12)",
    ),
    _digest("other units", jobs.other_units, "units in order: ", "unit layers.2: "),
    _digest(
        "another order of units",
        jobs.other_unit_order,
        "units in order: Branching, embed, layers.0",
        "Branching, layers.0, layers.1, layers.2, embed on rank 2",
    ),
    _debug(
        "a unit skipped",
        jobs.unit_skipped,
        "rank 2: all_gather on shard for unit layers.0",
        f"{ALL}: all_gather on shard for unit layers.1, 2,144 bytes (step 3, micro-batch 1)",
    ),
    _debug(
        "units run in another order",
        jobs.units_swapped,
        "(step 3, micro-batch 1)",
        f"{ALL}: all_gather on shard for unit layers.1",
    ),
    _debug(
        "one micro-batch more",
        jobs.more_micro_batches,
        "rank 2: all_gather on shard for unit Branching, 1,136 bytes (step 3, micro-batch 3)",
        f"{ALL}: optimizer step (SGD) (step 3, micro-batch 2)",
    ),
    _debug(
        "one micro-batch less",
        jobs.fewer_micro_batches,
        "rank 2: optimizer step (SGD) (step 3, micro-batch 1)",
        f"{ALL}: all_gather on shard for unit Branching, 1,136 bytes (step 3, micro-batch 2)",
    ),
    _debug(
        "a collective of the user's own on another axis",
        jobs.other_axis,
        "rank 2: all_reduce on replicate, 16 bytes (step 3, micro-batch 0)",
        f"{ALL}: all_reduce on shard, 16 bytes (step 3, micro-batch 0)",
    ),
    _debug(
        "another operation",
        jobs.other_operation,
        "rank 2: all_gather on shard, 32 bytes",
        f"{ALL}: all_reduce on shard, 16 bytes",
    ),
    _debug(
        "another size",
        jobs.other_bytes,
        "rank 2: all_reduce on shard, 12 bytes",
        f"{ALL}: all_reduce on shard, 16 bytes",
    ),
    _debug(
        "fewer steps",
        jobs.fewer_steps,
        "rank 2: left debug mode (step 3, micro-batch 0)",
        f"{ALL}: all_gather on shard for unit Branching",
        odd=("", ""),
    ),
    _watch(
        "a rank raises",
        jobs.one_raises,
        "rank 2 failed first, at step 3, phase step: LookupError: no more samples",
        odd=("LookupError", "no more samples"),
    ),
    _watch(
        "a rank raises while the others wait for its digest",
        jobs.one_raises_before_the_first_step,
        "rank 2 failed first, at step 1, phase start: LookupError: no more samples",
        odd=("LookupError", "no more samples"),
    ),
    _watch(
        "a rank is killed (SIGKILL)",
        jobs.one_is_killed,
        "rank 2 is lost: killed or hung; it posted no error and does not answer",
        dying=2,
    ),
    _watch(
        "rank 0, which hosts the store, is killed",
        jobs.host_is_killed,
        "the process that hosts the store has ended: rank 0, or the launcher",
        dying=0,
    ),
    _watch(
        "a rank is frozen, or its machine has lost the network: nothing is closed",
        jobs.one_freezes,
        "rank 2 is lost: killed or hung; it posted no error and does not answer",
        dying=2,
    ),
    _watch(
        "the same of rank 0, which hosts the store",
        jobs.host_freezes,
        "the store, on 127.0.0.1, has not answered for 3 s",
        dying=0,
    ),
    _watch(
        "a rank hangs",
        jobs.one_hangs,
        "rank 2 did not come within 2 s: its process lives, at step 3, phase step, and is in jobs.py:",
        "hangs_in_the_data_loader",
        odd=("PeerFailureError", "lost a collective before this rank did"),
    ),
    _watch(
        "a rank makes a forward more",
        jobs.one_evaluates,
        "Forwards without gradients begun: 1 on rank 2, 0 on ",
        "look for a forward that only rank 2 makes, for example an evaluation",
        dying=2,
    ),
    _watch(
        "a rank makes fewer steps",
        jobs.one_leaves_early,
        "rank 2 has left the watched part, at step 3",
        odd=("", ""),
    ),
]


def table() -> str:
    """In Markdown."""
    rows = ["| what goes wrong | what finds it | what every rank is told |", "| --- | --- | --- |"]
    for case in CASES:
        told = " ... ".join(f"`{text.strip()}`" for text in case.texts)
        rows.append(f"| {case.kind} | {case.finder} | `{case.error}`: {told} |")
    return "\n".join(rows)
