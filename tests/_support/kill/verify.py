"""What train.py's log and last checkpoint say of a run that was killed, beside those of one that wasn't."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llama import Llama, LlamaConfig
from step_log import digest_of_rows
from text import Samples, read_text
from torch import Tensor

import parallel3d as p3d


@dataclass
class Start:
    """One start of a job, as far as it came.

    Attributes:
        step, samples: where it went on.
        mesh: on which (replicate, shard, tp).
        steps: step -> its line of the log.
    """

    step: int
    samples: int
    mesh: tuple[int, ...]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Record:
    """A run: its starts, and its last line if it was done."""

    starts: list[Start] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @classmethod
    def read(cls, log: Path) -> "Record":
        """Raises ValueError where steps don't follow one another, or samples."""
        record = cls()
        for line in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
            match line.get("event"):
                case "start":
                    record.starts.append(Start(line["step"], line["samples"], tuple(line["mesh"])))
                case "end":
                    record.end = line
                case _:
                    record._add(line)
        return record

    def _add(self, line: dict[str, Any]) -> None:
        start = self.starts[-1]
        before = list(start.steps.values())[-1:]
        step = before[0]["step"] + 1 if before else start.step
        sample = before[0]["samples"][1] + 1 if before else start.samples
        if (line["step"], line["samples"][0]) != (step, sample):
            raise ValueError(f"step {step} with sample {sample} should follow, not {line}")
        start.steps[step] = line

    def lines(self) -> Iterator[dict[str, Any]]:
        """Of all starts: a step that was done again is there again."""
        for start in self.starts:
            yield from start.steps.values()

    def kept(self) -> dict[int, dict[str, Any]]:
        """Step -> its line, of the steps that led to the end: what was done again counts once."""
        found: dict[int, dict[str, Any]] = {}
        for start in self.starts:
            found = {step: line for step, line in found.items() if step < start.step} | start.steps
        return found


def wrong_samples(record: Record, data: Path, batch: int) -> list[str]:
    """Compares what the ranks had, by its digest, with the samples that a step should have.

    Returns:
        What is wrong.
    """
    config = LlamaConfig.named("nano")
    samples = Samples(read_text(data), config.max_seq_len, seed=0)
    wrong = []
    for step, line in record.kept().items():
        first = step * batch
        if line["samples"] != [first, first + batch - 1]:
            wrong.append(f"step {step} has the samples {line['samples']}")
        if line["digest"] != digest_of_rows(samples.batch(first, batch)):
            wrong.append(f"step {step}: the ranks had other tokens than those of its samples")
    return wrong


def different_steps(whole: Record, killed: Record, tolerance: float) -> tuple[list[str], float]:
    """Every step of every start beside the same step of the run that nobody killed.

    Args:
        tolerance: 0: bit for bit, the norm too; else for the loss.

    Returns:
        (what differs, the loss's largest difference).
    """
    expected, largest, wrong = whole.kept(), 0.0, []
    for line in killed.lines():
        step = line["step"]
        for name in ("samples", "digest", *(() if tolerance else ("loss", "norm"))):
            if line[name] != expected[step][name]:
                wrong.append(f"step {step}: {name} {line[name]}, not {expected[step][name]}")
        difference = abs(line["loss"] - expected[step]["loss"])
        largest = max(largest, difference)
        if not difference <= tolerance:
            wrong.append(f"step {step}: the loss is {difference:.1e} off")
    return wrong, largest


def different_end(whole: Record, killed: Record, tolerance: float) -> list[str]:
    """The steps that led to the end; with a tolerance of 0 the last weights too, bit for bit."""
    wrong = []
    if list(killed.kept()) != list(whole.kept()):
        wrong.append(f"the steps that count are {list(killed.kept())}")
    if killed.end is None or (killed.end != whole.end and not tolerance):
        wrong.append(f"the end is {killed.end}, not {whole.end}")
    return wrong


def different_states(one: Path, other: Path) -> list[str]:
    """Names of what is not the same, bit for bit, in the newest checkpoints of two runs."""
    a, b = _state_of(one), _state_of(other)
    return [
        name for name in {**a, **b} if name not in a or name not in b or not _same(a[name], b[name])
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def _state_of(folder: Path) -> dict[str, Any]:
    """Model, optimizer and the rest of a run's newest checkpoint, in this process, by name."""
    model = Llama(LlamaConfig.named("nano"))
    optimizer = torch.optim.AdamW(model.parameters())
    info = p3d.checkpoint.load(folder, model, optimizer)
    if info.skipped:
        raise ValueError(f"the newest checkpoint is damaged: {info.skipped}")
    found: dict[str, Any] = {"step": info.step, **dict(model.named_parameters())}
    for name, param in model.named_parameters():
        found |= {f"{name}: {key}": value for key, value in optimizer.state[param].items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {**found, "groups": groups, **info.extra}
