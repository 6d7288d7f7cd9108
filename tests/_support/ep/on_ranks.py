"""What the tests of expert parallelism run on every rank."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from _support.ep.models import Looped, Mixture, batch, loss
from parallel3d import Checks, MeshLayout, build_mesh, checkpoint, ep, optim, parallelize
from parallel3d.testing import assert_parity

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


def saved(folder: str, layout: MeshLayout) -> None:
    """Two steps of AdamW, saved."""
    _, plain, parallel = made(layout)
    optimizer = optim.local(torch.optim.AdamW, parallel.parameters(), lr=0.01)
    for step in range(2):
        backward(layout, plain, parallel, step)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(Path(folder) / "run", model=parallel, optimizer=optimizer, step=2)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
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


def planted(fault: str, layout: MeshLayout) -> str:
    """What the audit, on by default, says of a fault of expert parallelism."""
    from parallel3d.ep import exchange, experts
    from parallel3d.errors import AuditError
    from parallel3d.fsdp.bucket import Bucket

    torch.manual_seed(0)
    mesh = build_mesh(layout, device_type="cpu")
    model = EIGHT()
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.tp > 1 else None
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    if fault == "averaged over efsdp alone":
        put(Bucket, "divisor", property(lambda self: float(self.axes.data_size)))
    elif fault == "router without gradient":
        inner = experts.Dispatch.apply
        apply = staticmethod(lambda rows, weights, *rest: inner(rows, weights.detach(), *rest))
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
    try:
        model = parallelize(model, mesh, tp_plan=plan)
        loss(model, batch(layout.data_rank(dist.get_rank()))).backward()
    except AuditError as error:
        return str(error)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
    return ""
