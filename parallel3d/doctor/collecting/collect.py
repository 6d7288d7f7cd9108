"""collect: the Facts of this process."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from parallel3d.doctor.collecting.accelerators import read_devices
from parallel3d.doctor.collecting.limits import read_disk, read_limits
from parallel3d.doctor.collecting.network import addresses_of, read_infiniband, read_interfaces
from parallel3d.doctor.facts import Facts
from parallel3d.doctor.place import place_of

__all__ = ["collect", "steering"]

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "OMP_", "SLURM_NODE")
_NAMES = ("MASTER_ADDR", "MASTER_PORT")


def collect(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Facts:
    """Reads everything that needs no other rank. Takes a second; changes nothing.

    Args:
        folder: where checkpoints are to go.
        environment: that of this process by default.
    """
    given = os.environ if environment is None else environment
    devices, on_machine, device_error, versions = read_devices(given)
    master = given.get("MASTER_ADDR", "")
    host_addresses, host_error = addresses_of(socket.gethostname())
    master_addresses, master_error = addresses_of(master) if master else ((), "")
    return Facts(
        place=place_of(given),
        environment=steering(given),
        versions=_versions() | versions,
        interfaces=read_interfaces(),
        host_addresses=host_addresses,
        host_error=host_error,
        master_addresses=master_addresses,
        master_error=master_error,
        infiniband=read_infiniband(),
        limits=read_limits(),
        devices=devices,
        device_error=device_error,
        on_machine=on_machine,
        disk=None if folder is None else read_disk(folder),
    )


def steering(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer communication and memory."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _versions() -> dict[str, str]:
    import torch

    import parallel3d

    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": str(torch.__version__), "parallel3d": parallel3d.__version__}
