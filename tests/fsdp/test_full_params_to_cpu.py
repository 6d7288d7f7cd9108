"""offload_to_cpu: whole tensors leave the device before the next are gathered. The device is the CPU, the way
home a copy that is no longer counted."""

from collections.abc import Iterator

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes, deep_model
from _support.fsdp.wrapped import cpu_mesh

from parallel3d.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    full_params,
    model_state_dict,
    optim_state_dict,
    state_dict_type,
)
from parallel3d.testing import fake_world

FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


class Device(PeakBytes):
    """The most bytes that were on the device at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.storage_device: set[int] = set()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place of ``Tensor.cpu``."""
        copy = torch.clone(tensor)
        self._made.pop(copy.untyped_storage()._cdata)
        self.storage_device.add(copy.data_ptr())
        return copy

    def has_sent(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.storage_device


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: device.take(tensor))
    with fake_world(0, 4):
        yield device


def model_and_optimizer():
    model = deep_model(cpu_mesh(1, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


# Gathered rows, the whole tensor made of them, and its copy while it is made.
MOST = 3.5 * 32 * 32 * 4


def test_full_params(device) -> None:
    model, _ = model_and_optimizer()
    with device, full_params(model, writeback=False, offload_to_cpu=True):
        assert all(device.has_sent(p) for p in model.parameters())
    assert device.peak <= MOST


@pytest.mark.parametrize("as_context", [False, True], ids=["argument", "context"])
def test_model_state_dict(device, as_context) -> None:
    model, _ = model_and_optimizer()
    model[0].register_buffer("count", torch.ones(3))
    with device:
        if as_context:
            with state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
                state = model.state_dict()
        else:
            state = model_state_dict(model, type=FULL, offload_to_cpu=True)
    assert len(state) == 9 and all(map(device.has_sent, state.values()))
    assert device.peak <= MOST


@pytest.mark.parametrize("as_context", [False, True], ids=["argument", "context"])
def test_optim_state_dict(device, as_context) -> None:
    model, optimizer = model_and_optimizer()
    with device:
        if as_context:
            config = FullOptimStateDictConfig(offload_to_cpu=True)
            with state_dict_type(model, FULL, optim_config=config):
                state = optim_state_dict(model, optimizer)
        else:
            state = optim_state_dict(model, optimizer, type=FULL, offload_to_cpu=True)
    moments = [s[key] for s in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 16 and all(map(device.has_sent, moments))
    assert device.peak <= MOST


def test_parts_of_this_rank(device) -> None:
    model, optimizer = model_and_optimizer()
    with device:
        parts = model_state_dict(model, type=LOCAL, offload_to_cpu=True)
        states = optim_state_dict(model, optimizer, type=LOCAL, offload_to_cpu=True)["state"]
    assert len(parts) == 8 and all(map(device.has_sent, parts.values()))
    assert all(device.has_sent(state["exp_avg"]) for state in states.values())


def test_without_it_they_stay(device) -> None:
    model, optimizer = model_and_optimizer()
    with device:
        weights = model_state_dict(model, type=FULL)
        state = optim_state_dict(model, optimizer, type=FULL, offload_to_cpu=False)
    assert not device.storage_device
    assert device.peak >= (8 + 16) * 32 * 32 * 4
    assert weights and state["state"]
