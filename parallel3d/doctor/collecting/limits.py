"""Limits of this process and its container, memory, and the disk that checkpoints go to."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from parallel3d.doctor.facts import Disk, Limits

__all__ = ["read_cgroup", "read_disk", "read_limits"]

_HUGE = 1 << 60  # what version 1 of cgroups says for "no limit", and more


def read_limits() -> Limits:
    """Of this process."""
    nofile, nofile_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory, available = _memory()
    quota, memory_limit = read_cgroup()
    shm, shm_free = _space(Path("/dev/shm"))
    return Limits(
        nofile=_HUGE if nofile == resource.RLIM_INFINITY else nofile,
        nofile_hard=_HUGE if nofile_hard == resource.RLIM_INFINITY else nofile_hard,
        memlock=-1 if memlock == resource.RLIM_INFINITY else memlock,
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        quota=quota,
        memory=memory,
        available=available,
        memory_limit=0 if memory_limit >= memory else memory_limit,
        shm=shm,
        shm_free=shm_free,
    )


def _memory() -> tuple[int, int]:
    """(bytes of the machine, bytes available)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemTotal"], found.get("MemAvailable", found["MemFree"])


def read_cgroup(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float, int]:
    """(CPUs, bytes of memory) of the tightest limit of this process's cgroup and those above it; 0: none."""
    quotas, limits = [0.0], [_HUGE]
    for folder in _folders(root, own):
        quota, period = [*_words(folder / "cpu.max"), "", ""][:2]
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
        old = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if old[0] and old[1] and int(old[0][0]) > 0:
            quotas.append(int(old[0][0]) / int(old[1][0]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name) if word.isdigit()]
    least = min(limits)
    return min((q for q in quotas if q), default=0.0), 0 if least >= _HUGE else least


def _folders(root: Path, own: Path) -> list[Path]:
    """Those of this process in each hierarchy, and all above them."""
    found = []
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers else root
        here = base / path.lstrip("/")
        found += [here, *(p for p in here.parents if p.is_relative_to(base))]
    return found or [root]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _space(path: Path) -> tuple[int, int]:
    """(bytes, free bytes) of the file system; (-1, -1) if it isn't there."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return -1, -1
    return usage.total, usage.free


def read_disk(folder: Path) -> Disk:
    """Makes a file in it, which is removed again; if it is not there yet, in the nearest folder above it.

    It is not made: a share that isn't mounted would leave a folder of this node's own, and seem to be well.
    """
    path = str(folder)
    try:
        folder = folder.absolute()
        while not os.path.lexists(folder):
            folder = folder.parent
        probe = folder / f".doctor-{os.uname().nodename}-{os.getpid()}"
        probe.write_bytes(b"doctor")
        probe.unlink()
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Disk(path, error=f"{path}: {error.strerror or error}")
    return Disk(str(folder), usage.free, usage.total, kind=_kind(folder))


def _kind(folder: Path) -> str:
    """Of the file system, by the longest mount point above it."""
    whole = folder.resolve()
    best, kind = Path("/"), ""
    for line in _lines(Path("/proc/self/mounts")):
        _, point, name, *_ = line.split()
        at = Path(point.replace("\\040", " "))
        if whole.is_relative_to(at) and len(at.parts) >= len(best.parts):
            best, kind = at, name
    return kind
