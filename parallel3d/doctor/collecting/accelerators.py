"""Accelerators: as torch sees them, as the machine has them, and what nvidia-smi says of their health."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from parallel3d.doctor.facts import Device

__all__ = ["parse_health", "read_devices"]

_QUERY = (
    "uuid,persistence_mode,ecc.errors.uncorrected.volatile.total,memory.total,memory.used,"
    "clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_thermal_slowdown,"
    "clocks_event_reasons.hw_power_brake_slowdown"
)
_SLOWED = ("hardware thermal", "software thermal", "power brake")


def read_devices(
    environment: Mapping[str, str],
) -> tuple[tuple[Device, ...], int, str, dict[str, str]]:
    """(devices that torch sees, how many the machine has, why torch sees none, versions)."""
    import torch

    on_machine = len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()])
    on_machine = on_machine or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("[1-9]*")))
    versions = {"cuda": str(torch.version.cuda or torch.version.hip or "none")}
    if driver := _driver():
        versions["driver"] = driver
    with warnings.catch_warnings():  # torch says why it sees none: so do we
        warnings.simplefilter("ignore")
        there = torch.cuda.is_available()
    if not there:
        return (), on_machine, _why_none(environment) if on_machine else "", versions
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    health = parse_health(_nvidia_smi())
    return (
        tuple(_device(i, health) for i in range(torch.cuda.device_count())),
        on_machine,
        "",
        versions,
    )


def _device(index: int, health: Mapping[str, Device]) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    known = health.get(uuid.removeprefix("GPU-"), Device(""))
    # Not torch.cuda.mem_get_info: on every device it would leave a context of every rank.
    total = properties.total_memory
    free = total - (known.total - known.free)
    is_mig = "MIG" in properties.name or uuid.startswith("MIG")
    return replace(known, name=properties.name, uuid=uuid, total=total, free=free, mig=is_mig)


def _why_none(environment: Mapping[str, str]) -> str:
    """Why torch sees no device although there are; "" where they are hidden on purpose."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is False"


def _driver() -> str:
    """Version of the kernel's NVIDIA driver."""
    try:
        words = Path("/sys/module/nvidia/version").read_text().split()
    except OSError:
        return ""
    return words[0] if words else ""


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_health(text: str) -> dict[str, Device]:
    """UUID (without ``GPU-``) -> what nvidia-smi says of it; a query it does not know gives nothing."""
    found = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 8:
            continue
        uuid, persistence, errors, total, used, *slowed = words
        reasons = [why for why, word in zip(_SLOWED, slowed, strict=True) if word == "Active"]
        found[uuid.removeprefix("GPU-")] = Device(
            "",
            total=_mib(total),
            free=_mib(total) - _mib(used),
            persistence=persistence != "Disabled",
            errors=int(errors) if errors.isdigit() else 0,
            slowed=", ".join(reasons),
        )
    return found


def _mib(word: str) -> int:
    return int(word) * 2**20 if word.isdigit() else 0
