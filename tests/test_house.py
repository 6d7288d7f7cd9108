"""The house keeps its shape: layers, no circles, files of the engine, what one step runs."""

import re
import subprocess
import sys
from pathlib import Path

import house
import pytest


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


def test_a_name_is_of_one_class() -> None:
    public = {"Diagnosis", "Finding"}  # of two packages each
    assert house.same_class_names().keys() <= public


def test_sizes() -> None:
    assert len(house.top()) <= 24, house.top()
    assert len(house.engine_files()) <= 35, house.engine_files()
    long = {name: house.lines([path]) for name, path in house.modules().items()}
    assert {name: count for name, count in long.items() if count > 800} == {}


def test_a_plain_step_runs_no_option() -> None:
    ran = house.step()
    assert [name for name in ran if name.startswith("fsdp/options/")] == []
    own = [name for name in ran if not name.startswith("_torch/")]
    assert len(own) <= 9, sorted(own)  # FSDP2 runs 6; a wrapper of an older torch is not counted


@pytest.mark.slow
def test_options_are_there_without_being_asked_for() -> None:
    """What registers itself must be imported by whoever shards: nothing else names it."""
    code = (
        "import parallel3d as p3d; p3d.fully_shard; from parallel3d.fsdp.context import root_options; "
        "print(*sorted(each.__module__.rpartition('.')[2] for each in root_options))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("checks", "checks", "finalization", "gather_extension", "replicated")
    ]
