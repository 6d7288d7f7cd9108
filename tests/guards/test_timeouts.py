"""Timeouts per phase, and phases in what is reported."""

import threading
from datetime import timedelta

import pytest
from torch import distributed as dist

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh, guards
from parallel3d._torch.groups import all_groups, group_timeout
from parallel3d.guards import timeouts
from parallel3d.guards.session import current_session
from parallel3d.guards.timeouts import here
from parallel3d.mesh.store import while_waiting
from parallel3d.testing import fake_world


def seconds(**values: float) -> guards.Timeouts:
    return guards.Timeouts(**{name: timedelta(seconds=value) for name, value in values.items()})


def in_phases() -> list[float]:
    """The timeouts of all groups, as phases come and go."""
    import torch

    mesh = build_mesh(MeshLayout(shard=2, tp=2), device_type="cpu")
    found = []

    def note() -> None:
        own = {group_timeout(group).total_seconds() for group in all_groups()}
        assert len(own) == 1
        found.extend(own)

    before = [group_timeout(group) for group in all_groups()]
    with guards.watch(timeouts=seconds(start=50, step=20, save=90)):
        note()
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.SGD([weight], lr=0.1).step()
        note()
        with guards.phase("save"):
            note()
            with guards.phase("other"):
                note()
        note()
        dist.all_reduce(weight.data, group=mesh.get_group("tp"))
    assert [group_timeout(group) for group in all_groups()] == before
    assert len(set(before)) == 2  # the mesh's groups have torch's own
    return found


def test_they_change_with_the_phase(gloo_pool) -> None:
    for found in gloo_pool.run(in_phases, world_size=4, timeout=58):
        assert found == [50, 20, 90, 90, 20]


def late_for_the_save() -> str:
    """Rank 1 takes longer than a step may, within the save."""
    build_mesh(MeshLayout(shard=2), device_type="cpu")
    import time

    with guards.watch(timeouts=seconds(start=1, save=30)), guards.phase("save"):
        if dist.get_rank() == 1:
            time.sleep(2)
    return here.phase


@pytest.mark.slow
def test_a_shorter_one_comes_when_all_are_there(gloo_pool) -> None:
    assert gloo_pool.run(late_for_the_save, world_size=2) == ["start", "start"]


def test_arguments() -> None:
    with pytest.raises(
        Parallel3dError, match=r"step is 5; it must be a positive datetime.timedelta"
    ):
        guards.Timeouts(step=5)  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match=r"save is .*must be a positive"):
        seconds(save=0)
    with pytest.raises(Parallel3dError, match="not a name"), guards.phase(""):
        pass
    with pytest.raises(Parallel3dError, match=r"timeouts is 3; it must be a guards.Timeouts"):
        guards.watch(timeouts=3)  # type: ignore[arg-type]
    with pytest.raises(Parallel3dError, match="grace is 3"):
        guards.watch(grace=3)  # type: ignore[arg-type]


def test_the_same_watch_within_itself() -> None:
    watch = guards.watch(timeouts=seconds(start=5))
    for _ in range(2):  # one after the other is fine
        with watch, pytest.raises(StateError, match="entered already"), watch:
            pass
        assert current_session() is None and not while_waiting and not timeouts.active


def test_nothing_happens_without_other_ranks() -> None:
    @guards.watch(timeouts=seconds(start=5))
    def main() -> int:
        with guards.phase("save"):
            return 3

    assert main() == main() == 3
    with fake_world(0, 4):
        assert main() == 3
    with pytest.raises(KeyError), guards.watch():
        raise KeyError


def test_a_stack_with_code_of_no_module() -> None:
    """As the forward of a GraphModule, or what ``exec`` runs in a dict."""
    names = {"stack": lambda: timeouts.stack_of(threading.get_ident())}
    exec("def run(): return stack()", names)  # which has __builtins__, and no __name__
    assert "<string>:1 run" in names["run"]()
