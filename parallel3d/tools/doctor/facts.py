"""Facts: what one process reads of its machine and settings, as plain values, so that checks are pure."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from parallel3d.errors import MeshError

GIB = 2**30
_OFF = ("", "0", "no", "off", "false", "n", "f")


@dataclass(frozen=True)
class RankPlace:
    """The ranks of a process in its job.

    Attributes:
        node: the launcher's number of the node; -1 if it sets none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = -1
    host: str = ""

    @property
    def nodes(self) -> int:
        """Number of nodes, if all have as many ranks as this one."""
        return -(-self.world_size // max(self.local_world_size, 1))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        speed: Mb/s; 0 if not known.
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
        """Whether it connects the containers of one machine, so that other nodes can't be reached by it."""
        return self.name.startswith(("docker", "virbr", "cni", "flannel", "cali", "br-", "veth"))


@dataclass(frozen=True)
class Limits:
    """Limits and memory of this process and of its container (cgroup). Sizes are in bytes.

    Attributes:
        nofile, nofile_hard: limits of open files, soft and hard.
        memlock: memory that may be locked; -1 if unlimited.
        cpus: CPUs that the process may run on.
        quota: limit of the container in CPUs; 0 for none.
        memory, available: memory of the machine, and the part that is available now.
        memory_limit: limit of the container; 0 for none.
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
    """The file system that checkpoints are to be written to.

    Attributes:
        free, total: bytes.
        error: why it can't be written to; "" if it can.
        kind: the kernel's name of the file system.
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
    """Everything that one process reads.

    Attributes:
        environment: the variables that affect communication and memory.
        versions: versions of python, torch, cuda, nccl, parallel3d and driver, as far as they exist.
        host_addresses, host_error: what this machine's name resolves to, or why it does not.
        master_addresses, master_error: the same for MASTER_ADDR.
        store_error: why the store can't be reached, or its port not be used; "" if it can.
        infiniband: port -> state, such as ``mlx5_0/1`` -> ``ACTIVE``.
        devices: the devices that torch sees.
        device_error: why torch sees none although there are some; "".
        on_machine: number of devices of the machine.
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
        """The disk for checkpoints, if there is one that can be written to."""
        return self.disk if self.disk is not None and not self.disk.error else None

    @property
    def several_nodes(self) -> bool:
        return self.place.nodes > 1

    def is_set(self, name: str) -> bool:
        """Whether the variable is set to something other than an empty string, 0, no, off or false."""
        return self.environment.get(name, "").lower() not in _OFF

    @property
    def usable(self) -> tuple[Interface, ...]:
        """Interfaces by which another machine can be reached."""
        return tuple(
            each
            for each in self.interfaces
            if each.up and each.addresses and not (each.is_loopback or each.is_of_containers)
        )


_FIRST_PORT, _PORTS = 29500, 1000  # each SLURM job uses one of these ports


def place_of(environment: Mapping[str, str]) -> RankPlace:
    """Reads torchrun's variables; without them the process is the only one of its job."""

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
    """Sets torchrun's variables from SLURM's under ``srun`` without torchrun; returns whether it has."""
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
