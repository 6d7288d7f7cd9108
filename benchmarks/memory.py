"""Peak tensor memory of a training step beyond the sharded state: our engine beside torch's FSDP2.

    python benchmarks/memory.py [--quick] [--json PATH]

6 blocks 1024 -> 2048 -> 1024, each a unit, on a fake process group of 64 ranks, a batch of 4 rows; the
usual prefetching on both sides. Counted are the bytes of all tensor storages alive after each operation of
forward and backward, whichever side made them, less sharded parameters, their gradients and the batch.
Without ``--quick`` it also says what was alive at each side's peak, by the operation that had made it.

Then a whole training step as a user has it, with activations and the optimizer: eight blocks of an 8B Llama,
2,048 tokens, the third step of rank 0 of 64 in a dry run, and what is alive at its peak by kind. Ours also
with ``memory="static"``: how often a step allocates, beside the plain model; the peak and what torch's
allocator reserves, as dry run and planner predict them.
"""

import copy
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "llama"))

from llama import Llama, LlamaConfig, RotaryEmbedding
from measure import Claim, bytes_claim, command_line, print_rows, print_table
from models import MlpBlock, Stack, local_gradients, local_parameters, ours, torchs
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel3d as p3d
from parallel3d import planner
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import record

WORLD = 64
BLOCKS = 6
WIDTH = 1024
ROWS = 4
STEPS = 3
TOKENS = 2048
SIDES = ("ours", "torch")


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
            if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "__tensor_flatten__"):
                continue  # a wrapper has no memory of its own
            if tensor.device.type != "meta":
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


CONFIG = LlamaConfig(4096, 8, 32, 8, 14336, 32_000, TOKENS)


def training(engine: str, layout: p3d.MeshLayout, memory: str = "on demand") -> None:
    """Three steps of eight blocks of an 8B model, bf16/fp32: plain, under ours or torch's ``fully_shard``."""
    with torch.device("meta"):
        model: nn.Module = Llama(CONFIG)
    if engine == "plain":
        model.to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.float()
    else:
        mesh = p3d.build_mesh(layout)
        policy = p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        p3d.parallelize(model, mesh, mp_policy=policy, engine=engine, memory=memory)  # type: ignore[arg-type]
    if engine == "parallel3d":
        p3d.materialize(model, seed=0)
    else:
        model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(STEPS):
        tokens = torch.randint(0, 32_000, (1, TOKENS))
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def planned(layout: p3d.MeshLayout, memory: str) -> Any:
    """What the planner says of that training."""
    with torch.device("meta"):
        spec = planner.spec_from_module(Llama(CONFIG), seq_len=TOKENS)
    work = planner.Workload(seq_len=TOKENS, micro_batch=1, memory=memory)
    cluster = planner.Cluster.of("h100-80gb-sxm", WORLD // 8, 8)
    return planner.predict(spec, layout, cluster, work).memory


def whole_step(name: str, layout: p3d.MeshLayout) -> dict[str, Any]:
    """One row: both peaks beyond parameters, gradients and optimizer state, and their kinds in bytes."""
    row: dict[str, Any] = {"policy": f"{name} bf16/fp32"}
    for side, engine, memory in (
        ("ours", "parallel3d", "on demand"),
        ("static", "parallel3d", "static"),
        ("torch", "torch", "on demand"),
    ):
        run = partial(training, engine, layout, memory)
        found = record(run, layout.world_size, check_streams=engine == "torch")
        peak = found.step_peak or found.peak
        at_peak = Counter(peak.by_kind)
        parameters = at_peak["parameters"]  # there will be as many gradients
        state = parameters * 2 + at_peak["optimizer state"] + at_peak["buffers"]
        row[f"{side}_bytes"] = peak.bytes - state
        row[f"{side}_kinds"] = dict(at_peak)
        assert found.reserved is not None
        row[f"{side}_whole"] = {
            "allocations": found.step_counts[STEPS - 1].allocations,
            "peak": peak.bytes,
            "reserved": found.reserved.bytes,
            "expandable": found.reserved.expandable,
        }
        if engine == "parallel3d":
            said = planned(layout, memory)
            row[f"{side}_whole"] |= {"planned": said.allocated, "reserve": said.reserved}
    row["ratio"] = row["ours_bytes"] / row["torch_bytes"]
    return row


def print_kinds(rows: list[dict[str, Any]]) -> None:
    """What is alive at each side's peak, a row for each kind; then allocations."""
    sides = ("ours", "static", "torch")
    kinds = dict.fromkeys(k for row in rows for side in sides for k in row[f"{side}_kinds"])
    table = [
        [row["policy"], kind, *(row[f"{side}_kinds"].get(kind, 0) / 2**20 for side in sides)]
        for row in rows
        for kind in kinds
    ]
    names = ["case", "kind", "ours", "ours, static", "FSDP2"]
    print_table("alive at the peak of a training step, MiB", names, table)
    whole = [
        [row["policy"], names[2 + at], numbers.pop("allocations"), *in_mib(numbers)]
        for row in rows
        for at, side in enumerate(sides)
        for numbers in [dict(row[f"{side}_whole"])]
    ]
    plain = record(partial(training, "plain", p3d.MeshLayout()), 1)
    print_table(
        "a training step and its memory, MiB; the plain model allocates "
        f"{plain.step_counts[STEPS - 1].allocations} times",
        ["case", "side", "allocations", "peak", "reserved", "if expandable", "planned", "reserved"],
        whole,
    )


def in_mib(numbers: dict[str, float]) -> list[Any]:
    """The planner knows nothing of FSDP2's."""
    return [*(size / 2**20 for size in numbers.values()), *[""] * (5 - len(numbers))]


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
    layouts = {"FSDP": p3d.MeshLayout(shard=WORLD), "HSDP": p3d.MeshLayout(2, WORLD // 2)}
    whole = [whole_step(name, layout) for name, layout in layouts.items()]
    print_kinds(whole)
    claims = [
        bytes_claim("peak memory beyond the sharded state", r, bar=0.80, aim=0.65) for r in rows
    ]
    claims += [
        bytes_claim("peak memory with activations, 8 blocks of 8B", r, bar=0.95, aim=0.90)
        for r in whole
    ]
    return claims, {"memory": rows, "whole_step": whole}


if __name__ == "__main__":
    command_line(__doc__, run)
