"""Observability: speed, memory, waits by mesh axis, slow ranks and traces of the steps of a run."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.observability.exposed import ExposedTime as ExposedTime
    from parallel3d.observability.exposed import HostClock as HostClock
    from parallel3d.observability.exposed import StreamClock as StreamClock
    from parallel3d.observability.flops import ModelFlops as ModelFlops
    from parallel3d.observability.flops import model_flops as model_flops
    from parallel3d.observability.metrics import FIELDS as FIELDS
    from parallel3d.observability.metrics import START_FIELDS as START_FIELDS
    from parallel3d.observability.metrics import Metrics as Metrics
    from parallel3d.observability.metrics import OomSnapshots as OomSnapshots
    from parallel3d.observability.metrics import Sink as Sink
    from parallel3d.observability.profiling import ProfilerWindow as ProfilerWindow
    from parallel3d.observability.profiling import parse_steps as parse_steps
    from parallel3d.observability.progress import Progress as Progress
    from parallel3d.observability.sinks import JsonLines as JsonLines
    from parallel3d.observability.sinks import TensorBoard as TensorBoard
    from parallel3d.observability.sinks import read_json_lines as read_json_lines
    from parallel3d.observability.stragglers import Straggler as Straggler
    from parallel3d.observability.stragglers import find_stragglers as find_stragglers
else:
    export_lazily(
        __name__,
        {
            ".exposed": "ExposedTime HostClock StreamClock",
            ".flops": "ModelFlops model_flops",
            ".metrics": "FIELDS START_FIELDS Metrics OomSnapshots Sink",
            ".profiling": "ProfilerWindow parse_steps",
            ".progress": "Progress",
            ".sinks": "JsonLines TensorBoard read_json_lines",
            ".stragglers": "Straggler find_stragglers",
        },
    )
