"""Fixtures of the engine's tests."""

import pytest
from _support.fsdp.noted_streams import Device, note


@pytest.fixture
def device(monkeypatch) -> Device:
    """Streams and events that take notes."""
    device = Device()
    note(device, monkeypatch)
    return device
