"""Where this process stands in its job: by torchrun's variables, or SLURM's, which are made torchrun's."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping

from parallel3d.doctor.facts import Place
from parallel3d.errors import MeshError

__all__ = ["adopt_slurm", "first_host", "place_of"]

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
