"""Facts: what one process sees of its machine and settings: values only, so that checks are pure."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel3d.errors import MeshError

GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job.

    Attributes:
        node: number of its node, by the launcher; -1 if it does not say.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = -1
    host: str = ""

    @property
    def nodes(self) -> int:
        """How many there are, if all are like this one."""
        return -(-self.world_size // max(self.local_world_size, 1))


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        speed: Mb/s; 0 if it does not say.
    """

    name: str
    up: bool
    addresses: tuple[str, ...] = ()
    speed: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or any(a.startswith("127.") or a == "::1" for a in self.addresses)

    @property
    def is_of_containers(self) -> bool:
        """Whether it joins containers of one machine: its address means another machine elsewhere."""
        return self.name.startswith(("docker", "virbr", "cni", "flannel", "cali", "br-", "veth"))


@dataclass(frozen=True)
class Limits:
    """Of this process, and of its container (cgroup).

    Attributes:
        nofile, nofile_hard: open files, soft and hard.
        memlock: bytes that may be locked; -1: any number.
        cpus: it may run on; quota: of the container, in CPUs, 0: none.
        memory: bytes the machine has, available: of them now, memory_limit: the container's, 0: none.
        shm, shm_free: bytes of /dev/shm; -1 if there is none.
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


@dataclass(frozen=True)
class Device:
    """One accelerator that this process sees.

    Attributes:
        total, free: bytes of its memory.
        errors: uncorrected memory errors since the driver was loaded.
        slowed: why its clocks are held down: "thermal", "power brake", "hardware"; "" if they are not.
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
    """Where checkpoints are to go.

    Attributes:
        error: why it can't be written to; "".
        kind: of the file system, as the kernel calls it.
        shared: whether a file that rank 0 has written is seen here; None: nobody has looked.
    """

    path: str
    free: int = 0
    total: int = 0
    error: str = ""
    kind: str = ""
    shared: bool | None = None


@dataclass(frozen=True)
class Facts:
    """All of it.

    Attributes:
        environment: variables that steer communication and memory, by name.
        versions: of python, torch, cuda, nccl, parallel3d, driver; those there are.
        host_addresses: what this machine's own name resolves to; host_error: why not.
        master_addresses, master_error: the same of MASTER_ADDR.
        store_error: why the store there can't be reached, or its port not be taken; "".
        infiniband: port -> state, such as ``mlx5_0/1`` -> ``ACTIVE``.
        devices: as torch sees them; device_error: why it sees none though there are; on_machine: how many
            there are, as the device files say.
        clock, clock_error: seconds that this machine is ahead of rank 0's, and how sure that is; None: not
            measured.
    """

    place: Place = Place()
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """The reverse of ``to_json``."""
        made = dict(data)
        made["place"] = Place(**data["place"])
        made["limits"] = Limits(**data["limits"])
        made["interfaces"] = tuple(
            Interface(**{**each, "addresses": tuple(each["addresses"])})
            for each in data["interfaces"]
        )
        made["devices"] = tuple(Device(**each) for each in data["devices"])
        made["disk"] = None if data["disk"] is None else Disk(**data["disk"])
        for name in ("host_addresses", "master_addresses"):
            made[name] = tuple(data[name])
        return cls(**made)

    @property
    def several_nodes(self) -> bool:
        return self.place.nodes > 1

    def is_set(self, name: str) -> bool:
        """Whether a switch is on: set to something that isn't empty, 0, no, off or false."""
        return self.environment.get(name, "").lower() not in (
            "",
            "0",
            "no",
            "off",
            "false",
            "n",
            "f",
        )

    @property
    def usable(self) -> tuple[Interface, ...]:
        """Interfaces over which another machine can be reached."""
        return tuple(
            each
            for each in self.interfaces
            if each.up and each.addresses and not (each.is_loopback or each.is_of_containers)
        )


# Where this process stands in its job: by torchrun's variables, or SLURM's, which are made torchrun's.

_PORTS = 29500, 1000  # from, how many: each SLURM job one of its own
_ONE = ("MASTER_ADDR", "MASTER_PORT")


def place_of(environment: Mapping[str, str]) -> Place:
    """By the variables that torchrun sets; alone where they are not.

    Raises:
        MeshError: one of them is no number.
    """

    def number(name: str, otherwise: int) -> int:
        value = environment.get(name) or str(otherwise)
        if not value.lstrip("-").isdigit():
            raise MeshError(f"{name} is {value!r}; it must be an int, as torchrun sets it")
        return int(value)

    world = number("WORLD_SIZE", 1)
    return Place(
        number("RANK", 0),
        world,
        number("LOCAL_RANK", 0),
        number("LOCAL_WORLD_SIZE", world),
        number("GROUP_RANK", -1),
        socket.gethostname(),
    )


def adopt_slurm(environment: MutableMapping[str, str]) -> bool:
    """Under ``srun`` without torchrun: sets torchrun's variables from SLURM's. Whether it has."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks in ("", "1"):
        return False
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["GROUP_RANK"] = environment.get("SLURM_NODEID", "0")
    on_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
        "SLURM_TASKS_PER_NODE", tasks
    )
    found = re.match(r"\d+", on_nodes)
    environment["LOCAL_WORLD_SIZE"] = found.group() if found else tasks
    if not environment.get("MASTER_ADDR"):
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        environment["MASTER_ADDR"] = first_host(nodes)
    job = environment.get("SLURM_JOB_ID", "0")
    environment.setdefault("MASTER_PORT", str(_PORTS[0] + int(job) % _PORTS[1]))
    return True


def first_host(nodes: str) -> str:
    """Of a SLURM list of nodes such as ``gpu[03-05,09],login1``: ``gpu03``."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
        if said:
            return said[0]
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
