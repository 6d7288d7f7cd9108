"""copies: the time of the kernels that only copy or cast, and the bytes they write."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from copies import CopiedBytes
from llama import LlamaConfig
from page import Part
from runner import running
from share import synced, take_rounds
from sides import SIDES, batch_of, check_finite, forward_backward, loss_of, make, rank_of_many
from torch.profiler import ProfilerActivity, profile

import parallel3d as p3d

MIB = 2**20
SHAPE = LlamaConfig(4096, 4, 32, 8, 14336, 32_000, 2048)  # four blocks of an 8B model
TINY = LlamaConfig(64, 2, 4, 2, 192, 256, 64)
WORLD = 8

# Operations whose kernels copy or cast. A kernel belongs to the innermost operation that launched it, so
# ``fsdp::chunk_cat`` and the like, which call these, have none of their own, or all.
_COPIES = {
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::cat",
    "aten::stack",
    "aten::_chunk_cat",
    "aten::split_with_sizes_copy",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
}


def copies(device: str, small: bool) -> Part:
    """Milliseconds and bytes of copies above the plain model's, a step."""
    config = TINY if small else SHAPE
    part = Part(
        "copies",
        f"Kernels that copy or cast, in a forward and backward of a rank of {WORLD}, {config.n_layers} "
        f"blocks of width {config.dim}, bf16/fp32, above the plain model's: ours against FSDP2",
        [
            "tokens",
            "ours ms",
            "FSDP2 ms",
            "ours / FSDP2",
            "ours MiB",
            "FSDP2 MiB",
            "bytes: ours / FSDP2",
        ]
        + ["step: ours ms", "FSDP2 ms", "ours / FSDP2"],
    )
    sizes = (32, 64) if small else (512, 2048, 8192)
    with rank_of_many(p3d.MeshLayout(shard=WORLD), device) as (network, mesh):
        models = {side: make(side, config, mesh, device) for side in ("plain", *SIDES)}
        batch = batch_of(config, sizes[0], device)
        for side, model in models.items():
            check_finite(part, side, partial(loss_of, model, batch))
            model.zero_grad()
        network.values = False  # what the fake group copies is not counted
        for index, tokens in enumerate(sizes):
            batch = batch_of(config, tokens, device)
            steps = {side: forward_backward(model, batch) for side, model in models.items()}
            for step in steps.values():
                step(), step()
            copied = {side: _bytes(step) / MIB for side, step in steps.items()}
            kernels = {
                side: _kernels(step) if device == "cuda" else {} for side, step in steps.items()
            }
            taken = take_rounds(
                part,
                f"{tokens} tokens",
                {side: synced(step, device) for side, step in steps.items()},
                small=small,
                seconds=running().left / (len(sizes) - index),
            )
            network.clear()
            size = {side: copied[side] - copied["plain"] for side in SIDES}
            row: list[object] = [tokens, "", "", ""]
            if device == "cuda":
                if not any(kernels.values()):
                    part.notes.append(f"{tokens} tokens: the profiler has seen no kernels")
                spent = {k: sum(v.values()) for k, v in kernels.items()}
                ms = {side: spent[side] - spent["plain"] for side in SIDES}
                row = [tokens, ms["ours"], ms["torch"], ms["ours"] / max(ms["torch"], 1e-6)]
            row += [size["ours"], size["torch"], size["ours"] / size["torch"]]
            step_ms = {side: taken.median(side) * 1e3 for side in SIDES}
            row += [step_ms["ours"], step_ms["torch"], step_ms["ours"] / step_ms["torch"]]
            part.rows.append(row)
            part.data[str(tokens)] = {"kernels_ms": kernels, "copied_mib": copied, **taken.seconds}
        models.clear()
    part.notes += [
        "expected: 0.4 to 0.45 of FSDP2's time; of the step at most 2.5 % at 8,192 tokens, 10 % at 2,048",
        "collectives take no time and write no values. The size from which a parameter is gathered in place "
        "(16 MiB) is not varied: without NCCL the cost of coalesced calls is not there",
    ]
    if device != "cuda":
        part.notes.append("on a CPU: no kernel times")
    return part


def _bytes(step: Callable[[], None]) -> int:
    """What copies and casts of one step write."""
    with CopiedBytes() as counted:
        step()
    return counted.copies.total() + counted.casts.total()


def _kernels(step: Callable[[], None], steps: int = 3) -> dict[str, float]:
    """Milliseconds a step of the kernels of ``_COPIES``, by operation and kernel."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return {name: ms / steps for name, ms in copies_in(profiler.events() or ()).items()}


def copies_in(events: Iterable[Any]) -> dict[str, float]:
    """Returns the milliseconds of the kernels that copy or cast on the device, by operation and kernel.

    Args:
        events: a profiler's, of which those of the host have the ``kernels`` that they launched.
    """
    spent: Counter[str] = Counter()
    for event in events:
        if event.name in _COPIES:
            for kernel in event.kernels:
                if "HtoD" not in kernel.name and "DtoH" not in kernel.name:
                    spent[f"{event.name}: {kernel.name[:80]}"] += kernel.duration / 1e3
    return dict(spent.most_common())
