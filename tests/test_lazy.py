"""Importing the library loads nothing but itself; its public names are there all the same."""

import ast
import compileall
import importlib
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import parallel3d

PACKAGE = Path(parallel3d.__file__).parent
PACKAGES = ("parallel3d", *(f"parallel3d.{p}" for p in ("fsdp", "mesh", "optim", "testing", "tp")))
EXPORTING = sorted(
    ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for path in PACKAGE.rglob("__init__.py")
    if "if TYPE_CHECKING:" in path.read_text()
)
"""All packages that export names."""
OTHERS = "parallel3d.integrations"
"""Its modules import other libraries."""


def in_fresh_process(code: str) -> list[list[str]]:
    """The lines that ``code`` prints, as words."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow(every=True)
def test_an_import_loads_nothing_beyond_torch_but_the_package() -> None:
    code = f"""
import sys
import torch
before = set(sys.modules)
import {", ".join(PACKAGES)}
print(*sorted(set(sys.modules) - before))
parallel3d.MeshLayout(shard=-1, tp=2).resolve(world_size=8)
print(*sorted(set(sys.modules) - before))
print(parallel3d.mesh.layout.__name__, parallel3d.fsdp.unit.__name__)
"""
    loaded, for_sizes, modules = in_fresh_process(code)
    assert set(loaded) == {
        "parallel3d._util",
        "parallel3d._util.lazy",
        "parallel3d._util.version",
        *PACKAGES,
    }
    # Nor does what needs no tensor.
    assert not {"sympy", "torch.distributed.tensor", "transformers", "einops"} & set(for_sizes)
    # Modules are there without imports of their own.
    assert modules == ["parallel3d.mesh.layout", "parallel3d.fsdp.unit"]


@pytest.mark.parametrize("package", EXPORTING)
def test_what_type_checkers_read_is_what_python_finds(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert [node.value.func.id for node in block.orelse] == ["export_lazily"]
    read = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # As type checkers want it of a name that is public.
    assert all(alias.asname == alias.name for node in block.body for alias in node.names)
    assert set(read) == set(module.__all__)
    for name, where in read.items() if package != OTHERS else ():
        found = getattr(module, name)
        assert found is getattr(importlib.import_module(where), name)
    assert module._exports == {name: at for name, at in read.items() if at != package}


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_and_star_have_every_public_name(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    module = importlib.import_module(package)
    assert set(module.__all__) <= names.keys()
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.slow
def test_completion_offers_the_public_names_and_nothing_else() -> None:
    """Also after modules were imported, of whose names a package's namespace is then full."""
    code = f"""
import rlcompleter
import {", ".join(PACKAGES)}
import parallel3d.fsdp.unit
for package in ({", ".join(PACKAGES)}):
    complete = rlcompleter.Completer({{"package": package}}).complete
    found = {{complete("package.", at) for at in range(len(dir(package)))}} - {{None}}
    names = {{name.removeprefix("package.").rstrip("()") for name in found}}
    print(*sorted(names ^ {{*package.__all__}}))
print(*dir(parallel3d))
"""
    *wrong, root = in_fresh_process(code)
    assert wrong == [[] for _ in PACKAGES]
    packages = {"checkpoint", "doctor", "dryrun", "fsdp", "guards", "launch", "mesh"}
    assert packages | {"observability", "optim", "planner", "testing", "tp"} <= set(root)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_objects_are_pickled_by_reference(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        public = getattr(module, name)
        if callable(public):
            assert pickle.loads(pickle.dumps(public)) is public


@pytest.mark.slow
def test_functions_named_like_their_modules_stay_functions() -> None:
    """Whether the module or the name of the package is asked for first."""
    code = """
import parallel3d.fsdp.fully_shard
import parallel3d.optim.local
from parallel3d.fsdp.state_dict.full_params import full_params
import parallel3d.parallelize
from parallel3d import optim, fsdp
for each in (
    fsdp.fully_shard, fsdp.full_params, optim.local, optim.accumulate, optim.global_mean,
    optim.step_in_backward, parallel3d.parallelize,
):
    print(type(each).__name__)
"""
    assert in_fresh_process(code) == 7 * [["function"]]


@pytest.mark.parametrize(
    ("package", "misspelt", "meant"),
    [
        ("parallel3d", "fully_shar", "fully_shard"),
        ("parallel3d", "fdsp", "fsdp"),
        ("parallel3d.tp", "Colwize", "Colwise"),
        ("parallel3d.optim", "clip_grad_norm", "clip_grad_norm_"),
        ("parallel3d.mesh", "zzz", "MeshLayout"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(package: str, misspelt: str, meant: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"'{package}' has no '{misspelt}'.*{meant}"):
        getattr(module, misspelt)
    assert not hasattr(module, f"__{misspelt}__")
    with pytest.raises(ImportError, match=f"cannot import name '{misspelt}' from '{package}'"):
        exec(f"from {package} import {misspelt}")


def test_what_a_module_fails_to_import_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a module is no missing name."""
    monkeypatch.setitem(sys.modules, "parallel3d.materialize", None)
    monkeypatch.delitem(vars(parallel3d), "materialize", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"parallel3d\.materialize"):
        _ = parallel3d.materialize


@pytest.mark.slow
def test_compiled_files_are_enough(tmp_path: Path) -> None:
    """Every public name is found where the sources are left out, as some images do to be smaller."""
    copy = tmp_path / "parallel3d"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "_examples"))
    assert compileall.compile_dir(copy, quiet=1, legacy=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
import parallel3d as p3d
for package in {[each for each in EXPORTING if each != OTHERS]}:
    module = importlib.import_module(package)
    assert module.__file__.startswith({str(copy)!r}) and module.__file__.endswith(".pyc")
    assert all(getattr(module, name) is not None for name in module.__all__)
from parallel3d.dryrun import record
from parallel3d.launch import LaunchJob, launch_file
print(record is p3d.dryrun.record, p3d.MeshLayout(shard=-1, tp=2).resolve(world_size=8).shard)
print(len(launch_file("slurm", LaunchJob(command=("train.py",)))) > 0)
"""
    assert in_fresh_process(code) == [["True", "4"], ["True"]]
