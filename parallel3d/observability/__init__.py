"""Observability: speed, memory, waits by mesh axis, slow ranks and traces of the steps of a run."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.observability.exposed import ExposedTime, HostClock, StreamClock
    from parallel3d.observability.flops import ModelFlops, model_flops
    from parallel3d.observability.metrics import FIELDS, START_FIELDS, Metrics, OomSnapshots, Sink
    from parallel3d.observability.profiling import ProfilerWindow, parse_steps
    from parallel3d.observability.progress import Progress
    from parallel3d.observability.sinks import JsonLines, TensorBoard, read_json_lines
    from parallel3d.observability.stragglers import Straggler, find_stragglers

_EXPORTS = {
    "observability.exposed": "ExposedTime HostClock StreamClock",
    "observability.flops": "ModelFlops model_flops",
    "observability.metrics": "FIELDS Metrics OomSnapshots START_FIELDS Sink",
    "observability.profiling": "ProfilerWindow parse_steps",
    "observability.progress": "Progress",
    "observability.sinks": "JsonLines TensorBoard read_json_lines",
    "observability.stragglers": "Straggler find_stragglers",
}
__all__ = [name for names in _EXPORTS.values() for name in names.split()]

export_lazily(__name__, _EXPORTS)
