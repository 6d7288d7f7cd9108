"""What a GPU run writes: one JSON and one Markdown page of its parts, with the card and versions first."""

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["Part", "card", "compose"]


@dataclass
class Part:
    """One part of a run, such as ``truth1``.

    Attributes:
        name: the part's name on the command line.
        title: one line on what it shows and against what.
        head, rows: a table: the names of its columns, and text or numbers.
        failed: what is wrong, one line each; empty if all holds.
        notes: what a reader of the numbers must know.
        left_out: cases for which there was no time: the part isn't complete.
        data: everything measured, as JSON takes it.
        latest: the part that this process has made last, whose rows are written as they come.
    """

    name: str
    title: str
    head: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    latest: ClassVar["Part | None"] = None

    def __post_init__(self) -> None:
        Part.latest = self


def card(device: str | None) -> dict[str, Any]:
    """Returns what a reader of the numbers must know of the machine: card, driver, versions, date.

    Args:
        device: ``cuda`` or ``cpu``, or None: cuda if there is one.
    """
    import torch

    if device is None or (device == "cuda" and not torch.cuda.is_available()):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["card"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(Exception):  # needs pynvml
            found["clock_mhz"] = torch.cuda.clock_rate()
    return found


def compose(folder: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Writes page.json and page.md of what the parts' files hold; see ``runner.py``."""
    (folder / "page.json").write_text(json.dumps(list(results), indent=1) + "\n", encoding="utf-8")
    # Parts of a resumed run may be of another day, or card.
    machines = {_described(result["machine"]): None for result in results if result["machine"]}
    cards = {result["machine"].get("card") for result in results if result["machine"]}
    name = " and ".join(sorted(filter(None, cards)))
    lines = ["# On " + (name or "a CPU, to try the scripts: no figure of a GPU"), ""]
    lines += [f"{machine}\n" for machine in machines]
    for result in results:
        part = Part(**result["part"])
        wrong, status = "FAILED" if part.failed else "ok", result["status"]
        verdict = (
            wrong if status == "done" else f"{status}; so far {wrong}" if part.rows else status
        )
        lines += [f"## {part.name}: {verdict}", "", part.title, ""]
        if len(machines) > 1 and result["machine"]:
            lines += [_described(result["machine"]), ""]
        lines += [f"- wrong: {each}" for each in part.failed] + [""] * bool(part.failed)
        if part.rows:
            lines.append(f"| {' | '.join(part.head)} |")
            lines.append("|---" * len(part.head) + "|")
            lines += [f"| {' | '.join(map(_text, row))} |" for row in part.rows]
            lines.append("")
        lines += [f"- left out, no time was left: {each}" for each in part.left_out]
        lines += [f"- {note}" for note in part.notes]
        lines += [""] * bool(part.notes or part.left_out) + [f"{result['seconds']:.0f} s", ""]
    (folder / "page.md").write_text("\n".join(lines), encoding="utf-8")


def _described(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
