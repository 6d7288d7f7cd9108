"""What a gather half-way through a backward must not change: the order of collectives."""

from types import SimpleNamespace

import torch

from parallel3d.fsdp import reduction
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.comm import CpuComm
from parallel3d.fsdp.reduction import BucketSettings, Reducer, Reduction, stages_of


def test_an_input_that_is_freed_early_issues_nothing_over_tp(monkeypatch) -> None:
    """Half-way is elsewhere on a tp rank with other sizes, where tp's own collectives come in between."""
    sums: list[object] = []
    monkeypatch.setattr(reduction, "sum_over_tp", lambda bucket, *_: sums.append(bucket))
    scatter = ScatterWork(None, torch.full((2,), 3.0))
    monkeypatch.setattr(Reducer, "reduce_scatter", lambda *_, unit, scale: scatter)
    bucket = SimpleNamespace(
        unit="",
        tp_group=object(),
        scatter_group=object(),
        settings=BucketSettings(),
    )
    job = Reduction(bucket, [torch.ones(4)], [0], 0.5)
    job.stages = stages_of(job, (), (), ())
    finished: list[Reduction] = []
    bucket.grads = SimpleNamespace(
        start=lambda all_reduce: job, finish=finished.append, in_flight=None
    )
    comm = CpuComm()
    comm.reduce(bucket, all_reduce=True)
    comm.free_inputs()
    assert job.inputs == [] and sums == []
    comm.finish()
    assert sums == [bucket] and finished == [job]
    torch.testing.assert_close(job.tensor, torch.full((2,), 1.5))
