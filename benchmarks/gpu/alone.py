"""wrapped_alone: what parallel code costs that is left on with one GPU."""

import statistics
from typing import Any

import torch
from llama import LlamaConfig
from measure import range_of
from page import Part
from runner import running
from share import synced, take_rounds
from sides import NAMES, SIDES, batch_of, forward_backward, loss_of, make, rank_of_many

import parallel3d as p3d

SHAPE = LlamaConfig(4096, 1, 32, 8, 14336, 32_000, 2048)  # a block of an 8B model
TINY = LlamaConfig(64, 1, 4, 2, 192, 256, 64)
MOST = 1.01  # of the plain model's step


def wrapped_alone(device: str, small: bool) -> Part:
    """The step of a model in bf16 on a mesh of one rank."""
    config, sizes = (TINY, (64,)) if small else (SHAPE, (2048, 8192))
    part = Part(
        "wrapped_alone",
        f"Forward and backward of a block of width {config.dim}, embedding and head, in bf16, on a mesh of "
        "one rank: the step over the plain model's",
        ["tokens", "plain ms", "ours", "middle half", "FSDP2", "middle half"],
    )
    with rank_of_many(p3d.MeshLayout(), device) as (network, mesh):
        models = {
            side: make(side, config, mesh, device, dtype=torch.bfloat16, mixed=False)
            for side in ("plain", *SIDES)
        }
        batch = batch_of(config, sizes[0], device, length=2048)
        losses = {side: float(loss_of(model, batch).detach()) for side, model in models.items()}
        for side in SIDES:
            if not abs(losses[side] - losses["plain"]) <= 1e-3 * abs(losses["plain"]):
                what = f"the loss is {losses[side]}, the plain model's {losses['plain']}"
                (part.failed if side == "ours" else part.notes).append(f"{NAMES[side]}: {what}")
        for index, tokens in enumerate(sizes):
            batch = batch_of(config, tokens, device, length=2048)
            taken = take_rounds(
                part,
                f"{tokens} tokens",
                {k: synced(forward_backward(model, batch), device) for k, model in models.items()},
                small=small,
                seconds=running().left / (len(sizes) - index),
                steps_per_round=3,
            )
            row: list[Any] = [tokens, taken.median("plain") * 1e3]
            for side in SIDES:
                ratios = taken.ratios(side, "plain")
                row += [statistics.median(ratios), range_of(ratios)]
            part.rows.append(row)
            part.data[str(tokens)] = taken.seconds
            network.clear()
            if device == "cuda" and row[2] > MOST:
                part.failed.append(f"{tokens} tokens: ours takes {row[2]:.3f} of the plain step")
        models.clear()
    part.notes.append(f"failed if ours takes more than {MOST} of the plain step on a GPU")
    return part
