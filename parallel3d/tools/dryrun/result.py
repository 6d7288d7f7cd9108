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
        kind: ``matmul``, ``attention``, ``elementwise``, ``collective`` (it is issued) or ``wait`` (the
            computation waits for it).
        name: name of the torch operation, or ``all_gather`` and so on.
        module: path of the innermost module that runs, ``""`` outside all.
        phase: ``forward``, ``backward``, ``optimizer`` or ``other``.
        step: optimizer steps done before it.
        flops: FLOPs of a matmul or attention.
        moved: bytes read and written.
        sizes: (m, n, k) of a matmul, with the batch in m; (batch * heads, sequence, head dim) of attention.
        dtype: dtype of its output, such as ``bfloat16``.
        collective: index among ``DryRun.collectives``, of a collective and of its wait.
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
class DryRun:
    """What one rank of a world would do; returned by ``record``.

    Attributes:
        mesh: axis -> size, of the largest mesh with names; empty if none was made.
        axis_ranks: axis -> ranks of this rank's group.
        gpus_per_node: ranks of a node.
        steps: optimizer steps done.
        collectives, operations: all, in order.
        memory: memory over time, with samples where it changes.
        peak: the peak of the whole run.
        step_peak: the peak from the first forward on, without initialization; None without a forward.
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
