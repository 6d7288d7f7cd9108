"""Where a step can be broken by an exception: each place arms a model, for as long as its context lasts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _support.fsdp.counted_collectives import Memory, Scatter
from _support.models import Block, Lm, lm_loss, tokens
from parallel3d._torch.groups import all_gather_single


class Boom(Exception):
    """What is raised; nothing else raises it."""


def explode(*_: object, **__: object) -> None:
    raise Boom


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# ---- the model ----


class _Through(torch.autograd.Function):
    """Identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: "Gate") -> torch.Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.gate.in_backward()
        return grad, None


class Gate(nn.Module):
    """Lets everything pass, forward and back, until it is told what to call there."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0
        self.in_forward: Callable[[int], None] = lambda passed: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passed += 1
        self.in_forward(self.passed)
        return _Through.apply(x, self)


class GatedBlock(Block):
    """A gate in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate(self.up(self.norm(x))))


class Net(Lm):
    """Three blocks; ``recompute`` says how the middle one is checkpointed."""

    recompute: str | None = None

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.layers = nn.ModuleList(GatedBlock() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index == 1 and self.recompute is not None:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, index: int = 0) -> torch.Tensor:
    return lm_loss(model, tokens(index))


# ---- places ----

Place = Callable[[Net], AbstractContextManager[Any]]


def hooked(register: str, path: str = "layers.1", hook: Any = explode, **options: Any) -> Place:
    """A hook on the module or parameter at ``path``, put there by its method ``register``."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        target = attrgetter(path)(model) if path else model
        handle = getattr(target, register)(hook, **options)
        yield
        handle.remove()

    return place


def in_a_forward(model: Net) -> AbstractContextManager[Any]:
    """In the middle of an inner unit's forward, the next one's all-gather under way."""
    return patch.object(model.layers[1].gate, "in_forward", explode)


@contextmanager
def in_a_second_forward(model: Net) -> Iterator[None]:
    """Before the backward of a first one, which is then never run."""
    first = loss_of(model, 5)
    with in_a_forward(model):
        yield
    del first


@contextmanager
def in_an_evaluation(model: Net) -> Iterator[None]:
    with torch.no_grad(), in_a_forward(model):
        yield


def in_a_recomputation(how: str) -> Place:
    """Activation checkpointing runs the forward a second time, in backward."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        gate = model.layers[1].gate
        first = gate.passed + 1

        def explode_later(passed: int) -> None:
            if passed > first:
                raise Boom

        with (
            patch.object(model, "recompute", how),
            patch.object(gate, "in_forward", explode_later),
        ):
            yield

    return place


def in_a_functions_backward(model: Net) -> AbstractContextManager[Any]:
    """An autograd Function of the user's, inside a unit."""
    return patch.object(model.layers[1].gate, "in_backward", explode)


def on_a_tensor(hook: Any, path: str = "layers.1") -> Place:
    """A hook on the gradient of a module's output."""

    def register(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(hook)

    return hooked("register_forward_hook", path, register)


def saving_a_tensor(pack_error: bool, at: int = 9) -> Place:
    """In the ``at``-th call of a saved-tensor hook: when autograd saves, or when it reads again."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        calls = 0

        def counted(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Boom
            return x

        def through(x: torch.Tensor) -> torch.Tensor:
            return x

        hooks = (counted, through) if pack_error else (through, counted)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            yield

    return place


class _RaisesInLoss:
    """As a model's output: the loss fails after a whole forward, and no backward follows."""

    def __getitem__(self, _: object) -> None:
        raise Boom


class ExplodingGather(Memory):
    """The default all-gather, for ``left`` calls."""

    def __init__(self, left: float) -> None:
        super().__init__()
        self.left = left

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left == 0:
            raise Boom
        self.left -= 1
        return all_gather_single(*args, **options)


class ExplodingScatter(Scatter):
    """The default reduce-scatter, but while ``armed``."""

    armed = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.armed:
            raise Boom
        return super().__call__(*args, **options)


def in_an_all_gather(calls: int) -> Place:
    """In the user's own all-gather of an inner unit, after ``calls`` good ones: forward's or backward's."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        gather = ExplodingGather(calls)
        model.layers[1].set_custom_all_gather(gather)
        yield
        gather.left = float("inf")

    return place


@contextmanager
def in_a_reduce_scatter(model: Net) -> Iterator[None]:
    """In the user's own reduce-scatter, while those of later blocks are under way."""
    scatter = ExplodingScatter()
    model.layers[1].set_custom_reduce_scatter(scatter)
    yield
    scatter.armed = False


@contextmanager
def in_an_all_reduce_hook(model: Net) -> Iterator[None]:
    """After an inner unit's reduce-scatter."""
    model.layers[1].set_all_reduce_hook(explode)
    yield
    model.layers[1].set_all_reduce_hook(lambda gradient: None)


def put_off_by(switch: str, then: Place) -> Place:
    """A first micro-batch's sums wait for their reduction when the second one breaks."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        getattr(model, switch)(False)
        loss_of(model, 7).backward()
        with then(model):
            yield
        getattr(model, switch)(True)

    return place


def unsharded_by_hand(then: Place) -> Place:
    """The user has gathered some units, one of them not finished."""

    @contextmanager
    def place(model: Net) -> Iterator[None]:
        model.layers[1].unshard()
        model.layers[2].unshard(async_op=True)
        with then(model):
            yield

    return place


FORWARD: dict[str, Place] = {
    "forward pre-hook before ours": hooked("register_forward_pre_hook", prepend=True),
    "forward pre-hook after ours": hooked("register_forward_pre_hook"),
    "forward hook before ours": hooked("register_forward_hook", prepend=True),
    "forward hook after ours": hooked("register_forward_hook"),
    "root: forward pre-hook before ours": hooked("register_forward_pre_hook", "", prepend=True),
    "root: forward pre-hook after ours": hooked("register_forward_pre_hook", ""),
    "root: forward hook before ours": hooked("register_forward_hook", "", prepend=True),
    "root: forward hook after ours": hooked("register_forward_hook", ""),
    "inside an inner unit": in_a_forward,
    "inside the root": hooked("register_forward_pre_hook", "norm"),
    "inside an inner unit, KeyboardInterrupt": hooked(
        "register_forward_hook", "layers.1.up", interrupt
    ),
    "second forward before the backward": in_a_second_forward,
    "inside an inner unit, no_grad": in_an_evaluation,
    "a tensor is saved": saving_a_tensor(True),
    "the loss": hooked("register_forward_hook", "", lambda *_: _RaisesInLoss()),
    "all-gather in forward": in_an_all_gather(0),
    "units gathered by hand": unsharded_by_hand(in_a_forward),
    "sums that wait for sync": put_off_by("set_requires_gradient_sync", in_a_forward),
}

BACKWARD: dict[str, Place] = {
    "full backward pre-hook": hooked("register_full_backward_pre_hook"),
    "full backward hook": hooked("register_full_backward_hook"),
    "root: full backward pre-hook": hooked("register_full_backward_pre_hook", ""),
    "full backward hook inside a unit": hooked("register_full_backward_hook", "layers.1.up"),
    "full backward hook inside the root": hooked("register_full_backward_hook", "norm"),
    "hook on a unit's output": on_a_tensor(explode),
    "hook on a tensor inside a unit": on_a_tensor(explode, "layers.1.up"),
    "hook on a tensor, KeyboardInterrupt": on_a_tensor(interrupt),
    "hook on the first unit's input": on_a_tensor(explode, "embed"),
    "autograd Function": in_a_functions_backward,
    "post-accumulate-grad hook on a shard": hooked(
        "register_post_accumulate_grad_hook", "layers.1.up.weight"
    ),
    "recomputation": in_a_recomputation("non-reentrant"),
    "reentrant recomputation": in_a_recomputation("reentrant"),
    "a saved tensor is read": saving_a_tensor(False),
    "all-gather in backward": in_an_all_gather(1),
    "reduce-scatter": in_a_reduce_scatter,
    "all_reduce_hook": in_an_all_reduce_hook,
    "units gathered by hand": unsharded_by_hand(in_a_functions_backward),
    "sums that wait for sync": put_off_by("set_requires_gradient_sync", in_a_functions_backward),
    "sums that wait for the all-reduce": put_off_by(
        "set_requires_all_reduce", in_a_functions_backward
    ),
}
