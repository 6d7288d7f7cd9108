"""parallelize's arguments: what belongs together is one value, and old spellings still work."""

import inspect
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from _support.audit.models import PLAN, Net
from torch import nn

import parallel3d as p3d
from parallel3d import Parallel3dError, PlanError, WrongTypeError
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import fake_world


def parallel(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = p3d.build_mesh(p3d.MeshLayout(2, 2), device_type="cpu")
    return p3d.parallelize(model, mesh, units=["0"], **options)


def test_there_are_fourteen() -> None:
    given = inspect.signature(p3d.parallelize).parameters.values()
    assert len([each for each in given if each.kind is not each.VAR_KEYWORD]) <= 14


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"reshard_after_forward": False}, {"fsdp": p3d.Sharding(reshard_after_forward=False)}),
        ({"check_same_batch": False}, {"checks": p3d.Checks(same_batch=False)}),
    ],
)
def test_an_old_spelling_says_the_new_one(old: dict[str, Any], now: dict[str, Any]) -> None:
    (name,) = now
    with fake_world(0, 4):
        with pytest.warns(
            DeprecationWarning, match=f"{next(iter(old))}=.* is now .*{name}="
        ) as told:
            before = parallel(**old)
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            after = parallel(**now)
    units = unit_of(before[0]), unit_of(after[0])  # type: ignore[index]
    assert units[0] is not None and units[1] is not None
    assert units[0].reshard_after_forward == units[1].reshard_after_forward
    assert units[0].reshard_after_forward == ("check_same_batch" in old)


def test_both_at_once() -> None:
    with fake_world(0, 4), pytest.warns(DeprecationWarning):
        model = parallel(
            fsdp=p3d.Sharding(reshard_after_forward=True),
            checks=p3d.Checks(audit=False),
            shard_optimizer_over_replicate=True,
        )
    assert isinstance(model, nn.Module)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"activation_checkpoint": True},
            WrongTypeError,
            "the nearest is activation_checkpointing",
        ),
        ({"same_batch": True}, WrongTypeError, "no argument 'same_batch'"),
        ({"checks": True}, Parallel3dError, "must be a parallel3d.Checks"),
        ({"checks": p3d.Checks(same_batch=1)}, Parallel3dError, "check_same_batch is 1"),  # type: ignore[arg-type]
        ({"fsdp": torch.float32}, Parallel3dError, "True, False, a Sharding or"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with fake_world(0, 4), pytest.raises(error, match=message):
        parallel(**options)


def test_selected_recomputation_of_compiled_blocks_on_cp_and_tp_is_refused() -> None:
    """Its gradients were wrong: the audit of random configurations found it."""
    for cp, tp, refused in ((2, 2, True), (1, 2, False)):
        with fake_world(0, cp * tp):
            mesh = p3d.build_mesh(p3d.MeshLayout(cp=cp, tp=tp), device_type="cpu")
            options: dict[str, Any] = {"compile": "eager", "activation_checkpointing": "selective"}
            with pytest.raises(PlanError, match="wrong gradients") if refused else nullcontext():
                p3d.parallelize(Net(), mesh, PLAN, **options)
            p3d.parallelize(Net(), mesh, PLAN, activation_checkpointing="selective")
