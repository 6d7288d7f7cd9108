"""Accelerators: whether torch sees those there are, enough of them, and in good health."""

from __future__ import annotations

from parallel3d.doctor.facts import GIB, Facts
from parallel3d.doctor.finding import Result, Seen, Severity, check

__all__: list[str] = []

AREA = "devices"


@check(
    "no-device",
    AREA,
    Severity.error,
    why="The job would run on the CPU, or fail at its first tensor.",
    do="nvidia-smi; then a driver as new as torch's CUDA wants, or torch's wheel for this driver",
)
def no_device(facts: Facts) -> Result:
    if facts.devices or not facts.on_machine or not facts.device_error:
        return None
    return f"{facts.on_machine} on this machine, none that torch can use: {facts.device_error}"


@check(
    "devices-hidden",
    AREA,
    Severity.warning,
    why="torch sees no device although there are some.",
    do="unset CUDA_VISIBLE_DEVICES",
)
def hidden(facts: Facts) -> Result:
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.devices or not facts.on_machine or value is None or facts.device_error:
        return None
    return f"CUDA_VISIBLE_DEVICES={value!r} hides all {facts.on_machine}"


@check(
    "fewer-devices-than-ranks",
    AREA,
    Severity.error,
    why="Ranks beyond the last device fail with an invalid device ordinal.",
    do="torchrun --nproc-per-node N with as many as there are, or show more in CUDA_VISIBLE_DEVICES",
)
def too_few(facts: Facts) -> Result:
    count, place = len(facts.devices), facts.place
    if count in (0, 1) and place.local_world_size > 1 and count:
        return None  # each may be shown its own: see device-shared
    if not count or count >= place.local_world_size:
        return None
    text = f"{count} devices for {place.local_world_size} ranks of this node"
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    text += f" (CUDA_VISIBLE_DEVICES={value})" if value is not None else ""
    return Seen(text, f"torchrun --nproc-per-node {count}")


@check(
    "devices-unused",
    AREA,
    Severity.note,
    why="They are paid for and idle.",
    do="torchrun --nproc-per-node N with as many as there are",
)
def unused(facts: Facts) -> Result:
    count, place = len(facts.devices), facts.place
    if place.world_size == 1 or count <= place.local_world_size or count == 1:
        return None
    text = f"{place.local_world_size} ranks on {count} devices"
    return Seen(text, f"torchrun --nproc-per-node {count}")


@check(
    "mig",
    AREA,
    Severity.warning,
    why="NCCL does not join instances of one GPU, and there is no direct path between instances.",
    do="nvidia-smi -mig 0 on GPUs meant for training on several",
)
def mig(facts: Facts) -> Result:
    found = [each.name for each in facts.devices if each.mig]
    return f"{len(found)} of {len(facts.devices)} are MIG instances: {found[0]}" if found else None


@check(
    "no-persistence",
    AREA,
    Severity.note,
    why="The driver unloads between jobs: the first call takes seconds, and clocks and counters are reset.",
    do="nvidia-smi -pm 1, or the service nvidia-persistenced",
)
def persistence(facts: Facts) -> Result:
    off = [i for i, each in enumerate(facts.devices) if not each.persistence]
    return f"persistence mode is off on {len(off)} of {len(facts.devices)} devices" if off else None


@check(
    "device-busy",
    AREA,
    Severity.warning,
    why="Another process has memory there: an old job that has not ended, or a neighbour. It takes time too.",
    do="nvidia-smi shows whose it is; end what should have ended",
)
def busy(facts: Facts) -> Result:
    used = {i: d.total - d.free for i, d in enumerate(facts.devices) if d.total - d.free > 2 * GIB}
    if not used:
        return None
    return ", ".join(f"device {i} has {n / GIB:.1f} GiB in use" for i, n in used.items())


@check(
    "device-faulty",
    AREA,
    Severity.error,
    why="Uncorrected memory errors: numbers may be wrong, and the next one ends the job.",
    do="Take the node out of the job; nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace the device",
)
def faulty(facts: Facts) -> Result:
    bad = [f"device {i} had {d.errors}" for i, d in enumerate(facts.devices) if d.errors]
    return f"uncorrected memory errors: {', '.join(bad)}" if bad else None


@check(
    "device-slowed",
    AREA,
    Severity.warning,
    why="Its clocks are held down: it is the slowest of the job, and all wait for it.",
    do="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling and power supply",
)
def slowed(facts: Facts) -> Result:
    found = [f"device {i}: {d.slowed}" for i, d in enumerate(facts.devices) if d.slowed]
    return ", ".join(found) or None
