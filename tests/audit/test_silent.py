"""Each kind of program that passes cp's static check and computes something else ends in an error."""

import pytest
import torch
from _support.audit.models import cut
from _support.audit.silent import KINDS, example_of

import parallel3d as p3d
from parallel3d import AuditError, MeshLayout, StateError
from parallel3d.testing import GlooPool


def run(kind: str) -> list[str]:
    """The first line of each program's error; "" where there is none."""
    found = []
    mesh = p3d.build_mesh(MeshLayout(cp=2), device_type="cpu")
    for build, step in KINDS[kind]:
        torch.manual_seed(0)
        model = build()
        example = example_of(model)
        model = p3d.parallelize(model, mesh, example=example)
        try:
            step(model, cut(mesh, length=33), mesh)
        except (AuditError, StateError) as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            found.append("")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_an_error_on_every_rank(gloo_pool: GlooPool, kind: str) -> None:
    first, second = gloo_pool.run(run, kind, world_size=2)
    assert all(first), first
    assert [a.partition(":")[0] for a in first] == [b.partition(":")[0] for b in second]
