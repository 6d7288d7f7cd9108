"""The summary in terminals: wide, narrow, without colours, with hostile names."""

from dataclasses import replace
from io import StringIO

import pytest
from _support.tools.dryrun.made_runs import Llama

pytest.importorskip("rich")

from rich.console import Console

from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.compare import compare
from parallel3d.tools.dryrun.result import Peak
from parallel3d.tools.dryrun.summary import print_summary
from parallel3d.tools.dryrun.timeline import timeline

LAYOUT = MeshLayout(2, 4, 2)
RUN = Llama(layers=4).run(LAYOUT)


def shown(run: object = RUN, width: int = 120, colour: bool = False, **more: object) -> str:
    out = StringIO()
    terminal = Console(file=out, width=width, force_terminal=colour, no_color=not colour)
    print_summary(run, console=terminal, **more)  # type: ignore[arg-type]
    return out.getvalue()


def test_the_summary_has_all_parts() -> None:
    found = shown()
    parts = (
        "rank 0 of 16; replicate 2 x shard 4 x tp 2; 2 steps; h100-80gb-sxm; a step, predicted; "
        "reduce_scatter; waited for; memory at its peak; optimizer state; parameters on this rank; "
        "shard S(0); 1 warning; item in train.py"
    )
    for words in parts.split("; "):
        assert words in found, words
    assert "\x1b" not in found


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, shown(width=width).splitlines())) <= width


def test_a_narrow_terminal_has_fewer_columns() -> None:
    assert "such as" in shown(width=120) and "such as" not in shown(width=80)


def test_colours_where_the_terminal_has_them() -> None:
    assert "\x1b[1;31m" in shown(colour=True)


def test_names_are_no_markup() -> None:
    calls = tuple(replace(call, axis="[bold]x[/nothing]") for call in RUN.collectives)
    found = shown(replace(RUN, collectives=calls))
    assert "[bold]x[/nothing]" in found.replace("\n", "")


def test_divergence_machines_and_the_trainings_peak() -> None:
    found = compare(RUN, Llama(layers=4, skip=(1,)).run(LAYOUT, 2))
    early = Peak(0, 2**38, {"temporaries": 2**38}, "other", "", "normal_", ())
    run = replace(RUN, peak=early, step_peak=RUN.peak)
    text = shown(run, divergence=found, predicted=timeline(run, "a100"))
    parts = "rank-dependent order; a100; from the first forward on; memory above capacity"
    for words in parts.split("; "):
        assert words in text, words


def test_no_warnings_is_said() -> None:
    assert "no warnings" in shown(Llama(layers=8, checkpointing=True).run(LAYOUT, unknown=()))
