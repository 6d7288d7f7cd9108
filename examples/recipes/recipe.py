"""A scaling recipe: a TOML file that says what to train, on how many GPUs, and what to expect.

    python examples/recipes/recipe.py                               # lists them
    python examples/recipes/recipe.py llama-70b-512gpus             # its commands, what the planner expects
    python examples/recipes/recipe.py llama-70b-512gpus --to slurm  # its launch file
    python examples/recipes/recipe.py llama-70b-512gpus --expect    # writes what the planner expects into it

``[train]`` has the options of examples/train.py by name.
"""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import parallel3d as p3d
from parallel3d.launch import LaunchJob, launch_file
from parallel3d.planner import Cluster, Prediction, Workload, predict, spec_from_hf_config

__all__ = ["FOLDER", "Recipe", "names", "read"]

FOLDER = Path(__file__).parent
_GIB = 2**30
_MODELS = {
    "1b": "llama-3.2-1b",
    "8b": "llama-3.1-8b",
    "70b": "llama-3.1-70b",
    "405b": "llama-3.1-405b",
}


@dataclass(frozen=True)
class Recipe:
    """One file.

    Attributes:
        cluster: GPU's name, nodes, GPUs of a node. mesh: replicate, shard, tp. train: options of train.py.
        expected: by the planner: ``memory_gib`` a GPU, ``tokens_per_second_per_gpu``, ``mfu``,
            ``step_seconds``.
    """

    name: str
    why: str
    cluster: dict[str, Any]
    mesh: dict[str, int]
    train: dict[str, Any]
    expected: dict[str, float]

    @property
    def layout(self) -> p3d.MeshLayout:
        """The mesh."""
        return p3d.MeshLayout(**self.mesh)

    @property
    def world_size(self) -> int:
        """How many GPUs."""
        return self.cluster["nodes"] * self.cluster["gpus_per_node"]

    def arguments(self, **changed: Any) -> list[str]:
        """For examples/train.py; ``changed``: options in place of the recipe's."""
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
            command=("examples/train.py", *self.arguments()),
            nodes=self.cluster["nodes"],
            gpus_per_node=self.cluster["gpus_per_node"],
            layout=self.layout,
            name=self.name,
            **more,
        )

    def prediction(self) -> Prediction:
        """What the planner says of it now."""
        train = self.train
        work = Workload(
            seq_len=train["seq_len"],
            micro_batch=train["micro_batch"],
            global_batch=train["batch"],
            precision="bf16" if train["mixed_precision"] else "fp32",
            checkpointing=train.get("activation_checkpointing", "none"),
            compile=train.get("compile", False),
            sequence_parallel=train.get("sequence_parallel", False),
            loss_parallel=train.get("loss_parallel", "none") == "split",
            reshard_after_forward=not train.get("no_reshard", False),
        )
        cluster = Cluster.of(
            self.cluster["gpu"], self.cluster["nodes"], self.cluster["gpus_per_node"]
        )
        return predict(spec_from_hf_config(_MODELS[train["size"]]), self.layout, cluster, work)

    def expectation(self) -> dict[str, float]:
        """``expected`` as the planner has it now, rounded."""
        found = self.prediction()
        return {
            "memory_gib": round(found.memory.needed / _GIB, 1),
            "tokens_per_second_per_gpu": round(found.tokens_per_second_per_gpu),
            "mfu": round(found.mfu, 3),
            "step_seconds": round(found.step_seconds, 2),
        }


def names() -> list[str]:
    """Of all recipes, the smallest first."""
    return sorted((p.stem for p in FOLDER.glob("*.toml")), key=lambda n: read(n).world_size)


def read(name: str) -> Recipe:
    """The recipe called so, or in this file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise typer.BadParameter(f"there is no recipe {name!r}; there are {', '.join(names())}")
    return Recipe(path.stem, **tomllib.loads(path.read_text()))


def write_expectation(name: str) -> None:
    """Puts what the planner expects now into the file."""
    path = FOLDER / f"{name}.toml"
    head, _, _ = path.read_text().partition("[expected]")
    lines = [f"{key} = {value}" for key, value in read(name).expectation().items()]
    path.write_text(head + "\n".join(["[expected]", *lines]) + "\n")


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
        _show(recipe)


def _show(recipe: Recipe) -> None:
    arguments = " ".join(recipe.arguments())
    print(f"{recipe.name}: {recipe.why}")
    print(f"\ndry run:\n  parallel3d dryrun --world-size {recipe.world_size} --steps 1 -- ", end="")
    print(f"examples/train.py {arguments}")
    print(f"\nlaunch:\n  python examples/recipes/recipe.py {recipe.name} --to slurm > train.sbatch")
    print("\nexpected by the planner:")
    for key, value in recipe.expectation().items():
        print(f"  {key} {value:,}")


if __name__ == "__main__":
    typer.run(main)
