"""A scaling recipe: a TOML file that says what to train, on how many GPUs, and what to expect.

    python examples/recipes/recipe.py                               # lists them
    python examples/recipes/recipe.py llama-70b-512gpus             # its commands, what the planner expects
    python examples/recipes/recipe.py llama-70b-512gpus --to slurm  # its launch file
    python examples/recipes/recipe.py llama-70b-512gpus --expect    # writes what the planner expects into it

``[train]`` has the options of examples/llama/train.py by name. A recipe of your own is given by its path,
which ends with .toml; ``[expected]`` is what --expect writes.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

import parallel3d as p3d
from parallel3d.planner import Cluster, Prediction, Workload, predict, spec_from_hf_config
from parallel3d.tools.launch import LaunchJob, launch_file

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "llama"))

from options import Options  # noqa: E402

__all__ = ["FOLDER", "Recipe", "names", "read"]

_GIB = 2**30
_MODELS = {
    "1b": "llama-3.2-1b",
    "8b": "llama-3.1-8b",
    "70b": "llama-3.1-70b",
    "405b": "llama-3.1-405b",
}
_CLUSTER, _MESH = ("gpu", "nodes", "gpus_per_node"), ("replicate", "shard", "cp", "tp")
_TRAIN = tuple(option.name for option in fields(Options) if option.name not in _MESH)
_EXPECTED = ("memory_gib", "host_gib", "tokens_per_second_per_gpu", "mfu", "step_seconds")
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Recipe:
    """One file.

    Attributes:
        cluster: GPU's name, nodes, GPUs of a node. mesh: sizes of the axes. train: options of train.py.
        expected: by the planner: ``memory_gib`` a GPU, ``host_gib`` of the CPU's memory that it uses,
            ``tokens_per_second_per_gpu``, ``mfu``, ``step_seconds``; empty before it was asked.

    Raises:
        Parallel3dError: by ``prediction`` and ``expectation``: the planner doesn't know an option's value.
    """

    name: str
    why: str
    cluster: dict[str, Any]
    mesh: dict[str, int]
    train: dict[str, Any]
    expected: dict[str, float] = field(default_factory=dict)

    @property
    def layout(self) -> p3d.MeshLayout:
        """The mesh."""
        return p3d.MeshLayout(**self.mesh)

    @property
    def world_size(self) -> int:
        """How many GPUs."""
        return self.cluster["nodes"] * self.cluster["gpus_per_node"]

    def arguments(self, **changed: Any) -> list[str]:
        """For examples/llama/train.py; ``changed``: options in place of the recipe's."""
        found: list[str] = []
        for name, value in {**self.mesh, **self.train, **changed}.items():
            option = "--" + name.replace("_", "-")
            if value is True:
                found.append(option)
            elif value is not False:
                found += [option, str(value)]
        return found

    def job(self, **more: Any) -> LaunchJob:
        """What ``parallel3d launch`` starts; ``more``: of LaunchJob, such as a container's ``image``."""
        return LaunchJob(
            command=("examples/llama/train.py", *self.arguments()),
            nodes=self.cluster["nodes"],
            gpus_per_node=self.cluster["gpus_per_node"],
            layout=self.layout,
            name=self.name,
            **more,
        )

    def prediction(self) -> Prediction:
        """What the planner says of it now."""
        train = Options(**self.train)
        for option, known in (
            ("size", tuple(_MODELS)),
            ("dtype", tuple(_PRECISIONS)),
            ("double", (False,)),
            ("hfsdp", (False,)),
        ):
            value = getattr(train, option)
            if value not in known:
                raise p3d.Parallel3dError(
                    f"recipe {self.name}: the planner does not know {option} = {value!r}, but only "
                    f"{', '.join(map(repr, known))}; leave it out to see what the rest would take"
                )
        stored = _PRECISIONS[train.dtype]
        layout = self.layout.resolve(self.world_size)
        work = Workload(
            seq_len=train.model.max_seq_len,
            micro_batch=train.micro_batch or train.batch // layout.data_size,
            global_batch=train.batch,
            precision="bf16" if train.mixed_precision else stored,
            param_dtype=stored,
            checkpointing=str(train.activation_checkpointing),
            compile=train.compile,
            cp_attention=str(train.cp_attention),
            sequence_parallel=train.sequence_parallel,
            loss_parallel=train.loss_parallel != "none",
            chunked_loss=train.loss_parallel == "chunked",
            reshard_after_forward=not train.no_reshard,
        )
        cluster = Cluster.of(
            self.cluster["gpu"], self.cluster["nodes"], self.cluster["gpus_per_node"]
        )
        found = predict(spec_from_hf_config(_MODELS[train.size]), layout, cluster, work)
        if found.memory.host > train.offload_gib * _GIB:
            raise p3d.Parallel3dError(
                f"recipe {self.name}: offload_gib is {train.offload_gib}, and what layers keep takes "
                f"{found.memory.host / _GIB:.1f} GiB of the CPU's memory; the planner does not know offload "
                "of a part of it"
            )
        return found

    def expectation(self) -> dict[str, float]:
        """``expected`` as the planner has it now, rounded."""
        found = self.prediction()
        return {
            "memory_gib": round(found.memory.needed / _GIB, 1),
            **({"host_gib": round(found.memory.host / _GIB, 1)} if found.memory.host else {}),
            "tokens_per_second_per_gpu": round(found.tokens_per_second_per_gpu),
            "mfu": round(found.mfu, 3),
            "step_seconds": round(found.step_seconds, 2),
        }


def names() -> list[str]:
    """Of all recipes, the smallest first."""
    found = (path.stem for path in FOLDER.glob("*.toml"))
    return sorted(found, key=lambda name: (read(name).world_size, name))


def read(name: str) -> Recipe:
    """The recipe called so, or in this file.

    Raises:
        Parallel3dError: it is not there, or has something that a recipe hasn't.
    """
    path = _path(name)
    if not path.is_file():
        raise p3d.Parallel3dError(f"there is no recipe {name!r}; there are {', '.join(names())}")
    try:
        found = tomllib.loads(path.read_text())
    except ValueError as error:
        raise p3d.Parallel3dError(f"{path} is no TOML: {error}") from None
    _check_keys(f"{path}", found, needed=("why", "cluster", "mesh", "train"), also=("expected",))
    tables = {"cluster": (_CLUSTER, ()), "mesh": ((), _MESH), "train": (("size", "batch"), _TRAIN)}
    for table, (needed, also) in {**tables, "expected": ((), _EXPECTED)}.items():
        _check_keys(f"{path}: [{table}]", found.get(table, {}), needed=needed, also=also)
    return Recipe(path.stem, **found)


def _path(name: str) -> Path:
    return Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"


def _check_keys(
    where: str, found: object, *, needed: Collection[str], also: Collection[str]
) -> None:
    if not isinstance(found, dict):
        raise p3d.Parallel3dError(f"{where} is {found!r}; it must be a table")
    known = {*needed, *also}
    for key in found:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise p3d.Parallel3dError(f"{where} has {key!r}, which is not a key of it; {hint}")
    if absent := [key for key in needed if key not in found]:
        raise p3d.Parallel3dError(f"{where} lacks {', '.join(absent)}")


def write_expectation(name: str) -> None:
    """Puts what the planner expects now into the file, in place of what it expected before."""
    path = _path(name)
    lines = [f"{key} = {value}" for key, value in read(name).expectation().items()]
    rest = re.sub(r"(?ms)^\[expected\].*?(?=^\[|\Z)", "", path.read_text()).rstrip()
    path.write_text("\n".join([rest, "", "[expected]", *lines]) + "\n")


def main(
    name: Annotated[str | None, typer.Argument(help="Of a recipe; none: lists them.")] = None,
    to: Annotated[str | None, typer.Option(help="Prints the file for this launcher.")] = None,
    image: Annotated[
        str | None, typer.Option(help="The container's image, for kubeflow and jobset.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU's name, for skypilot: H100.")] = None,
    expect: Annotated[
        bool, typer.Option("--expect", help="Writes what the planner expects into the recipe.")
    ] = False,
) -> None:
    """Shows a scaling recipe, or writes the file that launches it."""
    if name is None:
        print("\n".join(f"{each:22} {read(each).why}" for each in names()))
        return
    recipe = read(name)
    if expect:
        write_expectation(name)
    elif to is not None:
        sys.stdout.write(launch_file(to, recipe.job(image=image, gpu=gpu)))
    else:
        _show(name, recipe)


def _show(name: str, recipe: Recipe) -> None:
    arguments = shlex.join(recipe.arguments())
    print(f"{recipe.name}: {recipe.why}")
    print(f"\ndry run:\n  parallel3d dryrun --world-size {recipe.world_size} -- ", end="")
    print(f"examples/llama/train.py {arguments}")
    print(
        f"\nlaunch:\n  python examples/recipes/recipe.py {shlex.quote(name)} --to slurm > train.sbatch"
    )
    print("\nexpected by the planner:")
    for key, value in recipe.expectation().items():
        print(f"  {key} {value:,}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except p3d.Parallel3dError as error:
        sys.exit(f"error: {error}")
