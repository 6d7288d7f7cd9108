"""Rich tables of a plan and of a prediction."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.planner.cluster import Cluster
from parallel3d.planner.constants import Term
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.planning import MeshPlan, memory_groups, reasons, setting, short
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.workload import Workload

_GIB = 2**30
_BAR = 24


def show_plan(plan: MeshPlan, top: int, explain: bool) -> None:
    """Prints the ranked layouts, the refused ones, the best in detail, and what would change it."""
    console = output()
    console.print(_heading(plan.model, plan.cluster, plan.workload))
    if plan.candidates:
        console.print(_ranked(plan, top, console.width >= 112))
    if plan.refused:
        console.print(_refused(plan))
    if not plan.candidates:
        return
    best = plan.best
    _details(console, best, "the fastest: ")
    console.print(_sensitivity(plan))
    if explain:
        _explanation(console, best)
        for other in plan.layouts[1:2]:
            console.print(Text("\nbeside the second:", style="bold"))
            console.print(Text(plan.explain(best, other)), soft_wrap=True)


def show_prediction(prediction: Prediction, refused: str | None, explain: bool) -> None:
    """Prints one layout's memory and time; ``refused``: why ``plan`` would not propose it."""
    console = output()
    console.print(_heading(prediction.model, prediction.cluster, prediction.workload))
    _details(console, prediction, "")
    if refused:
        console.print(Text(f"plan would refuse this layout: {refused}", style="bold red"))
    if explain:
        _explanation(console, prediction)


def output() -> Console:
    """As wide as the terminal; in a pipe or a file as wide as the tables need."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def _heading(model: ModelSpec, cluster: Cluster, work: Workload) -> Text:
    batch = f", global batch {work.global_batch:,}" if work.global_batch else ""
    return Text.assemble(
        (model.name, "bold"),
        f" ({model.numel / 1e9:,.2f} B parameters) on ",
        (f"{cluster.world_size:,} x {cluster.gpu.name}", "bold"),
        f" ({cluster.nodes:,} nodes), sequences of {work.seq_len:,}{batch}, {work.optimizer}",
    )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """The first ``left`` columns are words, the others numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return made


def _ranked(plan: MeshPlan, top: int, wide: bool) -> Table:
    """Of a line each; where it isn't ``wide``, memory as one number."""
    shown = plan.layouts[:top]
    table = _table(
        f"{len(shown)} of {len(plan.layouts)} layouts that fit, by speed (replicate x shard x tp; GiB)",
        *("", "layout", "checkpointing", "batch"),
        *(("state", "buffers", "activ.", "logits") if wide else ()),
        *("memory", "tok/s/GPU", "MFU", "step s"),
        left=3,
    )
    for place, each in enumerate(shown, 1):
        parts = [value / _GIB for value in memory_groups(each).values()]
        memory = each.memory
        table.add_row(
            str(place),
            short(each),
            setting(each),
            f"{each.micro_batch}\N{MULTIPLICATION SIGN}{each.accumulation}",
            *((f"{value:.1f}" for value in (sum(parts[:3]), *parts[3:6])) if wide else ()),
            Text(f"{memory.needed / _GIB:.1f}", _heat(memory.needed / memory.capacity)),
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.step_seconds:,.2f}",
            style="bold" if place == 1 else "",
        )
    return table


def _heat(part: float) -> str:
    return "green" if part < 0.8 else "yellow" if part <= 1 else "bold red"


def _refused(plan: MeshPlan) -> Table:
    table = _table(
        f"{len(plan.refused)} layouts refused", "why (the mildest)", "how many", "layouts"
    )
    for reason in reasons(plan.refused):
        table.add_row(Text(reason.text), str(reason.count), reason.examples)
    return table


def _details(console: Console, each: Prediction, lead: str) -> None:
    memory = each.memory
    console.print(
        Text.assemble(
            (
                f"\n{lead}replicate {each.layout.replicate}, shard {each.layout.shard}, tp {each.layout.tp}",
                "bold",
            ),
            f"; micro-batch {each.micro_batch} x {each.accumulation}, checkpointing {setting(each)}: ",
            (f"{each.tokens_per_second_per_gpu:,.0f} tokens/s/GPU", "bold"),
            f", MFU {each.mfu:.1%} (HFU {each.hfu:.1%}, by 6N {each.mfu_6n:.1%})",
            f", {each.step_seconds:,.3f} s a step",
        )
    )
    beyond = {term.name: term for term in memory.beyond}
    sizes = _components(
        f"memory at its peak ({memory.moment})", "GiB", {**memory.terms, **beyond}, _GIB
    )
    verdict = Text("fits" if each.fits else "does not fit", "green" if each.fits else "bold red")
    sizes.add_section()
    sizes.add_row(
        Text.assemble("needed of ", f"{memory.capacity / _GIB:.1f}: ", verdict),
        f"{memory.needed / _GIB:.3f}",
        f"{memory.needed / memory.capacity:.0%}",
        _bar(memory.needed / memory.capacity),
    )
    sizes.add_row("upper bound of reserved", f"{memory.upper / _GIB:.3f}", "", "")
    console.print(sizes)
    console.print(_components("step", "ms", each.time.terms, 1e-3))


def _components(title: str, unit: str, terms: Mapping[str, Term], scale: float) -> Table:
    """The terms above zero, in ``unit`` of ``scale``."""
    table = _table(title, "component", unit, "share", "")
    table.columns[-1].justify = "left"
    whole = sum(term.value for term in terms.values()) or 1.0
    for name, term in terms.items():
        if term.value:
            part = term.value / whole
            table.add_row(
                name.replace("_", "-"), f"{term.value / scale:,.3f}", f"{part:.1%}", _bar(part)
            )
    return table


def _bar(part: float) -> Text:
    full = min(part, 1.0) * _BAR
    half = "\N{LEFT HALF BLOCK}" if full % 1 >= 0.5 else ""
    return Text("\N{FULL BLOCK}" * int(full) + half, _heat(part) if part > 0.8 else "cyan")


def _sensitivity(plan: MeshPlan) -> Table:
    table = _table("tokens/s/GPU of the fastest, if this were", "", "half", "as it is", "twice")
    for name, tried in plan.sensitivity().items():
        now = tried[1][1]
        cells = []
        for value, speed, fits in tried:
            change = f" ({speed / now - 1:+.1%})" if speed != now else ""
            cell = Text(f"{value}: {speed:,.0f}{change}")
            if not fits:
                cell.append(" does not fit", "red")
            cells.append(cell)
        table.add_row(name.replace("_", " "), *cells)
    return table


def _explanation(console: Console, each: Prediction) -> None:
    console.print(Text("\nwhere each number is from:", style="bold"))
    console.print(Text(each.explain()), soft_wrap=True)
