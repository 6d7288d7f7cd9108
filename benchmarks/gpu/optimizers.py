"""optimizer and clip: AdamW's step and the norm of the gradients, on many sharded tensors."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from emulated_network import EmulatedNetwork
from llama import LlamaConfig
from measure import range_of
from models import SmallBlock, Stack, local_parameters, ours, torchs
from page import Part
from runner import running
from share import launched, synced, take_rounds
from sides import batch_of, check_finite, loss_of, make, plain_shards, rank_of_many
from torch import nn

import parallel3d as p3d

WORLD = 64
TINY = LlamaConfig(64, 4, 4, 2, 192, 256, 64)
Models = dict[str, nn.Module]


@contextmanager
def _large(part: Part, device: str, small: bool) -> Iterator[tuple[Models, EmulatedNetwork]]:
    """The 291 tensors of an 8B model as one of 64 ranks has them, with gradients of a backward."""
    config = TINY if small else LlamaConfig.named("8b")
    with rank_of_many(p3d.MeshLayout(shard=WORLD), device) as (network, mesh):
        models: Models = {side: make(side, config, mesh, device) for side in ("ours", "torch")}
        batch = batch_of(config, 16, device)
        for side, model in models.items():
            check_finite(part, side, partial(loss_of, model, batch))
        network.values = False
        yield models, network
        models.clear()


@contextmanager
def _many(part: Part, device: str, small: bool) -> Iterator[tuple[Models, EmulatedNetwork]]:
    """1,500 small tensors, ten in a unit."""
    plain = Stack(SmallBlock, 6 if small else 150, 64).to(device)
    with rank_of_many(p3d.MeshLayout(shard=WORLD), device) as (network, mesh):
        models: Models = {}
        for side, wrap in (("ours", ours), ("torch", torchs)):
            model = Stack(SmallBlock, len(plain.blocks), 64).to(device)
            models[side] = wrap(model, mesh)
            x = torch.randn(4, 64, device=device)
            check_finite(part, side, partial(_mean_square, models[side], x))
        network.values = False
        yield models, network
        models.clear()


def _mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def optimizer(device: str, small: bool) -> Part:
    """Milliseconds of AdamW's step."""
    part = Part(
        "optimizer",
        f"AdamW's step on one rank of {WORLD} of an 8B model in fp32, its gradients from a backward: "
        "parallel3d.optim.local against the same class on plain tensors and on FSDP2's DTensors",
        ["kernel, time", "plain ms", "optim.local ms", "FSDP2 ms", "ours / FSDP2", "middle half"]
        + ["ours / plain"],
    )
    with _large(part, device, small) as (models, network):
        numel = sum(local.numel() for local in local_parameters(models["ours"]))
        for index, kind in enumerate(("fused", "foreach")[: 1 if small else 2]):
            options: dict[str, Any] = {"lr": 1e-6, kind: True}
            optimizers = {
                "plain": torch.optim.AdamW(plain_shards(models["ours"]), **options),
                "ours": p3d.optim.local(torch.optim.AdamW, models["ours"], **options),
                "torch": torch.optim.AdamW(models["torch"].parameters(), **options),
            }
            calls = {name: each.step for name, each in optimizers.items()}
            _rows(part, kind, calls, network, running().left / (2 - index), device, small)
            optimizers.clear()
            calls.clear()
    part.notes += [
        f"{numel:,} elements: AdamW reads and writes 28 bytes of each, {28 * numel / 4.3e12 * 1e3:.2f} ms at "
        "4.3 TB/s, which no step can be below",
        "expected: time of the host 0.1 to 0.3 of FSDP2's. Muon is not measured",
    ]
    return part


def clip(device: str, small: bool) -> Part:
    """Milliseconds of clip_grad_norm_."""
    part = Part(
        "clip",
        f"clip_grad_norm_ on one rank of {WORLD}: parallel3d.optim.clip_grad_norm_ against torch's on plain "
        "tensors and on FSDP2's DTensors; the sum over ranks takes no time",
        ["tensors, time", "plain ms", "ours ms", "FSDP2 ms", "ours / FSDP2", "middle half"]
        + ["ours / plain"],
    )
    for index, build in enumerate((_large, _many)):
        with build(part, device, small) as (models, network):
            lists = {name: list(model.parameters()) for name, model in models.items()}
            lists["plain"] = plain_shards(models["ours"])
            calls: dict[str, Callable[[], object]] = {
                "plain": partial(nn.utils.clip_grad_norm_, lists["plain"], 1.0),
                "ours": partial(p3d.optim.clip_grad_norm_, lists["ours"], 1.0),
                "torch": partial(nn.utils.clip_grad_norm_, lists["torch"], 1.0),
            }
            number = f"{len(lists['ours'])} tensors"
            _rows(part, number, calls, network, running().left / (2 - index), device, small)
            lists.clear()
            calls.clear()
    part.notes.append("expected: time of the host 0.1 to 0.3 of FSDP2's")
    return part


def _rows(
    part: Part,
    what: str,
    calls: Mapping[str, Callable[[], object]],
    network: EmulatedNetwork,
    seconds: float,
    device: str,
    small: bool,
) -> None:
    """Two rows: the host's time, and until the device is done."""
    kinds = {
        "host": {name: launched(call, device, after=network.clear) for name, call in calls.items()},
        "until done": {name: synced(call, device) for name, call in calls.items()},
    }
    for kind, steps in kinds.items():
        taken = take_rounds(
            part, f"{what}, {kind}", steps, small=small, seconds=seconds / 2, steps_per_round=4
        )
        ms = [taken.median(name) * 1e3 for name in ("plain", "ours", "torch")]
        ratios = taken.ratios("ours", "torch")
        part.rows.append(
            [f"{what}, {kind}", *ms, statistics.median(ratios), range_of(ratios), ms[1] / ms[0]]
        )
        part.data[f"{what}, {kind}"] = taken.seconds
