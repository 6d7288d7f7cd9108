"""planner: what ``parallel3d.planner`` predicts of one rank, against that rank's memory and time."""

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from device_memory import Peak, Training, peak_memory
from emulated_network import Link
from llama import Llama, LlamaConfig
from page import Part
from runner import running
from share import synced, take_rounds
from sides import batch_of, check_finite, loss_of, rank_of_many

import parallel3d as p3d
from parallel3d.planner import Cluster, Gpu, Prediction, Workload, predict, spec_from_module
from parallel3d.planner.calibrate import calibrate
from parallel3d.planner.stacks import stack_of

MIB = 2**20
SHAPE = LlamaConfig(2048, 16, 32, 8, 8192, 32_000, 2048)
TINY = LlamaConfig(64, 2, 4, 2, 192, 256, 64)
STACK = stack_of("parallel3d").with_values(
    "this run",
    # AdamW with foreach reads and writes 20 numbers a parameter, not 7.
    {"overlap_slowdown": 0.0, "optimizer_traffic": 20 / 7},
    "how the run is made",
)
LINK = Link(latency=15e-6, bandwidth=300e9)
FSDP, HSDP, WIDE = p3d.MeshLayout(shard=8), p3d.MeshLayout(2, 4), p3d.MeshLayout(shard=64)
# (layout, sequences of a rank, resharded after forward), in the order of their use to a reader
CASES = [
    (FSDP, 1, True),
    (HSDP, 1, True),
    (FSDP, 4, True),
    (WIDE, 1, True),
    (FSDP, 1, False),
    (p3d.MeshLayout(shard=2), 1, True),
    (p3d.MeshLayout(4, 16), 4, True),
    (WIDE, 4, True),
    (HSDP, 4, False),
    (p3d.MeshLayout(2, 32), 1, True),
    (p3d.MeshLayout(shard=16), 2, True),
    (p3d.MeshLayout(4, 2), 2, True),
]


def planner(device: str, small: bool) -> Part:
    """Predicted against measured peak and step."""
    config, length = (TINY, 32) if small else (SHAPE, 2048)
    part = Part(
        "planner",
        "Predicted and measured peak of allocated memory, and step (forward, backward, AdamW; bf16/fp32), of "
        f"one rank; {config.n_layers} blocks of width {config.dim}, sequences of {length}, links of 300 GB/s",
        [
            "layout, sequences",
            "MiB predicted",
            "measured",
            "off by",
            "reserved MiB predicted",
            "measured",
        ]
        + ["step ms predicted", "measured", "off by"],
    )
    gpu = calibrate(device=device, largest=1024 if small else 8192, seconds=1.0 if small else 5.0)
    with torch.device("meta"):
        spec = spec_from_module(Llama(config), tp_plan=None, seq_len=length)
    cases = CASES[:1] if small else CASES
    errors: dict[str, list[float]] = {"memory": [], "time": []}
    for index, (layout, sequences, reshard) in enumerate(cases):
        what = f"{layout.sizes}, {sequences}" + ", not resharded" * (not reshard)
        if index > 1 and running().used_up:
            part.left_out.append(what)
            continue
        work = Workload(
            seq_len=length,
            micro_batch=sequences,
            fused_norm=device == "cuda",
            reshard_after_forward=reshard,
            stack=STACK,
        )
        cluster = Cluster(_with_link(gpu, layout), 1, layout.world_size)
        prediction = predict(spec, layout, cluster, work)
        seconds = running().left / (len(cases) - index)
        peak, step = _measure(part, what, config, layout, work, device, small, seconds)
        _row(part, what, prediction, peak, step, errors, device)
    for name, values in errors.items():
        part.notes.append(f"{name}: median error {statistics.median(map(abs, values)):.1%}")
    part.notes += [
        "predicted from matmuls, attention, memory and the host's times as measured here, and from the "
        "emulated link's own times; a link that sleeps slows no kernel",
        "expected: memory within 5 %, time within 12 %; failed if memory is off by more than 20 %",
        "AdamW is the foreach one, for whose temporaries the planner allows",
    ]
    if device != "cuda":
        part.notes.append(
            "on a CPU there are no streams, and no allocator that rounds sizes, as the planner assumes: no "
            "limit is applied; time is that of one core"
        )
    part.data["gpu"] = {
        **{
            name: getattr(gpu, name)
            for name in ("peak", "gemm_efficiency", "gemm_start_us", "sustained")
        },
        **{name: getattr(gpu, name) for name in ("bandwidth", "attention_kernel", "attention")},
        "host_times": vars(gpu.host_times),
        "source": gpu.source,
    }
    return part


def _with_link(gpu: Gpu, layout: p3d.MeshLayout) -> Gpu:
    """``gpu`` among as many as ``layout`` has, whose collectives take the times of ``LINK``.

    A table has start (us), GB/s of the whole tensor, and a ramp (MB), here none.
    """
    sizes = {size for size in layout.sizes if size > 1}
    start, rate = LINK.latency * 1e6, LINK.bandwidth / 1e9
    table: Any = {
        kind: {n: (start, rate * n / (n - 1) / passes, 1e-9) for n in sorted(sizes)}
        for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2))
    }
    world = layout.world_size
    return replace(gpu, collectives=table, node=world, domain=world)


def _measure(
    part: Part,
    what: str,
    config: LlamaConfig,
    layout: p3d.MeshLayout,
    work: Workload,
    device: str,
    small: bool,
    seconds: float,
) -> tuple[Peak, float]:
    """(peak of a step, median seconds of a step)."""
    with rank_of_many(layout, device, links={"link": LINK}) as (network, mesh):
        training = Training(
            *("ours", config, mesh, network, device),
            reshard=work.reshard_after_forward,
            foreach=True,
        )
        assert work.micro_batch is not None
        batch = batch_of(config, work.micro_batch * work.seq_len, device, length=work.seq_len)
        check_finite(part, what, partial(loss_of, training.model, batch))
        network.values = False
        step = partial(training.step, batch)
        for _ in range(2):
            step()
        with peak_memory(device) as peak:
            step()
        taken = take_rounds(
            part, what, {"ours": synced(step, device)}, small=small, seconds=0.6 * seconds
        )
        del training, batch, step
    return peak, taken.median("ours")


def _row(
    part: Part,
    what: str,
    prediction: Prediction,
    peak: Peak,
    step: float,
    errors: dict[str, list[float]],
    device: str,
) -> None:
    memory = prediction.memory
    off = memory.allocated / peak.allocated - 1
    late = prediction.step_seconds / step - 1
    errors["memory"].append(off)
    errors["time"].append(late)
    reserved = ["", ""]
    if peak.reserved is not None:
        reserved = [f"{size / MIB:.0f}" for size in (memory.reserved, peak.reserved)]
    part.rows.append(
        [what, memory.allocated / MIB, peak.allocated / MIB, f"{off:+.1%}", *reserved]
        + [prediction.step_seconds * 1e3, step * 1e3, f"{late:+.1%}"]
    )
    part.data[what] = {"predicted": prediction.as_dict(), "peak": vars(peak), "step": step}
    if device == "cuda" and abs(off) > 0.2:
        part.failed.append(f"{what}: predicted memory is off by {off:+.0%}")
