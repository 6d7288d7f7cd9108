"""docs/from_fsdp1.md: a row for everything that FSDP1 has, and names that exist on our side."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, wrap
from torch.distributed.fsdp import fully_sharded_data_parallel as module_of_fsdp1
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import parallel3d
import parallel3d.testing

DOCUMENT = (Path(__file__).parents[1] / "docs" / "from_fsdp1.md").read_text()
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"([\w.]+)(?:\(([^()]*)\))?")


def tables() -> dict[str, list[list[str]]]:
    """The rows' cells by heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in DOCUMENT.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").replace("`", "")
        elif line.startswith("| `"):
            found.setdefault(heading, []).append([c.strip() for c in line.strip("|").split("|")])
    return found


TABLES = tables()
ROWS = [row for rows in TABLES.values() for row in rows]


def arguments(function: Callable) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def fields(*classes: type) -> list[str]:
    return [field.name for each in classes for field in dataclasses.fields(each)]


def members(enum: type) -> list[str]:
    return list(enum.__members__)  # type: ignore[attr-defined]


def configs() -> list[type]:
    """Of state dicts."""
    return [getattr(torch_fsdp, n) for n in torch_fsdp.__all__ if n.endswith("StateDictConfig")]


def methods(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def variables() -> list[str]:
    """What FSDP1 reads from the environment."""
    names = [n for n in vars(_flat_param) if re.fullmatch("_FSDP_[A-Z_]+", n)]
    return [getattr(_flat_param, name) for name in names]


EXPECTED = {
    "Arguments of FullyShardedDataParallel": arguments(FullyShardedDataParallel.__init__),
    "ShardingStrategy": members(torch_fsdp.ShardingStrategy),
    "BackwardPrefetch": [*members(torch_fsdp.BackwardPrefetch), "None"],
    "MixedPrecision": fields(torch_fsdp.MixedPrecision),
    "CPUOffload": fields(torch_fsdp.CPUOffload),
    "Wrap policies": wrap.__all__,
    "Methods": methods(FullyShardedDataParallel),
    "State dict types and configurations": [
        *members(torch_fsdp.StateDictType),
        *(each.__name__ for each in configs()),
        "StateDictSettings",
        "OptimStateKeyType",
        *fields(*configs()),
    ],
    "Communication hooks": [
        name
        for name, value in vars(default_hooks).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == default_hooks.__name__
    ],
    "ShardedGradScaler": arguments(ShardedGradScaler.__init__),
    "The DTensor extension": methods(FSDPExtensions),
    "Environment and debug checks": [*variables(), "TORCH_DISTRIBUTED_DEBUG"],
}


@pytest.mark.parametrize("heading", EXPECTED)
def test_nothing_of_fsdp1_is_missing(heading: str) -> None:
    rows = [CODE.findall(row[0]) for row in TABLES[heading]]
    assert all(len(names) == 1 for names in rows)
    named = [name for names in rows for name in names]
    assert sorted(named) == sorted(set(EXPECTED[heading]))


def test_arguments_of_methods_are_fsdp1s() -> None:
    rows = [row[0] for row in TABLES["Arguments of methods"]]
    for text in rows:
        name, argument = CALL.fullmatch(text.strip("`")).groups()
        assert argument in arguments(getattr(FullyShardedDataParallel, name))
    of_summon = arguments(FullyShardedDataParallel.summon_full_params)[1:]
    assert {f"`summon_full_params({argument})`" for argument in of_summon} <= set(rows)
    assert set(module_of_fsdp1.__all__) == {"FullyShardedDataParallel", "OptimStateKeyType"}


def resolve(path: str) -> object:
    """What a name in the column "here" means."""
    first, *rest = path.split(".")
    if first == "unit":
        value: object = parallel3d.fsdp.FSDPModule
    elif first == "torch":
        value = importlib.import_module("torch")
    else:
        value = getattr(parallel3d, first)
    for name in rest:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_names_of_ours_exist(row: list[str]) -> None:
    assert len(row) == 3 and all(row)
    codes = CODE.findall(row[1])
    assert codes and re.sub(r"`[^`]+`", "", row[1]).strip(" ,") == ""
    for code in codes:
        path, given = CALL.fullmatch(code).groups()
        value = resolve(path)
        if given is not None:
            named = [each.strip() for each in given.split(",") if each.strip()]
            assert all(each.endswith("=") for each in named), code
            assert {each[:-1] for each in named} <= set(arguments(value)), code
    assert callable(value) or issubclass(value, nn.Module)


def test_names_in_prose_and_code_exist() -> None:
    for path in re.findall(r"\bp3d((?:\.\w+)+)", DOCUMENT):
        assert resolve(path.removeprefix(".")) is not None
    for path in re.findall(r"`((?:unit|fsdp|optim)\.\w+)", DOCUMENT):
        assert resolve(path) is not None
