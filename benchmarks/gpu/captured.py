"""captured: a training step as one CUDA graph, ours and the plain model's, beside the same steps eagerly."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from emulated_network import Link
from measure import range_of
from page import Part
from runner import running
from share import launched, synced, take_rounds
from sides import batch_of, loss_of, make, rank_of_many
from step_times import MODELS, SEQUENCE, TINY
from torch import nn

import parallel3d as p3d

MOST = 1.10  # of the plain model's captured step
MOST_MS = 1.0  # of the host
WARM_UP = 4  # the third looks for a host that waits, the fourth is recorded


def captured(device: str, small: bool) -> Part:
    """Ours captured over plain captured, and what capturing brings to each."""
    name, config = next(iter((TINY if small else MODELS).items()))
    part = Part(
        "captured",
        f"A training step (forward, backward, clipping, fused AdamW) of {name} in bf16 with p3d.capture, on "
        "a mesh of one rank: eager, captured, and ours over plain's, both captured",
        [
            "tokens",
            "plain ms",
            "plain captured",
            "ours",
            "ours captured",
            "ours / plain",
            "middle half",
        ]
        + ["host ms of a replay"],
    )
    sizes = (32, 64) if small else (512, 2048, 16384)
    with rank_of_many(p3d.MeshLayout(), device, links={"link": Link()}) as (_, mesh):
        for index, tokens in enumerate(sizes):
            if index and running().used_up:
                part.left_out.append(f"{tokens} tokens")
                continue
            batch = batch_of(config, tokens, device, length=SEQUENCE)
            steps: dict[str, Callable[[], object]] = {}
            for side in ("plain", "ours"):
                for kind in ("", " captured"):
                    model = make(side, config, mesh, device, dtype=torch.bfloat16, mixed=False)
                    steps[side + kind] = _step(part, model, batch, f"{side}{kind}", bool(kind))
            taken = take_rounds(
                part,
                f"{tokens} tokens",
                {k: synced(step, device) for k, step in steps.items()},
                small=small,
                seconds=running().left / (len(sizes) - index),
            )
            host = take_rounds(
                part,
                f"{tokens} tokens, host",
                {"ours captured": launched(steps["ours captured"], device)},
                small=True,
                seconds=5.0,
            )
            ratios = taken.ratios("ours captured", "plain captured")
            ratio, ms = statistics.median(ratios), host.median("ours captured") * 1e3
            medians = [
                taken.median(k) * 1e3 for k in ("plain", "plain captured", "ours", "ours captured")
            ]
            part.rows.append([tokens, *medians, ratio, range_of(ratios), ms])
            part.data[str(tokens)] = taken.seconds
            if device == "cuda" and ratio > MOST:
                part.failed.append(
                    f"{tokens} tokens: ours captured takes {ratio:.3f} of plain captured"
                )
            if device == "cuda" and ms > MOST_MS:
                part.failed.append(f"{tokens} tokens: a replay takes the host {ms:.2f} ms")
    part.notes.append(
        f"failed if ours takes more than {MOST} of the plain step, both captured, or the host more than "
        f"{MOST_MS} ms a replay; on a CPU nothing is captured"
    )
    return part


def _step(
    part: Part, model: nn.Module, batch: Any, what: str, capture: bool
) -> Callable[[], object]:
    lr = torch.tensor(1e-5, device=batch[0].device)
    options: dict[str, Any] = {"lr": lr, "fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def train(given: Any) -> torch.Tensor:
        loss = loss_of(model, given)
        loss.backward()
        p3d.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if not capture:
        return lambda: train(batch)
    step = p3d.capture(train, model, optimizer, batch)
    for _ in range(WARM_UP):
        step(batch)
    if batch[0].device.type == "cuda" and not step.is_captured:
        part.failed.append(f"{what}: not captured: {step.reason}")
    return lambda: step(batch)
