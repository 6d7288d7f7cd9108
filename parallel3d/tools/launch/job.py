"""LaunchJob: the program to launch and its machines, checked, so that targets only have to write the file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError
from parallel3d.mesh.axes import axis_named
from parallel3d.mesh.layout import MeshLayout


class LaunchError(Parallel3dError):
    """A job that can't be launched, or a value that a launch file can't contain."""


# The training command: the arguments that torchrun takes, with the mesh's sizes among them.

_STARTERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")


def checked_command(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the words of ``command`` if they are a script or -m module with arguments; else raises."""
    words = tuple(command)
    if isinstance(command, str):
        raise LaunchError(f"command is the text {command!r}; it must be a sequence of words")
    if not words or not words[0]:
        raise LaunchError(
            "what is to be launched? Give a script and its arguments after --, such as train.py"
        )
    first = PurePosixPath(str(words[0])).name
    wrong = ""
    if bad := [word for word in words if not _is_text(word)]:
        wrong = f"the argument {bad[0]!r} can't be in a launch file; it must be text without NUL"
    elif first.startswith("python") or first in _STARTERS:
        rest = next((w for w in words[1:] if w.endswith(".py") or w == "-m"), "train.py")
        wrong = f"the command begins with {first}, which the launch file starts itself; begin with {rest}"
    elif words[0] == "-m":
        if len(words) == 1 or not all(part.isidentifier() for part in words[1].split(".")):
            wrong = f"-m needs a module's name, such as -m package.train; not {words[1:2]}"
    elif words[0].startswith("-"):
        wrong = f"the command begins with {words[0]!r}; begin with the script, such as train.py"
    if wrong:
        raise LaunchError(wrong)
    return words


def _is_text(word: object) -> bool:
    """Whether ``word`` is a string without NUL and surrogates."""
    return isinstance(word, str) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in word)


def with_mesh(
    command: tuple[str, ...], layout: MeshLayout | None, world_size: int
) -> tuple[tuple[str, ...], MeshLayout | None]:
    """Returns (the command with the mesh's sizes as options, the mesh resolved for ``world_size`` ranks).

    If ``layout`` is None, the command is unchanged, and the mesh is that of its own ``--replicate``,
    ``--shard``, ``--cp``, ``--tp`` and ``--ep``, or None. An option that contradicts ``layout`` is an error.
    """
    own = _own_sizes(command)
    if layout is None:
        layout = mesh_of(own)
        return command, layout and layout.resolve(world_size)
    layout = layout.resolve(world_size)
    for axis, size in own.items():
        if size not in (-1, getattr(layout, axis)):
            raise LaunchError(
                f"the command has --{axis} {size}, but the mesh is {layout}; leave it out of the command"
            )
    missing = {axis: size for axis, size in layout.as_dict(views=True).items() if axis not in own}
    more = [word for axis, size in missing.items() for word in (f"--{axis}", str(size))]
    return (*command, *more), layout


def mesh_of(sizes: Mapping[str, int | None]) -> MeshLayout | None:
    """Returns the mesh with these sizes of axes; a missing shard is -1: what the others leave. None: no size
    is given."""
    given = {axis: size for axis, size in sizes.items() if size is not None}
    left = 1 if -1 in given.values() else -1
    return MeshLayout(**{"shard": left, **given}) if given else None


def _own_sizes(command: tuple[str, ...]) -> dict[str, int]:
    """Returns axis -> the size that the command's own arguments give (the last one, if several)."""
    sizes = {}
    for word, following in pairwise((*command, "")):
        name, equals, value = word.partition("=")
        axis = axis_named(name.removeprefix("--")) if name.startswith("--") else None
        if axis is not None and name == f"--{axis.name}":
            value = value if equals else following
            try:
                sizes[axis.name] = int(value)
            except ValueError:
                if not axis.in_mesh_if_one:
                    continue  # the script's own option of this name: it has no such axis
                text = f"the command has {name} {value!r}; it must be a number"
                raise LaunchError(text) from None
    return sizes


_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 44  # Kubernetes appends "-node-0-<index>-<5 letters>" and allows 63 characters
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
    """A training script on ``nodes`` machines of ``gpus_per_node`` GPUs, with one process for each GPU.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments, as for torchrun: without
            ``python``.
        nodes: number of machines.
        gpus_per_node: processes on each machine, one for each of its GPUs.
        layout: the mesh. It must fill all nodes, with tp groups within nodes. Its sizes are appended to the
            command as ``--replicate``, ``--shard`` and ``--tp``, and ``--cp`` if above 1, unless they are
            there. If None, only a mesh that the command's own arguments name is checked.
        domain: number of GPUs that fast links join, if that is more than a node's (NVL72: 72).
        name: name of the job: lower-case letters, digits and dashes, as Kubernetes requires (DNS-1123).
        image: the container's image, for targets that run containers.
        gpu: the GPU's name for targets that need it: ``H100`` for SkyPilot, ``gpu:h100:8`` in SLURM.
        partition, account: SLURM's.
        time: time limit in SLURM's form: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``.
        max_restarts: how often all processes are restarted after one has failed.
        env: variables of the training processes; they override those that the file sets itself.
        device: ``"cuda"`` or ``"cpu"`` (gloo; no GPUs are requested).
        setup: shell lines that run first, such as ``module load cuda`` or ``source venv/bin/activate``.
        grace: seconds for a last checkpoint between the signal to stop and the kill. With 0, SLURM sends no
            signal and does not requeue.

    Raises:
        LaunchError: a value is not possible; the message has the nearest one that is.
        MeshError: the mesh doesn't fill the machines.
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
    setup: str | None = None

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
        _ = self.seconds  # checks time
        if self.setup is not None and not _is_text(self.setup):
            raise LaunchError(f"setup is {self.setup!r}; it must be shell lines, without NUL")
        self._set("env", dict(self.env))
        check_env(self.env)
        command, layout = with_mesh(checked_command(self.command), self.layout, self.world_size)
        self._set("command", command)
        self._set("layout", layout)
        self._check_tp()

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds.

        Raises:
            LaunchError: ``time`` isn't in one of SLURM's forms, or is zero.
        """
        if self.time is None:
            return None
        if found := _TIME.fullmatch(self.time):
            parts = [int(part) for part in found["rest"].split(":")]
            hours_first = found["days"] or len(parts) == 3  # otherwise MM or MM:SS
            units = (3600, 60, 1) if hours_first else (60, 1)
            seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
            if seconds := seconds + int(found["days"] or 0) * 86400:
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
        """Raises an error if tp groups would extend over several fast-link domains."""
        if self.layout is None or self.layout.tp == 1:
            return
        tp, domain = self.layout.tp, self.domain or self.gpus_per_node
        if domain % tp:
            nearest = max(n for n in range(1, domain + 1) if domain % n == 0 and n <= tp)
            why = "is more than" if tp > domain else "doesn't divide"
            raise LaunchError(
                f"tp {tp} {why} the {domain} GPUs that fast links join, so groups would cross nodes and "
                f"every layer wait for the network; the nearest that fits is tp {nearest}. If fast links "
                "join more GPUs than a node has (NVL72), give their number with --domain"
            )


def check_name(name: str) -> None:
    """Raises LaunchError, with the nearest valid name, if Kubernetes does not allow ``name``."""
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
    """Raises LaunchError for what can't be an environment variable or would break every launch."""
    for name, value in env.items():
        wrong = ""
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            near = re.sub(r"^(?=\d|$)|[^A-Za-z0-9_]+", "_", str(name))
            wrong = (
                f"env has {name!r}; a variable's name has letters, digits and '_' and doesn't begin with "
                f"a digit; for example {near!r}"
            )
        elif not _is_text(value):
            wrong = f"env {name} is {value!r}; it must be text without NUL"
        elif name in _SET_BY_LAUNCHER or name.startswith("PET_"):
            wrong = f"env has {name}, which the launcher sets in each process; leave it out"
        elif name in _READ_ONLY:
            wrong = f"env has {name}, which bash does not let anyone set; leave it out"
        if wrong:
            raise LaunchError(wrong)
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS", "32") in ("1", "0"):
        raise LaunchError(
            "env has CUDA_DEVICE_MAX_CONNECTIONS=1, a setting for Megatron that puts FSDP's collectives in "
            "one queue with the computation they should overlap; leave it out or give 16 or more"
        )
