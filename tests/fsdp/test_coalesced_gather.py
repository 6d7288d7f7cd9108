"""Several buckets of a unit in one all-gather."""

import pytest
import torch
from _support.fsdp.counted_collectives import Gather
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes
from _support.models import Block

from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import local_world, record_collectives


def build(**options):
    mesh = cpu_mesh()
    torch.manual_seed(0)
    block = Block()
    block.up.requires_grad_(False)
    block.norm.double()  # cast to the compute dtype of the others
    policy = MixedPrecisionPolicy(torch.float32)
    return fully_shard(block, mesh=mesh, mp_policy=policy, **options), mesh


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}])
def test_frozen_and_other_dtypes_go_together(options):
    torch.manual_seed(0)
    plain = Block()
    x = torch.randn(3, 12)
    with local_world(2):
        block, mesh = build(**options)
        assert len(unit_of(block).group.buckets) == 3
        with record_collectives(mesh) as recorder:
            out = block(x)
        assert recorder.count("all_gather") == 1
        torch.testing.assert_close(out, plain(x))
        out.sum().backward()
        plain(x).sum().backward()
        for name, p in block.named_parameters():
            if p.requires_grad:
                want = plain.get_parameter(name).grad.to(p.dtype)
                torch.testing.assert_close(p.grad.full_tensor(), want, rtol=1e-5, atol=1e-6)
        assert at_rest(block)


def test_apart_where_one_has_its_own_collective():
    with local_world(2):
        block, mesh = build()
        buckets = unit_of(block).group.buckets
        buckets[0].change(gather_comm=Gather())
        with record_collectives(mesh) as recorder, torch.no_grad():
            block(torch.randn(3, 12))
        assert recorder.count("all_gather") == 2
        assert not any(held_bytes(bucket.precision.gathered) for bucket in buckets)
