"""compile: a training with blocks compiled one by one, beside the same without, and beside FSDP2's."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from llama import Llama, LlamaConfig
from measure import range_of
from page import Part
from runner import running
from share import synced, synchronize, take_rounds
from sides import Batch, batch_of, fill, loss_of, make, rank_of_many
from torch import nn
from torch._dynamo.utils import counters

import parallel3d as p3d

SHAPE = LlamaConfig(2048, 4, 32, 8, 8192, 32_000, 2048)  # four blocks of a 1B model
TINY = LlamaConfig(64, 2, 4, 2, 192, 256, 64)
PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}
STEPS = 5  # of the training; those after the second must not compile anything


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: of the row. layout: the mesh. mixed: bf16 computation, fp32 reduction; else all in fp32.
        bound: how far the compiled losses may be from the others; relative.
        peer: whether it is timed, beside FSDP2. FSDP2 with tensor parallelism is another program.
    """

    name: str
    layout: p3d.MeshLayout
    mixed: bool = True
    bound: float = 1e-2
    peer: bool = True


CASES = (
    Case("FSDP bf16/fp32", p3d.MeshLayout(shard=8)),
    Case("FSDP fp32", p3d.MeshLayout(shard=8), mixed=False, bound=1e-4, peer=False),
    Case("HSDP bf16/fp32", p3d.MeshLayout(2, 4)),
    Case("FSDP and TP 2, bf16/fp32", p3d.MeshLayout(1, 4, 2), peer=False),
    Case("replicated, bf16/fp32", p3d.MeshLayout(replicate=8)),
)


def compile(device: str, small: bool) -> Part:
    """Losses, step, recompilations, graph breaks, seconds of compiling."""
    config, tokens = (TINY, 32) if small else (SHAPE, 4096)
    backend = "inductor" if device == "cuda" else "aot_eager"
    part = Part(
        "compile",
        f"{STEPS} steps of AdamW with each of {config.n_layers} blocks of width {config.dim} compiled "
        f"({backend}), {tokens} tokens: losses beside those without compile; then the step beside FSDP2's",
        ["layout", "loss off by", "first two steps s", "graph breaks", "recompiles after step 2"]
        + ["step: ours ms", "FSDP2 ms", "ours / FSDP2", "middle half"],
    )
    cases = CASES[:1] if small else CASES
    for index, case in enumerate(cases):
        if index and running().used_up:
            part.left_out.append(case.name)
            continue
        seconds = running().left / (len(cases) - index)
        with rank_of_many(case.layout, device) as (network, mesh):
            torch._dynamo.reset()
            batch = batch_of(config, tokens, device, length=2048)
            made = {
                "eager": _ours(config, mesh, device, case, False),
                "ours": _ours(config, mesh, device, case, backend),
            }
            losses = _train(made["eager"], batch)["losses"]
            found = _train(made["ours"], batch, lambda: synchronize(device))
            apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], losses, strict=True))
            if not apart <= case.bound:
                part.failed.append(
                    f"{case.name}: losses {found['losses']}, without compile {losses}"
                )
            if found["recompiles"]:
                part.failed.append(f"{case.name}: ours compiles again after the second step")
            row: list[Any] = [
                case.name,
                apart,
                found["seconds"],
                found["breaks"],
                found["recompiles"],
            ]
            part.data[case.name] = {**found, "eager": losses}
            if case.peer:
                row += _timed(part, case, made["ours"], batch, network, mesh, device, backend, config,
                              small, 0.3 * seconds)  # fmt: skip
            part.rows.append(row + [""] * (len(part.head) - len(row)))
            made.clear()
    torch._dynamo.reset()
    part.notes += [
        "the compiler's caches are cold for the first row, and warm where a block is the same",
        "expected: the step 0.95 to 1.00 of FSDP2's; no recompilation",
    ]
    return part


def _ours(
    config: LlamaConfig, mesh: Any, device: str, case: Case, backend: str | bool
) -> nn.Module:
    """Our engine, with blocks compiled inside its hooks."""
    with torch.device("meta"):
        plain = Llama(config)
    policy = p3d.MixedPrecisionPolicy()
    if case.mixed:
        policy = p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = PLAN if case.layout.tp > 1 else None
    made = p3d.parallelize(plain, mesh, tp_plan=plan, mp_policy=policy, compile=backend)
    made.to_empty(device=device)
    fill(made)
    return made


def _train(
    model: nn.Module, batch: Batch, synchronize: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Trains, and says what has been compiled when."""
    counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    start = time.perf_counter()
    seconds, graphs = 0.0, 0
    for step in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 1:
            synchronize()
            seconds = time.perf_counter() - start
            graphs = counters["stats"]["unique_graphs"]
    return {
        "losses": losses,
        "seconds": seconds,
        "breaks": sum(counters["graph_break"].values()),
        "recompiles": counters["stats"]["unique_graphs"] - graphs,
    }


def _timed(
    part: Part,
    case: Case,
    ours: nn.Module,
    batch: Batch,
    network: Any,
    mesh: Any,
    device: str,
    backend: str,
    config: LlamaConfig,
    small: bool,
    seconds: float,
) -> list[Any]:
    """Milliseconds of a step, ours and FSDP2's, the ratio and its middle half."""
    theirs = make("torch", config, mesh, device)
    for block in theirs.layers:
        block.compile(backend=backend)
    part.data[f"{case.name}, FSDP2"] = _train(theirs, batch)
    network.values = False
    steps = {
        side: synced(partial(_step, model, batch, network), device)
        for side, model in (("ours", ours), ("torch", theirs))
    }
    taken = take_rounds(part, case.name, steps, small=small, seconds=seconds)
    ratios = taken.ratios("ours", "torch")
    ms = [taken.median(side) * 1e3 for side in ("ours", "torch")]
    return [*ms, statistics.median(ratios), range_of(ratios)]


def _step(model: nn.Module, batch: Batch, network: Any) -> None:
    loss_of(model, batch).backward()
    model.zero_grad()
    network.clear()
