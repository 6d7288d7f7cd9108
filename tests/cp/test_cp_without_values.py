"""Attention of tensors without values, as in a dry run, and calls that are refused."""

from typing import Any

import pytest
import torch
from _support.cp.reference import axis_of
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel3d.cp import Sequence, attention
from parallel3d.errors import Parallel3dError, PlanError, WrongTypeError
from parallel3d.testing.worlds import fake_world

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"softcap": 3.0},
    {"dropout_p": 0.1},
    {"mask_function": lambda b, h, q, k: q >= k},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
def test_without_values(kind: Any, options: dict[str, Any]) -> None:
    with fake_world(1, 4):
        axis = axis_of(4)
        documents = torch.zeros(2, 64, dtype=torch.int64)
        for device, numbers in (("meta", None), ("cpu", documents)):
            sequence = Sequence(60, 4, True, numbers)
            with FakeTensorMode(allow_non_fake_inputs=True):
                shape = (2, 8, sequence.rows, 16)
                q, k, v = (torch.ones(shape, device=device, requires_grad=True) for _ in range(3))
                out = attention(q, k, v, axis, sequence, causal=True, kind=kind, **options)
                out.sum().backward()
                assert out.shape == shape and out.device.type == device
                assert q.grad.shape == k.grad.shape == v.grad.shape == shape


def refused(message: str, error: type[Exception] = Parallel3dError, **change: Any) -> None:
    shapes: dict[str, Any] = {"q": (2, 4, 4, 8), "k": (2, 4, 4, 8), "v": (2, 4, 4, 8)}
    made = {name: torch.ones(change.pop(name, shape)) for name, shape in shapes.items()}
    sequence = change.pop("sequence", Sequence(7, 2, True))
    with pytest.raises(error, match=message):
        attention(**made, axis=axis_of(2), sequence=sequence, **{"causal": True, **change})


def test_what_is_refused() -> None:
    with fake_world(0, 2):
        refused(r"each must be \(batch, heads, rows, channels\)", WrongTypeError, q=(2, 4, 8))
        refused("the sequence lies on 4 ranks, the axis cp has 2", sequence=Sequence(7, 4))
        refused(
            r"each must hold this rank's 4 rows of the sequence of 7 \(padded 8\)", q=(2, 4, 8, 8)
        )
        refused("batch, K/V heads and channels must agree", k=(2, 2, 4, 8))
        refused("4 query heads, 3 K/V heads", k=(2, 3, 4, 8), v=(2, 3, 4, 8))
        refused(r"key_mask .* must be bool, \(2, 4\)", key_mask=torch.ones(2, 8, dtype=torch.bool))
        refused(r"sinks \(3,\): must be \(4,\)", sinks=torch.ones(3))
        refused("kind='all': must be one of 'ulysses', 'gather', 'ring' or \"auto\"", kind="all")
        refused("window=0: must be a positive number", window=0)
        refused("window=", window=(-1, 2))
        many = torch.zeros(3, 8, dtype=torch.int64)
        refused("documents of 3 sequences, q of 2", sequence=Sequence(7, 2, True, many))
        one_head = dict.fromkeys(("q", "k", "v"), (2, 1, 4, 8))
        refused(
            'use cp=1 or less, or kind="gather" or "ring"', PlanError, kind="ulysses", **one_head
        )
        refused("dropout_p=1.5: must be", dropout_p=1.5)
        refused("softcap=0: must be", softcap=0)
