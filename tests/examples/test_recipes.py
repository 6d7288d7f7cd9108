"""The scaling recipes: what the planner expects of them, their launch files, and a dry run of each on all
its GPUs."""

import sys
from dataclasses import replace
from pathlib import Path

import llama
import pytest

from parallel3d.planner.memory import state_memory
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.world import script
from parallel3d.tools.launch import TARGETS, launch_file

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES / "recipes"))

from recipe import names, read  # noqa: E402

ALL = ("llama-1b-8gpus", "llama-8b-64gpus", "llama-70b-512gpus", "llama-405b-4096gpus")
LONG = ("llama-8b-1m-32gpus", "llama-8b-128k-64gpus")


def test_there_is_one_for_each_scale():
    assert tuple(names()) == (ALL[0], *LONG, *ALL[1:])
    assert [read(name).world_size for name in ALL] == [8, 64, 512, 4096]
    assert [read(name).train["size"] for name in ALL] == ["1b", "8b", "70b", "405b"]


def test_long_sequences_are_cut_over_cp():
    recipes = [read(name) for name in LONG]
    assert [recipe.train["seq_len"] for recipe in recipes] == [2**20, 2**17]
    assert [recipe.layout.cp for recipe in recipes] == [32, 8]
    assert [recipe.train["activation_checkpointing"] for recipe in recipes] == [
        "offload",
        "selective",
    ]
    for recipe in recipes:
        found = recipe.prediction()
        assert found.workload.cp_attention == recipe.train["cp_attention"]
        assert found.memory.host <= found.memory.host_capacity


@pytest.mark.parametrize("name", (*ALL, *LONG))
def test_it_says_what_the_planner_expects(name):
    recipe = read(name)
    assert recipe.layout.world_size == recipe.world_size
    assert recipe.expected == recipe.expectation()
    assert recipe.prediction().fits


@pytest.mark.parametrize("name", (*ALL, *LONG))
def test_each_launcher_starts_it(name):
    recipe = read(name)
    for target in TARGETS:
        image = "registry/train:1" if target in ("kubeflow", "jobset") else None
        text = launch_file(
            target, recipe.job(image=image, gpu="H100" if target == "skypilot" else None)
        )
        assert "examples/llama/train.py" in text and recipe.train["checkpoint"] in text
        assert str(recipe.cluster["nodes"]) in text


def dry_run(recipe):
    """The first rank's first step, of one micro-batch."""
    batch = recipe.train["micro_batch"] * recipe.layout.data_size
    program = script(EXAMPLES / "llama" / "train.py", recipe.arguments(batch=batch))
    return record(program, recipe.world_size, 0, steps=1)


def check(recipe, run, model):
    """The mesh is the recipe's; memory fits; parameters, gradients and AdamW's state are what the planner
    says, to the byte; every axis that divides something communicates."""
    planned = recipe.prediction()
    assert run.mesh == recipe.layout.as_dict() and run.world_size == recipe.world_size
    assert run.steps == 1
    assert run.peak.bytes < planned.memory.capacity - 4 * 2**30  # what the context and NCCL take
    # After the last step, before the trainer lets go of its gradients.
    held = max(reversed(run.memory), key=lambda each: each.by_kind.get("gradients", 0)).by_kind
    state = state_memory(model, planned.layout, planned.workload)
    assert held["parameters"] == state.parameters
    assert held["optimizer state"] - state.optimizer in range(8 * len(run.parameters))  # steps
    assert held["gradients"] == state.gradients
    axes = {call.axis for call in run.collectives}
    shard = "shard" if recipe.layout.cp == 1 else "shard_cp"
    assert {axis for axis, size in recipe.mesh.items() if size > 1} <= axes | {shard.split("_")[0]}
    reduced = [c for c in run.collectives if (c.op, c.axis) == ("reduce_scatter", shard)]
    assert len(reduced) == 2 + model.blocks


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALL[:2]),
        *(pytest.param(name, marks=pytest.mark.full) for name in ALL[2:]),
    ],
)
def test_a_dry_run_on_all_its_gpus(name):
    recipe = read(name)
    check(recipe, dry_run(recipe), recipe.prediction().model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(ALL[2], marks=pytest.mark.slow),
        pytest.param(ALL[3], marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.full) for name in LONG),
    ],
)
def test_some_layers_on_all_its_gpus(name, monkeypatch):
    """Of the large ones; all their layers take minutes (-m full)."""
    recipe, layers = read(name), 8
    size = recipe.train["size"]
    monkeypatch.setitem(llama.SIZES, size, replace(llama.SIZES[size], n_layers=layers))
    model = recipe.prediction().model
    units = [replace(u, count=layers) if u.kind == "block" else u for u in model.units]
    check(recipe, dry_run(recipe), replace(model, units=tuple(units)))
