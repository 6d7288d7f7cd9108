"""A dry run's memory is that of the program on real tensors, byte for byte, operation by operation."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from _support.tools.dryrun.dry_programs import Training, named, train
from _support.tools.dryrun.float_memory import FloatMemory
from torch import nn

import parallel3d as p3d
from parallel3d._torch import groups
from parallel3d._util import dry_run
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import record
from parallel3d.tp.auto import check

CASES = [
    pytest.param(Training((2, 2, 2), sequence=True, recompute=True), marks=pytest.mark.slow),
    pytest.param(Training((2, 2, 1), tied=True, hfsdp=True), marks=pytest.mark.slow),
    Training((1, 3, 2), mixed=False, reshard=False, vocabulary=250, hidden=170, steps=1),
]
MORE = [Training((1, 2, 1)), Training((1, 1, 2), mixed=False, vocabulary=250, hidden=170)]


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
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=named
)
def test_equal_that_of_real_tensors(case, monkeypatch):
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
