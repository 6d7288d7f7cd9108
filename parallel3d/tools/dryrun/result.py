"""The result of a dry run, as plain values that can be compared and written as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d._util.recorder import Collective

KINDS = (
    *("parameters", "gradients", "optimizer state", "buffers", "unsharded parameters"),
    *("communication", "activations", "inputs", "temporaries"),
)
"""What memory is for, in the order in which it is drawn, from the bottom."""


@dataclass(frozen=True)
class Operation:
    """One operation of the rank, in the order of the program.

    Attributes:
        kind: ``matmul``, ``attention``, ``elementwise``, ``host_copy`` (between the GPU's memory and the
            CPU's), ``collective`` (it is issued) or ``wait`` (the computation waits for it).
        name: name of the torch operation, or ``all_gather`` and so on.
        module: path of the innermost module that runs, ``""`` outside all.
        phase: ``forward``, ``backward``, ``optimizer`` or ``other``.
        step: optimizer steps done before it.
        flops: FLOPs of a matmul or attention.
        moved: bytes read and written.
        sizes: (m, n, k) of a matmul, with the batch in m; (batch * heads, sequence, head dim) of attention.
        dtype: dtype of its output, such as ``bfloat16``.
        collective: index among ``DryRun.collectives``, of a collective and of its wait; None for a wait for
            what ``after`` names.
        stream: the stream that the program puts it on; 0 is the computation's.
        after: indices of operations on other streams that come before. What is not on stream 0 also comes
            after everything put on stream 0 before.
    """

    kind: str
    name: str
    module: str
    phase: str
    step: int
    flops: float = 0.0
    moved: int = 0
    sizes: tuple[int, int, int] | None = None
    dtype: str = ""
    collective: int | None = None
    stream: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemorySample:
    """Bytes alive by kind (without zeros) from the operation with index ``operation`` on."""

    operation: int
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at the peak.

    Attributes:
        module: path of the module in which it was made; a parameter's name.
        made_by: the torch operation that made it.
    """

    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    made_by: str


@dataclass(frozen=True)
class Peak:
    """When most memory was alive, and what it was.

    Attributes:
        operation: index among ``DryRun.operations``.
        phase, module, name: those of that operation.
        largest: the largest tensors, largest first.
    """

    operation: int
    bytes: int
    by_kind: dict[str, int]
    phase: str
    module: str
    name: str
    largest: tuple[LiveTensor, ...]


@dataclass(frozen=True)
class ParameterPlacement:
    """One parameter of the model.

    Attributes:
        shape, local_shape: the plain model's shape, and the shape of this rank's shard.
        placements: mesh axis -> placement, such as ``{"replicate": "R", "shard": "S(0)"}``; empty for a plain
            tensor.
        bytes: size of this rank's shard.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placements: dict[str, str]
    bytes: int
    requires_grad: bool


@dataclass(frozen=True)
class UnknownRead:
    """A place where the program has read a tensor's value, which was NaN.

    Attributes:
        where: ``file:line, in function``.
        what: ``item``, ``tolist`` and so on.
        count: how often.
        last: how often in the last step, what was read before the first forward left out; None: not known.
    """

    where: str
    what: str
    count: int
    last: int | None = None


@dataclass(frozen=True)
class DryRunWarning:
    """What is likely to be wrong, slow or dangerous.

    Attributes:
        kind: ``exposed gather``, ``tp across nodes``, ``tiny messages``, ``rank-dependent order``, ...
        text: a description with numbers, and what to do.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StepCounts:
    """What keeps a GPU's host from running ahead, in one optimizer step.

    Attributes:
        reads: how often a value was read that the GPU computes (``item()``, ``tolist()``, a printed number).
        host_waits: how often the host waited for an event, a stream or the GPU.
        allocations: how often memory was taken from the caching allocator.
    """

    reads: int
    host_waits: int
    allocations: int


@dataclass(frozen=True)
class StreamOperation:
    """One of the two operations of a race.

    Attributes:
        name: name of the torch operation, or ``all_gather`` and so on.
        does: ``reads`` or ``writes``.
        stream: the stream that it is on: ``compute``, the name of the variable with the stream, ``host``, or
            ``communicator of`` an axis.
        module: path of the innermost module that runs. unit: the engine's unit.
        phase, step: as in ``Operation``.
        line: ``file:line, in function``.
    """

    name: str
    does: str
    stream: str
    module: str
    unit: str
    phase: str
    step: int
    line: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module or self.unit, self.phase, f"step {self.step}")))
        return f"{self.name} {self.does} it on stream {self.stream!r} ({where})\n    {self.line}"


@dataclass(frozen=True)
class Race:
    """Two operations on two streams use the same memory, one of them writes, and none waits for the other.

    Attributes:
        kind: ``no wait between``, or ``memory used again``: the memory that the first uses is freed, and the
            allocator may give it to the second.
        memory: what it is for, one of ``KINDS``. shape, dtype, made_by: of its first tensor.
        freed: the line that frees it; ``""`` if it is not freed.
        missing: the wait that is missing.
        count: how often it happens.
    """

    kind: str
    memory: str
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    freed: str
    first: StreamOperation
    second: StreamOperation
    missing: str
    count: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "1"
        freed = f", freed at {self.freed}," if self.freed else ""
        then = "the same memory, given to another tensor:\n  " if self.freed else ""
        return (
            f"{self.kind}: {self.memory} {shape} {self.dtype} (made by {self.made_by}){freed}\n"
            f"  {self.first}\n  {then}{self.second}\n  missing: {self.missing}"
        )


@dataclass(frozen=True)
class DryRun:
    """What one rank of a world would do; returned by ``record``.

    Attributes:
        mesh: axis -> size, of the largest mesh with names; empty if none was made.
        axis_ranks: axis -> ranks of this rank's group, also of axes as one, such as ``shard_cp``.
        gpus_per_node: ranks of a node.
        steps: optimizer steps done.
        collectives, operations: all, in order.
        memory: memory over time, with samples where it changes.
        peak: the peak of the whole run.
        step_peak: the peak from the first forward on, without initialization; None without a forward.
        step_counts: reads, waits and allocations by step; the last entry is what follows the last step.
        races: what ``check_streams`` has found; None if it was not asked for.
        seconds: duration of the dry run.
    """

    rank: int
    world_size: int
    mesh: dict[str, int]
    axis_ranks: dict[str, tuple[int, ...]]
    gpus_per_node: int
    steps: int
    collectives: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    memory: tuple[MemorySample, ...]
    peak: Peak
    parameters: tuple[ParameterPlacement, ...]
    unknown: tuple[UnknownRead, ...] = ()
    warnings: tuple[DryRunWarning, ...] = ()
    seconds: float = 0.0
    step_peak: Peak | None = None
    races: tuple[Race, ...] | None = None
    step_counts: tuple[StepCounts, ...] = ()
