"""A dry run's collectives are those of the program itself: all fields of each, in order, on every rank."""

import pytest
from _support.tools.dryrun.dry_programs import Training, named, recorded, train

from parallel3d._torch import groups
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import record

CASES = [
    pytest.param(Training((2, 2, 2), sequence=True), marks=pytest.mark.slow),  # eight processes
    pytest.param(Training((2, 2, 1), hfsdp=True, tied=True), marks=pytest.mark.slow),
    Training((1, 1, 2), sequence=True, steps=1),
    pytest.param(Training((1, 4, 1), reshard=False, recompute=True), marks=pytest.mark.slow),
]
MORE = [Training((2, 2, 2)), Training((1, 1, 2), sequence=True, recompute=True)]
ODD = [
    Training((1, 3, 2), vocabulary=250, hidden=170, mixed=False, steps=1),
    pytest.param(
        Training((1, 5, 1), dim=80, hidden=90, vocabulary=251, steps=1), marks=pytest.mark.slow
    ),
]


def dry(case: Training, rank: int) -> list:
    run = record(lambda: train(case), case.world_size, rank, backend="gloo")
    assert run.steps == case.steps
    return list(run.collectives)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=named
)
def test_equal_those_of_real_processes(gloo_pool, case):
    """All real ranks have the same list, and so have the dry runs of the first and the last."""
    real = gloo_pool.run(recorded, case, world_size=case.world_size)
    assert len(real[0]) > 30
    assert {call.axis for call in real[0]} >= {
        axis for axis, size in zip(("replicate", "shard", "tp"), case.mesh, strict=True) if size > 1
    }
    for rank, calls in enumerate(real):
        assert calls == real[0], rank
    for rank in (0, case.world_size - 1):
        assert dry(case, rank) == real[rank]


@pytest.mark.slow
@pytest.mark.parametrize("case", ODD, ids=named)
def test_equal_those_of_the_same_code_on_real_tensors(case, monkeypatch):
    """Of the first and the last rank, where nothing divides: they hold different numbers of rows."""
    for rank in (0, case.world_size - 1):
        with monkeypatch.context() as patch, fake_world(rank, case.world_size):
            patch.setattr(groups, "pretended_backend", "gloo")
            calls = recorded(case)
        assert dry(case, rank) == calls


@pytest.mark.slow
def test_nccl_differs_from_gloo_only_in_how_gradients_are_reduced():
    case = Training((2, 2, 1), steps=1)
    by_nccl = record(lambda: train(case), case.world_size).collectives
    by_gloo = record(lambda: train(case), case.world_size, backend="gloo").collectives
    assert {call.op for call in by_nccl} == {"all_gather", "reduce_scatter", "all_reduce"}
    gathered = [
        [(c.unit, c.bytes) for c in calls if c.op == "all_gather"] for calls in (by_nccl, by_gloo)
    ]
    assert gathered[0] == gathered[1]


@pytest.mark.parametrize(
    "mesh, rows", [((3, 1, 2), 9), pytest.param((1, 5, 1), 17, marks=pytest.mark.slow)], ids=str
)
def test_ranks_of_uneven_worlds_agree(mesh, rows):
    """Parameters of 9 and 17 rows: what a group's members bring to its collectives is alike."""
    sizes = {"hidden": rows * mesh[2], "vocabulary": rows * 3, "dim": 80}
    case = Training(mesh, **sizes, micro=4, mixed=False, steps=1)
    lists = [dry(case, rank) for rank in (0, case.world_size // 2, case.world_size - 1)]
    for calls in lists[1:]:
        assert calls == lists[0]
