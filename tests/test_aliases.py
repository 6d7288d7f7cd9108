"""``parallel3d.dryrun``, ``doctor`` and ``launch`` are in ``parallel3d.tools``, importable by both names."""

import importlib

import pytest

import parallel3d as p3d


@pytest.mark.parametrize("name", ["dryrun", "doctor", "launch", "dryrun.record", "launch.job"])
def test_both_names_are_one_module(name: str) -> None:
    short = importlib.import_module(f"parallel3d.{name}")
    assert short is importlib.import_module(f"parallel3d.tools.{name}")
    assert short.__spec__ is not None
    assert short.__spec__.name == f"parallel3d.tools.{name}"


def test_a_module_inside_a_package() -> None:
    from parallel3d.tp.derive import derive_plan

    from parallel3d.tp.auto import derive

    assert derive_plan is derive.derive_plan
    assert importlib.import_module("parallel3d.cli").main is not None


def test_they_are_attributes() -> None:
    assert p3d.launch.__name__ == "parallel3d.tools.launch"
    assert p3d.dryrun.record.__module__ == "parallel3d.tools.dryrun.record"


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("parallel3d.dryrun.no_such")
