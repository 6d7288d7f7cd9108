"""check_capture: what keeps a step out of a CUDA graph is found, and the engine's own step is clean."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from _support.ep.models import Mixture, batch
from _support.tools.dryrun.stream_programs import CASES, train
from torch import Tensor, nn
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.captures import KINDS
from parallel3d.tools.dryrun.result import CaptureObstacle, DryRun, from_json, to_json


def checked(fn: Callable[[], object], world_size: int = 1) -> DryRun:
    return record(fn, world_size, 0, check_capture=True)


def obstacles_of(fn: Callable[[], object], world_size: int = 1) -> tuple[CaptureObstacle, ...]:
    found = checked(fn, world_size).obstacles
    assert found is not None
    return found


def told(found: tuple[CaptureObstacle, ...]) -> str:
    return "\n".join(map(str, found))


# ---- the engine ----

REFUSED = {
    "offload": "the CPU holds shards, and its optimizer computes",
    "HFSDP, one dtype, unsharded early": "a unit is unsharded between two steps",
    "experts": "sizes of messages are read, see below",
}
"""Beginning of a program's name -> why it can't be captured."""

QUICK = ("HFSDP",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK))
        for n in CASES
        if "raises" not in n
    ],
)
def test_the_engine_can_be_captured(name: str) -> None:
    """FSDP, HSDP, HFSDP, TP, CP, accumulation, recomputation, offloaded activations, clipping, AdamW."""
    program = replace(CASES[name], capturable=True, steps=4)
    run = checked(lambda: train(program), program.world_size)
    assert bool(run.obstacles) == name.startswith(tuple(REFUSED)), told(run.obstacles or ())
    assert run.races == ()


# ---- what is planted ----


class Step:
    """A small training, with what each test plants.

    Attributes:
        at: what runs after the forward. before: what runs before the first step. after: after the optimizer.
    """

    def __init__(
        self,
        at: Callable[[Step, Tensor], Any],
        *,
        setup: Callable[[Step], Any] = lambda step: None,
        before: Callable[[Step], Any] = lambda step: None,
        optimizer: Callable[..., Any] = torch.optim.SGD,
    ) -> None:
        self.at, self.setup, self.before, self.optimizer = at, setup, before, optimizer
        self.state: Any = None
        self.side: Any = None
        self.ids = torch.arange(8)

    def __call__(self) -> None:
        self.model = nn.Embedding(8, 4)
        self.setup(self)
        optimizer = self.optimizer(self.model.parameters(), lr=0.1)
        for _ in range(4):
            self.before(self)
            out = self.model(self.ids)
            self.at(self, out)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def make_side(step: Step) -> None:
    step.side = torch.cuda.Stream()
    step.state = torch.zeros(8, 4)


def on_side(*, forked: bool, joined: bool) -> Callable[[Step, Tensor], None]:
    def at(step: Step, out: Tensor) -> None:
        if forked:
            step.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(step.side):
            step.state.add_(1)
        if joined:
            torch.cuda.current_stream().wait_stream(step.side)

    return at


def record_on_side(step: Step) -> None:
    with torch.cuda.stream(step.side):
        step.state.add_(1)
    step.event = step.side.record_event()


def unwaited_collective(step: Step, out: Tensor) -> None:
    dist.all_reduce(step.state, async_op=True)


def decide(step: Step, out: Tensor) -> None:
    if out.sum() > 0:
        step.state = None


def keep(step: Step, out: Tensor) -> None:
    if step.state is not None:
        out.detach().add(step.state)
    step.state = out.detach() * 2


def join_group(step: Step) -> None:
    dist.init_process_group()
    make_side(step)


def allocate_on(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.empty(8)


def one_value(step: Step) -> None:
    step.state = torch.ones(1)


def time_between() -> None:
    first, last = (torch.cuda.current_stream().record_event() for _ in range(2))
    first.elapsed_time(last)


PLANTED: dict[str, dict[str, Step]] = {
    "host synchronisation": {
        "item": Step(lambda step, out: out.sum().item()),
        "format": Step(lambda step, out: f"{out.sum()}"),
        "tolist": Step(lambda step, out: out.tolist()),
        "cpu": Step(lambda step, out: out.cpu()),
        "to cpu": Step(lambda step, out: out.to("cpu")),
        "torch.cuda.synchronize": Step(lambda step, out: torch.cuda.synchronize()),
        "event.synchronize": Step(
            lambda *_: torch.cuda.current_stream().record_event().synchronize()
        ),
        "event.query": Step(lambda *_: torch.cuda.current_stream().record_event().query()),
        "nonzero": Step(lambda step, out: out.nonzero()),
        "a mask": Step(lambda step, out: out[out > 0]),
        "a mask of integers": Step(lambda step, out: step.ids[step.ids > 3]),
        "item of an integer": Step(lambda step, out: step.ids.max().item()),
        "repr": Step(lambda step, out: repr(out)),
        "elapsed_time": Step(lambda *_: time_between()),
        "values at a mask": Step(
            lambda step, out: out.detach().clone().__setitem__(out > 0, step.state), setup=one_value
        ),
        "repeat_interleave": Step(lambda step, out: out.repeat_interleave(step.ids, dim=0)),
        "classes of one_hot": Step(lambda step, out: nn.functional.one_hot(step.ids)),
        "new_tensor": Step(lambda step, out: out + out.new_tensor([1.0] * 4)),
        "numbers of Python": Step(
            lambda step, out: out + torch.tensor([1.0] * 4, device=out.device)
        ),
    },
    "allocation outside the pool": {
        "pinned memory": Step(lambda step, out: out.pin_memory()),
        "made pinned": Step(lambda step, out: torch.zeros(8, pin_memory=True)),
        "on a stream outside": Step(lambda step, out: allocate_on(step.side), setup=make_side),
    },
    "memory of another step": {"kept from step to step": Step(keep)},
    "event of uncaptured work": {
        "an event from before": Step(
            lambda step, out: torch.cuda.current_stream().wait_event(step.event),
            setup=make_side,
            before=record_on_side,
        ),
        "forked too late": Step(on_side(forked=False, joined=True), setup=make_side),
    },
    "work outside the capture": {
        "not forked": Step(on_side(forked=False, joined=False), setup=make_side),
        "a count on the CPU": Step(
            lambda step, out: step.state.add_(1),
            setup=lambda step: setattr(step, "state", torch.tensor(0)),
        ),
        "an optimizer that is not capturable": Step(lambda *_: None, optimizer=torch.optim.AdamW),
    },
    "stream not joined": {
        "not joined": Step(on_side(forked=True, joined=False), setup=make_side),
        "a collective without wait": Step(unwaited_collective, setup=join_group),
    },
    "branch on a value": {
        "if tensor": Step(decide),
        "if a known tensor": Step(lambda step, out: bool((step.ids > 3).any())),
        "if number": Step(lambda step, out: out.sum().item() > 0),
    },
    "random state": {
        "a generator": Step(
            lambda step, out: torch.rand(4, generator=step.state),
            setup=lambda step: setattr(step, "state", torch.Generator()),
        ),
        "a seed": Step(lambda step, out: torch.manual_seed(1)),
        "a seed of the step": Step(lambda step, out: p3d.seed_step(seed=1, step=2)),
        "the state of a generator": Step(lambda step, out: torch.cuda.get_rng_state()),
        "seed": Step(lambda step, out: torch.cuda.seed_all()),
        "Python's random": Step(lambda step, out: out * random.random()),
        "numpy's random": Step(lambda step, out: out * np.random.rand()),
    },
}
"""Kind that is found -> what a step does, and the program."""


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, steps in PLANTED.items() for name in steps]
)
def test_each_kind_is_found(kind: str, name: str) -> None:
    """And nothing but that; with its line, and what to do."""
    found = obstacles_of(PLANTED[kind][name], 2 if "collective" in name else 1)
    assert kind in {each.kind for each in found}, told(found)
    of_kind = next(each for each in found if each.kind == kind)
    assert of_kind.remedy
    if kind != "stream not joined" and not name.endswith("'s random"):
        assert "test_captures.py" in of_kind.line + of_kind.called, of_kind


def test_every_kind_is_planted() -> None:
    assert PLANTED.keys() == set(KINDS)


ALLOWED: dict[str, Step] = {
    "nothing": Step(lambda step, out: None),
    "forked and joined": Step(on_side(forked=True, joined=True), setup=make_side),
    "dropout": Step(lambda step, out: nn.functional.dropout(out, 0.5)),
    "a number at a mask": Step(lambda step, out: out.detach().clone().__setitem__(out > 0, 0.0)),
    "a known number of classes": Step(lambda step, out: nn.functional.one_hot(step.ids, 8)),
    "kept in place": Step(lambda step, out: step.state.copy_(out.detach()), setup=make_side),
    "counts on the GPU": Step(
        lambda step, out: None,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, capturable=True),
    ),
    "read between steps": Step(
        lambda step, out: setattr(step, "state", out.detach().sum()),
        before=lambda step: step.state is not None and print(step.state.item()),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_not_reported(name: str) -> None:
    found = obstacles_of(ALLOWED[name])
    assert found == (), told(found)


# ---- what is reported, and where ----


def test_a_finding_says_where() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.sum().item()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.reader = Reader()

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(self.inner(x))

    def program() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(5):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    (found,) = obstacles_of(program)
    assert (found.kind, found.module, found.phase) == ("host synchronisation", "reader", "forward")
    assert (found.step, found.count) == (3, 3)  # the first two steps warm up
    assert "test_captures.py" in found.line and found.line.endswith("in forward")
    assert str(found).splitlines()[0] == (
        "host synchronisation: the host reads a value (item) (reader, forward, step 3, 3 times)"
    )


def train_linear(
    within: Callable[[nn.Module, Tensor], Any],
    after: Callable[[nn.Module, Tensor], Any] = lambda model, loss: None,
    optimizers: int = 1,
) -> Callable[[], None]:
    """A training; ``within`` runs between backward and the optimizers, ``after`` after the first of them."""

    def program() -> None:
        model = nn.Linear(4, 4)
        made = [torch.optim.SGD(model.parameters()) for _ in range(optimizers)]
        for _ in range(4):
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            within(model, loss)
            made[0].step()
            after(model, loss)
            for optimizer in made[1:]:
                optimizer.step()

    return program


def test_what_follows_the_last_optimizer_is_not_part_of_the_step() -> None:
    read = train_linear(lambda *_: None, lambda model, loss: loss.item())
    assert obstacles_of(read) == ()
    between = train_linear(lambda *_: None, lambda model, loss: loss.item(), optimizers=2)
    assert [each.kind for each in obstacles_of(between)] == ["host synchronisation"]


def test_a_forward_without_gradients_is_no_step() -> None:
    def evaluate(model: nn.Module, loss: Tensor) -> None:
        with torch.no_grad():
            print(model(torch.randn(2, 4)).sum().item())

    assert obstacles_of(train_linear(lambda *_: None, evaluate)) == ()


def test_a_decision_ends_the_program_and_what_was_found_is_told() -> None:
    def within(model: nn.Module, loss: Tensor) -> None:
        torch.cuda.synchronize()
        if loss > 3:
            raise RuntimeError("diverged")

    run = checked(train_linear(within))
    found = run.obstacles or ()
    assert [each.kind for each in found] == ["host synchronisation", "branch on a value"]
    assert run.steps == 0
    with pytest.raises(DryRunError, match="the program decides by a tensor's value"):
        checked(train_linear(lambda *_: None, lambda model, loss: bool(loss > 3)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [p3d.optim.GradScaler, torch.amp.GradScaler])
def test_a_scaler_decides_unless_the_optimizer_does(
    kind: type[torch.amp.GradScaler], fused: bool
) -> None:
    """One of a GPU, which torch disables where none is; and one that the program has disabled."""

    def program(enabled: bool) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused, capturable=True)
            scaler = kind("cuda", enabled=enabled)
            for _ in range(4):
                scaler.scale(model(torch.randn(2, 4)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        return run

    assert obstacles_of(program(False)) == ()
    found = obstacles_of(program(True))
    assert [each.kind for each in found] == ["branch on a value"] * (not fused), told(found)


def test_an_empty_tensor_has_no_numbers_to_copy() -> None:
    """The caches of Hugging Face's models begin with one."""

    def within(model: nn.Module, loss: Tensor) -> None:
        torch.cat([torch.tensor([], device=loss.device), loss.detach()[None]])

    assert obstacles_of(train_linear(within)) == ()


def test_clipping_with_an_error_reads_the_norm() -> None:
    def clip(**options: Any) -> tuple[CaptureObstacle, ...]:
        return obstacles_of(
            train_linear(
                lambda model, _: p3d.optim.clip_grad_norm_(model.parameters(), 1.0, **options)
            )
        )

    assert clip() == ()
    assert "error_if_nonfinite" in clip(error_if_nonfinite=True)[0].what


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "count"), [(None, 1), (1.25, 0)])
def test_experts_without_capacity_read_the_sizes_of_messages(
    capacity: float | None, count: int
) -> None:
    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4, ep=2), device_type="cpu")
        model = p3d.parallelize(Mixture(experts=8), mesh, checks=p3d.Checks(audit=False))
        p3d.ep.set_capacity(model, capacity)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            model(batch(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = obstacles_of(program, 4)
    assert len(found) == count, told(found)
    assert all("messages" in each.what for each in found)


def test_written_as_json() -> None:
    run = checked(PLANTED["host synchronisation"]["item"])
    assert run.obstacles and from_json(to_json(run)) == run
