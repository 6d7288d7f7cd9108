"""collect: the Facts of this process."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from parallel3d._util.version import __version__
from parallel3d.tools.doctor.facts import Device, Disk, Facts, Interface, Limits, place_of

# Accelerators: as torch sees them, as the machine has them, and what nvidia-smi says of their health.

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


# Limits of this process and its container, memory, and the disk that checkpoints go to.

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


# Interfaces and their addresses, names and what they resolve to, InfiniBand's ports.

_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS of linux/sockios.h
_UP_AND_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING


def read_interfaces() -> tuple[Interface, ...]:
    """Those of this network namespace, in the kernel's order; a bond's and bridge's members too."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return ()
    six = _addresses_of_version_6()
    return tuple(
        Interface(name, _is_up(name), (*_address(name), *six.get(name, [])), _speed(name))
        for name in names
    )


def _ask(name: str, what: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, what, struct.pack("256s", name[:15].encode()))


def _is_up(name: str) -> bool:
    try:
        (flags,) = struct.unpack("H", _ask(name, _GET_FLAGS)[16:18])
    except OSError:
        return False
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def _address(name: str) -> list[str]:
    """Its first address of version 4."""
    try:
        return [socket.inet_ntoa(_ask(name, _GET_ADDRESS)[20:24])]
    except OSError:
        return []


def _addresses_of_version_6() -> dict[str, list[str]]:
    """Interface -> addresses of version 6, without those that hold on one link only."""
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        raw, _, _, scope, _, name = line.split()
        if scope != "20":
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw))
            found.setdefault(name, []).append(address)
    return found


def _speed(name: str) -> int:
    try:
        return max(int(Path(f"/sys/class/net/{name}/speed").read_text()), 0)
    except (OSError, ValueError):
        return 0


def read_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Port -> its state, of InfiniBand and RoCE: ``mlx5_0/1`` -> ``ACTIVE``."""
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        port = f"{state.parents[2].name}/{state.parent.name}"
        try:
            found[port] = state.read_text().partition(":")[2].strip()
        except OSError:
            found[port] = "unknown"
    return found


def addresses_of(name: str) -> tuple[tuple[str, ...], str]:
    """(the addresses a name resolves to, "") or ((), why it doesn't)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""


def try_store(address: str, port: int, seconds: float) -> str:
    """Connects to the store as a rank would; why it can't, "" if it can."""
    try:
        with socket.create_connection((address, port), seconds):
            return ""
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return f"{address}:{port}: {why}"


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

    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": str(torch.__version__), "parallel3d": __version__}
