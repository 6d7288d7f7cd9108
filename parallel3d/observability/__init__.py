"""Observability: what each step of a run was: speed, memory, waits by axis, slow ranks, traces."""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.observability.exposed import ExposedTime, HostClock
    from parallel3d.observability.fields import FIELDS, START_FIELDS
    from parallel3d.observability.flops import ModelFlops, model_flops
    from parallel3d.observability.json_lines import JsonLines, read_json_lines
    from parallel3d.observability.memory import OomSnapshots
    from parallel3d.observability.metrics import Metrics, Sink
    from parallel3d.observability.profiling import ProfilerWindow, parse_steps
    from parallel3d.observability.progress import Progress
    from parallel3d.observability.stragglers import Straggler, find_stragglers
    from parallel3d.observability.stream_clock import StreamClock
    from parallel3d.observability.tensorboard_sink import TensorBoard

__all__ = [
    "FIELDS",
    "START_FIELDS",
    "ExposedTime",
    "HostClock",
    "JsonLines",
    "Metrics",
    "ModelFlops",
    "OomSnapshots",
    "ProfilerWindow",
    "Progress",
    "Sink",
    "Straggler",
    "StreamClock",
    "TensorBoard",
    "find_stragglers",
    "model_flops",
    "parse_steps",
    "read_json_lines",
]

export_lazily(
    __name__,
    {
        "observability.exposed": "ExposedTime HostClock",
        "observability.fields": "FIELDS START_FIELDS",
        "observability.flops": "ModelFlops model_flops",
        "observability.json_lines": "JsonLines read_json_lines",
        "observability.memory": "OomSnapshots",
        "observability.metrics": "Metrics Sink",
        "observability.profiling": "ProfilerWindow parse_steps",
        "observability.progress": "Progress",
        "observability.stragglers": "Straggler find_stragglers",
        "observability.stream_clock": "StreamClock",
        "observability.tensorboard_sink": "TensorBoard",
    },
)
