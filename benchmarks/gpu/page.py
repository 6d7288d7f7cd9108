"""What a GPU run writes: one JSON and one Markdown page of its parts, with the card and versions first."""

import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["Part", "card", "run_parts", "write"]


@dataclass
class Part:
    """One part of a run, such as ``truth``.

    Attributes:
        name: the part's name on the command line.
        title: one line on what it shows and against what.
        head, rows: a table: the names of its columns, and text or numbers.
        failed: what is wrong, one line each; empty if all holds.
        notes: what a reader of the numbers must know.
        data: everything measured, as JSON takes it.
        seconds: how long the part took.
    """

    name: str
    title: str
    head: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def card(device: str) -> dict[str, Any]:
    """Returns what a reader of the numbers must know of the machine: card, driver, versions, date."""
    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["card"] = properties.name
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(Exception):  # needs pynvml
            found["clock_mhz"] = torch.cuda.clock_rate()
    return found


def run_parts(parts: Mapping[str, Callable[[], Part]], out: Path, device: str) -> int:
    """Runs the parts one after another, and writes the page after each, so that a limit loses only the rest.

    A part that raises is written as failed, and the others run.

    Returns:
        The exit code: 0 if every part holds, else 1.
    """
    done: list[Part] = []
    for name, function in parts.items():
        start = time.perf_counter()
        try:
            part = function()
        except Exception as error:
            part = Part(name, "raised an error", failed=[f"{type(error).__name__}: {error}"])
            part.notes = traceback.format_exc().splitlines()[-12:]
        part.seconds = time.perf_counter() - start
        done.append(part)
        verdict = "FAILED: " + "; ".join(part.failed) if part.failed else "ok"
        print(f"{name}: {verdict} ({part.seconds:.0f} s)", flush=True)
        write(done, out, device)
    return int(any(part.failed for part in done))


def write(parts: list[Part], out: Path, device: str) -> None:
    """Writes ``out``.json and ``out``.md."""
    machine = card(device)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "parts": [asdict(part) for part in parts]}, indent=1)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    lines = ["# On " + machine.get("card", "a CPU, to try the scripts: no figure of a GPU"), ""]
    lines += [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    for part in parts:
        lines += [f"## {part.name}: {'FAILED' if part.failed else 'ok'}", "", part.title, ""]
        lines += [f"- wrong: {each}" for each in part.failed] + [""] * bool(part.failed)
        if part.rows:
            lines.append(f"| {' | '.join(part.head)} |")
            lines.append("|---" * len(part.head) + "|")
            lines += [f"| {' | '.join(map(_text, row))} |" for row in part.rows]
            lines.append("")
        lines += [f"- {note}" for note in part.notes] + [""] * bool(part.notes)
        lines += [f"{part.seconds:.0f} s", ""]
    out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
