"""calibrate: measures matmuls, attention, memory, collectives and the host of the machine at hand.

parallel3d calibrate --out profile.toml
torchrun --nproc-per-node 8 -m parallel3d calibrate --out profile.toml     # collectives too
"""

from __future__ import annotations

import copy
import json
import os
import platform
import statistics
import time
import timeit
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, inf, isfinite, log
from operator import itemgetter, sub
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from parallel3d._torch.attention import chosen_kernel
from parallel3d._torch.fake import cuda_sleep, init_fake_group
from parallel3d.errors import PlanningError
from parallel3d.fsdp import MixedPrecisionPolicy
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.parallelize import Checks, parallelize
from parallel3d.planner.arguments import check_choice, check_number
from parallel3d.planner.cluster import DEVICES, MEASURED, Gpu, HostTimes, gpus
from parallel3d.planner.constants import constant
from parallel3d.planner.from_module import spec_from_module
from parallel3d.planner.kernels import operations
from parallel3d.planner.workload import Local, Workload
from parallel3d.testing.worlds import destroy_group

_MATMULS = ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 4096), (16384, 8192))
_HEAD_DIMS = (64, 128)
_KERNELS = {"flash": "flash2", "efficient": "flash1", "cudnn": "cudnn"}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def calibrate(
    name: str | None = None,
    *,
    device: str | None = None,
    largest: int = 8192,
    seconds: float = 60.0,
) -> Gpu:
    """Measures matmuls, memory, attention and the host of this machine, and with a process group also
    collectives of 2, 4, 8 ... ranks.

    On a GPU, CUDA events around queued calls time matmuls, copies, attention and collectives, so that
    launches and synchronisations don't count; the host's time for these is measured separately.

    Args:
        name: name of the returned GPU; by default the device's own. If it is that of a GPU in hardware.toml,
            what can't be measured (peak, links) is taken from there, else from the most similar GPU in it.
        device: "cuda" or "cpu"; by default "cuda" if there is one.
        largest: most rows of a matmul that is measured.
        seconds: no further matmul size is measured after this long. A quarter of it in addition goes to
            matmuls under continuous load, after which the clock has settled at the GPU's power limit.

    Returns:
        A ``Gpu`` with the measured numbers. Its ``peak`` is that of hardware.toml; on a CPU, the best
        measured FLOP/s.

    Raises:
        PlanningError: the device isn't there or not known, or ``seconds`` isn't above 0.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_choice("device", kind, DEVICES)
    check_number("seconds", seconds)
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanningError("there is no CUDA device; calibrate with device='cpu'")
    known = gpus()
    similar, own_name, capacity = _describe(kind)
    base = known.get((name or "").lower()) or known[similar]
    bandwidth = _copy_rate(kind)
    memory_rate = bandwidth * constant("memory_efficiency").value
    times = _matmul_times(kind, largest, seconds)
    start, rate = _fit_matmuls(times, memory_rate)
    rows, columns = (max(times[-1].m, 4096), 4096) if kind == "cuda" else (times[-1].m, times[-1].n)
    loaded = _under_load(kind, rows, columns, seconds / 4).rate(start, memory_rate)
    best = max(rate, *(each.flops / each.seconds for each in times))
    peak = base.peak if base.name != "cpu" else best / 1e12
    kernel, attention = _attention(kind)
    measured = replace(
        base,
        name=name or own_name,
        like="" if (name or own_name).startswith(base.family) else base.name,
        peak=peak,
        gemm_efficiency=min(rate / (peak * 1e12), 1.0),
        gemm_start_us=max(start, 1e-7) * 1e6,
        sustained=min(loaded, rate) / (peak * 1e12),
        attention_kernel=kernel,
        attention=attention,
        bandwidth=bandwidth / 1e12,
        capacity_gib=capacity,
        host_times=measure_host(kind),
        source=f"measured on {platform.node()} with torch {torch.__version__}; else {base.name}'s",
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        table = _collectives(kind)
        link = max(rate for _, rate, _ in table["all_gather"].values())
        node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        measured = replace(measured, collectives=table, node=node, domain=node, link=link)
    return measured


def _describe(kind: str) -> tuple[str, str, float]:
    """Returns (family of the most similar GPU in hardware.toml, the device's own name, GiB of its memory)."""
    if kind == "cpu":
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "cpu", f"cpu-{platform.machine()}", nbytes / 2**30
    name, nbytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return similar_to(name), name.lower().replace(" ", "-"), nbytes / 2**30


def similar_to(name: str) -> str:
    """Returns the longest GPU family ("h100") that torch's name of a GPU contains; else "a100"."""
    families = sorted({each.family for each in gpus().values()}, key=len, reverse=True)
    return next((family for family in families if family in name.lower()), "a100")


def _operands(rows: int, columns: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random features (rows, columns) and a weight (columns, columns), in bf16; in fp32 on a CPU."""
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    sizes = (rows, columns), (columns, columns)
    features, weight = (torch.randn(size, device=kind).to(dtype) for size in sizes)
    return features, weight


def _matmul_times(kind: str, largest: int, seconds: float) -> list[_Product]:
    """Times matmuls of growing size, up to ``largest`` rows, on an otherwise idle GPU."""
    end = time.monotonic() + seconds
    times: list[_Product] = []
    for rows, columns in _MATMULS:
        if rows > largest or (len(times) >= 2 and time.monotonic() > end):
            break
        a, b = _operands(rows, columns, kind)
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        times.append(_Product(rows, columns, columns, a.element_size(), timed(product, kind)))
    return times


def _under_load(kind: str, rows: int, columns: int, seconds: float) -> _Product:
    """Times the three matmuls of a linear layer's training under continuous load; returns their mean."""
    x, weight = _operands(rows, columns, kind)
    grad = torch.randn_like(x)

    def train() -> None:
        x @ weight.t()
        grad @ weight
        grad.t() @ x

    took = timed_under_load(train, kind, seconds) / 3
    return _Product(rows, columns, columns, x.element_size(), took)


@dataclass(frozen=True)
class _Product:
    """A timed matmul (m, k) @ (k, n) with ``itemsize`` bytes an element, which took ``seconds``."""

    m: int
    n: int
    k: int
    itemsize: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def rate(self, start: float, memory_rate: float) -> float:
        """Returns the FLOP/s with which ``gemm_time`` would predict this matmul's seconds, given ``start``
        seconds to start and ``memory_rate`` bytes a second; infinite if start and memory alone take that
        long."""
        moved = (self.m * self.k + self.k * self.n + self.m * self.n) * self.itemsize
        p = constant("roofline_power").value
        compute = max(self.seconds - start, 0.0) ** p - (moved / memory_rate) ** p
        growth = (self.flops / 1e12) ** constant("gemm_growth").value
        return self.flops / growth / compute ** (1 / p) if compute > 0 else inf


def _fit_matmuls(times: Sequence[_Product], memory_rate: float) -> tuple[float, float]:
    """Returns the (seconds to start, FLOP/s) with which ``gemm_time`` fits the timed matmuls best."""
    fits = []
    for part in range(100):
        start = min(each.seconds for each in times) * part / 100
        rates = [each.rate(start, memory_rate) for each in times]
        finite = [log(rate) for rate in rates if isfinite(rate)]
        if len(finite) > len(times) / 2:
            middle = statistics.fmean(finite[-3:])  # of the largest, which a start hardly moves
            fits.append((sum(abs(each - middle) for each in finite) / len(finite), start, middle))
    if not fits:  # all are as fast as their bytes
        return 0.0, max(each.flops / each.seconds for each in times)
    _, start, middle = min(fits)
    return start, exp(middle)


def _attention(kind: str) -> tuple[str, tuple[tuple[int, float, float], ...]]:
    """Returns (name of the kernel that scaled_dot_product_attention runs, ((head_dim, forward TFLOP/s,
    backward TFLOP/s), ...)); ("", ()) if the planner doesn't know this kernel."""
    length, width, dtype = (8192, 4096, torch.bfloat16) if kind == "cuda" else (512, 256, None)
    ramp, products = constant("attention_ramp").value, constant("attention_backward").value
    kernels, rates = set(), []
    for head_dim in _HEAD_DIMS:
        shape = 1, width // head_dim, length, head_dim
        q, k, v, grad = (torch.randn(shape, device=kind, dtype=dtype) for _ in range(4))
        inputs = [each.requires_grad_() for each in (q, k, v)]
        kernels.add(chosen_kernel(*inputs, causal=True))
        attend = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        out = attend()
        back = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
        flops = 2.0 * width * length**2 * (length + ramp) / length / 1e12
        rates.append((head_dim, flops / timed(attend, kind), products * flops / timed(back, kind)))
    kernel = _KERNELS.get(kernels.pop(), "") if len(kernels) == 1 else ""
    return (kernel, tuple(rates)) if kernel else ("", ())


def _copy_rate(kind: str) -> float:
    """Returns the memory bandwidth, bytes a second: what a copy reads and writes, divided by the fraction of
    the bandwidth that copies are known to reach."""
    count = 2**28 if kind == "cuda" else 2**25
    a, b = torch.ones(count, device=kind), torch.empty(count, device=kind)
    rate = 2 * a.numel() * a.element_size() / timed(lambda: b.copy_(a), kind)
    return rate / constant("memory_efficiency").value


def _fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fits y = start + x / rate by least squares of the relative errors; returns (start, rate)."""
    weights = np.array(y) ** -2.0
    mean_x, mean_y = np.average([x, y], axis=1, weights=weights)
    (spread, both), _ = np.cov([x, y], aweights=weights, ddof=0)
    slope = both / spread if spread and both > 0 else mean_y / mean_x
    return float(max(mean_y - slope * mean_x, 0.0)), float(1 / slope)


def _collectives(kind: str) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Times collectives and returns operation -> number of ranks -> (start us, GB/s, ramp MB), see
    ``_fit_collective``. All ranks call it; the time of the slowest rank counts."""
    world = dist.get_world_size()
    sizes = [n for n in (2, 4, 8, 16, 32) if n < world and world % n == 0] + [world]
    most = 2**28 if kind == "cuda" else 2**23
    table: dict[str, dict[int, tuple[float, float, float]]] = {name: {} for name in COLLECTIVES}
    for size in sizes:
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
        group = groups[dist.get_rank() // size]
        for name in COLLECTIVES:
            times = []
            for nbytes in (4**n for n in range(6, 15) if 4**n <= most):
                seconds = collective_seconds(name, nbytes, size, group, kind)
                slowest = torch.tensor([seconds], device=kind)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                times.append((nbytes, slowest.item()))
            table[name][size] = _fit_collective(times)
    return table


def collective_seconds(
    name: str, nbytes: int, size: int, group: dist.ProcessGroup, kind: str
) -> float:
    """Returns the median seconds of one collective on this rank. All ranks of ``group`` call it.

    Args:
        name: one of ``COLLECTIVES``.
        nbytes: bytes of the whole float32 tensor (``size`` ranks' parts together), rounded down to a multiple
            of ``size`` elements.
        kind: "cuda" or "cpu".
    """
    count = max(nbytes // 4 // size, 1) * size
    whole = torch.ones(count, device=kind)
    part = torch.ones(count // size, device=kind)
    if name == "all_gather":
        return timed(lambda: dist.all_gather(list(whole.chunk(size)), part, group=group), kind)
    if name == "reduce_scatter":
        return timed(lambda: dist.reduce_scatter(part, list(whole.chunk(size)), group=group), kind)
    return timed(lambda: dist.all_reduce(whole, group=group), kind)


def _fit_collective(times: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fits seconds = start + (S + ramp (1 - exp(-S / ramp))) / bandwidth to ``times``, (S bytes, seconds);
    returns (start us, bandwidth GB/s, ramp MB)."""
    fits = []
    for ramp in (0.25e6, 0.5e6, 1e6, 2e6, 4e6, 8e6, 16e6, 32e6):
        x = [s + ramp * (1 - exp(-s / ramp)) for s, _ in times]
        y = [t for _, t in times]
        start, rate = _fit_line(x, y)
        error = sum(abs((start + a / rate) / b - 1) for a, b in zip(x, y, strict=True))
        fits.append((error, (round(start * 1e6, 2), round(rate / 1e9, 4), ramp / 1e6)))
    return min(fits, key=itemgetter(0))[1]


# A call's time on a GPU, without the host's part of it, and when it has been under load for long.

_ROUNDS = 5
_CALLS = 20  # in a queue
_CLOCK = 2.2e9  # cycles a second that no GPU exceeds: it sleeps for at least as long as it is told
_LONGEST = 1.0  # seconds of a sleep
_PART = 0.1  # seconds of load that are timed together


def timed(function: Callable[[], object], kind: str) -> float:
    """Returns the median seconds of a call of ``function``, after two calls to warm up.

    On CUDA, events on the current stream time a queue of calls. Launches don't count: the stream sleeps until
    all calls of the queue have been issued.

    Args:
        kind: "cuda" or "cpu".
    """
    for _ in range(2):
        function()
    if kind != "cuda":
        return statistics.median(timeit.repeat(function, repeat=_ROUNDS, number=1))
    torch.cuda.synchronize()
    issuing = timeit.timeit(function, number=_CALLS)
    taken = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        cuda_sleep(int(min(1.5 * issuing, _LONGEST) * _CLOCK))
        first, last = _between_events(function, _CALLS)
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1e3 / _CALLS)
    return statistics.median(taken)


def timed_under_load(function: Callable[[], object], kind: str, seconds: float) -> float:
    """Calls ``function`` without a pause for ``seconds``; returns the median seconds of a call over the
    second half of that time. On CUDA calls are queued ahead, so that the GPU is never idle."""
    calls = max(int(_PART / timed(function, kind)), 1)
    taken: list[float] = []
    running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 2:
        if kind != "cuda":
            taken.append(timeit.timeit(function, number=calls) / calls)
            continue
        running.append(_between_events(function, calls))
        if len(running) > 1:
            first, last = running.popleft()
            last.synchronize()
            taken.append(first.elapsed_time(last) / 1e3 / calls)
    return statistics.median(taken[len(taken) // 2 :])


def _between_events(
    function: Callable[[], object], calls: int
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        function()
    last.record()
    return first, last


# The host's times: of an operation, of the engine for a unit, of an optimizer's step.

_BLOCKS, _WIDTH, _HEAD, _TOKENS = 8, 64, 16, 8
_TURNS = 9
_FAKE_RANKS = 4
_PLAN = {"blocks.*.wqkv.*": "colwise", "blocks.*.gate": "colwise", "blocks.*.up": "colwise"}
_PLAN |= {"blocks.*.wo": "rowwise", "blocks.*.down": "rowwise"}


class _TimedBlock(nn.Module):
    """A Llama block so small that its step takes as long as the host needs to issue it."""

    def __init__(self) -> None:
        super().__init__()
        linear = lambda: nn.Linear(_WIDTH, _WIDTH, bias=False)  # noqa: E731
        self.norm1, self.norm2 = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.wqkv = nn.ModuleList(linear() for _ in range(3))
        self.wo, self.gate, self.up, self.down = (linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (w(normed).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for w in self.wqkv)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def measure_host(kind: str) -> HostTimes:
    """Measures the fields of ``HostTimes`` by forward and backward steps of small blocks, plain and through
    ``parallelize``.

    A process group is used if there is one, and then all its ranks call this; else torch's fake group of 4
    ranks, whose collectives communicate nothing. With a process group on CPUs the engine's part isn't
    measured, because real collectives take the same cores.

    Args:
        kind: "cuda" or "cpu".
    """
    with _group(kind) as ranks:
        blocks = nn.Sequential(*(_TimedBlock() for _ in range(_BLOCKS)))
        plain = nn.Sequential(OrderedDict(blocks=blocks)).to(kind)
        x = torch.randn(1, _TOKENS, _WIDTH, device=kind)
        sharded = {what: _sharded(plain, each, kind) for what, each in _layouts(ranks).items()}
        half = copy.deepcopy(plain).bfloat16()
        given = {"plain": (half, x.bfloat16()), **{what: (m, x) for what, m in sharded.items()}}
        taken = _in_turns({what: partial(_step, *each) for what, each in given.items()}, kind)
        launch = statistics.median(taken["plain"]) / _launches(plain)
        unit = _above(taken, "shard", "plain")
        replicate, tp = (_above(taken, what, "shard") for what in ("replicate", "tp"))
        optimizer = _optimizer(sharded.get("shard", half), kind)
    return HostTimes(*(1e6 * each for each in (launch, unit, replicate, tp, optimizer)))


def _above(taken: dict[str, list[float]], what: str, base: str) -> float:
    """Returns the seconds by which forward or backward of one block takes longer in the steps ``what`` than
    in the steps ``base``: the median over turns. 0: one of them was not measured.

    Steps of the same turn are subtracted, because other load on the machine slows both alike.
    """
    if not {what, base} <= taken.keys():
        return 0.0
    above = statistics.median(map(sub, taken[what], taken[base]))
    return max(above / (2 * _BLOCKS), 1e-9)


@contextmanager
def _group(kind: str) -> Iterator[int]:
    """Makes sure that there is a process group, a fake one if necessary, and yields its number of ranks; 0 if
    its collectives would disturb the measurement (a real group on CPUs)."""
    if dist.is_initialized():
        yield dist.get_world_size() if kind == "cuda" else 0
        return
    init_fake_group(0, _FAKE_RANKS)
    try:
        yield _FAKE_RANKS
    finally:
        destroy_group()


def _layouts(ranks: int) -> dict[str, MeshLayout]:
    found = {"shard": MeshLayout(1, ranks, 1)} if ranks > 1 else {}
    if ranks > 2 and ranks % 2 == 0:
        found["replicate"] = MeshLayout(2, ranks // 2, 1)
        found["tp"] = MeshLayout(1, ranks // 2, 2)
    return found


def _sharded(plain: nn.Module, layout: MeshLayout, kind: str) -> nn.Module:
    mesh = build_mesh(layout, device_type=kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return parallelize(
        copy.deepcopy(plain),
        mesh,
        _PLAN if layout.tp > 1 else None,
        units=["blocks.*"],
        mp_policy=policy,
        checks=Checks(same_batch=False, audit=False),
    )


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _in_turns(steps: dict[str, Callable[[], None]], kind: str) -> dict[str, list[float]]:
    """Runs all ``steps`` once in each turn, and returns step -> the seconds that the host took in each turn
    (on a CPU, processor time)."""
    clock = time.perf_counter if kind == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(_TURNS + 3):
        for name, step in steps.items():
            seconds = timeit.Timer(step, timer=clock).timeit(1)  # without the garbage collector
            if kind == "cuda":
                torch.cuda.synchronize()
            if number > 2:  # the first ones allocate
                taken[name].append(seconds)
    return taken


def _launches(plain: nn.Module) -> float:
    """Returns the number of operations that the planner counts for a forward and backward of ``plain``."""
    example = torch.empty(1, _TOKENS, _WIDTH, device="meta")
    model = spec_from_module(copy.deepcopy(plain).to("meta"), example, tp_plan=None)
    local = Local(gpus()["cpu"], Workload(_TOKENS, 1))
    return sum(unit.count * sum(operations(unit, local)) for unit in model.units)


def _optimizer(model: nn.Module, kind: str) -> float:
    """Returns the seconds, per parameter, that the host takes for a step of fused AdamW."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    taken = _in_turns({"step": optimizer.step}, kind)["step"]
    return statistics.median(taken) / len(parameters)


def write_profile(gpu: Gpu, path: str | PathLike[str]) -> Path:
    """Writes ``gpu`` to a TOML file for ``Cluster.of(name, profile=path)``; returns the path."""
    lines = [f'[gpu."{gpu.name}"]', *(f"{name} = {getattr(gpu, name):.6g}" for name in MEASURED)]
    if gpu.like:
        lines.append(f"like = {json.dumps(gpu.like)}")
    if gpu.sustained:
        lines.append(f"sustained = {gpu.sustained:.6g}")
    if gpu.attention:
        each = ", ".join(f"{n} = [{a:.6g}, {b:.6g}]" for n, a, b in gpu.attention)
        lines.append(f"attention_kernel = {json.dumps(gpu.attention_kernel)}")
        lines.append(f"attention = {{ {each} }}")
    if host := [f"{name} = {us:.6g}" for name, us in asdict(gpu.host_times).items() if us]:
        lines.append(f"host_times = {{ {', '.join(host)} }}")
    if gpu.mesh_links:
        lines.append(f"mesh_links = {gpu.mesh_links}")
    lines.append(f"source = {json.dumps(gpu.source, ensure_ascii=False)}")
    if gpu.collectives:
        lines += ['collectives = "own"', "", "[collectives.own]"]
        for kind, table in gpu.collectives.items():
            sizes = ", ".join(f"{n} = [{a}, {b}, {c}]" for n, (a, b, c) in table.items())
            lines.append(f"{kind} = {{ {sizes} }}")
    profile = Path(path)
    profile.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return profile
