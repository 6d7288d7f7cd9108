"""Blocks recomputed under context parallelism: right, and selectively without a second message."""

from collections import Counter
from typing import Any

import pytest
import torch
from _support.cp.models import Lm, batches, layout_of, parity
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.cp import ContextParallel
from parallel3d.testing import record_collectives
from parallel3d.testing.worlds import fake_world

KINDS = ("ulysses", "gather", "ring")


def messages(kind: Any, how: Any, *, mask: bool = False) -> Counter[str]:
    """Operation -> how often it was issued over cp in a training step, on a rank of (1, 1, 4, 1)."""
    layout = layout_of((1, 1, 4, 1))
    with fake_world(1, 4):
        mesh = p3d.build_mesh(layout, device_type="cpu")
        torch.manual_seed(0)
        model = p3d.parallelize(
            Lm(),
            mesh,
            example=((torch.ones(2, 16, dtype=torch.int64),), {}),
            context_parallel=ContextParallel(kind),
            activation_checkpointing=how,
        )
        ids = torch.arange(32).view(2, 16)
        given = {"key_mask": ids > 3} if mask else {}
        ids, labels = p3d.cp.shard_batch((ids, ids), mesh, **given)
        with record_collectives(mesh) as recorder:
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    return Counter(call.op for call in recorder.calls if call.axis == "cp")


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("ulysses", True),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS[1:]),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_selectively_nothing_is_sent_again(kind: Any, mask: bool) -> None:
    plain = messages(kind, False, mask=mask)
    assert plain and messages(kind, "selective", mask=mask) == plain
    assert messages(kind, True, mask=mask).total() > plain.total()  # it sends again


@pytest.mark.parametrize("how", [pytest.param(True, marks=pytest.mark.slow), "selective"])
@pytest.mark.parametrize(
    "kind", [k if k == "ring" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_parity(kind: Any, how: Any) -> None:
    options = {"context_parallel": kind, "activation_checkpointing": how}
    parity(Lm, batches(13), (1, 1, 2, 1), **options)
