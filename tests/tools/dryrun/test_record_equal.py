"""A dry run's collectives and memory are those of the program itself: field by field, and byte for byte."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from _support.tools.dryrun.dry_programs import Training, named, recorded, train
from _support.tools.dryrun.float_memory import FloatMemory
from torch import nn

import parallel3d as p3d
from parallel3d._torch import groups
from parallel3d._util import dry_run
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import record
from parallel3d.tp.auto import check

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
def test_collectives_equal_those_of_real_processes(gloo_pool, case):
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
def test_collectives_equal_those_of_the_same_code_on_real_tensors(case, monkeypatch):
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


# ---- memory ----

HELD = [
    pytest.param(Training((2, 2, 2), sequence=True, recompute=True), marks=pytest.mark.slow),
    pytest.param(Training((2, 2, 1), tied=True, hfsdp=True), marks=pytest.mark.slow),
    Training((1, 3, 2), mixed=False, reshard=False, vocabulary=250, hidden=170, steps=1),
]
MORE_HELD = [Training((1, 2, 1)), Training((1, 1, 2), mixed=False, vocabulary=250, hidden=170)]


def ledger_of_this_run() -> Any:
    assert dry_run._run is not None
    unrecorded: Any = dry_run._run[1]  # a method of the run's Place
    return unrecorded.__self__.on_backward.__self__


class Compared(FloatMemory):
    """Beside the fake tensors' memory, what the dry run has noted of it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_of_this_run()
        self.sizes: dict[object, int] = {}
        self.noted: list[int] = []
        self._read = 0

    def now(self) -> int:
        for change in self.ledger.changes[self._read :]:
            if "float" in change.held.dtype:
                self.sizes[change.held] = change.size
        self._read = len(self.ledger.changes)
        self.noted.append(sum(self.sizes.values()))
        return super().now()


def changes(memory: FloatMemory) -> list[int]:
    """Bytes alive each time they have changed; views and questions come in other numbers."""
    return [size for size, _ in itertools.groupby(size for _, size in memory.series)]


@pytest.mark.parametrize(
    "case", [*HELD, *(pytest.param(case, marks=pytest.mark.full) for case in MORE_HELD)], ids=named
)
def test_memory_equals_that_of_real_tensors(case, monkeypatch):
    rank = case.world_size - 1
    with monkeypatch.context() as patch, fake_world(rank, case.world_size):
        patch.setattr(groups, "pretended_backend", "gloo")
        patch.setattr(check, "check_groups", lambda *_: [])  # a dry run doesn't try the plan
        materialize = importlib.import_module("parallel3d.materialize")
        for name in ("_leaves_out", "_is_unset"):  # nor looks at values that were initialized
            patch.setattr(materialize, name, lambda *_: False)
        real = FloatMemory()
        with real:
            trained = train(case)
        rest = real.now()
        del trained
    observed: list[tuple[Compared, int]] = []

    def program() -> None:
        memory = Compared()
        with memory:
            trained = train(case)
        observed.append((memory, memory.now()))
        del trained

    seen = record(program, case.world_size, rank, backend="gloo")
    memory, at_rest = observed[0]
    assert memory.noted[:-1] == [size for _, size in memory.series]
    assert at_rest == rest
    assert changes(memory) == changes(real)
    unseen = record(lambda: train(case), case.world_size, rank, backend="gloo")
    assert unseen.peak == seen.peak
    floats = unseen.peak.bytes - unseen.peak.by_kind.get("inputs", 0)
    assert floats == real.most()


@pytest.mark.parametrize("engine", ["parallel3d", "torch"])
def test_both_engines_unsharded_parameters_are_told(engine):
    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4))
        model = nn.Sequential()
        model.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
        model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))
        p3d.parallelize(model, mesh, engine=engine)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    samples = record(program, 4).memory
    most = max(sample.by_kind.get("unsharded parameters", 0) for sample in samples)
    unit = 4 * 64 * 64
    assert unit <= most <= 3 * unit and most % unit == 0
