"""Reads measured steps from a run's log, and fits a stack to them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d._util.arguments import counted
from parallel3d.errors import Parallel3dError, PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.observability.sinks import read_json_lines
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.stacks import PLAIN, Stack

# Constant -> (what its logarithm is off by, as a standard deviation; whether more is faster). What one step
# leaves open, the machine's matmuls, attention, small kernels, network or host, is shared by how unsure each
# was. Hosts differ most: 6 us an operation are usual, an H200's host took 36 (docs/gpu.md).
_PRIORS = {
    "gemm_sustained": (0.12, True),
    "attention_time": (0.2, False),
    "elementwise_time": (0.15, False),
    "collective_time": (0.25, False),
    "host_time": (0.6, False),
}
# Of the host's logarithm, where the fit begins; below 0: a slower host.
_HOST_STARTS = (0.0, -1.0, -2.0)
_NOISE = 0.03  # of a step's logarithm
_LIKELY = 4.0  # a fit: two standard deviations
_WARM_UP = 3  # steps that compile, allocate and warm up


@dataclass(frozen=True)
class LoggedRun:
    """What the last run in a log of ``JsonLines`` says about its steps.

    Attributes:
        layout: sizes of the mesh's axes.
        tokens_per_step: tokens of all ranks in one step.
        step_seconds: median over the steps after the first three.
        steps: number of the steps after the first three.
        memory_reserved: most bytes reserved in these steps; None on a CPU.
    """

    layout: MeshLayout
    tokens_per_step: int
    step_seconds: float
    steps: int
    memory_reserved: float | None = None

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds / self.layout.world_size


def read_run(path: str | PathLike[str]) -> LoggedRun:
    """Reads the last run of a log that ``JsonLines`` wrote.

    Raises:
        PlanningError: the log can't be read, has no start line, or too few steps.
    """
    start: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    try:
        for record in read_json_lines(path):
            if record.get("event") == "start":
                start, steps = record, []
            elif record.get("step_seconds"):
                steps.append(record)
    except (OSError, UnicodeDecodeError, Parallel3dError) as error:
        raise PlanningError(f"the log {path} can't be read: {error}") from error
    if start is None or not isinstance(start.get("mesh"), dict):
        raise PlanningError(f"{path} has no start line with a mesh; it must be a log of JsonLines")
    if not start.get("tokens_per_step"):
        raise PlanningError(f"{path}: the run's tokens_per_step is not known; give it to Metrics")
    if len(steps) <= _WARM_UP:
        raise PlanningError(
            f"{path}: its last run has {len(steps)} steps; it must have more than {_WARM_UP}, the first "
            f"{_WARM_UP} are left out"
        )
    sizes = {name.removeprefix("dp_"): size for name, size in start["mesh"].items()}
    if unknown := sorted(set(sizes) - {"replicate", "shard", "cp", "tp"}):
        raise PlanningError(f"{path}: its mesh has an axis {unknown[0]!r}, which the planner lacks")
    axes = (sizes.get(axis, 1) for axis in ("replicate", "shard", "tp"))
    reserved = [r["memory_reserved_peak"] for r in steps if r.get("memory_reserved_peak")]
    return LoggedRun(
        MeshLayout(*axes, cp=sizes.get("cp", 1)),
        start["tokens_per_step"],
        statistics.median(r["step_seconds"] for r in steps[_WARM_UP:]),
        len(steps) - _WARM_UP,
        max(reserved, default=None),
    )


def fit_stack(measured: Sequence[tuple[Prediction, float]], name: str = "calibrated") -> Stack:
    """Returns the stack whose predictions are nearest to speeds measured on one machine.

    Five constants are fitted: the rates of matmuls, attention and small kernels, the time of collectives, and
    that of the host. One measured step can't determine all five. So the most probable values are taken, if
    the logarithms of constants are normally distributed: a constant changes the more, the less certain it is
    and the larger its share of the step. Measurements of more layouts determine them better.

    Args:
        measured: (prediction, measured tokens/s/GPU), all of one machine and stack.

    Raises:
        PlanningError: ``measured`` is empty, has several GPUs or stacks, or a speed isn't positive.
    """
    if not measured:
        raise PlanningError("measured is empty; give at least one measured step")
    first = measured[0][0]
    gpu, base = first.cluster.gpu, first.workload.profile
    for prediction, speed in measured:
        if prediction.cluster.gpu != gpu or prediction.workload.profile != base:
            raise PlanningError("measured has steps of several GPUs or stacks; fit each by itself")
        if not speed > 0:
            raise PlanningError(f"a measured speed is {speed!r}; it must be above 0")
    wanted = np.array([log(speed) for _, speed in measured])
    spread = np.array([sigma for sigma, _ in _PRIORS.values()])
    source = f"fitted to {counted(len(measured), 'measured run')} on {gpu.name}"

    def stack(moved: np.ndarray) -> Stack:
        values = {
            constant: base.value(constant) * exp(by if more_is_faster else -by)
            for (constant, (_, more_is_faster)), by in zip(_PRIORS.items(), moved, strict=True)
        }
        return replace(base.with_values(name, values, source), measured_on=gpu.name)

    def speeds(moved: np.ndarray) -> np.ndarray:
        tried = stack(moved)
        found = []
        for p, _ in measured:
            work = replace(p.workload, stack=tried)
            found.append(predict(p.model, p.layout, p.cluster, work).tokens_per_second_per_gpu)
        return np.log(found)

    tried: list[tuple[float, np.ndarray]] = []  # (improbability, moved)
    for start in _HOST_STARTS:  # a host that is ahead of the GPU has no slope
        if tried and min(tried, key=itemgetter(0))[0] < _LIKELY:
            break
        moved = np.zeros(len(_PRIORS))
        moved[list(_PRIORS).index("host_time")] = start
        for _ in range(5):  # Gauss-Newton
            now = speeds(moved)
            off = float(np.sum(((wanted - now) / _NOISE) ** 2) + np.sum((moved / spread) ** 2))
            tried.append((off, moved))
            slopes = np.stack(
                [(speeds(moved + step) - now) / 0.01 for step in np.eye(len(_PRIORS)) * 0.01],
                axis=1,
            )
            target = wanted - now + slopes @ moved
            variance = (slopes * spread**2) @ slopes.T + _NOISE**2 * np.eye(len(wanted))
            moved = spread**2 * (slopes.T @ np.linalg.solve(variance, target))
    return stack(min(tried, key=itemgetter(0))[1])


def unlikely(fitted: Stack, base: Stack) -> list[str]:
    """Returns the names of the constants that a fit moved by more than three times their uncertainty.

    If there are any, the measured run probably isn't what was predicted: it had another GPU, sequence length
    or model.
    """
    moved = {name: abs(log(fitted.value(name) / base.value(name))) for name in _PRIORS}
    return [name for name, by in moved.items() if by > 3 * _PRIORS[name][0]]


def write_stack(stack: Stack, path: str | PathLike[str]) -> Path:
    """Writes ``stack`` to a TOML file for ``Workload(stack=read_stack_file(path))``; returns the path."""
    quoted = partial(json.dumps, ensure_ascii=False)  # a string of JSON is one of TOML
    each = (f"{family} = {quoted(kernel)}" for family, kernel in stack.attention.items())
    kernels = ", ".join(each)
    lines = [f"[stack.{quoted(stack.name)}]", f"attention = {{ {kernels} }}"]
    lines += [f"{key} = {quoted(getattr(stack, key))}" for key in PLAIN]
    lines += [
        f"{name} = {{ value = {each.value:.6g}, source = {quoted(each.source)} }}"
        for name, each in stack.own.items()
    ]
    found = Path(path)
    found.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found
