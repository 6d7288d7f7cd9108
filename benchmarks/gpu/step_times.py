"""host_time and small_step: what the engine costs the host, and what a step takes for few and many tokens."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from emulated_network import EmulatedNetwork, Link
from llama import LlamaConfig
from measure import Rounds, range_of
from models import SmallBlock, Stack, ours, ours_tp, torchs, torchs_tp
from page import Part
from runner import running
from share import launched, synced, take_rounds
from sides import batch_of, check_finite, loss_of, make, plain_shards, rank_of_many
from torch import nn

import parallel3d as p3d


@dataclass(frozen=True)
class Case:
    """One mesh of ``host_time``, and what runs on it."""

    what: str
    layout: p3d.MeshLayout
    ours: Callable[..., Stack]
    torchs: Callable[..., Stack]
    mixed: bool
    expected: str


CASES = (
    Case("FSDP fp32", p3d.MeshLayout(shard=64), ours, torchs, False, "0.40 to 0.55"),
    Case("FSDP bf16/fp32", p3d.MeshLayout(shard=64), ours, torchs, True, "0.40 to 0.55"),
    Case("HSDP bf16/fp32", p3d.MeshLayout(2, 32), ours, torchs, True, "0.40 to 0.55"),
    Case(
        "FSDP and TP 2, eager", p3d.MeshLayout(1, 32, 2), ours_tp, torchs_tp, True, "0.15 to 0.25"
    ),
)


def host_time(device: str, small: bool) -> Part:
    """Microseconds of the host's time above the plain model, a unit and step."""
    units = 4 if small else 16
    part = Part(
        "host_time",
        f"Time of the host above the plain model's, forward and backward, {units} units of ten small "
        "parameters: ours against torch's FSDP2 (and its TP), collectives that take no time",
        ["case", "plain us", "ours us", "FSDP2 us", "ours / FSDP2", "middle half", "expected"],
    )
    cases = CASES[1::2] if small else CASES
    for number, case in enumerate(cases):
        with rank_of_many(case.layout, device) as (network, mesh):
            plain = Stack(SmallBlock, units, 64).to(device)
            x = torch.randn(8, 64, device=device)
            models = {
                "plain": copy.deepcopy(plain).bfloat16() if case.mixed else copy.deepcopy(plain),
                "ours": case.ours(copy.deepcopy(plain), mesh, mixed=case.mixed),
                "torch": case.torchs(copy.deepcopy(plain), mesh, mixed=case.mixed),
            }
            steps = {}
            for name, model in models.items():
                inputs = x.bfloat16() if case.mixed and name == "plain" else x
                # The first step writes values: the ranks of a tp group compare their batches in it.
                check_finite(part, f"{case.what}, {name}", partial(_sum, model, inputs))
                steps[name] = launched(
                    _forward_backward(model, inputs), device, after=_clean(model, network)
                )
            network.values = False
            seconds = running().left / (len(cases) - number)
            taken = take_rounds(
                part,
                case.what,
                steps,
                small=small,
                seconds=seconds,
                steps_per_round=2 if small else 8,
                warmup=4,
            )
            models.clear()
            steps.clear()
        above = taken.above("plain")
        ratios = above.ratios("ours", "torch")
        cost = {name: seconds / units * 1e6 for name, seconds in _medians(above).items()}
        base = taken.median("plain") / units * 1e6
        row = [case.what, base, cost["ours"], cost["torch"], statistics.median(ratios)]
        part.rows.append([*row, range_of(ratios), case.expected])
        part.data[case.what] = taken.seconds
    part.notes += [
        "real time of the host, which does not wait for the GPU"
        if device == "cuda"
        else "CPU time",
        "expected: guessed before there was a GPU, from CPU figures; not a limit",
    ]
    return part


def _sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def _forward_backward(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    return lambda: model(x).sum().backward()


def _clean(model: nn.Module, network: EmulatedNetwork) -> Callable[[], None]:
    def clean() -> None:
        model.zero_grad()
        network.clear()

    return clean


def _medians(taken: Rounds) -> dict[str, float]:
    return {name: taken.median(name) for name in taken.seconds}


SEQUENCE = 512
MODELS = {
    "125M": LlamaConfig(768, 12, 12, 12, 2048, 32_000, SEQUENCE),
    "350M": LlamaConfig(1024, 24, 16, 16, 2816, 32_000, SEQUENCE),
    "1B": LlamaConfig(2048, 16, 32, 8, 8192, 32_000, SEQUENCE),
}
TINY = {"tiny": LlamaConfig(64, 2, 4, 2, 128, 256, 64)}
NVLINK = Link(latency=10e-6, bandwidth=300e9)
WORLD = 8
VARIANTS = ("plain", "ours", "ours, optim.local", "torch")


def small_step(device: str, small: bool) -> Part:
    """Tokens a second against tokens a step."""
    part = Part(
        "small_step",
        f"A training step (forward, backward, fused AdamW; bf16/fp32) of one rank of {WORLD}, links of 300 "
        "GB/s and of no time: thousands of tokens a second against tokens a step. plain: the whole bf16 "
        "model with AdamW on one rank's shards, the ceiling",
        ["model, link", "tokens", "plain", "ours", "ours, optim.local", "FSDP2"]
        + ["step: ours / FSDP2", "middle half", "with optim.local"],
    )
    tokens = (32, 64) if small else (512, 2048, 8192, 16384)
    links = {"300 GB/s": NVLINK, "no time": Link()}
    cases = [
        (name, config, link)
        for name, config in (TINY if small else MODELS).items()
        for link in links
        if link == "300 GB/s" or name == "350M"
    ]
    for index, (name, config, link) in enumerate(cases):
        if index and running().used_up:
            part.left_out.append(f"{name}, {link}")
            continue
        what = f"{name}, {link}"
        seconds = running().left / (len(cases) - index)
        _measure_model(part, what, config, links[link], tokens, seconds, device, small)
    part.notes += [
        "expected while the host is the limit: the step 0.65 to 0.8 of FSDP2's; 1.00 where the GPU is",
        "ours and FSDP2 step AdamW on DTensors; ours, optim.local is the same with parallel3d.optim.local",
        "collectives write no values: what is computed from gathered weights is what memory held, except in "
        "rows marked so; numbers that are none take less power, so a GPU may run faster on them",
    ]
    return part


def _measure_model(
    part: Part,
    what: str,
    config: LlamaConfig,
    link: Link,
    tokens: tuple[int, ...],
    seconds: float,
    device: str,
    small: bool,
) -> None:
    end = running().left - seconds
    crossing = None
    with rank_of_many(p3d.MeshLayout(shard=WORLD), device, links={"link": link}) as (network, mesh):
        models: dict[str, nn.Module] = {}
        steps: dict[str, Callable[[], None]] = {}
        batches: list[Any] = [batch_of(config, tokens[0], device, length=SEQUENCE)]
        for name in VARIANTS[1:] + VARIANTS[:1]:
            side = name.partition(",")[0]
            models[name] = model = make(side, config, mesh, device)
            check_finite(part, f"{what}, {name}", partial(loss_of, model, batches[0]))
        for name in VARIANTS:
            optimizer = _adamw(name, models)
            steps[name] = _training_step(models[name], optimizer, batches, network)
        largest = len(tokens) - 1
        # With values first: without them the weights are soon no numbers.
        sizes = [(largest, True), *((n, False) for n in range(len(tokens)))]
        for done, (number, values) in enumerate(sizes):
            if done > 1 and running().left < end + 0.05 * seconds:
                part.left_out.append(f"{what}: from {tokens[number]} tokens on")
                break
            network.values = values
            batches[0] = batch_of(config, tokens[number], device, length=SEQUENCE)
            label = f"{tokens[number]}, values written" if values else str(tokens[number])
            taken = take_rounds(
                part,
                f"{what}, {label} tokens",
                {name: synced(step, device) for name, step in steps.items()},
                small=small,
                seconds=max(0.0, (running().left - end) / (len(sizes) - done)),
            )
            rate = {k: tokens[number] / taken.median(k) / 1e3 for k in VARIANTS}
            ratios, local = (taken.ratios(k, "torch") for k in ("ours", "ours, optim.local"))
            part.rows.append(
                [what, label, *rate.values(), statistics.median(ratios), range_of(ratios)]
                + [statistics.median(local)]
            )
            part.data[f"{what}, {label}"] = taken.seconds
            if crossing is None and not values and statistics.median(ratios) >= 0.98:
                crossing = tokens[number]
        models.clear()
        steps.clear()
        del model, optimizer
    part.notes.append(
        f"{what}: ours takes at least 0.98 of FSDP2's step from {crossing} tokens on"
        if crossing
        else f"{what}: ours takes less than 0.98 of FSDP2's step at all sizes"
    )


def _adamw(name: str, models: dict[str, nn.Module]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-5, "fused": True}
    if name == "plain":
        return torch.optim.AdamW(plain_shards(models["ours"]), **options)
    if name == "ours, optim.local":
        return p3d.optim.local(torch.optim.AdamW, models[name], **options)
    return torch.optim.AdamW(models[name].parameters(), **options)


def _training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], network: EmulatedNetwork
) -> Callable[[], None]:
    """Forward, backward, the optimizer's step. The plain optimizer's gradients stay as they are."""

    def step() -> None:
        loss_of(model, batches[0]).backward()
        optimizer.step()
        model.zero_grad()
        network.clear()

    return step
