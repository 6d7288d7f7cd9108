"""Jobs of four ranks that diverge, fail or hang: what each rank does, and what each is told in the end."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

import parallel3d as p3d
from _support.guards import jobs
from _support.models import Lm, lm_loss, tokens
from parallel3d import guards
from parallel3d.fsdp import fully_shard

RANKS, ODD = 4, 2
LIMIT = 30.0  # seconds
GRACE = timedelta(seconds=3)


class Branching(Lm):
    """Runs its blocks in the order ``self.places``."""

    def __init__(self, layers: int = 3, hidden: int = 20) -> None:
        super().__init__(layers=layers, hidden=hidden)
        self.places = list(range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for place in self.places:
            x = self.layers[place](x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Ending:
    """How a rank has ended."""

    error: str  # name of the exception's class; "" if there was none
    message: str
    seconds: float  # that the job took


def is_odd() -> bool:
    return dist.get_rank() == ODD


def a_mesh(replicate: int = 2, shard: int = 2, tp: int = 1) -> Any:
    return p3d.build_mesh(p3d.MeshLayout(replicate, shard, tp), device_type="cpu")


def sharded(model: Any, mesh: Any, units: int = 3) -> Any:
    """By plain ``fully_shard``, which compares nothing."""
    data = mesh["replicate", "shard"]
    for module in [*model.layers[:units], model.embed]:
        fully_shard(module, mesh=data)
    return fully_shard(model, mesh=data)


def a_model() -> Any:
    torch.manual_seed(0)
    return sharded(Branching(), a_mesh())


Steps = Callable[[int, Any], None]


def train(
    model: Any, steps: int = 4, each: Steps = lambda step, model: None, micro: int = 2
) -> None:
    """``each`` is called before every step and may ask for another number of micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        number = each(step, model)
        for _ in range(micro if number is None else number):
            lm_loss(model, tokens(dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- What the digest finds -----------------------------------------------------------------------------


def first_step(model: Any) -> None:
    train(model, steps=1)


def other_plan() -> None:
    mesh = a_mesh(1, 2, 2)
    torch.manual_seed(0)
    model = Branching()
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    if is_odd():
        plan = {"layers.0.up": "colwise", "layers.0.down": "rowwise"}
    p3d.resolve_plan(model, plan, 2).apply(model, mesh)
    first_step(sharded(model, mesh))


def other_shape() -> None:
    first_step(sharded(Branching(hidden=24 if is_odd() else 20), a_mesh()))


def other_dtype() -> None:
    model = Branching()
    first_step(sharded(model.bfloat16() if is_odd() else model, a_mesh()))


def frozen_afterwards() -> None:
    torch.manual_seed(0)
    model = p3d.parallelize(Branching(), a_mesh())
    if is_odd():
        model.layers[1].up.weight.requires_grad_(False)
    first_step(model)


def other_units() -> None:
    first_step(sharded(Branching(), a_mesh(), units=2 if is_odd() else 3))


def other_unit_order() -> None:
    model = Branching()
    if is_odd():
        model._modules["embed"] = model._modules.pop("embed")  # the last one now
    first_step(sharded(model, a_mesh()))


# -- What debug mode finds -----------------------------------------------------------------------------


def debugged(each: Steps, *, timeout: float = 20, folder: str | None = None) -> None:
    model = a_model()
    limit = timedelta(seconds=timeout)
    with guards.watch(grace=GRACE), guards.debug(model, timeout=limit, folder=folder):
        train(model, each=each)


def odd_at_3(what: Steps) -> Steps:
    """``what`` on the odd rank before step 3."""
    return lambda step, model: what(step, model) if step == 3 and is_odd() else None


def unit_skipped() -> None:
    debugged(odd_at_3(lambda step, model: setattr(model, "places", [0, 2])))


def units_swapped() -> None:
    debugged(odd_at_3(lambda step, model: setattr(model, "places", [1, 0, 2])))


def more_micro_batches() -> None:
    debugged(odd_at_3(lambda step, model: 3))


def fewer_micro_batches() -> None:
    debugged(odd_at_3(lambda step, model: 1))


def _own(step: int, model: Any, *, odd: Callable[[torch.Tensor, Any], Any]) -> None:
    """A collective of the user's own before step 3, on the odd rank ``odd``."""
    if step != 3:
        return
    mesh = model.head.weight.device_mesh
    numbers = torch.ones(4)
    if is_odd():
        odd(numbers, mesh)
    else:
        dist.all_reduce(numbers, group=mesh.get_group("shard"))


def other_axis() -> None:
    debugged(
        lambda s, m: _own(
            s, m, odd=lambda x, mesh: dist.all_reduce(x, group=mesh.get_group("replicate"))
        )
    )


def other_operation() -> None:
    debugged(
        lambda s, m: _own(
            s,
            m,
            odd=lambda x, mesh: dist.all_gather_into_tensor(
                torch.empty(8), x, group=mesh.get_group("shard")
            ),
        )
    )


def other_bytes() -> None:
    debugged(
        lambda s, m: _own(
            s, m, odd=lambda x, mesh: dist.all_reduce(x[:3], group=mesh.get_group("shard"))
        )
    )


def fewer_steps() -> None:
    model = a_model()
    with guards.watch(grace=GRACE), guards.debug(model):
        train(model, steps=2 if is_odd() else 4)


def killed_in_debug(folder: str) -> None:
    debugged(odd_at_3(lambda step, model: kill()), timeout=4, folder=folder)


# -- What watch finds ----------------------------------------------------------------------------------


def watched(each: Steps, timeouts: guards.Timeouts | None = None) -> None:
    with guards.watch(grace=GRACE, timeouts=timeouts):
        train(a_model(), each=each)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising(step: int, model: Any) -> None:
    raise LookupError("no more samples")


def one_raises() -> None:
    watched(odd_at_3(raising))


def one_raises_before_the_first_step() -> None:
    """The others wait in the store for its digest."""
    watched(lambda step, model: raising(step, model) if is_odd() else None)


def one_is_killed() -> None:
    watched(odd_at_3(lambda step, model: kill()))


def freeze() -> None:
    """As a machine without network: no connection is closed. Ended later by a process of its own."""
    frozen = os.getpid()
    if os.fork() == 0:
        time.sleep(9)
        with suppress(ProcessLookupError):  # who started it has killed it already
            os.kill(frozen, signal.SIGKILL)
        os._exit(0)
    os.kill(frozen, signal.SIGSTOP)


def freezing(rank: int) -> None:
    def at_3(step: int, model: Any) -> None:
        if step == 3 and dist.get_rank() == rank:
            freeze()

    with guards.watch(grace=GRACE, silence=GRACE):
        train(a_model(), each=at_3)


def one_freezes() -> None:
    freezing(ODD)


def host_freezes() -> None:
    freezing(0)


def host_is_killed() -> None:
    watched(lambda step, model: kill() if step == 3 and dist.get_rank() == 0 else None)


def hangs_in_the_data_loader() -> None:
    time.sleep(9)


def one_evaluates() -> None:
    """Alone, within a step. gloo ends the process that then gets what has another size."""

    def at_3(step: int, model: Any) -> None:
        if step == 3 and is_odd():
            with torch.no_grad():
                lm_loss(model, tokens(0))

    watched(at_3, guards.Timeouts(start=timedelta(seconds=60), step=timedelta(seconds=6)))


def one_hangs() -> None:
    timeouts = guards.Timeouts(start=timedelta(seconds=60), step=timedelta(seconds=2))
    watched(odd_at_3(lambda step, model: hangs_in_the_data_loader()), timeouts)


def one_leaves_early() -> None:
    with guards.watch(grace=GRACE):
        model = a_model()
        train(model, steps=2 if is_odd() else 4)


# -- What a rank is told -------------------------------------------------------------------------------


def ending(job: Callable[..., None], *args: Any) -> Ending:
    """Of ``job(*args)`` on this rank."""
    start = time.monotonic()
    error, message = "", ""
    try:
        job(*args)
    except Exception as caught:
        error, message = type(caught).__name__, str(caught)
    return Ending(error, message, time.monotonic() - start)


DIGEST, DEBUG, WATCH = "always: the digest", "`guards.debug`", "`guards.watch`"
MAJORITY = "rank 2 differs from the majority"


@dataclass(frozen=True)
class Case:
    """One kind."""

    kind: str  # what goes wrong, on rank 2 unless it says another
    finder: str
    job: Callable[..., None]  # what all ranks run
    error: str  # class of the exception that the other ranks get
    texts: tuple[str, ...]  # what is in its message, on each of them
    odd: tuple[str, str] | None = (
        None  # (class, text) of the odd rank's; None if it is told the same
    )
    dying: int | None = None  # the rank that is killed


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
