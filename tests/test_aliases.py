"""``parallel3d.dryrun``, ``doctor`` and ``launch`` are in ``parallel3d.tools``, importable by both names."""

import importlib

import pytest

import parallel3d as p3d


@pytest.mark.parametrize("name", ["dryrun", "doctor", "launch"])
def test_both_names_have_the_same_objects(name: str) -> None:
    short = importlib.import_module(f"parallel3d.{name}")
    package = importlib.import_module(f"parallel3d.tools.{name}")
    assert getattr(p3d, name) is package  # also after an import of the short name
    for each in package.__all__:
        assert getattr(short, each) is getattr(package, each)
    assert dir(short)[-1] in package.__all__ == short.__all__
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = short.nothing


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("parallel3d.dryrun.no_such")


def test_a_module_is_imported_by_one_name_only() -> None:
    """A second copy of it would have classes of its own."""
    with pytest.raises(ModuleNotFoundError, match=r"parallel3d\.dryrun' is not a package"):
        importlib.import_module("parallel3d.dryrun.record")
