"""What ``parallel3d verify`` prints."""

from __future__ import annotations

import math
import os

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallel3d.testing import Difference, Verification

_NAMES = 4  # of parameters, before "more"


def show(found: Verification, model: str, parallelize: str) -> None:
    """Prints the verdict: the first module that differs, or the largest differences."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=100)
    layout = found.layout
    console.print(
        Text.assemble(
            (model, "bold"),
            f" on replicate {layout.replicate}, shard {layout.shard}, tp {layout.tp} "
            f"({layout.world_size} ranks), made parallel by {parallelize}",
        )
    )
    if found.difference is not None:
        console.print(_difference(found.difference))
        return
    console.print(Text("equal to the plain model", style="bold green"))
    parity = found.parity
    for dtype, loss in parity.loss.items():
        console.print(
            f"largest relative differences in {dtype}: loss {loss:.1e}, gradients "
            f"{parity.grads[dtype]:.1e}, weights {parity.weights[dtype]:.1e}"
        )
    if found.dropouts:
        calls = (
            "1 call of dropout draws as it"
            if found.dropouts == 1
            else f"{found.dropouts} calls of dropout draw as they"
        )
        console.print(f"{calls} must")
    if found.without_gradient:
        console.print(Text(_unreached(found.without_gradient), style="yellow"))


def _unreached(names: tuple[str, ...]) -> str:
    some = ", ".join(names[:_NAMES])
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return (
        f"not compared: gradients of {some}{more}, which the loss doesn't reach, and outputs that it "
        "doesn't read (--loss)"
    )


def _difference(found: Difference) -> Panel:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    kind = f" ({found.module_type})" if found.module_type else ""
    rows.add_row("module", Text(f"{found.module or '(the model itself)'}{kind}", style="bold red"))
    rows.add_row("what", Text(found.what))
    if math.isfinite(found.difference):
        rows.add_row("differs by", f"{found.difference:.3g} (relative; {found.bound:g} is allowed)")
    if found.hint:
        rows.add_row("looks like", Text(found.hint))
    rows.add_row("where", f"step {found.step}, rank {found.rank}")
    return Panel(
        rows,
        title=Text("first difference from the plain model", style="bold red"),
        title_align="left",
        box=box.ROUNDED,
        border_style="red",
        expand=False,
    )
