"""What the tests of expert parallelism run on every rank."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from _support.ep.models import HIDDEN, Looped, Mixture, batch, loss
from parallel3d import Checks, MeshLayout, build_mesh, checkpoint, ep, optim, parallelize
from parallel3d.ep.division import Division, capacities
from parallel3d.testing import assert_parity, record_collectives

EIGHT = functools.partial(Mixture, Looped, 8)


def made(layout: MeshLayout, build: Callable[[], nn.Module] = EIGHT, **options: Any):
    """The mesh, the plain model and the parallel one, in float64."""
    mesh = build_mesh(layout, device_type="cpu")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build().double())
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.tp > 1 else None
    options = {"checks": Checks(audit=False), "tp_plan": plan} | options
    return mesh, models[0], parallelize(models[1], mesh, **options)


def whole(value: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return value.full_tensor() if isinstance(value, DTensor) else value


def backward(layout: MeshLayout, plain: nn.Module, parallel: nn.Module, step: int = 0) -> None:
    """A backward of both: the plain model's over all data ranks' batches, their mean."""
    for rank in range(layout.data_size):
        (loss(plain, batch(step * 8 + rank)) / layout.data_size).backward()
    loss(parallel, batch(step * 8 + layout.data_rank(dist.get_rank()))).backward()


def parity(layout: dict[str, int], experts: int, hot: bool, options: dict[str, Any]) -> float:
    build = functools.partial(Mixture, Looped, experts, hot=hot)
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.get("tp", 1) > 1 else None
    found = assert_parity(build, batch, MeshLayout(**layout), loss=loss, tp_plan=plan, **options)
    return found.grads["float64"]


def clipped(layout: MeshLayout) -> None:
    """The norm over experts and others, and what clipping leaves."""
    _, plain, parallel = made(layout)
    backward(layout, plain, parallel)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    got = optim.clip_grad_norm_(parallel.parameters(), 0.05)
    torch.testing.assert_close(whole(got), want)
    for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad, msg=name)


def with_room(layout: MeshLayout) -> list[int]:
    """Enough room changes nothing; too little drops pairs, which ``stats`` counts. Returns those dropped."""
    _, plain, parallel = made(layout)
    ep.count(parallel)
    ep.set_capacity(parallel, 8.0)
    backward(layout, plain, parallel)
    for (name, p), q in zip(plain.named_parameters(), parallel.named_parameters(), strict=True):
        torch.testing.assert_close(whole(q[1].grad), p.grad, msg=name)
    assert [each.dropped for each in ep.stats(parallel).values()] == [0, 0]
    ep.set_capacity(parallel, 0.5)
    loss(parallel, batch(0)).backward()
    dropped = [each.dropped for each in ep.stats(parallel).values()]
    ep.set_capacity(parallel, None)
    loss(parallel, batch(0)).backward()
    assert [each.dropped for each in ep.stats(parallel).values()] == [0, 0]
    return dropped


def loads(layout: MeshLayout) -> tuple[dict[str, tuple[int, ...]], list[list[float]]]:
    """The loads of a step, and the biases after it."""
    _, _, parallel = made(layout, activation_checkpointing=True)
    ep.count(parallel)
    # The same four samples on every mesh.
    for rank in range(4 // layout.data_size):
        sample = layout.data_rank(dist.get_rank()) * (4 // layout.data_size) + rank
        loss(parallel, batch(sample)).backward()
    found = ep.stats(parallel, reset=False)
    ep.balance(parallel, 0.25)
    return (
        {name: each.tokens for name, each in found.items()},
        [layer.expert_bias.tolist() for layer in parallel.layers],
    )


def traffic(
    ep: int, rows: int, pairs: int, hidden: int, size: int, weight: int
) -> tuple[list[int], list[int]]:
    """Bytes of the exchanges over ep of a layer, in forward and in backward, as docs/expert_parallel.md says.

    Args:
        size, weight: bytes of an element of the hidden states, and of the weights of pairs.
    """
    row = rows * hidden * size
    return [16 * ep, row, pairs * weight, 8 * pairs, row], [row, row, pairs * weight]


def exchanged(layout: MeshLayout, capacity: float | None) -> tuple[list[int], list[int]]:
    """Bytes of each exchange over ep that the recorder counts, and those of the routing that there was."""
    build = functools.partial(Mixture, Looped, 8, layers=1)
    mesh, _, parallel = made(layout, build)
    if capacity is not None:
        ep.set_capacity(parallel, capacity)
    routed: list[torch.Tensor] = []
    experts = parallel.layers[0].experts
    experts.register_forward_pre_hook(lambda module, args: routed.append(args[1]))
    axis = ep.make_expert_view(mesh, layout.ep).ep
    with record_collectives(axis) as recorder:
        loss(parallel, batch(layout.data_rank(dist.get_rank()))).backward()
    index = routed[0].chunk(layout.tp)[mesh.get_local_rank("tp") if layout.tp > 1 else 0]
    to = index // (8 // layout.ep)
    ranks = range(layout.ep)
    if capacity is None:
        sent = [[int((to == r).any(1).sum()), int((to == r).sum())] for r in ranks]
        every: list[Any] = [None] * layout.ep
        dist.all_gather_object(every, sent, group=axis.get_group())
        taken = [each[axis.get_local_rank()] for each in every]
        # Of each call the larger of what is sent and what comes.
        rows, pairs = (max(sum(n[i] for n in way) for way in (sent, taken)) for i in (0, 1))
    else:
        room = capacities(*index.shape, Division(8, layout.ep), capacity)
        rows, pairs = (each * layout.ep for each in room)
    forward, backward = traffic(layout.ep, rows, pairs, HIDDEN, 8, 8)
    wanted = [*(forward if capacity is None else forward[1:]), *backward]
    # Where one group is that of ep and of shard, the engine's are on it too.
    calls = recorder.select(op="all_to_all", axis="ep", unit="layers.0.experts")
    return [call.bytes for call in calls], wanted


def saved(folder: str, layout: MeshLayout) -> None:
    """Two steps of AdamW, saved."""
    _, plain, parallel = made(layout)
    optimizer = optim.local(torch.optim.AdamW, parallel.parameters(), lr=0.01)
    for step in range(2):
        backward(layout, plain, parallel, step)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(Path(folder) / "run", model=parallel, optimizer=optimizer, step=2)
    state = {name: whole(p.detach()) for name, p in parallel.named_parameters()}
    moments = {
        name: whole(optimizer.state[p]["exp_avg"]) for name, p in parallel.named_parameters()
    }
    if dist.get_rank() == 0:
        torch.save((state, moments), Path(folder) / "want.pt")
    dist.barrier()


def resumed(folder: str, layout: MeshLayout) -> None:
    """What was saved, on another mesh: the same bits."""
    _, _, parallel = made(layout)
    optimizer = optim.local(torch.optim.AdamW, parallel.parameters(), lr=0.01)
    checkpoint.load(Path(folder) / "run", model=parallel, optimizer=optimizer)
    state, moments = torch.load(Path(folder) / "want.pt")
    for name, p in parallel.named_parameters():
        assert torch.equal(whole(p.detach()), state[name]), name
        assert torch.equal(whole(optimizer.state[p]["exp_avg"]), moments[name]), name


def logged(layout: MeshLayout) -> list[str]:
    """What torch logs of redistributions in a first step, which the audit compares."""
    from torch.distributed.tensor import _redistribute

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(_redistribute.__name__)
    getattr(_redistribute, "_warned_flatten_issues", set()).clear()  # it warns once
    logger.addHandler(handler)
    try:
        _, _, parallel = made(layout, checks=Checks())
        loss(parallel, batch(layout.data_rank(dist.get_rank()))).backward()
    finally:
        logger.removeHandler(handler)
    return said


DETACHED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "router without gradient": lambda rows, weights, *rest: (rows, weights.detach(), *rest),
    "gradient missing of what is before the experts": lambda rows, *rest: (rows.detach(), *rest),
}


def planted(fault: str, layout: MeshLayout) -> str:
    """What the audit, on by default, says of a fault of expert parallelism."""
    from parallel3d.ep import exchange, experts
    from parallel3d.errors import AuditError
    from parallel3d.fsdp.bucket import Bucket

    torch.manual_seed(0)
    mesh = build_mesh(layout, device_type="cpu")
    model = EIGHT()
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.tp > 1 else None
    stack = ExitStack()

    def put(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(patch.object(owner, name, value))

    if fault == "averaged over efsdp alone":
        put(Bucket, "divisor", property(lambda self: float(self.axes.data_size)))
    elif fault in DETACHED:
        inner = experts.Dispatch.apply
        apply = staticmethod(lambda *given: inner(*DETACHED[fault](*given)))
        put(experts, "Dispatch", type("Dispatch", (), {"apply": apply}))
    elif fault == "gradient of tokens that went elsewhere missing":
        inner = exchange._transposed
        put(exchange, "_transposed", lambda g, *rest: inner(g, *rest) * 0.5)
    elif fault == "experts of another rank":
        inner = experts.routes
        put(
            experts,
            "routes",
            lambda *args: (way := inner(*args))._replace(expert=way.expert.flip(0)),
        )
    elif fault == "tokens counted by each tp rank":
        put(experts, "split_to_tp", lambda x, dim, tp: x)
        chunk = experts.local_chunk
        keep = lambda x, *rest: chunk(x, *rest) if x.is_floating_point() else x  # noqa: E731
        put(experts, "local_chunk", keep)
        put(experts, "gather_from_tp", lambda x, *rest: x)
    with stack:
        try:
            model = parallelize(model, mesh, tp_plan=plan)
            loss(model, batch(layout.data_rank(dist.get_rank()))).backward()
        except AuditError as error:
            return str(error)
    return ""
