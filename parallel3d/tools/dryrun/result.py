"""What a dry run has found, as plain values: they compare, and go to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel3d._util.recorder import Collective

KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "unsharded parameters",
    "communication",
    "activations",
    "inputs",
    "temporaries",
)
"""What memory is for, in the order in which it is drawn, from the bottom."""


@dataclass(frozen=True)
class Operation:
    """One thing that the rank does, in the order of the program.

    Attributes:
        kind: ``matmul``, ``attention``, ``elementwise``, ``collective`` (it is issued) or ``wait`` (the
            computation waits for it).
        name: of the torch operation; of a collective ``all_gather`` and so on.
        module: path of the innermost module that runs, ``""`` outside all.
        phase: ``forward``, ``backward``, ``optimizer`` or ``other``.
        step: optimizer steps done before it.
        flops: of a matmul or attention.
        moved: bytes read and written.
        sizes: (m, n, k) of a matmul, m with the batch; (heads of all sequences, their length, head dim) of an
            attention.
        dtype: of what it writes, such as ``bfloat16``.
        collective: position among ``DryRun.collectives``, of a collective and of its wait.
        stream: on which it runs; 0 is the one that computes. A collective is put on it by the program, and
            runs on the backend's own.
        after: positions of operations on other streams that are to be over before. What is not on stream 0
            comes after all that was put on that one before.
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
    """Bytes alive by kind (those of ``KINDS`` that aren't 0) from the operation at this position on."""

    operation: int
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class LiveTensor:
    """A tensor's memory at the peak.

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
        operation: position among ``DryRun.operations``.
        bytes: all of it. by_kind: its parts.
        phase, module, name: of that operation.
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
        shape: of the plain model's. local_shape: of what this rank holds.
        placements: by mesh axis, such as ``{"replicate": "R", "shard": "S(0)"}``; empty for a plain tensor.
        bytes: that this rank holds.
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
    """A place where the program asked for a tensor's value, and got NaN.

    Attributes:
        where: ``file:line, in function``.
        what: ``item``, ``tolist`` and so on.
        count: how often.
    """

    where: str
    what: str
    count: int


@dataclass(frozen=True)
class DryRunWarning:
    """What is likely to be wrong, slow or dangerous.

    Attributes:
        kind: ``exposed gather``, ``tp across nodes``, ``tiny messages``, ``rank-dependent order``, ...
        text: what it is, with its numbers, and what to do.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class DryRun:
    """What one rank of a world would do; ``record`` returns it.

    Attributes:
        rank, world_size: whose run it is.
        mesh: axis -> size, of the largest mesh with names; empty if none was made.
        axis_ranks: axis -> ranks of this rank's group.
        gpus_per_node: ranks of a node, for what crosses nodes.
        steps: optimizer steps done.
        collectives: in order. operations: all, in order. memory: over time; samples where it changes.
        peak: of the whole run. step_peak: from the first forward on, without what initialisation takes; None
            if there was no forward.
        seconds: that the dry run took.
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
    warnings: tuple[DryRunWarning, ...] = field(default=())
    seconds: float = 0.0
    step_peak: Peak | None = None
