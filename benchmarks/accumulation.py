"""What gradient accumulation under HSDP sends over ``replicate``, ours beside torch's FSDP2.

    python benchmarks/accumulation.py [--quick] [--json PATH]

Bytes of all-reduces in one optimizer step of 4 micro-batches, as the recorder of collectives sees them on one
rank of a fake group of 8 ranks, (2, 4, 1). ``each``: a plain loop over the micro-batches. ``last``: ours by
``p3d.optim.accumulate``, without an option; FSDP2's by ``set_requires_all_reduce`` on all but the last. The
recorder counts; nothing here is timed, so that ``--quick`` is the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from measure import Claim, command_line, print_table
from models import MlpBlock, Stack, ours, torchs
from torch.distributed import DeviceMesh

import parallel3d as p3d
from parallel3d.testing import fake_world, record_collectives

LAYOUT = p3d.MeshLayout(replicate=2, shard=4)
MICRO_BATCHES = 4
UNITS, WIDTH = 4, 64

Batches = Iterable[torch.Tensor]


def each(model: Any, batches: Batches) -> Iterator[torch.Tensor]:
    """A plain loop."""
    return iter(batches)


def switched(model: Any, batches: Batches) -> Iterator[torch.Tensor]:
    """FSDP2's way: the user says which is the last."""
    given = list(batches)
    for number, batch in enumerate(given):
        model.set_requires_all_reduce(number == len(given) - 1)
        yield batch


def sent(
    wrap: Callable[..., Stack], loop: Callable[..., Iterator[torch.Tensor]], mesh: DeviceMesh
) -> dict[str, int]:
    """Bytes and calls on each axis."""
    model = wrap(Stack(MlpBlock, UNITS, WIDTH), mesh)
    batches = [torch.randn(2, WIDTH) for _ in range(MICRO_BATCHES)]
    model(batches[0]).sum().backward()  # what is done once
    model.zero_grad()
    with record_collectives(mesh) as recorder:
        for batch in loop(model, batches):
            model(batch).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    replicate = recorder.select(axis="replicate")
    return {
        "bytes": sum(call.bytes for call in replicate),
        "calls": len(replicate),
        "shard_bytes": sum(call.bytes for call in recorder.select(axis="shard")),
    }


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """Both engines, both loops."""
    cases: dict[str, tuple[Any, Any]] = {
        "ours, each": (ours, each),
        "ours, last": (ours, p3d.optim.accumulate),
        "FSDP2, each": (torchs, each),
        "FSDP2, last": (torchs, switched),
    }
    with fake_world(0, LAYOUT.world_size):
        mesh = p3d.build_mesh(LAYOUT, device_type="cpu")
        found = {name: sent(*case, mesh) for name, case in cases.items()}
    print_table(
        f"HSDP {LAYOUT.sizes}, {MICRO_BATCHES} micro-batches, {UNITS} blocks of width {WIDTH}",
        ["all-reduce after", "bytes on replicate", "calls", "bytes on shard"],
        [[name, row["bytes"], row["calls"], row["shard_bytes"]] for name, row in found.items()],
    )
    claims = [
        Claim(
            "bytes on replicate, HSDP, optim.accumulate over 4 micro-batches",
            found["ours, last"]["bytes"],
            found[f"{peer}, each"]["bytes"],
            "bytes",
            f"{peer} all-reducing each",
            bar=1 / MICRO_BATCHES,
        )
        for peer in ("ours", "FSDP2")
    ]
    return claims, {"accumulation": found}


if __name__ == "__main__":
    command_line(__doc__, run)
