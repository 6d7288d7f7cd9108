"""Ctrl-C, ``sys.exit()`` or a cancelled task in a forward (no ``Exception``) leave the model at rest, and
so do reads after a backward that failed."""

import asyncio
import copy
import random
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh, equal_grads
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh, fsdp
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from parallel3d.fsdp.inspect import units_of
from parallel3d.testing import local_world

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x))))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def sharded(plain: Net, layout: MeshLayout) -> Net:
    """``second`` is a unit with one inside, ``norm`` and ``head`` are one of two modules."""
    mesh = build_mesh(layout, device_type="cpu")
    model = copy.deepcopy(plain)
    for unit in (model.first, model.second[0], model.second, [model.norm, model.head], model):
        fully_shard(unit, mesh=mesh)
    register_fsdp_forward_method(model, "predict")
    return model


def check_at_rest(model: Net, plain: Net) -> None:
    for unit in units_of(model, recurse=True):
        assert not (unit.forward or unit.backward or unit.group.is_registered), unit.label
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        assert all(torch.equal(each, q) for each in inner_tensors(p.full_tensor())), name


def check_step(model: Net, plain: Net) -> None:
    for each in (model, plain):
        each.zero_grad()
        each(X).square().sum().backward()
    equal_grads(model, plain)


def interrupts(kind: type[BaseException]) -> Callable[..., None]:
    def interrupt(*_: object) -> None:
        raise kind

    return interrupt


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)], ids=str)
@pytest.mark.parametrize("where", ["first", "second", "", "second.0", "second.1", "norm", "head"])
@pytest.mark.parametrize("method", ["forward", "predict"])
def test_in_a_forward(layout: MeshLayout, where: str, method: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    with local_world(2):
        model = sharded(plain, layout)
        check_step(model, plain)
        module = model.get_submodule(where)
        for kind, register in zip(
            KINDS,
            [module.register_forward_hook, module.register_forward_pre_hook] * 2,
            strict=True,
        ):
            handle = register(interrupts(kind))
            with pytest.raises(kind):
                (model if method == "forward" else model.predict)(torch.zeros(2, 6))
            handle.remove()
            check_at_rest(model, plain)
            check_step(model, plain)


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)], ids=str)
@pytest.mark.parametrize("inside", ["a unit", "the root"])
def test_a_forward_goes_on_after_a_backward_in_it_that_fails(
    layout: MeshLayout, inside: str
) -> None:
    """What it has gathered stays, in the unit whose forward it is and in those around it."""

    class Probing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.probe, self.after = (nn.Linear(6, 6) for _ in range(3))
            self.bias = nn.Parameter(torch.randn(6))
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x) * self.bias
            if self.fails:
                y = x.detach().requires_grad_() * 1
                y.register_hook(interrupts(ZeroDivisionError))
                with pytest.raises(ZeroDivisionError):
                    self.probe(y).sum().backward()
            return self.after(x * self.bias) + self.bias

    torch.manual_seed(0)
    plain = (
        nn.Sequential(Probing(), nn.Tanh(), nn.Linear(6, 3)) if inside == "a unit" else Probing()
    )
    with local_world(2):
        mesh = build_mesh(layout, device_type="cpu")
        model = copy.deepcopy(plain)
        probing = [each for each in model.modules() if isinstance(each, Probing)]
        for unit in (probing[0].before, probing[0].probe, probing[0].after, *probing, model):
            if not isinstance(unit, FSDPModule):
                fully_shard(unit, mesh=mesh)
        for fails in (False, True, False):
            probing[0].fails = fails
            check_step(model, plain)


def test_an_outer_forward_that_catches_it_goes_on() -> None:
    class Retries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.failures = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return self.inner(x)

    torch.manual_seed(0)
    plain = Retries()
    with local_world(2):
        mesh = cpu_mesh()
        model = copy.deepcopy(plain)
        fully_shard(fully_shard(model.inner, mesh=mesh) and model, mesh=mesh)

        def once(*_: object) -> None:
            model.failures -= 1
            if model.failures >= 0:
                raise KeyboardInterrupt

        model.inner.register_forward_hook(once)
        check_step(model, plain)
        assert model.failures < 0


def test_a_forward_that_returns_none_while_an_exception_is_handled() -> None:
    """It has not failed: its parameters' gradients come by what it has kept."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, found: list) -> None:
            found.append(self.inner(x).sum())

    torch.manual_seed(0)
    plain = Keeps()
    with local_world(2):
        mesh = cpu_mesh()
        model = copy.deepcopy(plain)
        fully_shard(fully_shard(model.inner, mesh=mesh) and model, mesh=mesh)
        found: list[torch.Tensor] = []
        try:
            raise ValueError
        except ValueError:
            model(torch.ones(2, 6), found)
        found[0].backward()
        for p in model.parameters():
            assert isinstance(p, DTensor)
            assert p.grad is not None


class Around(nn.Module):
    """No unit: a wrapper of the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


READS: dict[str, Callable[[Net], Iterable[tuple[str, torch.Tensor]]]] = {
    "parameters": lambda model: ((str(i), p) for i, p in enumerate(model.parameters())),
    "named_parameters": lambda model: model.named_parameters(),
    "state_dict": lambda model: model.state_dict().items(),
    "of a unit": lambda model: model.second.named_parameters(),
    "of a unit itself": lambda model: model.second[0].named_parameters(recurse=False),
    "of a module above": lambda model: Around(model).named_parameters(),
    "state_dict above": lambda model: Around(model).state_dict().items(),
    "by modules": lambda model: (
        (f"{name}.{key}", p)
        for name, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None
    ),
}


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)], ids=str)
@pytest.mark.parametrize("read", READS)
def test_reads_after_a_backward_that_failed(layout: MeshLayout, read: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    with local_world(2):
        model = sharded(plain, layout)
        check_step(model, plain)
        for kind in (RuntimeError, KeyboardInterrupt):
            handle = model.second[1].register_full_backward_hook(interrupts(kind))
            loss = model(X).sum()
            with pytest.raises(kind):
                loss.backward()
            handle.remove()
            found = dict(READS[read](model))
            assert found
            assert all(isinstance(p, DTensor) for p in found.values())
            for p in model.parameters():
                p.grad = None
            assert not any(p.grad is not None for p in model.parameters())
            check_step(model, plain)


def test_a_thread_that_reads_during_a_backward_leaves_it_alone() -> None:
    torch.manual_seed(0)
    plain = Net()
    with local_world(2):
        model = sharded(plain, MeshLayout(1, 2, 1))

        def read_elsewhere(*_: object) -> None:
            thread = threading.Thread(target=lambda: list(model.parameters()))
            thread.start()
            thread.join()

        model.second[1].register_full_backward_hook(read_elsewhere)
        check_step(model, plain)


class _Interrupt:
    """Ctrl-C before line ``at`` of the engine that a call runs; without ``at`` it counts them."""

    folder = str(Path(fsdp.__file__).parent)

    def __init__(self, at: int = 0) -> None:
        self.at, self.lines = at, 0

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace

    def run(self, model: Net, *, backward: bool) -> None:
        before = sys.gettrace()
        try:
            sys.settrace(None if backward else self.trace)
            loss = model(X).sum()
            sys.settrace(self.trace if backward else None)
            loss.backward()
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)], ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "places", [8, pytest.param(400, marks=pytest.mark.full)], ids=["few", "many"]
)
def test_at_any_line_of_the_engine(layout: MeshLayout, backward: bool, places: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    with local_world(2):
        model = sharded(plain, layout)
        check_step(model, plain)
        counted = _Interrupt()
        counted.run(model, backward=backward)
        raised = 0
        for at in random.Random(0).sample(range(1, counted.lines), min(places, counted.lines - 1)):
            interrupt = _Interrupt(at)
            try:
                interrupt.run(model, backward=backward)
            except KeyboardInterrupt:
                raised += 1
            else:
                assert interrupt.lines < at  # the first run had more to do
            model.zero_grad()
            check_at_rest(model, plain)
            check_step(model, plain)
        assert raised > places // 2 or raised > counted.lines // 2
