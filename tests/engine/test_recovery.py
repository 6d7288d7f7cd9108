"""After an exception in a forward or a backward, ``reset_iter_state`` makes the model usable again."""

import functools

import pytest
import torch
from _support.engine.twins import Twins, device_mesh, sample_of, shard_layers
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.testing import fake_world


class Boom(Exception):
    pass


def explode(*_: object) -> None:
    raise Boom


# Where the exception comes from: (module of the model, how the hook is registered).
PLACES = {
    "before a unit's forward": ("layers.1", "register_forward_pre_hook"),
    "in a unit's forward": ("layers.1.up", "register_forward_pre_hook"),
    "after a unit's forward": ("layers.1", "register_forward_hook"),
    "in the root's forward": ("norm", "register_forward_hook"),
    "before a unit's backward": ("layers.1", "register_full_backward_pre_hook"),
    "in a unit's backward": ("layers.1.up", "register_full_backward_hook"),
    "after a unit's backward": ("layers.1", "register_full_backward_hook"),
    "in the first unit's backward": ("layers.0.down", "register_full_backward_hook"),
}


def fails(model: nn.Module, place: str, ids: torch.Tensor) -> None:
    """A step of ``model`` that an exception ends at ``place``."""
    name, register = PLACES[place]
    handle = getattr(model.get_submodule(name), register)(explode)
    with pytest.raises(Boom):
        lm_loss(model, ids).backward()
    handle.remove()


def recovers(engine, where: str, options: dict) -> None:
    wrap = functools.partial(shard_layers, engine, mesh=device_mesh(), **options)
    for place in (p for p in PLACES if p.endswith(where)):
        twins = Twins(Lm(layers=3), wrap)
        for first in (True, False):  # in the very first step, and in a later one
            if not first:
                twins.train(range(1))
            fails(twins.sharded, place, tokens(sample_of(8, torch.distributed.get_rank())))
            twins.sharded.reset_iter_state()
            assert all(isinstance(p, DTensor) for p in twins.sharded.parameters()), place
            twins.zero_grad()
            twins.train(range(2))


@pytest.mark.parity(
    "method: reset_iter_state",
    "reliability: exception in forward, reset_iter_state",
)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_exception_in_forward(on_ranks, options) -> None:
    on_ranks(recovers, "forward", options)


@pytest.mark.parity(
    "method: reset_iter_state",
    "reliability: exception in backward, reset_iter_state",
)
@pytest.mark.torch_fails("found: reset", match="grad: differs")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_exception_in_backward(on_ranks, options) -> None:
    on_ranks(recovers, "backward", options)


def accumulated(engine, method: str, shape: tuple[int, ...], place: str) -> None:
    """What waited for its reduction is dropped with the failed micro-batch."""
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh(*shape)))
    getattr(twins.sharded, method)(False)
    twins.backward_sharded(0)
    fails(twins.sharded, place, tokens(sample_of(1, torch.distributed.get_rank())))
    twins.sharded.reset_iter_state()
    getattr(twins.sharded, method)(True)
    twins.backward(2)
    twins.check_grads()


KEEPS = pytest.mark.torch_fails("found: reset", match="grad: differs")


@pytest.mark.parity(
    "method: reset_iter_state",
    "reliability: exception in forward, reset_iter_state",
    "reliability: exception in backward, reset_iter_state",
)
@pytest.mark.parametrize(
    ("method", "shape", "place"),
    [
        pytest.param("set_requires_gradient_sync", (2,), "in a unit's forward", marks=KEEPS),
        pytest.param("set_requires_gradient_sync", (2,), "in a unit's backward", marks=KEEPS),
        ("set_requires_all_reduce", (2, 2), "in a unit's forward"),
        pytest.param("set_requires_all_reduce", (2, 2), "in a unit's backward", marks=KEEPS),
    ],
)
def test_exception_while_accumulating(on_ranks, method, shape, place) -> None:
    on_ranks(accumulated, method, shape, place, size=2 * len(shape))


def list_unit(engine) -> None:
    """An exception between the modules of one unit."""

    def wrap(model: nn.Module) -> None:
        engine.fully_shard([model.norm, model.head], mesh=device_mesh())
        shard_layers(engine, model, device_mesh())

    twins = Twins(Lm(), wrap)
    for _ in range(2):
        fails(twins.sharded, "in the root's forward", tokens(0))
        twins.sharded.reset_iter_state()
        twins.train(range(2))


@pytest.mark.smoke
@pytest.mark.parity("method: reset_iter_state", "argument: list of modules")
def test_exception_between_the_modules_of_a_list(on_ranks) -> None:
    on_ranks(list_unit)


@pytest.mark.parity("method: reset_iter_state")
def test_reset_of_a_unit_that_is_not_the_root_is_refused(engine) -> None:
    with fake_world(0, 2):
        model = shard_layers(engine, Lm(), device_mesh())
        model(tokens(0))
        with pytest.raises((RuntimeError, ValueError), match=r"root|outermost"):
            model.layers[0].reset_iter_state()
        model.reset_iter_state()
        lm_loss(model, tokens(0)).backward()
