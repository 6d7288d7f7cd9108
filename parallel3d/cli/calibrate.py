"""``parallel3d calibrate``: measures this machine and writes a profile for ``--profile``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from parallel3d.planner.cluster import Gpu

__all__ = ["calibrate_command"]


def calibrate_command(
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.toml"),
    name: Annotated[
        str | None, typer.Option(help="Of the profile's GPU; the device's own by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; what there is by default.")
    ] = None,
    largest: Annotated[int, typer.Option(help="Rows of the largest matmul.", min=512)] = 8192,
    seconds: Annotated[float, typer.Option(help="Stop measuring matmuls after this long.")] = 60.0,
) -> None:
    """Measures matmuls and memory; under torchrun (-m parallel3d calibrate) collectives too."""
    from torch import distributed as dist

    from parallel3d.planner.calibrate import calibrate, write_profile

    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group()
    try:
        found = calibrate(name, device=device, largest=largest, seconds=seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_profile(found, out)
            _show(found)
            typer.echo(
                f"wrote {out}: parallel3d plan --gpu {found.name} --profile {out} ...", err=True
            )
    finally:
        if joined:
            dist.destroy_process_group()


def _show(found: Gpu) -> None:
    table = Table(title=f"{found.name}: {found.source}")
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_row("peak, TFLOP/s", f"{found.peak:.4g}")
    table.add_row("matmul efficiency", f"{found.gemm_efficiency:.3f}")
    table.add_row("matmul start, us", f"{found.gemm_start_us:.2f}")
    table.add_row("memory, TB/s", f"{found.bandwidth:.4g}")
    table.add_row("memory, GiB", f"{found.capacity_gib:.1f}")
    for kind, sizes in found.collectives.items():
        for ranks, (start, bandwidth, _) in sizes.items():
            table.add_row(
                f"{kind}, {ranks} ranks", f"{start:.0f} us + bytes / {bandwidth:.3g} GB/s"
            )
    Console().print(table)
