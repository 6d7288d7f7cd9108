"""What a gather half-way through a backward must not change: the order of collectives."""

from types import SimpleNamespace

import torch

from parallel3d.fsdp import reduction
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.comm import CpuComm
from parallel3d.fsdp.reduction import ReduceJob


def test_an_input_that_is_freed_early_issues_nothing_over_tp(monkeypatch) -> None:
    """Half-way is elsewhere on a tp rank with other sizes, where tp's own collectives come in between."""
    sums: list[object] = []
    monkeypatch.setattr(reduction, "sum_over_tp", lambda bucket, *_: sums.append(bucket))
    bucket = SimpleNamespace(
        tp_group=object(),
        second_group=None,
        replicate_groups=[],
        all_reduce_hook=None,
        comm_hook=None,
        all_reduce=True,
    )
    job = ReduceJob(bucket, [torch.ones(4)], [0], 0.5, True, None)
    comm = CpuComm()
    comm.scattering.append((job, ScatterWork(None, torch.full((2,), 3.0))))
    comm.free_inputs()
    assert job.inputs == [] and sums == []
    comm._advance()
    assert sums == [bucket]
    torch.testing.assert_close(job.tensor, torch.full((2,), 1.5))
