"""Facts: what one process reads of its machine and settings, as plain values, for checks that are pure
functions."""

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from parallel3d._util.version import __version__
from parallel3d.errors import MeshError

GIB = 2**30
_OFF = ("", "0", "no", "off", "false", "n", "f")


@dataclass(frozen=True)
class RankPlace:
    """The rank of a process in its job and on its node.

    Attributes:
        node: the node's number given by the launcher; -1 if it gives none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = -1
    host: str = ""

    @property
    def nodes(self) -> int:
        """Number of nodes in the job, if all have as many ranks as this one."""
        return -(-self.world_size // max(self.local_world_size, 1))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        speed: Mb/s; 0 if unknown.
    """

    name: str
    up: bool
    addresses: tuple[str, ...] = ()
    speed: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or any(map(is_loopback, self.addresses))

    @property
    def is_of_containers(self) -> bool:
        """Whether it joins containers of this machine (docker0), so that it reaches no other node."""
        return self.name.startswith(("docker", "virbr", "cni", "flannel", "cali", "br-", "veth"))


@dataclass(frozen=True)
class Limits:
    """Limits and memory of this process and of its container (cgroup). Sizes are in bytes.

    Attributes:
        nofile, nofile_hard: limits of open files, soft and hard.
        memlock: memory that may be locked; -1 if unlimited.
        cpus: number of CPUs that the process may run on.
        quota: the container's limit in CPUs; 0 for none.
        memory, available: memory of the machine; how much of it is available now.
        memory_limit: the container's limit of memory; 0 for none.
        shm, shm_free: size of /dev/shm and its free part; -1 if there is none.
    """

    nofile: int = 1 << 20
    nofile_hard: int = 1 << 20
    memlock: int = -1
    cpus: int = 64
    quota: float = 0.0
    memory: int = 512 * GIB
    available: int = 500 * GIB
    memory_limit: int = 0
    shm: int = 256 * GIB
    shm_free: int = 256 * GIB

    @property
    def usable_cpus(self) -> float:
        return min(self.cpus, self.quota or self.cpus)


@dataclass(frozen=True)
class Device:
    """An accelerator that this process sees.

    Attributes:
        total, free: its memory in bytes.
        errors: uncorrected memory errors since the driver was loaded.
        slowed: why its clocks are throttled, such as "power brake"; "" if they are not.
    """

    name: str
    uuid: str = ""
    total: int = 80 * GIB
    free: int = 80 * GIB
    mig: bool = False
    persistence: bool = True
    errors: int = 0
    slowed: str = ""


@dataclass(frozen=True)
class Disk:
    """The file system of the folder for checkpoints.

    Attributes:
        free, total: its free bytes, and all.
        error: why nothing can be written to it; "" if something can.
        kind: its type, as the kernel names it ("nfs4").
        shared: whether this process sees a file that rank 0 has written; None if not tested.
    """

    path: str
    free: int = 0
    total: int = 0
    error: str = ""
    kind: str = ""
    shared: bool | None = None


@dataclass(frozen=True)
class Facts:
    """Everything that one process reads of its machine and settings.

    Attributes:
        environment: the variables that affect communication and memory.
        versions: name -> version of python, torch, cuda, nccl, parallel3d and driver, as far as they exist.
        host_addresses, host_error: the addresses that this machine's name resolves to, or why it doesn't.
        master_addresses, master_error: the same for MASTER_ADDR.
        store_error: why the store of the job can't be reached, or its port not be used; "" if it can.
        infiniband: port -> state, such as ``mlx5_0/1`` -> ``ACTIVE``.
        devices: the devices that torch sees.
        device_error: why torch sees no device although there are some; else "".
        on_machine: number of devices that the machine has.
        clock: seconds that this machine's clock is ahead of rank 0's; None if not measured.
        clock_error: largest error of ``clock`` in seconds.
    """

    place: RankPlace = RankPlace()
    environment: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    interfaces: tuple[Interface, ...] = ()
    host_addresses: tuple[str, ...] = ()
    host_error: str = ""
    master_addresses: tuple[str, ...] = ()
    master_error: str = ""
    store_error: str = ""
    infiniband: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    devices: tuple[Device, ...] = ()
    device_error: str = ""
    on_machine: int = 0
    disk: Disk | None = None
    clock: float | None = None
    clock_error: float = 0.0

    @property
    def writable_disk(self) -> Disk | None:
        """The disk for checkpoints; None if there is none or it can't be written to."""
        return self.disk if self.disk is not None and not self.disk.error else None

    @property
    def several_nodes(self) -> bool:
        return self.place.nodes > 1

    def is_set(self, name: str) -> bool:
        """Whether the environment variable is neither empty nor 0, no, off or false."""
        return self.environment.get(name, "").lower() not in _OFF

    @property
    def usable(self) -> tuple[Interface, ...]:
        """The interfaces through which another machine can be reached."""
        return tuple(
            each
            for each in self.interfaces
            if each.up and each.addresses and not (each.is_loopback or each.is_of_containers)
        )


_FIRST_PORT, _PORTS = 29500, 1000  # each SLURM job uses one of these ports


def place_of(environment: Mapping[str, str]) -> RankPlace:
    """Returns this process's place by torchrun's variables; without them it is alone in its job."""

    def number(name: str, default: int) -> int:
        value = environment.get(name) or str(default)
        if not value.lstrip("-").isdigit():
            raise MeshError(f"{name} is {value!r}; it must be an int, as torchrun sets it")
        return int(value)

    world_size = number("WORLD_SIZE", 1)
    return RankPlace(
        number("RANK", 0),
        world_size,
        number("LOCAL_RANK", 0),
        number("LOCAL_WORLD_SIZE", world_size),
        number("GROUP_RANK", -1),
        socket.gethostname(),
    )


def adopt_slurm(environment: MutableMapping[str, str]) -> bool:
    """Sets torchrun's variables from SLURM's if ``srun`` has started the process; returns whether."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks in ("", "1"):
        return False

    def first_set(*names: str, default: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), default)

    on_nodes = first_set("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=tasks)
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=tasks,
        LOCAL_RANK=environment.get("SLURM_LOCALID", "0"),
        GROUP_RANK=environment.get("SLURM_NODEID", "0"),
        LOCAL_WORLD_SIZE=re.split(r"\D", on_nodes)[0] or tasks,
    )
    if not environment.get("MASTER_ADDR"):
        nodes = first_set("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", default="")
        environment["MASTER_ADDR"] = first_host(nodes)
    job = int(environment.get("SLURM_JOB_ID", "0"))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + job % _PORTS))
    return True


def first_host(nodes: str) -> str:
    """Returns the first of a SLURM list of nodes: ``gpu03`` of ``gpu[03-05,09],login1``."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        output = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
        if output:
            return output[0]
    return re.sub(r"^([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*).*", r"\1\2\3", nodes)


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
    """Returns (torch's devices, number of the machine's GPUs, why torch sees none of them, else "", versions
    by name, of Python, torch, CUDA, the driver, NCCL). ``environment``: this process's variables."""
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
    said = ""
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    health = parse_health(said)
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
    """Returns why torch sees no device although there are some; "" if they are hidden on purpose."""
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


def parse_health(text: str) -> dict[str, Device]:
    """Parses nvidia-smi's output: UUID (without "GPU-") -> device; empty if it is an error message."""
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
    """Returns (CPUs, bytes): the tightest limits of this process's cgroup and its parents; 0: none."""
    folders = []  # in each hierarchy
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        base = root / controllers if controllers else root
        folder = base / path.lstrip("/")
        folders += [folder, *(p for p in folder.parents if p.is_relative_to(base))]
    quotas, limits = [], [_HUGE]
    for folder in folders or [root]:
        v1 = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        for words in (_words(folder / "cpu.max"), v1):
            if len(words) == 2 and all(word.isdigit() for word in words):
                quotas.append(int(words[0]) / int(words[1]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name) if word.isdigit()]
    least = min(limits)
    return min(filter(None, quotas), default=0.0), 0 if least >= _HUGE else least


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def read_disk(folder: Path) -> Disk:
    """Returns the file system of ``folder``, after writing a file to it and removing the file.

    If the folder doesn't exist, its nearest existing parent is used. It is not created: where a share isn't
    mounted, it would be a folder of this node alone and look correct.
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
    """Returns the type of the file system that ``folder`` is on, from the mount points."""
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
    """Returns the interfaces of this network namespace in the kernel's order, members of bonds included."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return ()
    interfaces, six = [], dict[str, list[str]]()
    for line in _lines(Path("/proc/net/if_inet6")):
        raw, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local
            six.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw)))
    for name in names:
        flags = int.from_bytes(_ioctl(name, _GET_FLAGS)[16:18], sys.byteorder)
        is_up = flags & _UP_AND_RUNNING == _UP_AND_RUNNING
        four = _ioctl(name, _GET_ADDRESS)[20:24]
        addresses = (*([socket.inet_ntoa(four)] if four else ()), *six.get(name, ()))
        speed = _words(Path(f"/sys/class/net/{name}/speed"))
        interfaces.append(Interface(name, is_up, addresses, max(int(speed[0]), 0) if speed else 0))
    return tuple(interfaces)


def _ioctl(name: str, request: int) -> bytes:
    """Returns the kernel's answer to an ioctl on the interface ``name``; empty if it fails."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return fcntl.ioctl(any_socket, request, struct.pack("256s", name[:15].encode()))
    except OSError:
        return b""


def read_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Returns port of InfiniBand or RoCE -> its state, such as ``mlx5_0/1`` -> ``ACTIVE``."""
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        text = " ".join(_lines(state))
        port = f"{state.parents[2].name}/{state.parent.name}"
        found[port] = text.partition(":")[2].strip() if text else "unknown"
    return found


def addresses_of(name: str) -> tuple[tuple[str, ...], str]:
    """Returns (the addresses that ``name`` resolves to, ""), or ((), why it does not resolve)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""


def try_store(address: str, port: int, seconds: float) -> str:
    """Connects to the store as a rank would; returns why that fails, or ""."""
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
    """Reads all facts that need no other rank; ``folder`` is that for checkpoints."""
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
