"""Failures half-way through parallelize: the model goes back to what it was."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.bad_input import DATA, TWO_BY_TWO, one_rank
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.snapshot import Snapshot
from torch import nn
from torch.nn import functional as F

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.activations import kinds
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import Bucket
from parallel3d.testing import fake_world
from parallel3d.tp import Rowwise

implementation = sys.modules[parallelize.__module__]  # its name is also the function's


class Broken(RuntimeError):
    """Not one of ours: memory, a bug, an interrupt."""


def failing_on_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Broken(f"call {number}")
        return function(*args, **kwargs)

    return wrapped


def annotated() -> Lm:
    """A model with things of its own that wrapping must not lose."""
    model = Lm(layers=3)
    model.register_buffer("steps", torch.zeros(3))
    model.layers[0].up.weight.no_decay = True  # a mark on a parameter
    model.head.weight.requires_grad_(False)
    model.names = ["a"]
    model.layers[1].forward = functools.partial(type(model.layers[1]).forward, model.layers[1])
    lm_loss(model, tokens(1)).backward()
    return model


# Three blocks, embedding, tail, root; with and without tensor parallelism before.
@pytest.mark.parametrize("number", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("layout", [DATA, TWO_BY_TWO, MeshLayout()], ids=str)
def test_failure_in_any_fully_shard_is_rolled_back(monkeypatch, number: int, layout) -> None:
    failing = failing_on_call(number, implementation.fully_shard)
    monkeypatch.setattr(implementation, "fully_shard", failing)
    check_rolled_back(layout, compile="eager", activation_checkpointing=True)


# Three blocks: checkpointing, then compile.
@pytest.mark.parametrize("number", [1, 3, 4, 6])
def test_failure_in_a_new_forward_is_rolled_back(monkeypatch, number: int) -> None:
    failing = failing_on_call(number, implementation.wrap_forward)
    for module in (implementation, kinds):
        monkeypatch.setattr(module, "wrap_forward", failing)
    check_rolled_back(TWO_BY_TWO, compile="eager", activation_checkpointing=True)


# Buckets: one for each block, one for the embedding, two for the tail, whose head is half frozen.
@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_failure_inside_fully_shard_is_rolled_back(monkeypatch, number: int) -> None:
    monkeypatch.setattr(Bucket, "build", failing_on_call(number, Bucket.build))
    check_rolled_back(TWO_BY_TWO)


def test_failure_in_a_style_is_rolled_back(monkeypatch) -> None:
    monkeypatch.setattr(Rowwise, "install", failing_on_call(2, Rowwise.install))
    check_rolled_back(TWO_BY_TWO)


def test_interrupt_is_rolled_back(monkeypatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rowwise, "install", interrupted)
    check_rolled_back(TWO_BY_TWO, error=KeyboardInterrupt)


def check_rolled_back(
    layout: MeshLayout, error: type[BaseException] = Broken, **options: Any
) -> None:
    model = annotated()
    calls: list[nn.Module] = []
    handle = model.layers[2].register_forward_hook(lambda module, *_: calls.append(module))
    before = Snapshot(model, tokens(0))
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        with pytest.raises(error):
            parallelize(model, mesh, LM_PLAN, **options)
    before.check()
    # The user's handle still belongs to the hook.
    calls.clear()
    handle.remove()
    model(tokens(0))
    assert not calls


def test_a_rolled_back_model_can_be_made_parallel(monkeypatch) -> None:
    model = Lm()
    expected = model(tokens(0))
    failing = failing_on_call(3, implementation.fully_shard)
    with one_rank() as single:
        with monkeypatch.context() as patched:
            patched.setattr(implementation, "fully_shard", failing)
            with pytest.raises(Broken):
                parallelize(model, single, LM_PLAN)
        assert parallelize(model, single, LM_PLAN) is model
        torch.testing.assert_close(model(tokens(0)), expected)


def test_snapshot_sees_changes() -> None:
    """The helper itself: each of these changes is one it must notice."""

    def attribute(model: Lm) -> None:
        model.norm.extra = 1

    def hook(model: Lm) -> None:
        model.layers[0].register_forward_pre_hook(lambda *_: None)

    def load_hook(model: Lm) -> None:
        model.register_load_state_dict_post_hook(lambda *_: None)

    def value(model: Lm) -> None:
        model.head.bias.data[3] += 1e-6

    def parameter(model: Lm) -> None:
        model.head.bias = nn.Parameter(model.head.bias.detach())

    def mark(model: Lm) -> None:
        model.head.bias._layout = object()

    def frozen(model: Lm) -> None:
        model.head.bias.requires_grad_(False)

    def cls(model: Lm) -> None:
        model.norm.__class__ = type("FSDPLayerNorm", (nn.LayerNorm,), {})

    def forward(model: Lm) -> None:
        model.layers[1].forward = lambda x: F.relu(x)

    for change in (attribute, hook, load_hook, value, parameter, mark, frozen, cls, forward):
        model = Lm()
        before = Snapshot(model, tokens(0))
        before.check()
        change(model)
        with pytest.raises(AssertionError):
            before.check()


def test_fully_shard_that_fails_late_leaves_the_module_alone(monkeypatch) -> None:
    """Two dtypes make two buckets; the second can't be built."""
    built: list[Bucket] = []
    original = Bucket.build

    def build(self: Bucket, device: torch.device) -> None:
        built.append(self)
        if len(built) == 2:
            raise RuntimeError("out of memory")
        original(self, device)

    monkeypatch.setattr(Bucket, "build", build)
    with fake_world(0, 2):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
        before = list(model.parameters())
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        with pytest.raises(RuntimeError, match="out of memory"):
            fully_shard(model, mesh=mesh)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert type(model) is nn.Sequential and not model._forward_pre_hooks
