"""Bytes copied in a training step: our engine beside torch's FSDP2.

    python benchmarks/copies.py [--quick] [--json PATH]

6 blocks 1024 -> 2048 -> 1024, each a unit, on a fake process group of 64 ranks, batches of 4 rows. Counted
are the bytes that operations which only copy or cast have written (``_WRITTEN`` lists them, torch's own FSDP2
operators among them), in forward and backward, whichever side called them; what collectives move is not. Of
the model's own copies, which are the same on both sides, there are next to none.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from measure import Claim, bytes_claim, command_line, print_rows
from models import MlpBlock, Stack, ours, torchs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel3d as p3d
from parallel3d.testing import fake_world

WORLD = 64
BLOCKS = 6
WIDTH = 1024
ROWS = 4

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _into_first(args: Any, kwargs: Any, result: Any) -> Pairs:
    first, second = args[0], args[1]
    if isinstance(first, torch.Tensor):
        return [(first, second)]
    return list(zip(first, second, strict=True))


def _result(args: Any, kwargs: Any, result: Any) -> Pairs:
    source = next(t for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    target = kwargs.get("out", result)
    return [(t, source) for t in ([target] if isinstance(target, torch.Tensor) else target)]


def _gather_input(args: Any, kwargs: Any, result: Any) -> Pairs:
    return [(result[0], args[0][0])]  # the part of the output that this rank brings


# By operation: (target, a source of its dtype) of what is written.
_WRITTEN: dict[str, Callable[[Any, Any, Any], Pairs]] = {
    "aten::copy_": _into_first,
    "aten::_foreach_copy_": _into_first,
    "aten::cat": _result,
    "aten::stack": _result,
    "aten::_chunk_cat": _result,
    "aten::split_with_sizes_copy": _result,
    "aten::_to_copy": _result,
    "aten::clone": _result,
    "aten::contiguous": _result,
    "fsdp::all_gather_copy_in": _gather_input,
    "fsdp::split_with_sizes_copy": _result,
    "fsdp::chunk_cat": _result,
}


class CopiedBytes(TorchDispatchMode):
    """Bytes that copies and casts in the body have written, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()
        self.casts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:  # a DTensor: its own dispatch runs ops on its local tensor, seen here
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _WRITTEN:
            for target, source in _WRITTEN[name](args, kwargs or {}, result):
                counter = self.casts if target.dtype != source.dtype else self.copies
                counter[name] += target.numel() * target.element_size()
        return result


def copied(model: nn.Module, x: torch.Tensor) -> CopiedBytes:
    """What one step copies, after another that has shown each side the order."""
    for _ in range(2):
        with CopiedBytes() as counted:
            model(x).sum().backward()
        model.zero_grad()
    return counted


def case(mixed: bool) -> dict[str, Any]:
    """One row."""
    with fake_world(0, WORLD):
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=WORLD), device_type="cpu")
        plain = Stack(lambda width: MlpBlock(width, 2 * width), BLOCKS, WIDTH)
        models = {
            "ours": ours(copy.deepcopy(plain), mesh, mixed=mixed),
            "torch": torchs(copy.deepcopy(plain), mesh, mixed=mixed),
        }
        row: dict[str, Any] = {"policy": "bf16/fp32" if mixed else "fp32"}
        for name, model in models.items():
            counted = copied(model, torch.randn(ROWS, WIDTH))
            copies, casts = counted.copies.total(), counted.casts.total()
            row[f"{name}_copied_bytes"], row[f"{name}_cast_bytes"] = copies, casts
            row[f"{name}_bytes"] = copies + casts
            row[f"{name}_by_operation"] = {"copies": counted.copies, "casts": counted.casts}
    row["ratio"] = row["ours_bytes"] / row["torch_bytes"]
    return row


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Both policies; nothing here is timed, so nothing is repeated."""
    rows = [case(mixed) for mixed in (False, True)]
    print_rows(
        f"bytes copied in a step, {BLOCKS} blocks, {WORLD} ranks, MiB",
        {
            "policy": "policy",
            "ours: copies": "ours_copied_bytes",
            "ours: casts": "ours_cast_bytes",
            "FSDP2: copies": "torch_copied_bytes",
            "FSDP2: casts": "torch_cast_bytes",
            "ratio": "ratio",
        },
        rows,
    )
    claims = [
        bytes_claim("copied bytes", r, bar=0.5, aim=r["ours_cast_bytes"] / r["torch_bytes"])
        for r in rows  # the aim: casts only
    ]
    return claims, {"copies": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
