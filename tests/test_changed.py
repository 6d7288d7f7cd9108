"""``pytest --changed`` runs the tests of what has changed, and not all."""

from _support.changed import ROOT, concerned


def names(*changed: str) -> set[str]:
    return {path.name for path in concerned(ROOT / each for each in changed)}


def test_of_an_option() -> None:
    found = names("parallel3d/fsdp/options/hfsdp.py")
    assert "test_hfsdp.py" in found and len(found) < 40


def test_of_a_helper_and_of_a_test() -> None:
    assert names("tests/_support/changed.py") == {"test_changed.py"}
    assert names("tests/test_units.py", "README.md") == {"test_units.py"}


def test_of_a_deleted_file() -> None:
    assert names(f"parallel3d/optim/{'x' * 9}.py") == set()
