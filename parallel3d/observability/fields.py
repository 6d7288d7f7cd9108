"""What the fields of a record mean; docs/observability.md has the same table."""

__all__ = ["FIELDS", "OWN_FIELDS", "START_FIELDS"]

FIELDS = {
    "step": "number of the step, as given to `Metrics.step`",
    "time": "when it ended, seconds since 1970",
    "loss": "as logged",
    "grad_norm": "as logged",
    "step_seconds": "wall time of the step on this rank, with loading data",
    "data_seconds": "of it, in `Metrics.loading_data`",
    "tokens_per_second": "tokens of the step, over all ranks, by its wall time",
    "tflops_per_rank": "model TFLOP/s of one rank",
    "mfu": "that by the device's dense bf16 peak; convention in the start line",
    "mfu_6n": "the same by 6 N + 12 L h s, as most others count",
    "memory_peak": "bytes: most allocated in the step (CUDA); most resident so far (CPU)",
    "memory_reserved_peak": "bytes: most that the allocator held in the step (CUDA)",
    "alloc_retries": "times so far that the allocator freed its caches to go on (CUDA)",
    "ooms": "times so far that it had no memory (CUDA)",
    "exposed_seconds": "sampled: axis -> seconds that this rank waited for communication over it",
    "exposed_seconds_mean": "sampled: the same, mean over all ranks",
    "own_seconds": "sampled: the step's seconds on this rank without these waits",
    "memory_peak_max": "sampled: largest `memory_peak` of all ranks, bytes",
    "memory_peak_max_rank": "sampled: the rank that has it",
    "own_seconds_max": "sampled: largest `own_seconds` of all ranks (of its last samples the least)",
    "own_seconds_median": "sampled: the median of them",
    "stragglers": "sampled: list of {axes, times, cause, text}; empty while there are too few samples",
}
"""Name -> meaning. What else is logged is there under its own name."""

OWN_FIELDS = (frozenset(FIELDS) | {"event"}) - {"loss", "grad_norm"}
"""Names that nothing else can be logged under."""

START_FIELDS = {
    "event": '`"start"`: which no step has',
    "time": "seconds since 1970",
    "version": "of parallel3d",
    "torch": "its version",
    "world_size": "ranks of the mesh",
    "mesh": "axis -> size",
    "device": "its type",
    "device_name": "what torch calls it (CUDA)",
    "memory_total": "bytes of the device (CUDA)",
    "tokens_per_step": "over all ranks",
    "every": "steps between two samples",
    "flops_per_token": "model FLOPs, forward and backward",
    "flops_per_token_6n": "the same by the common formula",
    "mfu_convention": "what the first counts",
    "peak_flops": "FLOP/s of one device, as `mfu` takes it",
}
"""What the first line of a run has: field -> meaning."""
