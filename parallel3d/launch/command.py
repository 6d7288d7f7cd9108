"""The training command: as torchrun takes it, with the mesh's sizes as its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from parallel3d.launch.error import LaunchError
from parallel3d.mesh.layout import AXES, MeshLayout

__all__ = ["checked_command", "with_mesh"]

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
