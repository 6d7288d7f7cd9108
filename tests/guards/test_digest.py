"""The digest where it must not disturb, and how long it waits."""

import os
import time
from datetime import timedelta

import pytest
import torch
from _support.launch import launch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist

import parallel3d as p3d
from parallel3d import AgreementError, MeshError, MeshLayout, build_mesh
from parallel3d._torch.groups import all_groups, set_group_timeout
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options.checks import RanksAgree
from parallel3d.mesh import build as building
from parallel3d.testing import fake_world, record_collectives


def a_model(*sizes: int) -> p3d.fsdp.FSDPModule:
    torch.manual_seed(0)
    return p3d.parallelize(Lm(), build_mesh(MeshLayout(*sizes), device_type="cpu"), LM_PLAN)


def waiting(model: p3d.fsdp.FSDPModule) -> str:
    agree = [each for each in get_unit(model).context.options if isinstance(each, RanksAgree)]
    return agree[0].before if agree else ""


def one_rank_looks_alone() -> None:
    """Where nothing is sharded, or all is gathered, a rank may run forward by itself."""
    for sizes, gathered in (((4, 1, 1), False), ((1, 4, 1), True)):
        model = a_model(*sizes)
        if gathered:
            for module in model.modules():
                if isinstance(module, p3d.fsdp.FSDPModule):
                    module.unshard()
        if dist.get_rank() == 3:
            with torch.no_grad():
                model(tokens(0))
            assert waiting(model)
        for module in model.modules():
            if gathered and isinstance(module, p3d.fsdp.FSDPModule):
                module.reshard()
        for _ in range(2):
            lm_loss(model, tokens(0)).backward()
            assert not waiting(model)


def test_a_rank_that_runs_forward_by_itself(gloo_pool) -> None:
    gloo_pool.run(one_rank_looks_alone, world_size=4, timeout=40)


def never_comes() -> tuple[str, float]:
    model = a_model(1, 4, 1)
    for group in all_groups():
        set_group_timeout(group, timedelta(seconds=2))
    start, message = time.monotonic(), ""
    if dist.get_rank() != 3:
        with pytest.raises(AgreementError) as error:
            model(tokens(0))
        message = str(error.value)
    return message, time.monotonic() - start


@pytest.mark.slow
def test_it_waits_for_the_process_groups_timeout(gloo_pool) -> None:
    for message, seconds in gloo_pool.run(never_comes, world_size=4)[:3]:
        assert "rank 3 of 4 did not report 'model' within 2 s" in message
        assert seconds < 20


def round_trips() -> list[int]:
    """Calls of ``check_agreement`` in three steps; and collectives of the first, which it has none of."""
    counts = []
    model = a_model(2, 2, 1)
    from parallel3d.fsdp.options import checks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "check_agreement", lambda *a, **k: counts.append(1))
        with record_collectives() as recorder:
            for _ in range(3):
                lm_loss(model, tokens(0)).backward()
        assert recorder.count("barrier") == recorder.count("broadcast") == 0
    return counts


@pytest.mark.smoke
def test_one_round_trip_for_each_model(gloo_pool) -> None:
    """Before its first forward."""
    assert gloo_pool.run(round_trips, world_size=4) == [[1]] * 4


def test_other_worlds_compare_nothing() -> None:
    with fake_world(0, 4):
        model = a_model(1, 2, 2)
        lm_loss(model, tokens(0)).backward()
        assert waiting(model) == ""


# Warm-up


def warmed() -> list[tuple[str | None, str]]:
    with record_collectives() as recorder:
        mesh = build_mesh(MeshLayout(replicate=2, shard=1, tp=2), device_type="cpu")
    names = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}
    assert len(names) == 3
    return [(call.op, str(call.bytes)) for call in recorder.calls]


def test_each_axis_of_several_ranks_is_warmed_up(gloo_pool) -> None:
    assert gloo_pool.run(warmed, world_size=4) == [[("all_reduce", "4")] * 2] * 4
    with fake_world(0, 4), record_collectives() as recorder:
        build_mesh(MeshLayout(shard=2, tp=2), device_type="cpu")
        assert not recorder.calls


def dies_before_the_warm_up() -> str:
    if os.environ["RANK"] == "2":
        building.warm_up = lambda mesh: os._exit(0)
    try:
        build_mesh(MeshLayout(shard=2, tp=2), device_type="cpu")
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.xdist_group("gloo")
def test_its_failure_names_the_axis() -> None:
    found = [text for text, _ in launch(dies_before_the_warm_up, ranks=4, dying=[2])]
    assert "the first collective on axis 'shard' (ranks 0, 2, cpu) failed: " in found[0]
    assert "the first collective on axis 'tp' (ranks 2-3, cpu) failed: " in found[3]
