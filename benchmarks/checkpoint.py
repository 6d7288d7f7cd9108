"""checkpoint.save and load beside plain DCP on the same sharded model, and how long an async save blocks.

    python benchmarks/checkpoint.py [--quick] [--json PATH]

Blocks 1024-4096-1024 with AdamW's state on 4 gloo processes: (1, 4, 1), (2, 2, 1) and (1, 2, 2). Both
write to and read from the same disk (what is read lies in the page cache), in turns; each brings its files to
the disk before it returns (DCP's default as well). Ours makes checksums of all it writes and verifies all it
reads. DCP's ``save`` and ``load`` are given state dicts that were made before, so what torch's
``get_state_dict`` and ``set_state_dict`` take isn't counted; ours is counted whole. An async save is compared
with one copy of what this rank holds into memory that is there, on 2 processes: more than there are cores
would wait for each other's. All times are the slowest rank's.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from measure import MIB, Claim, Rounds, command_line, no_gc, print_table, range_of
from models import MlpBlock, Stack, ours
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

import parallel3d as p3d
from parallel3d.testing import GlooPool

RANKS = 4
WIDTH, DEPTH = 1024, 6
LAYOUTS = [(1, 4, 1), (2, 2, 1), (1, 2, 2)]
ASYNC_LAYOUTS = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
BAR, ASYNC_BAR = 1.1, 1.2


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Case:
    """A model with its optimizer's state, and what is timed."""

    def __init__(self, sizes: tuple[int, int, int], depth: int, folder: Path) -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
        plain = Stack(MlpBlock, depth, WIDTH)
        if sizes[2] > 1:
            self.model = p3d.parallelize(plain, mesh, PLAN)
        else:
            self.model = ours(plain, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.model(torch.randn(2, 4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ours, self.theirs = folder / "ours", folder / "theirs"
        self.saves = 0
        state = {
            name: dict(self.optimizer.state[param]) for name, param in self.model.named_parameters()
        }
        self.state = {"model": self.model.state_dict(), "optimizer": state}
        self.held = [local(p.detach()) for p in self.model.parameters()]
        self.held += [local(t) for entry in state.values() for t in entry.values()]
        self.copies = [torch.empty_like(t) for t in self.held]

    @property
    def bytes(self) -> int:
        """What this rank holds."""
        return sum(t.numel() * t.element_size() for t in self.held)

    def save_ours(self) -> None:
        self.saves += 1
        p3d.checkpoint.save(self.ours, self.model, self.optimizer, step=self.saves, keep=None)

    def save_theirs(self) -> None:
        self.saves += 1
        dcp.save(self.state, checkpoint_id=self.theirs / str(self.saves))

    def load_ours(self) -> None:
        p3d.checkpoint.load(self.ours, self.model, self.optimizer)

    def load_theirs(self) -> None:
        dcp.load(self.state, checkpoint_id=max(self.theirs.iterdir()))

    def save_async(self) -> Any:
        self.saves += 1
        return p3d.checkpoint.save(
            self.ours, self.model, self.optimizer, step=self.saves, keep=None, async_=True
        )

    def clean(self) -> None:
        """Removes all but the last of each side's checkpoints, untimed."""
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in filter(Path.exists, (self.ours, self.theirs)):
                entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
                for old in entries[:-1]:
                    shutil.rmtree(old)
        dist.barrier()

    def copy(self) -> None:
        torch._foreach_copy_(self.copies, self.held)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, all ranks starting together."""
    dist.barrier()
    with no_gc():
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result


def worker(
    sizes: tuple[int, int, int], depth: int, rounds: int, path: str, what: list[str]
) -> dict[str, Any]:
    """One rank: variant -> seconds of each round."""
    case = Case(sizes, depth, Path(path))
    variants = {
        "save": {"ours": case.save_ours, "torch": case.save_theirs},
        "load": {"ours": case.load_ours, "torch": case.load_theirs},
        "async": {"ours": case.save_async, "torch": case.copy},
    }
    taken: dict[str, dict[str, list[float]]] = {}
    for each in what:
        pair = variants[each]
        times = taken[each] = {name: [] for name in pair}
        order = list(pair)
        # A copy is short: one that the machine interrupts counts for more.
        for number in range((3 * rounds if each == "async" else rounds) + 1):
            for name in order:
                seconds, result = timed(pair[name])
                if hasattr(result, "result"):
                    result.result()
                if number:  # the first warms up
                    times[name].append(seconds)
            case.clean()
            order.reverse()
    return {"bytes": case.bytes, **taken}


def case(
    pool: GlooPool, sizes: tuple[int, int, int], what: list[str], *, depth: int, rounds: int
) -> dict[str, Any]:
    """One mesh."""
    path = tempfile.mkdtemp(prefix="checkpoint-", dir=Path.cwd())
    try:
        ranks = pool.run(
            worker, sizes, depth, rounds, path, what, world_size=prod(sizes), timeout=900
        )
    finally:
        shutil.rmtree(path, ignore_errors=True)
    result: dict[str, Any] = {"mesh": str(sizes), "mib": ranks[0]["bytes"] / MIB}
    for each in what:
        slowest = Rounds(
            {
                name: [max(round_) for round_ in zip(*(r[each][name] for r in ranks), strict=True)]
                for name in ("ours", "torch")
            }
        )
        ratios = slowest.ratios("ours", "torch")
        result[each] = {
            **{name: slowest.median(name) for name in slowest.seconds},
            "ratio": statistics.median(ratios),
            "spread": range_of(ratios),
        }
    return result


TEXTS = {
    "save": ("checkpoint.save", "plain DCP", BAR),
    "load": ("checkpoint.load", "plain DCP", BAR),
    "async": ("async save blocks", "a copy", ASYNC_BAR),
}


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All meshes."""
    depth, rounds = (2, 3) if quick else (DEPTH, 9)
    kept = slice(1 if quick else None)
    with GlooPool(RANKS) as pool:
        results = [
            case(pool, sizes, what, depth=depth, rounds=rounds)
            for what, layouts in ((["save", "load"], LAYOUTS), (["async"], ASYNC_LAYOUTS))
            for sizes in layouts[kept]
        ]
    claims = []
    for result in results:
        rows = []
        for what, (text, against, bar) in TEXTS.items():
            if what not in result:
                continue
            found = result[what]
            values = found["ours"] * 1e3, found["torch"] * 1e3
            rows.append([f"{text}, {against}", *values, found["ratio"], found["spread"]])
            claims.append(
                Claim(
                    f"{text}, {result['mesh']}, {result['mib']:.0f} MiB a rank",
                    ours=values[0],
                    peer=values[1],
                    unit="ms",
                    against=against,
                    bar=bar,
                    ratio=found["ratio"],
                    spread=found["spread"],
                )
            )
        print_table(f"{result['mesh']}: ms", ["", "ours", "theirs", "ratio", "middle half"], rows)
    return claims, {"depth": depth, "meshes": results}


if __name__ == "__main__":
    command_line(__doc__, run)
