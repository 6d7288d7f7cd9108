"""Who owns a parameter: found from the user's Parameter and from the sharded one, kept alive by neither."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn

from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import owner_of, unit_of
from parallel3d.testing import fake_world


def sharded_linear() -> tuple[nn.Module, nn.Parameter]:
    model = nn.Linear(4, 6)
    weight = model.weight
    return fully_shard(model, mesh=cpu_mesh()), weight


def test_found_from_both_parameters() -> None:
    with fake_world(0, 2):
        model, user = sharded_linear()
        owner = owner_of(user)
        assert owner is owner_of(model.weight)
        assert owner.sharded is model.weight and owner.name == "weight"
        assert owner.unit() is unit_of(model)
        assert owner.module() is model
        assert owner_of(model.bias) is not owner
        assert owner_of(nn.Parameter(torch.zeros(2))) is None


def test_a_copy_has_no_owner() -> None:
    """The mark is neither copied nor pickled with the Parameter it is on."""
    with fake_world(0, 2):
        model, user = sharded_linear()
        assert owner_of(copy.deepcopy(user)) is None
        assert owner_of(pickle.loads(pickle.dumps(user))) is None
        assert owner_of(copy.deepcopy(model.weight)) is None


@pytest.mark.parity("reliability: everything freed at once")
def test_ownership_keeps_no_module_alive() -> None:
    """What owns a Parameter does not hold its module."""
    with fake_world(0, 2):
        model, _ = sharded_linear()
        owner = owner_of(model.weight)
        gc.disable()
        try:
            gone = weakref.ref(model)
            del model
            assert gone() is None
            assert isinstance(owner.sharded, nn.Parameter)
        finally:
            gc.enable()
