"""Jobs of four ranks that diverge, fail or hang: what each rank does, and what each is told in the end."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

import parallel3d as p3d
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
    """How a rank has ended.

    Attributes:
        error: name of the exception's class; "" if there was none.
        seconds: the job took.
    """

    error: str
    message: str
    seconds: float


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
