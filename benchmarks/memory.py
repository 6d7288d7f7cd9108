"""Peak tensor memory of a training step beyond the sharded state: our engine beside torch's FSDP2.

    python benchmarks/memory.py [--quick] [--json PATH]

6 blocks 1024 -> 2048 -> 1024, each a unit, on a fake process group of 64 ranks, a batch of 4 rows; the
usual prefetching on both sides. Counted are the bytes of all tensor storages alive after each operation of
forward and backward, whichever side made them, less sharded parameters, their gradients and the batch.
Without ``--quick`` it also says what was alive at each side's peak, by the operation that had made it.
"""

import copy
from collections import Counter
from typing import Any

import torch
from measure import Claim, bytes_claim, command_line, print_rows
from models import MlpBlock, Stack, local_gradients, local_parameters, ours, torchs
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel3d as p3d
from parallel3d.testing import fake_world

WORLD = 64
BLOCKS = 6
WIDTH = 1024
ROWS = 4
STEPS = 3


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages alive, after each operation in the body; what was there before counts too, from
    its first use on.

    Args:
        outside: tensors whose memory is not to be counted, whatever storage says it is its own.

    Attributes:
        peak: the most there were.
        at_peak: what they were: by (operation that made or resized the storage, bytes), how many.
        when: the operation after which.
    """

    def __init__(self, outside: list[torch.Tensor]) -> None:
        super().__init__()
        self.outside = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in outside]
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.reset()

    def reset(self) -> None:
        """Begins anew; what is known to be alive stays known."""
        self.peak = 0
        self.at_peak: Counter[tuple[str, int]] = Counter()
        self.when = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:  # a DTensor: its own dispatch runs ops on its local tensor, seen here
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._note(tensor, name)
        self._take(name)
        return result

    def _note(self, tensor: torch.Tensor, name: str) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        known = self._made.get(storage.cdata)
        if known is None or known[0].expired():
            begin = tensor.untyped_storage().data_ptr()
            end = begin + tensor.untyped_storage().nbytes()
            if not any(first < end and begin < last for first, last in self.outside):
                self._made[storage.cdata] = (storage, name)

    def _take(self, name: str) -> None:
        alive: list[tuple[str, int]] = []
        for key, (storage, maker) in list(self._made.items()):
            if storage.expired():
                del self._made[key]
            else:
                alive.append((maker, _nbytes(storage)))
        total = sum(size for _, size in alive)
        if total > self.peak:
            self.peak, self.when = total, name
            self.at_peak = Counter(entry for entry in alive if entry[1] > 1024)


def _nbytes(storage: StorageWeakRef) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes()


def peak(model: nn.Module, x: torch.Tensor) -> tuple[PeakMemory, int]:
    """The peak of the last of several steps, the first of which have taught each side its order; in bytes,
    less the gradients of the step, which are sharded state too."""
    at_rest = local_parameters(model)
    model(x).sum().backward()
    grads = [grad for grad in local_gradients(model) if grad is not None]
    with PeakMemory([x, *at_rest]) as memory:
        for _ in range(STEPS):
            memory.reset()
            model.zero_grad()
            model(x).sum().backward()
    return memory, memory.peak - sum(g.nbytes for g in grads)


def case(mixed: bool, where: bool) -> dict[str, Any]:
    """One row."""
    with fake_world(0, WORLD):
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=WORLD), device_type="cpu")
        plain = Stack(lambda width: MlpBlock(width, 2 * width), BLOCKS, WIDTH)
        models = {
            "ours": ours(copy.deepcopy(plain), mesh, mixed=mixed),
            "torch": torchs(copy.deepcopy(plain), mesh, mixed=mixed),
        }
        one = sum(p.numel() for p in plain.blocks[0].parameters()) * (2 if mixed else 4)
        row: dict[str, Any] = {"policy": "bf16/fp32" if mixed else "fp32", "unit_bytes": one}
        for name, model in models.items():
            memory, row[f"{name}_bytes"] = peak(model, torch.randn(ROWS, WIDTH))
            row[f"{name}_at_peak"] = [
                (maker, size, count) for (maker, size), count in memory.at_peak.most_common()
            ]
            if where:
                print(
                    f"\n{name}, {row['policy']}: {row[f'{name}_bytes'] / one:.2f} units, in {memory.when}"
                )
                for (maker, size), count in sorted(memory.at_peak.items(), key=lambda e: -e[0][1]):
                    if size > one // 100:
                        print(f"  {count} x {size / one:.2f} of a unit, made by {maker}")
    row["ratio"] = row["ours_bytes"] / row["torch_bytes"]
    return row


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Both policies; nothing here is timed, so nothing is repeated."""
    rows = [case(mixed, not quick) for mixed in (False, True)]
    print_rows(
        f"peak tensor memory beyond the sharded state, {BLOCKS} blocks, {ROWS} rows, {WORLD} ranks, MiB",
        {
            "policy": "policy",
            "one unit unsharded": "unit_bytes",
            "ours": "ours_bytes",
            "FSDP2": "torch_bytes",
            "ratio": "ratio",
        },
        rows,
    )
    claims = [
        bytes_claim("peak memory beyond the sharded state", r, bar=0.80, aim=0.65) for r in rows
    ]
    return claims, {"memory": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
