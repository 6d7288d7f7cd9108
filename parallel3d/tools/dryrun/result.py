"""The result of a dry run: plain values that can be compared, and written as JSON and back without loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from parallel3d._util.recorder import Collective
from parallel3d.errors import DryRunError

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
            CPU's), ``collective`` (it is issued) or ``wait`` (the compute stream waits for one).
        name: name of the torch operation, or ``all_gather`` and so on.
        module: path of the innermost module that runs, ``""`` outside all.
        phase: ``forward``, ``backward``, ``optimizer`` or ``other``.
        step: optimizer steps done before it.
        flops: FLOPs of a matmul or attention.
        moved: bytes read and written.
        sizes: (m, n, k) of a matmul, with the batch in m; (batch * heads, sequence, head dim) of attention.
        dtype: dtype of its output, such as ``bfloat16``.
        collective: for a collective and its wait its index in ``DryRun.collectives``; None for a wait for the
            operations in ``after``.
        stream: number of the stream that the program puts it on; 0 is the compute stream.
        after: indices of operations on other streams that it waits for. An operation on another stream than 0
            also comes after everything put on stream 0 before.
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
    """Bytes alive by kind (kinds without any left out) from the operation with index ``operation`` on."""

    operation: int
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at the peak.

    Attributes:
        module: path of the module in which it was made; for a parameter its name.
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
    """The moment when most memory was alive, and what it was for.

    Attributes:
        operation: index in ``DryRun.operations``.
        phase, module, name: where in the program that operation is, and its name.
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
    """Where one parameter of the model is: its shapes and placements.

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
    """A place where the program reads a tensor's value, which is NaN in a dry run.

    Attributes:
        where: ``file:line, in function``.
        what: the call: ``item``, ``tolist`` and so on.
        count: how often in the whole run.
        last: how often in the last step, without reads before its first forward; None: not known.
    """

    where: str
    what: str
    count: int
    last: int | None = None


@dataclass(frozen=True)
class DryRunWarning:
    """A text on what is likely to be wrong, slow or dangerous.

    Attributes:
        kind: ``exposed gather``, ``tp across nodes``, ``tiny messages``, ``rank-dependent order``, ...
        text: a description with numbers, and what to do.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StepCounts:
    """How often, in one optimizer step, something happens that keeps the host from running ahead of the GPU.

    Attributes:
        reads: how often a value was read that the GPU computes (``item()``, ``tolist()``, a printed number).
        host_waits: how often the host waited for an event, a stream or the GPU.
        allocations: how often memory was allocated from the caching allocator.
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
        stream: name of its stream: ``compute``, the name of the variable that holds the stream, ``host``, or
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
    """Two operations on two streams that use the same memory, one of them writing, with no wait between them.

    Attributes:
        kind: ``no wait between``, or ``memory used again``: the memory was freed after the first operation,
            and the allocator may give it to the second.
        memory: what the memory is for, one of ``KINDS``. shape, dtype, made_by: of the first tensor in it.
        freed: the line that frees it; ``""`` if it is not freed.
        missing: a sentence on the wait that is missing.
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
class CaptureObstacle:
    """What keeps a training step from being captured in a CUDA graph, or its replays from being right.

    Attributes:
        kind: one of ``captures.KINDS``.
        what: a sentence on what the program does.
        module: path of the innermost module that runs. unit: the engine's unit.
        phase: as in ``Operation``. step: the step, counted from 1.
        line: ``file:line, in function``; ``""`` if it is known only at the step's end.
        called: the user's line from which ``line`` is reached; ``""`` if it is the same.
        remedy: a sentence on what to do.
        count: how often it happens.
    """

    kind: str
    what: str
    module: str
    unit: str
    phase: str
    step: int
    line: str
    called: str
    remedy: str
    count: int

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module or self.unit, self.phase, f"step {self.step}")))
        lines = [f"{self.kind}: {self.what} ({where}{f', {self.count} times' * (self.count > 1)})"]
        lines += [f"  {self.line}"] if self.line else []
        lines += [f"  called at {self.called}"] if self.called else []
        return "\n".join([*lines, f"  remedy: {self.remedy}"])


@dataclass(frozen=True)
class Reserved:
    """What torch's caching allocator has reserved on the GPU at the end of the run, with default settings.

    Attributes:
        bytes: of all segments. segments: their number.
        expandable: the bytes with ``PYTORCH_ALLOC_CONF=expandable_segments:True`` instead.
    """

    bytes: int
    segments: int
    expandable: int


@dataclass(frozen=True)
class DryRun:
    """What one rank of a world would do; returned by ``record``.

    Attributes:
        mesh: axis -> size, of the largest named mesh that the program made; empty if it made none.
        axis_ranks: axis -> ranks of this rank's group; also for flattened axes, such as ``shard_cp``.
        gpus_per_node: ranks of a node.
        steps: optimizer steps done.
        collectives, operations: all, in order.
        memory: memory over time, with samples where it changes.
        peak: the peak of the whole run.
        step_peak: the peak from the first forward on, without initialization; None without a forward.
        step_counts: the ``StepCounts`` of each step; the last entry is for what follows the last step.
        races: races that ``check_streams`` found; None if it was not asked for.
        obstacles: obstacles that ``check_capture`` found; None if it was not asked for.
        reserved: what torch's caching allocator reserves for this run; None on CPUs.
        seconds: how long the dry run itself took.
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
    obstacles: tuple[CaptureObstacle, ...] | None = None
    step_counts: tuple[StepCounts, ...] = ()
    reserved: Reserved | None = None


# As JSON, and back.

VERSION = 1
_FORMAT = "parallel3d dry run"


def to_json(run: DryRun) -> str:
    """Returns ``run`` as one line of JSON, which ``from_json`` reads.

    A tuple of records, such as operations, becomes ``{"columns": [...], "rows": [[...], ...]}``. Later
    versions of this package read it too; fields that are new there get their defaults.
    """
    data = {"format": _FORMAT, "version": VERSION, "run": _encoded(run)}
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str | bytes) -> DryRun:
    """Returns the dry run that ``to_json`` wrote.

    Raises:
        DryRunError: ``text`` is not a dry run, or is of a version that this one doesn't know.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DryRunError(f"this is not a dry run: no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise DryRunError(f'this is not a dry run: JSON without "format": {_FORMAT!r}')
    if data.get("version") != VERSION:
        raise DryRunError(
            f"a dry run of version {data.get('version')!r}; this parallel3d reads version {VERSION}: "
            "write it again with this one"
        )
    try:
        return decoded(DryRun, data["run"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DryRunError(f"a damaged dry run: {type(error).__name__}: {error}") from error


def _encoded(value: Any) -> Any:
    """Returns ``value`` with dataclasses as dicts, and tuples of dataclasses as tables."""
    if is_dataclass(value):
        return {name: _encoded(own) for name, own in vars(value).items()}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        rows = [[_encoded(own) for own in vars(item).values()] for item in value]
        return {"columns": list(vars(value[0])), "rows": rows}
    return value


def decoded(kind: Any, value: Any) -> Any:
    """Returns a value of the type ``kind`` from JSON values; raises TypeError if they don't fit."""
    return _decoder(kind)(value)


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        record: Any = kind
        return lambda value: _row_decoder(record, tuple(value))(value.values())
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (other,) = [_decoder(each) for each in inner if each is not type(None)]
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        of_item, size = _decoder(inner[0]), None if inner[-1] is Ellipsis else len(inner)

        def items(value: Any) -> tuple[Any, ...]:
            if isinstance(value, dict):
                return tuple(map(_row_decoder(inner[0], tuple(value["columns"])), value["rows"]))
            if size is not None and len(value) != size:
                raise TypeError(f"{value!r} has not {size} items")
            return tuple(map(of_item, value))

        return items
    if origin is dict:
        of_value = _decoder(inner[1])
        return lambda value: {key: of_value(item) for key, item in value.items()}

    def plain(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"{value!r} is no {kind.__name__}")

    return plain


@lru_cache(maxsize=64)
def _row_decoder(kind: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    """Returns a function that makes a ``kind`` from a row: values of the fields in ``names``."""
    hints = get_type_hints(kind)
    if unknown := set(names) - set(hints):
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    if missing := needed - set(names):
        raise TypeError(f"{kind.__name__} without {min(missing)!r}")
    decoders = [_decoder(hints[name]) for name in names]

    def decode(row: Any) -> Any:
        values = [of_value(value) for of_value, value in zip(decoders, row, strict=True)]
        return kind(**dict(zip(names, values, strict=True)))

    return decode
