"""Phases in a profile and in the log, and what a log has of decisions; none without a profiler or a level."""

import copy
import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from _support.fsdp.wrapped import equal_grads
from torch import nn
from torch.profiler import ProfilerActivity, profile

import parallel3d as p3d
from parallel3d._util import scopes
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import GlooPool, fake_world

PHASES = ("pre_forward", "post_forward", "pre_backward", "post_backward_reduce")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)
    )


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(replicate: int = 1, shard: int = 2) -> nn.Module:
    whole = model()
    mesh = p3d.build_mesh(p3d.MeshLayout(replicate, shard), device_type="cpu")
    for module in whole:
        if next(module.parameters(), None) is not None:
            p3d.fully_shard(module, mesh=mesh)
    return p3d.fully_shard(whole, mesh=mesh)


def step(module: nn.Module) -> None:
    module(torch.randn(3, 6)).square().mean().backward()


def scopes_of(run: profile) -> set[str]:
    return {
        e.key.removeprefix("parallel3d::") for e in run.key_averages() if "parallel3d::" in e.key
    }


def in_a_trace() -> None:
    module, plain = sharded(shard=2), model()
    for each in (module, plain):
        torch.manual_seed(0)
        step(each)
    torch.manual_seed(1)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(module)
    torch.manual_seed(1)
    step(plain)
    equal_grads(module, plain)
    names = scopes_of(run)
    for unit in ("0", "1", "2"):
        for phase in (*PHASES, "all_gather", "all_gather_copy_out"):
            assert f"{phase} ({unit})" in names, (phase, unit, sorted(names))
    assert {"root_pre_forward (Sequential)", "root_post_backward (Sequential)"} <= names
    step(module)  # it takes them away
    unit = get_unit(module[0])
    for owner in (unit, unit.context, unit.context.comm):
        assert not [name for name, value in vars(owner).items() if "_scoped" in repr(value)]


def test_a_trace_names_units(gloo_pool: GlooPool) -> None:
    gloo_pool.run(in_a_trace, world_size=2)


@pytest.mark.parametrize("replicate, shard", [(1, 2), (2, 2), (2, 1), (1, 1)])
def test_on_each_mesh(replicate: int, shard: int) -> None:
    with fake_world(0, replicate * shard):
        module = sharded(replicate, shard)
        with profile(activities=[ProfilerActivity.CPU]) as run:
            step(module)
        names = scopes_of(run)
        for unit in ("0", "1", "2"):
            assert {f"pre_forward ({unit})", f"post_forward ({unit})"} <= names, sorted(names)
        assert (
            any(name.startswith("post_backward_reduce") for name in names) or replicate * shard == 1
        )
        assert any("all_gather (" in name for name in names) == (shard > 1)


def test_a_model_is_freed_and_copied_while_a_profiler_runs() -> None:
    with fake_world(0, 2):
        module = sharded()
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU]) as run:
            step(module)
            copied = copy.deepcopy(module)
            ref = weakref.ref(get_unit(module))
            gc.disable()
            del module
            gone = ref() is None
            gc.enable()
            step(copied)
        assert gone and "pre_forward (0)" in scopes_of(run)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = scopes.LOGGER.level
    yield caplog
    scopes.LOGGER.setLevel(before)


def test_phases_are_logged_where_torch_logs_its_own(logged: pytest.LogCaptureFixture) -> None:
    with fake_world(0, 2):
        module = sharded()
        step(module)
        assert not [r for r in logged.records if "FSDP::" in r.message]
        with logged.at_level(logging.DEBUG, scopes.LOGGER.name):
            step(module)
        lines = [r.message for r in logged.records]
        for line in ("FSDP::root_pre_forward (Sequential)", "FSDP::pre_forward (0)"):
            assert line in lines
        for phase in (*PHASES, "root_post_backward", "all_gather"):
            assert any(line.startswith(f"FSDP::{phase} (") for line in lines), phase


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def made() -> list[str]:
        caplog.clear()
        with fake_world(0, 4):
            mesh = p3d.build_mesh(p3d.MeshLayout(1, 2, tp=2), device_type="cpu")
            whole = Blocks()
            plan = {"layers.*": "colwise_rep"}
            p3d.parallelize(whole, mesh, plan, example=((torch.randn(2, 6),), {}))
            whole(torch.randn(2, 6))
        return [f"{r.name} {r.levelname} {r.message}" for r in caplog.records]

    assert made() == []
    with caplog.at_level(logging.INFO, "parallel3d"):
        (line,) = made()
    assert (
        line.startswith("parallel3d.parallelize INFO mesh {'replicate': 1, 'shard': 2")
        and "2 units" in line
    )
    with caplog.at_level(logging.DEBUG, "parallel3d"):
        lines = made()
    assert any("units, blocks: layers.0, layers.1" in line for line in lines)
    assert any("Tensor parallel over 2 ranks" in line and "layers.* (x2)" in line for line in lines)
    assert any(
        "unit layers.1: " in line and "gathered over 2 ranks in float32" in line for line in lines
    )


def test_quiet_by_default() -> None:
    assert not logging.getLogger("parallel3d").handlers
    assert not logging.getLogger("parallel3d.parallelize").isEnabledFor(logging.INFO)
    assert not scopes.LOGGER.isEnabledFor(logging.DEBUG)
