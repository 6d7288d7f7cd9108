"""A file with one line of JSON a step: what each rank has really consumed, and the loss to its last digit."""

import json
from ctypes import string_at
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import parallel3d as p3d
from parallel3d.tools.dryrun import active

__all__ = ["StepLog", "digest_of_rows", "digest_of_weights"]


class StepLog:
    """Appends to a file on rank 0; the other ranks send it what they have consumed.

    ``{"event": "start", "step", "samples", "world", "mesh"}`` when a process begins or goes on, for each step
    ``{"step", "samples": [first, last], "digest", "loss", "norm"}``, and at the end
    ``{"event": "end", "step", "samples", "weights"}``. Steps that were done again after a crash are there
    again.

    Args:
        path: of the file; None, and in a dry run: nothing is written, and nothing sent.
    """

    def __init__(self, path: Path | None, layout: p3d.MeshLayout, device: torch.device) -> None:
        self.path = None if active() else path
        self.layout, self.device = layout, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def start(self, step: int, samples: int) -> None:
        """From where it goes on."""
        place = {"world": self.world, "mesh": list(self.layout.sizes)}
        self._append(event="start", step=step, samples=samples, **place)

    def step(self, step: int, first: int, tokens: Tensor, **values: float) -> None:
        """Takes what this rank has consumed: its rows of the batch, the same for the ranks of a tp group.

        Raises:
            RuntimeError: on rank 0, the ranks of a tp group had different rows.
        """
        if self.path is None:
            return
        mine = torch.tensor([digest_of_row(row) for row in tokens.cpu()], device=self.device)
        found = mine.new_empty(self.world, len(mine))
        dist.all_gather(list(found.unbind()), mine)
        by_data_rank: dict[int, list[int]] = {}
        for rank, rows in enumerate(found.tolist()):
            if by_data_rank.setdefault(self.layout.data_rank(rank), rows) != rows:
                raise RuntimeError(f"step {step}: rank {rank} had other rows than its tp group")
        rows = [row for data_rank in sorted(by_data_rank) for row in by_data_rank[data_rank]]
        last = first + len(rows) - 1
        self._append(step=step, samples=[first, last], digest=digest_of(rows), **values)

    def end(self, step: int, samples: int, model: nn.Module) -> None:
        """The weights, gathered one by one. All ranks call it."""
        if self.path is not None:
            weights = digest_of_weights(model)
            self._append(event="end", step=step, samples=samples, weights=weights)

    def _append(self, **line: Any) -> None:
        if self.path is not None and self.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def digest_of_row(row: Tensor) -> int:
    """Of one sequence's tokens, which are bytes."""
    return int.from_bytes(blake2b(bytes(row.tolist()), digest_size=8).digest(), signed=True)


def digest_of(rows: list[int]) -> str:
    """Of all rows of a batch by their digests, in order."""
    return blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def digest_of_rows(tokens: Tensor) -> str:
    """What a step's line says as ``digest`` if the ranks together had ``tokens``."""
    return digest_of([digest_of_row(row) for row in tokens])


def digest_of_weights(model: nn.Module) -> str:
    """Of all bits of all parameters. Gathers each: all ranks call it."""
    digest = blake2b(digest_size=16)
    for name, param in model.named_parameters():
        weight = param.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        held = whole.cpu().contiguous()
        digest.update(f"{name} {tuple(held.shape)} {held.dtype}".encode())
        digest.update(string_at(held.data_ptr(), held.nbytes))
    return digest.hexdigest()
