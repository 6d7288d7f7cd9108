"""The house keeps its shape: layers, no circles, files of the engine, what one step runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest
import torch
from torch import nn

from parallel3d import MeshLayout, build_mesh, fully_shard
from parallel3d.fsdp.inspect import Bucket, get_unit
from parallel3d.testing import fake_world


@pytest.fixture(scope="module")
def edges() -> dict[str, dict[str, int]]:
    return house.graph()


@pytest.mark.slow(every=True)
def test_no_import_circle(edges: dict[str, dict[str, int]]) -> None:
    """Every import counted, in functions and under TYPE_CHECKING too."""
    assert house.circles(edges) == []


def test_a_circle_is_found() -> None:
    edges = {"a": {"b": 1}, "b": {"c": 1}, "c": {"a": 1, "d": 2}, "d": {}}
    assert house.circles(edges) == [["a", "b", "c"]]


@pytest.mark.slow(every=True)
def test_layers(edges: dict[str, dict[str, int]]) -> None:
    assert house.wrong_layers(edges, house.LAYERS) == []
    assert house.wrong_layers(edges, house.FSDP_LAYERS, "fsdp") == []


def test_what_is_against_the_layers_is_found() -> None:
    wrong = {"mesh.build": {"tools.doctor": 7}, "new": {}}
    assert house.wrong_layers(wrong, house.LAYERS) == [
        "mesh.build:7 imports tools.doctor",
        "new: in no layer",
    ]
    wrong = {"fsdp.bucket": {"fsdp.options.hfsdp": 3}}
    assert house.wrong_layers(wrong, house.FSDP_LAYERS, "fsdp") == [
        "fsdp.bucket:3 imports fsdp.options.hfsdp"
    ]


@pytest.mark.slow(every=True)
def test_others_see_the_engine_through_inspect(edges: dict[str, dict[str, int]]) -> None:
    assert house.reaches_inside(edges) == []
    wrong = {"optim.local": {"fsdp.unit": 9, "fsdp.inspect": 10, "fsdp": 11}}
    assert house.reaches_inside(wrong) == ["optim.local:9 imports fsdp.unit"]


def test_tests_ask_inspect() -> None:
    """But for those whose subject is an internal."""
    inside = re.compile(r"from parallel3d\.fsdp\.(?!inspect\b)[a-z_.]+ import")
    tests = Path(__file__).parent.rglob("*.py")
    assert len([path for path in tests if inside.search(path.read_text())]) <= 33


def test_what_watches_torch_is_one_file() -> None:
    """But for what is there only where it was asked for, or has gone wrong."""
    assert house.watches().keys() == {
        "fsdp.watch",
        "fsdp.options.finalization",
        "_util.replaced_params",
    }


@pytest.mark.ci
def test_a_name_is_of_one_class() -> None:
    public = {"Diagnosis", "Experts", "Finding"}  # of two packages each
    assert house.same_class_names().keys() <= public


def test_sizes() -> None:
    assert len(house.top()) <= 25, house.top()
    assert len(house.engine_files()) <= 39, house.engine_files()
    long = {name: house.lines([path]) for name, path in house.modules().items()}
    assert {name: count for name, count in long.items() if count > 800} == {}


@pytest.mark.slow(every=True)
def test_a_plain_step_runs_no_option() -> None:
    """In a process of its own: what watches losses stays on where a test of it has run."""
    code = "import json, house; print(json.dumps(list(house.step())))"
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    ran = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in ran if name.startswith("fsdp/options/")] == []
    own = sorted(name for name in ran if name != "_torch/v2_11.py")  # a wrapper of an older torch
    assert len(own) <= 9, own  # FSDP2 runs 6
    assert house.lines(house.PACKAGE / name for name in own) <= 4_300, own


IN_ORDERS = """
import importlib, os, sys, torch.distributed.fsdp
for start in range(len(names := sys.argv[1:])):
    for step in (1, -1):
        if not os.fork():
            for name in (names[start:] + names[:start])[::step]:
                importlib.import_module(name)
            from parallel3d.fsdp.context import RunContext
            print(*(kind.__name__ for kind in RunContext.root_options), flush=True)
            os._exit(0)
        os.wait()
"""


@pytest.mark.slow
def test_the_order_of_imports_is_not_that_of_options() -> None:
    """Each option is imported first, and last; and whoever shards has them without asking for them."""
    files = sorted((house.PACKAGE / "fsdp" / "options").glob("[a-z]*.py"))
    names = ["parallel3d.fsdp.fully_shard", *(f"parallel3d.fsdp.options.{f.stem}" for f in files)]
    command = [sys.executable, "-c", IN_ORDERS, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = (
        "LateExtensions StaticMemory RanksAgree BuffersAreFilled Finalization MergedBuckets "
        "RegisteredByRoot"
    )
    assert done.stdout.splitlines() == [expected] * (2 * len(names))


def test_seams_have_types() -> None:
    """``X = Any`` between the engine's files would hide what one uses of the other."""
    untyped = re.compile(r"^[A-Z]\w* = Any$", re.MULTILINE)
    files = (house.PACKAGE / "fsdp").rglob("*.py")
    found = [path.stem for path in files if untyped.search(path.read_text())]
    assert set(found) <= {"same_order"}


def test_a_bucket_has_few_fields() -> None:
    with fake_world(0, 4):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=build_mesh(MeshLayout(shard=4), device_type="cpu"))
        model(torch.ones(1, 4)).sum().backward()
        (bucket,) = get_unit(model).group.buckets
    of_class = {
        name
        for name, value in vars(Bucket).items()
        if name[0] != "_" and not hasattr(value, "__get__")
    }
    assert len(of_class | vars(bucket).keys()) <= 30
