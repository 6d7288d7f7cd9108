"""collect: reads the Facts of this process."""

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from parallel3d._util.version import __version__
from parallel3d.tools.doctor.facts import Device, Disk, Facts, Interface, Limits, place_of

# Accelerators: the devices that torch sees, those of the machine, and their health by nvidia-smi.

_QUERY = (
    "uuid,persistence_mode,ecc.errors.uncorrected.volatile.total,memory.total,memory.used,"
    "clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_thermal_slowdown,"
    "clocks_event_reasons.hw_power_brake_slowdown"
)
_SLOWED = ("hardware thermal", "software thermal", "power brake")


def read_devices(
    environment: Mapping[str, str],
) -> tuple[tuple[Device, ...], int, str, dict[str, str]]:
    """Returns torch's devices, the number of the machine's, why torch sees none, and versions."""
    import torch

    on_machine = len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()])
    on_machine = on_machine or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("[1-9]*")))
    versions = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "parallel3d": __version__,
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
    }
    if driver := _words(Path("/sys/module/nvidia/version")):
        versions["driver"] = driver[0]
    with warnings.catch_warnings():  # torch warns why it sees none, which a finding says too
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available()
    if not available:
        return (), on_machine, _why_none(environment) if on_machine else "", versions
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    health = parse_health(_nvidia_smi())
    devices = tuple(_device(i, health) for i in range(torch.cuda.device_count()))
    return devices, on_machine, "", versions


def _device(index: int, health: Mapping[str, Device]) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    known = health.get(uuid.removeprefix("GPU-"), Device(""))
    # torch.cuda.mem_get_info would leave a context of every rank on every device.
    total = properties.total_memory
    free = total - (known.total - known.free)
    is_mig = "MIG" in properties.name or uuid.startswith("MIG")
    return replace(known, name=properties.name, uuid=uuid, total=total, free=free, mig=is_mig)


def _why_none(environment: Mapping[str, str]) -> str:
    """Why torch sees no device although there are some; "" if they are hidden on purpose."""
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


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_health(text: str) -> dict[str, Device]:
    """Returns UUID (without ``GPU-``) -> device of nvidia-smi's output; empty if it is an error message."""
    found = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 8:
            continue
        uuid, persistence, errors = words[:3]
        total, used = (int(word) * 2**20 if word.isdigit() else 0 for word in words[3:5])
        reasons = [why for why, word in zip(_SLOWED, words[5:], strict=True) if word == "Active"]
        found[uuid.removeprefix("GPU-")] = Device(
            "",
            total=total,
            free=total - used,
            persistence=persistence != "Disabled",
            errors=int(errors) if errors.isdigit() else 0,
            slowed=", ".join(reasons),
        )
    return found


# Limits of this process and its container, memory, and the disk for checkpoints.

_HUGE = 1 << 60  # cgroup version 1 writes "no limit" as a number larger than this


def read_limits() -> Limits:
    """Returns the limits of this process."""
    nofile, nofile_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in _lines(Path("/proc/meminfo"))}
    quota, memory_limit = read_cgroup()
    shm = shm_free = -1
    with suppress(OSError):  # there is no /dev/shm
        shm, _, shm_free = shutil.disk_usage("/dev/shm")
    affinity = getattr(os, "sched_getaffinity", None)
    return Limits(
        nofile=_HUGE if nofile == resource.RLIM_INFINITY else nofile,
        nofile_hard=_HUGE if nofile_hard == resource.RLIM_INFINITY else nofile_hard,
        memlock=-1 if memlock == resource.RLIM_INFINITY else memlock,
        cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
        quota=quota,
        memory=memory,
        available=kib["MemAvailable"] * 1024 if kib else memory,
        memory_limit=0 if memory_limit >= memory else memory_limit,
        shm=shm,
        shm_free=shm_free,
    )


def read_cgroup(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float, int]:
    """Returns the tightest limits of this process's cgroup and its parents: CPUs, bytes; 0 for none."""
    quotas, limits = [], [_HUGE]
    for folder in _cgroups(root, own):
        v1 = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        for words in (_words(folder / "cpu.max"), v1):
            if len(words) == 2 and all(word.isdigit() for word in words):
                quotas.append(int(words[0]) / int(words[1]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name) if word.isdigit()]
    least = min(limits)
    return min(filter(None, quotas), default=0.0), 0 if least >= _HUGE else least


def _cgroups(root: Path, own: Path) -> list[Path]:
    """The folders of this process's cgroup in each hierarchy, and of their parents."""
    found = []
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers else root
        folder = base / path.lstrip("/")
        found += [folder, *(p for p in folder.parents if p.is_relative_to(base))]
    return found or [root]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def read_disk(folder: Path) -> Disk:
    """Writes a file to ``folder``, or to its nearest parent that exists, and removes it again.

    The folder is not created: where a share isn't mounted, that would make a folder on this node alone, which
    would look correct.
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
    return Disk(str(folder), usage.free, usage.total, kind=_file_system(folder))


def _file_system(folder: Path) -> str:
    """The kind of the file system with the longest mount point that is a parent of ``folder``."""
    resolved = folder.resolve()
    best, kind = Path("/"), ""
    for line in _lines(Path("/proc/self/mounts")):
        _, point, name, *_ = line.split()
        at = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(at) and len(at.parts) >= len(best.parts):
            best, kind = at, name
    return kind


# Interfaces and their addresses, names and the addresses they resolve to, InfiniBand's ports.

_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS of linux/sockios.h
_UP_AND_RUNNING = 0x1 | 0x40  # IFF_UP, IFF_RUNNING


def read_interfaces() -> tuple[Interface, ...]:
    """Returns the interfaces of this network namespace in the kernel's order, with members of bonds."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return ()
    interfaces, six = [], _addresses_of_version_6()
    for name in names:
        flags = int.from_bytes(_ioctl(name, _GET_FLAGS)[16:18], sys.byteorder)
        is_up = flags & _UP_AND_RUNNING == _UP_AND_RUNNING
        four = _ioctl(name, _GET_ADDRESS)[20:24]
        addresses = (*([socket.inet_ntoa(four)] if four else ()), *six.get(name, ()))
        speed = _words(Path(f"/sys/class/net/{name}/speed"))
        interfaces.append(Interface(name, is_up, addresses, max(int(speed[0]), 0) if speed else 0))
    return tuple(interfaces)


def _ioctl(name: str, request: int) -> bytes:
    """Returns the kernel's answer about an interface; empty if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return fcntl.ioctl(any_socket, request, struct.pack("256s", name[:15].encode()))
    except OSError:
        return b""


def _addresses_of_version_6() -> dict[str, list[str]]:
    """Returns interface -> IPv6 addresses, without link-local ones."""
    found: dict[str, list[str]] = {}
    for line in _lines(Path("/proc/net/if_inet6")):
        raw, _, _, scope, _, name = line.split()
        if scope != "20":
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw))
            found.setdefault(name, []).append(address)
    return found


def read_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Returns port of InfiniBand or RoCE -> state: ``mlx5_0/1`` -> ``ACTIVE``."""
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        text = " ".join(_lines(state))
        port = f"{state.parents[2].name}/{state.parent.name}"
        found[port] = text.partition(":")[2].strip() if text else "unknown"
    return found


def addresses_of(name: str) -> tuple[tuple[str, ...], str]:
    """Returns the addresses that ``name`` resolves to and "", or () and why it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""


def try_store(address: str, port: int, seconds: float) -> str:
    """Connects to the store as a rank would; returns why that fails, "" if it succeeds."""
    try:
        with socket.create_connection((address, port), seconds):
            return ""
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return f"{address}:{port}: {why}"


_READ = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "OMP_"),
    *("SLURM_NODE", "MASTER_ADDR", "MASTER_PORT"),
)


def collect(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Facts:
    """Reads everything that needs no other rank. It takes a second and changes nothing.

    Args:
        folder: where checkpoints are to be written.
        environment: environment variables; those of this process by default.
    """
    variables = os.environ if environment is None else environment
    devices, on_machine, device_error, versions = read_devices(variables)
    master = variables.get("MASTER_ADDR", "")
    host_addresses, host_error = addresses_of(socket.gethostname())
    master_addresses, master_error = addresses_of(master) if master else ((), "")
    return Facts(
        place=place_of(variables),
        environment=relevant_variables(variables),
        versions=versions,
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


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that affect communication and memory, sorted by name."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(_READ)}
