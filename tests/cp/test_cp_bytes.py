"""What each kind communicates: the formulas, the recorder, and the choice between kinds."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.cp import CpAxis, Sequence, attention, bytes_per_layer, choose
from parallel3d.cp.choose import share_heads
from parallel3d.errors import PlanError
from parallel3d.testing import record_collectives
from parallel3d.testing.worlds import fake_world, local_world

KINDS = ("ulysses", "gather", "ring")
CALLS = {"ulysses": (2, 2), "gather": (1, 1)}
CONFIGS = [
    {"heads": 8, "kv_heads": 8},
    {"heads": 8, "kv_heads": 2},
    {"heads": 8, "kv_heads": 1},
    {"heads": 8, "kv_heads": 4, "value_channels": 24},
    {"heads": 8, "kv_heads": 4, "key_mask": True},
    {"heads": 8, "kv_heads": 4, "itemsize": 2},
]


def recorded(
    size: int, kind: Any, batch: int, length: int, mesh: Any, make: Any, config: dict
) -> Any:
    """Bytes and calls in forward and in backward."""
    axis = CpAxis(mesh)
    sequence = Sequence(length, size, True)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[config.get("itemsize", 4)]
    rows, channels = sequence.rows, 16
    values = config.get("value_channels", channels)
    q = make(batch, config["heads"], rows, channels, dtype).requires_grad_()
    k = make(batch, config["kv_heads"], rows, channels, dtype).requires_grad_()
    v = make(batch, config["kv_heads"], rows, values, dtype).requires_grad_()
    mask = make(batch, rows, 0, 0, torch.bool) if config.get("key_mask") else None
    with record_collectives(mesh) as recorder:
        out = attention(q, k, v, axis, sequence, causal=True, kind=kind, key_mask=mask)
        forward = len(recorder.calls)
        out.sum().backward()
    assert {call.axis for call in recorder.calls} == {"cp"}
    sizes = [call.bytes for call in recorder.calls]
    return (sum(sizes[:forward]), sum(sizes[forward:])), (forward, len(sizes) - forward)


def tensor(a: int, b: int, c: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(a, b, dtype=dtype) if not c else torch.ones(a, b, c, d, dtype=dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_recorder_counts_what_the_formula_says(kind: Any, config: dict, size: int) -> None:
    with fake_world(1, size):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        counted, calls = recorded(size, kind, 3, 30, mesh, tensor, config)
    sizes = {"size": size, "batch": 3, "length": 32, "channels": 16, "itemsize": 4, **config}
    assert counted == bytes_per_layer(kind, **sizes)[:2]
    masks = bool(config.get("key_mask"))
    forward, backward = CALLS.get(kind, (size - 1, 2 * size - 1))
    assert calls == (forward + masks, backward)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (6, 2), (9, 3), (7, 1)])
def test_heads_that_cp_does_not_divide(heads: int, kv_heads: int) -> None:
    """The rank with most."""
    with local_world(4) as world:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))

        def make(*shape: Any) -> torch.Tensor:
            return world.map(lambda rank: tensor(*shape))

        config = {"heads": heads, "kv_heads": kv_heads}
        counted, _ = recorded(4, "ulysses", 1, 16, mesh, make, config)
    sizes = {"size": 4, "batch": 1, "length": 16, "channels": 16, "itemsize": 4, **config}
    assert counted == bytes_per_layer("ulysses", **sizes)[:2]


def test_no_more_copies_of_heads_than_needed() -> None:
    # as many ranks as share a head get it, and no rank gets another's
    assert [s.kv_number for s in share_heads(32, 8, 8)] == [1] * 8
    assert [s.kv_number for s in share_heads(32, 2, 8)] == [1] * 8
    assert [(s.first, s.number, s.kv_first, s.kv_number) for s in share_heads(6, 2, 4)] == [
        (0, 2, 0, 1),
        (2, 2, 0, 2),
        (4, 1, 1, 1),
        (5, 1, 1, 1),
    ]
    assert share_heads(9, 3, 4)[0].kv_of is None
    # heads 0 to 2 and heads 3, 4 of groups of three
    assert [s.kv_of for s in share_heads(9, 3, 2)] == [(0, 0, 0, 1, 1), (0, 1, 1, 1)]
    with pytest.raises(PlanError, match=r'use cp=2 or less, or kind="gather" or "ring"'):
        share_heads(2, 2, 4)


LLAMA_8B = {"batch": 1, "heads": 32, "kv_heads": 8, "channels": 128}


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        # (32 + 8) / 8 heads at all positions, or 8
        (
            {"size": 8, "length": 1 << 17},
            "ulysses",
            "cp=8 divides the 32 heads, and Ulysses sends 560",
        ),
        ({"size": 2, "length": 1 << 14}, "gather", "K and V of the whole sequence take 64.0 MiB"),
        (
            {"size": 2, "length": 1 << 17},
            "ring",
            "would take 512.0 MiB a layer, more than 256.0 MiB",
        ),
        ({"size": 3, "length": 1 << 14}, "gather", "cp=3 does not divide the 32 heads"),
        ({"size": 64, "length": 1 << 20}, "ring", "cp=64 does not divide the 32 heads"),
        ({"size": 2, "length": 1 << 14, "balanced": False}, "ulysses", "have different work"),
        ({"size": 2, "length": 1 << 14, "balanced": False, "causal": False}, "gather", "64.0 MiB"),
        ({"size": 8, "length": 1 << 17, "kv_heads": 1}, "gather", "where Ulysses sends"),
    ],
)
def test_auto(change: dict, kind: str, why: str) -> None:
    choice = choose(**{**LLAMA_8B, **change})
    assert choice.kind == kind, choice
    assert why in choice.reason, choice


def test_one_rank_sends_nothing() -> None:
    for kind in KINDS:
        assert bytes_per_layer(kind, size=1, length=64, **LLAMA_8B) == (0, 0, 0)  # type: ignore[arg-type]


def test_the_page_has_these_numbers() -> None:
    text = (Path(__file__).parents[2] / "docs" / "context_parallel.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (.+) \| (.+) \| (.+) \|$", text, re.M)
    assert len(rows) == 6
    for size, length, *cells in rows:
        for kind, cell in zip(KINDS, cells, strict=True):
            sizes = {"size": int(size), "length": int(length.replace(",", "")), **LLAMA_8B}
            traffic = bytes_per_layer(kind, **sizes)  # type: ignore[arg-type]
            assert cell == f"{traffic.forward / 2**20:,.0f} + {traffic.backward / 2**20:,.0f}"
