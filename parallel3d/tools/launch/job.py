"""LaunchJob: what is to be started, on which machines; checked here, so that a target only writes it down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError
from parallel3d.mesh.axes import AXES
from parallel3d.mesh.layout import MeshLayout

# LaunchError: a child of Parallel3dError.


class LaunchError(Parallel3dError):
    """A job that can't be launched so, or a value that a launch file can't hold."""


# The training command: as torchrun takes it, with the mesh's sizes as its arguments.

_STARTERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")


def checked_command(command: Sequence[str]) -> tuple[str, ...]:
    """``command`` as a tuple of words.

    Raises:
        LaunchError: it is empty, holds what no argument can hold, or begins with what torchrun starts itself.
    """
    words = tuple(command)
    if isinstance(command, str):
        raise LaunchError(f"command is the text {command!r}; it must be a sequence of words")
    if not words or not words[0]:
        raise LaunchError(
            "what is to be launched? Give a script and its arguments after --, such as train.py"
        )
    for word in words:
        if (
            not isinstance(word, str)
            or "\0" in word
            or any("\ud800" <= c <= "\udfff" for c in word)
        ):
            raise LaunchError(
                f"the argument {word!r} can't be in a launch file; it must be text without NUL"
            )
    first = PurePosixPath(words[0]).name
    if first.startswith("python") or first in _STARTERS:
        rest = next((w for w in words[1:] if w.endswith(".py") or w == "-m"), "train.py")
        raise LaunchError(
            f"the command begins with {first}, which the launch file starts itself; begin with {rest}"
        )
    if words[0] == "-m":
        if len(words) == 1 or not all(part.isidentifier() for part in words[1].split(".")):
            raise LaunchError(
                f"-m needs a module's name, such as -m package.train; not {words[1:2]}"
            )
    elif words[0].startswith("-"):
        raise LaunchError(
            f"the command begins with {words[0]!r}; begin with the script, such as train.py"
        )
    return words


def with_mesh(
    command: tuple[str, ...], layout: MeshLayout | None, world_size: int
) -> tuple[tuple[str, ...], MeshLayout | None]:
    """The command with the mesh's sizes, and the mesh resolved for ``world_size`` ranks.

    Where ``layout`` is None, the mesh is what the command's own ``--replicate``, ``--shard`` and ``--tp``
    say (one of them missing counts as 1, a missing shard as what is left); None if it has none of them.

    Raises:
        LaunchError: the command's own sizes are not those of ``layout``.
        MeshError: the sizes don't fill ``world_size``.
    """
    own = _own_sizes(command)
    if layout is None:
        if not own:
            return command, None
        left = -1 if -1 not in own.values() else 1
        return command, MeshLayout(**{"shard": left, **own}).resolve(world_size)
    layout = layout.resolve(world_size)
    for axis, size in own.items():
        if size not in (-1, getattr(layout, axis)):
            raise LaunchError(
                f"the command has --{axis} {size}, but the mesh is {layout}; leave it out of the command"
            )
    more = [
        w for axis in AXES if axis not in own for w in (f"--{axis}", str(getattr(layout, axis)))
    ]
    return (*command, *more), layout


def _own_sizes(command: tuple[str, ...]) -> dict[str, int]:
    """The axes that the command's arguments name, the last of several, as argument parsers take them."""
    sizes = {}
    for word, following in pairwise((*command, "")):
        for axis in AXES:
            if word == f"--{axis}" or word.startswith(f"--{axis}="):
                value = following if word == f"--{axis}" else word.partition("=")[2]
                try:
                    sizes[axis] = int(value)
                except ValueError:
                    raise LaunchError(
                        f"the command has --{axis} {value!r}; it must be a number"
                    ) from None
    return sizes


_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 44  # Kubernetes adds "-node-0-<index>-<5 letters>" and allows 63 characters
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_SET_BY_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
_READ_ONLY = {"UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO"}


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A training script on ``nodes`` machines of ``gpus_per_node`` GPUs, a process for each GPU.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments; as torchrun takes
            them, without ``python``.
        nodes: how many machines.
        gpus_per_node: processes on each, one for each of its GPUs (with ``device="cpu"`` just processes).
        layout: the mesh; must fill all nodes, with tp groups within nodes. Its sizes are appended to the
            command as ``--replicate``, ``--shard`` and ``--tp`` where they are not there yet. None: no
            mesh is checked but the one that the command's own arguments name.
        domain: GPUs that fast links join, where these are more than a node's (NVL72: 72).
        name: of the job: lower-case letters, digits and dashes, as Kubernetes wants it (DNS-1123).
        image: the container's image, for targets that run containers.
        gpu: the GPU's name where the target asks for it: SkyPilot's ``H100``, SLURM's ``gpu:h100:8``.
        partition, account: SLURM's.
        time: the time limit in SLURM's form: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``.
        max_restarts: how often all processes start again after one has failed.
        env: variables for the training processes; they win over those that the file sets itself.
        device: ``"cuda"`` or ``"cpu"`` (gloo; nothing is asked of GPUs).
        grace: seconds for a last checkpoint between the signal to stop and the kill; 0: SLURM sends no
            signal and does not requeue.

    Raises:
        LaunchError: a value that can't be, with what comes nearest.
        MeshError: a mesh that doesn't fill the machines.
    """

    command: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int = 8
    layout: MeshLayout | None = None
    domain: int | None = None
    name: str = "train"
    image: str | None = None
    gpu: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cuda"
    grace: int = 120

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 1), ("max_restarts", 0), ("grace", 0)):
            self._set(name, as_count(name, getattr(self, name), least))
        if self.domain is not None:
            self._set("domain", as_count("domain", self.domain, 1))
        if self.device not in ("cuda", "cpu"):
            raise LaunchError(f"device is {self.device!r}; it must be 'cuda' or 'cpu'")
        check_name(self.name)
        for name in ("partition", "account", "gpu"):
            self._check_word(name, _WORD, "letters, digits, '_', '.', '-', '+' and ','")
        self._check_word("image", _IMAGE, "such as registry/name:tag or name@sha256:...")
        if self.time is not None:
            _ = self.seconds
        self._set("env", dict(self.env))
        check_env(self.env)
        self._set("command", checked_command(self.command))
        command, layout = with_mesh(self.command, self.layout, self.world_size)
        self._set("command", command)
        self._set("layout", layout)
        self._check_tp()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.nodes * self.gpus_per_node

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds.

        Raises:
            LaunchError: it isn't in one of SLURM's forms, or is nothing.
        """
        if self.time is None:
            return None
        found = _TIME.fullmatch(self.time)
        if found:
            parts = [int(part) for part in found["rest"].split(":")]
            if found["days"]:
                seconds = int(found["days"]) * 86400 + _seconds(parts, (3600, 60, 1))
            elif len(parts) < 3:
                seconds = _seconds(parts, (60, 1))  # MM or MM:SS
            else:
                seconds = _seconds(parts, (3600, 60, 1))
            if seconds:
                return seconds
        raise LaunchError(
            f"time is {self.time!r}; it must be minutes, HH:MM:SS or D-HH:MM:SS, such as 90, 12:00:00, "
            "2-00:00:00"
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_word(self, name: str, allowed: re.Pattern[str], words: str) -> None:
        value = getattr(self, name)
        if value is not None and not (isinstance(value, str) and allowed.fullmatch(value)):
            raise LaunchError(f"{name} is {value!r}; it may have {words}")

    def _check_tp(self) -> None:
        """Each layer waits for its tp group: over the network between nodes that takes most of the time."""
        if self.layout is None or self.layout.tp == 1:
            return
        tp, domain = self.layout.tp, self.domain or self.gpus_per_node
        if domain % tp:
            fitting = max(
                size for size in range(1, domain + 1) if domain % size == 0 and size <= tp
            )
            why = "is more than" if tp > domain else "doesn't divide"
            raise LaunchError(
                f"tp {tp} {why} the {domain} GPUs that fast links join, so groups would cross nodes and "
                f"every layer wait for the network; the nearest that fits is tp {fitting}. If fast links "
                "join more GPUs than a node has (NVL72), say how many with --domain"
            )


def check_name(name: str) -> None:
    """Raises LaunchError if ``name`` is none for Kubernetes, with the nearest that is."""
    if isinstance(name, str) and _LABEL.fullmatch(name) and len(name) <= _LONGEST_NAME:
        return
    near = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
    near = near if near[:1].isalpha() else f"train-{near}"
    near = near[:_LONGEST_NAME].strip("-")
    raise LaunchError(
        f"name is {name!r}; it must begin with a letter and have lower-case letters, digits and dashes "
        f"(DNS-1123), {_LONGEST_NAME} at most; for example {near!r}"
    )


def check_env(env: Mapping[str, str]) -> None:
    """Raises LaunchError for what can't be a variable, or would be wrong in every launch."""
    for name, value in env.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            near = re.sub(r"^(?=\d|$)|[^A-Za-z0-9_]+", "_", str(name))
            raise LaunchError(
                f"env has {name!r}; a variable's name has letters, digits and '_' and doesn't begin with "
                f"a digit; for example {near!r}"
            )
        if not isinstance(value, str) or "\0" in value or not _is_text(value):
            raise LaunchError(f"env {name} is {value!r}; it must be text without NUL")
        if name in _SET_BY_LAUNCHER or name.startswith("PET_"):
            raise LaunchError(
                f"env has {name}, which the launcher sets in each process; leave it out"
            )
        if name in _READ_ONLY:
            raise LaunchError(f"env has {name}, which bash does not let anyone set; leave it out")
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS", "32") in ("1", "0"):
        raise LaunchError(
            "env has CUDA_DEVICE_MAX_CONNECTIONS=1, a habit from Megatron that puts FSDP's collectives in "
            "one queue with the computation they should overlap; leave it out or give 16 or more"
        )


def _is_text(value: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _seconds(parts: list[int], units: tuple[int, ...]) -> int:
    return sum(part * unit for part, unit in zip(parts, units, strict=False))
