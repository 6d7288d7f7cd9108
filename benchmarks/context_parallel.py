"""Attention on ``cp``: our three kinds beside torch's experimental ``context_parallel``, taking turns.

    python benchmarks/context_parallel.py [--quick] [--json PATH]

Causal attention, forward and backward, each rank holding a head and a tail of the sequence; ours and torch's
(its all-gather, the default, and its all-to-all). Step: gloo processes in one launch; a step takes as long as
its slowest rank. Host time: the CPU time of small tensors on a fake process group, above plain attention of
the same tensors. Bytes: what ``record_collectives`` counts on one rank.

torch's has no rule for the operator that ``scaled_dot_product_attention`` uses on the CPU: as it is, it
raises NotImplementedError there. Here that operator is given to torch's own ring as its GPU operators are.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import (
    Claim,
    Rounds,
    alternate,
    command_line,
    cpu_seconds,
    no_gc,
    print_table,
    range_of,
)
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn import functional as F

from parallel3d.cp import CpAxis, Sequence, attention
from parallel3d.testing import GlooPool, fake_world, record_collectives

KINDS = ("ulysses", "gather", "ring")
PEERS = {"torch, all-gather": "allgather", "torch, all-to-all": "alltoall"}
PEER = "torch, all-gather"
SHAPES = {"equal heads": (1, 8, 8), "grouped heads": (1, 8, 2)}
"""Batch, query heads, K/V heads."""
CHANNELS = 64
Run = Callable[[], list[Tensor]]


def tensors(length: int, shape: tuple[int, int, int], rank: int = 0) -> list[Tensor]:
    """q, k and v of ``length`` positions."""
    batch, heads, kv_heads = shape
    generator = torch.Generator().manual_seed(rank)
    sizes = [(batch, n, length, CHANNELS) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def step_of(attend: Callable[..., Tensor], parts: list[Tensor]) -> Run:
    """Forward and backward; returns the output and the gradients."""

    def run() -> list[Tensor]:
        out = attend(*parts)
        grads = torch.autograd.grad(out.square().sum(), parts)
        return [out.detach(), *grads]

    return run


# ---- torch's ----

_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _locals(args: Any) -> list[Any]:
    return [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]


def _mesh_of(x: Any) -> DeviceMesh:
    return x.device_mesh


def _forward_on_cpu(op_call: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """What torch's handler does for its GPU operators."""
    mesh = _mesh_of(args[0])
    q, k, v, _, causal = _locals((*args, 0.0, False)[:5])
    results = torch_cp._templated_ring_attention(
        mesh.get_group(), 2, _OP.default, q, k, v, is_causal=causal, scale=kwargs.get("scale")
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def _backward_on_cpu(op_call: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    mesh = _mesh_of(args[1])
    grad, q, k, v, out, lse, dropout, causal = _locals(args)
    results = torch_cp._templated_ring_attention_backward(
        mesh.get_group(),
        2,
        _BACKWARD.default,
        grad_out=grad,
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        is_causal=causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


@contextmanager
def torchs(mesh: DeviceMesh, length: int) -> Iterator[None]:
    """torch's ``context_parallel``, which runs on the CPU."""
    handlers: dict[Any, Any] = torch_cp.custom_ops
    handlers |= {_OP.default: _forward_on_cpu, _BACKWARD.default: _backward_on_cpu}
    buffer = torch.zeros(1, 1, length, 1)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2], no_restore_buffers={buffer}):
        yield


def torchs_step(mesh: DeviceMesh, length: int, parts: list[Tensor], method: str) -> Run:
    """Its step; the context, which is entered once per training step, is outside of what is timed."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )

    inner = step_of(attend, parts)

    def run() -> list[Tensor]:
        torch_cp.set_rotate_method(method)
        return inner()

    return run


def steps_of(mesh: DeviceMesh, length: int, parts: list[Tensor]) -> dict[str, Run]:
    """Variant -> its step. Those of torch run within ``torchs``."""
    axis, sequence = CpAxis(mesh), Sequence(length, mesh.size(), True)

    def ours(kind: Any) -> Run:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, axis, sequence, causal=True, kind=kind)

        return step_of(attend, parts)

    found = {kind: ours(kind) for kind in KINDS}
    for name, method in PEERS.items():
        found[name] = torchs_step(mesh, length, parts, method)
    return found


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of what one rank holds, as if it were the whole."""
    return _plain(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


_plain = F.scaled_dot_product_attention  # before torch replaces it


# ---- what is measured ----


def worker(length: int, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """One rank: variant -> seconds of its steps, and bytes; how far its results are from the first one's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    rows = length // mesh.size()
    parts = tensors(rows, shape, dist.get_rank())
    steps = steps_of(mesh, length, parts)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    counted, differences = {}, {}
    reference: list[Tensor] = []
    with torchs(mesh, length):
        for name, step in steps.items():
            with record_collectives(mesh) as recorder:
                results = step()
            counted[name] = sum(call.bytes for call in recorder.calls)
            reference = reference or results
            differences[name] = max(
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip(results, reference, strict=True)
            )
        order = list(steps)
        for _ in range(rounds):
            for name in order:
                with no_gc():
                    dist.barrier()
                    start = time.perf_counter()
                    steps[name]()
                    taken[name].append(time.perf_counter() - start)
            order.reverse()
    return {"seconds": taken, "bytes": counted, "differences": differences}


def on_processes(
    pool: GlooPool, ranks: int, length: int, shape: tuple[int, int, int], rounds: int
) -> dict[str, Any]:
    """Medians of the slowest rank's steps, and ratios to the peer's of the same round."""
    found = pool.run(worker, length, shape, rounds, world_size=ranks, timeout=900)
    names = list(found[0]["seconds"])
    for rank in found:
        far = {name: error for name, error in rank["differences"].items() if error > 1e-4}
        assert not far, f"not the same results: {far}"
    slowest = Rounds(
        {
            name: [max(times) for times in zip(*(r["seconds"][name] for r in found), strict=True)]
            for name in names
        }
    )
    ratios = {name: slowest.ratios(name, PEER) for name in names}
    return {
        "ms": {name: slowest.median(name) * 1e3 for name in names},
        "ratio": {name: statistics.median(each) for name, each in ratios.items()},
        "spread": {name: range_of(each) for name, each in ratios.items()},
        "bytes": {name: max(rank["bytes"][name] for rank in found) for name in names},
    }


def host_time(ranks: int, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """CPU microseconds of a step of small tensors above plain attention, on a fake group."""
    length = 16 * ranks
    with fake_world(1, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        parts = tensors(length // ranks, shape)
        steps = {"plain": step_of(plain, parts), **steps_of(mesh, length, parts)}
        with torchs(mesh, length):
            taken = alternate(
                {name: cpu_seconds(step) for name, step in steps.items()},
                rounds=rounds,
                steps_per_round=8,
                warmup=4,
            )
    above = taken.above("plain")
    ratios = {name: above.ratios(name, PEER) for name in above.seconds}
    return {
        "plain_us": taken.median("plain") * 1e6,
        "us": {name: above.median(name) * 1e6 for name in above.seconds},
        "ratio": {name: statistics.median(each) for name, each in ratios.items()},
        "spread": {name: range_of(each) for name, each in ratios.items()},
    }


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Steps on two and four processes, and host time."""
    length, rounds = (1024, 3) if quick else (4096, 9)
    claims, results = [], {}
    with GlooPool(4) as pool:
        for ranks in (2, 4):
            for what, shape in SHAPES.items():
                found = on_processes(pool, ranks, length, shape, rounds)
                results[f"cp={ranks}, {what}"] = found
                print_table(
                    f"forward and backward of {length} positions, cp={ranks}, {what}; "
                    f"{shape[1]} query heads and {shape[2]} K/V heads of {CHANNELS}",
                    ["", "ms", f"to {PEER}", "middle half", "MiB a rank"],
                    [
                        [
                            n,
                            found["ms"][n],
                            found["ratio"][n],
                            found["spread"][n],
                            found["bytes"][n] / 2**20,
                        ]
                        for n in found["ms"]
                    ],
                )
                claims += [
                    Claim(
                        f"attention on cp={ranks} gloo processes, {what}, {kind}",
                        found["ms"][kind],
                        found["ms"][PEER],
                        "ms",
                        "context_parallel",
                        1.1,
                        1.0,
                        found["ratio"][kind],
                        found["spread"][kind],
                    )
                    for kind in KINDS
                ]
    for ranks in (2, 8):
        host = host_time(ranks, SHAPES["equal heads"], 6 if quick else 25)
        results[f"host, cp={ranks}"] = host
        print_table(
            f"host time, cp={ranks}: microseconds above plain attention ({host['plain_us']:.0f})",
            ["", "us", f"to {PEER}", "middle half"],
            [[n, host["us"][n], host["ratio"][n], host["spread"][n]] for n in host["us"]],
        )
        claims += [
            Claim(
                f"host time of attention, cp={ranks}, {kind}",
                host["us"][kind],
                host["us"][PEER],
                "us",
                "context_parallel",
                1.0,
                0.5,
                host["ratio"][kind],
                host["spread"][kind],
            )
            for kind in KINDS
        ]
    return claims, results


if __name__ == "__main__":
    command_line(__doc__, run)
