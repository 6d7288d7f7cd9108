"""What of a layer's communication hides behind its compute, as bars on lanes: the report's timeline."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.planner.constants import constant
from parallel3d.planner.model_spec import Unit
from parallel3d.planner.overlap import UnitTimes
from parallel3d.planner.prediction import Prediction

__all__ = ["LANES", "Span", "layer_spans"]

LANES = ("compute", "tp", "gather", "reduce", "all-reduce")


@dataclass(frozen=True)
class Span:
    """A bar: ``seconds`` from ``start`` on ``lane``.

    Attributes:
        kind: "compute", "tensor parallel", "slowdown", "hidden" or "exposed".
        what: in words.
        phase: "forward" or "backward".
    """

    lane: str
    start: float
    seconds: float
    kind: str
    what: str
    phase: str

    @property
    def end(self) -> float:
        return self.start + self.seconds


def layer_spans(prediction: Prediction) -> list[Span]:
    """One block between two others, forward and then backward, in the last micro-batch of a step.

    Durations are the prediction's. The order on a lane is a sketch: tensor parallelism's collectives are
    spread evenly between equal parts of compute, and the engine's collectives follow each other, as the
    model of time adds them up.
    """
    blocks = [each for each in prediction.time.units if each[0].kind == "block"]
    if not blocks:
        return []
    unit, times = max(blocks, key=lambda each: each[0].count)
    around = prediction.workload.sequence_parallel
    forward = _phase(
        0.0,
        "forward",
        _pieces(unit, times.forward, times.tp_forward, around),
        [("gather", "parameters of the next block", times.gather)],
    )
    end = max((span.end for span in forward), default=0.0)
    backward = _phase(
        end * 1.04,
        "backward",
        _pieces(unit, times.backward, times.tp_backward, around),
        _behind(times),
    )
    return forward + backward


def _behind(times: UnitTimes) -> list[tuple[str, str, float]]:
    return [
        ("gather", "parameters of the block before", times.gather_again),
        ("reduce", "gradients of the block after", times.reduce),
        ("all-reduce", "gradients of the block after, between copies", times.all_reduce),
    ]


def _pieces(unit: Unit, whole: float, tp: float, around: bool) -> list[tuple[str, float]]:
    """(kind, seconds) of compute and tensor parallelism's collectives in turn.

    Args:
        whole: seconds, with ``tp`` of them in collectives.
        around: a collective before and after each part (sequence parallel), else only after.
    """
    if not tp:
        return [("compute", whole)]
    parts = max(len(unit.tp_inputs), len(unit.tp_outputs), 1)
    before = tp / parts / 2 if around else 0.0
    one = [
        ("tensor parallel", before),
        ("compute", (whole - tp) / parts),
        ("tensor parallel", tp / parts - before),
    ]
    return one * parts


def _phase(
    start: float, phase: str, pieces: list[tuple[str, float]], beside: list[tuple[str, str, float]]
) -> list[Span]:
    """Compute from ``start`` on with the collectives ``beside`` it, in the arithmetic of ``Exposed.wait``."""
    compute = sum(seconds for _, seconds in pieces)
    together = sum(seconds for _, _, seconds in beside)
    slower = constant("overlap_slowdown").value * min(together, compute)
    spans, at = [], start
    for kind, seconds in [*pieces, ("slowdown", slower)]:
        lane = "tp" if kind == "tensor parallel" else "compute"
        what = "slower under collectives" if kind == "slowdown" else f"{kind} of the block"
        spans.append(Span(lane, at, seconds, kind, what, phase))
        at += seconds
    end, at = at, start
    for lane, what, seconds in beside:
        hidden = min(max(end - at, 0.0), seconds)
        spans.append(Span(lane, at, hidden, "hidden", what, phase))
        spans.append(Span(lane, at + hidden, seconds - hidden, "exposed", what, phase))
        at += seconds
    return [span for span in spans if span.seconds > 0]
