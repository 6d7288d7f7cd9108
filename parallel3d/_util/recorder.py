"""The recorder of collectives: which were issued, over which axis, for which unit."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.dtensor import axis_groups
from parallel3d._torch.groups import process_group_of
from parallel3d._torch.simulated import LocalTensor, inner_tensors
from parallel3d._util.trace import issuing

active_recorders: list["Recorder"] = []  # innermost last


@dataclass(frozen=True)
class Collective:
    """One collective call, as one rank issues it.

    Attributes:
        order: position among the recorded calls, from 0.
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``,
            ``reduce``, ``gather``, ``scatter``, ``send``, ``recv`` or ``barrier``.
        axis: mesh axis whose group it ran on; None for a group of no recorded mesh.
        unit: the unit the engine issued it for; ``""`` outside the engine.
        bytes: size of the larger of its input and output on this rank; for a coalesced call the
            sum over its tensors; 0 for a barrier.
        group_size: number of ranks in the group.
        asynchronous: whether the caller got a handle to wait for instead of blocking.
    """

    order: int
    op: str
    axis: str | None
    unit: str
    bytes: int
    group_size: int
    asynchronous: bool


@dataclass
class Recorder:
    """The collectives that ``record_collectives`` has recorded; ``str()`` is a table.

    Attributes:
        calls: the collectives in the order they were issued.
    """

    calls: list[Collective] = field(default_factory=list)

    def select(
        self, op: str | None = None, axis: str | None = None, unit: str | None = None
    ) -> list[Collective]:
        """Returns the calls that match all arguments given, in order."""
        return [
            call
            for call in self.calls
            if op in (None, call.op) and axis in (None, call.axis) and unit in (None, call.unit)
        ]

    def count(self, op: str | None = None, axis: str | None = None, unit: str | None = None) -> int:
        """Returns the number of calls that match all arguments given."""
        return len(self.select(op, axis, unit))

    def by_unit(self) -> dict[str, list[Collective]]:
        """Returns the calls by unit, units in the order of their first call."""
        units = dict.fromkeys(call.unit for call in self.calls)
        return {unit: self.select(unit=unit) for unit in units}

    def clear(self) -> None:
        """Drops the calls so far; the next one has order 0."""
        self.calls.clear()

    def __str__(self) -> str:
        rows = [("order", "op", "axis", "unit", "bytes", "ranks", "")]
        for call in self.calls:
            mode = "async" if call.asynchronous else ""
            names = call.op, call.axis or "-", call.unit or "-"
            rows.append((str(call.order), *names, f"{call.bytes:,}", str(call.group_size), mode))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        columns = [f"{{:{align}{w}}}" for align, w in zip("><<<>>", widths[:-1], strict=True)]
        line = "  ".join([*columns, "{}"])
        return "\n".join(line.format(*row).rstrip() for row in rows)


Before = Callable[[Collective, ProcessGroup, bool], None]
"""(the call, its group, whether ranks may pass different numbers of bytes)."""


@contextmanager
def record_collectives(*meshes: DeviceMesh, before: Before | None = None) -> Iterator[Recorder]:
    """Records every collective issued in the body, forward and backward, ours and torch's.

    Works on any backend and under simulated ranks, where a collective counts once, not once per rank; enter
    it inside ``local_world``. A coalesced call counts once, also where the engine issues its members one by
    one, for a backend without coalescing. Code compiled by ``torch.compile`` runs eagerly while recording.

    Args:
        meshes: meshes with axis names, whose groups give calls their ``axis``; a group of several axes has
            their names joined, such as ``shard_cp``, over which parameters are gathered. Where two axes
            share a group the first named wins. Without a mesh every ``axis`` is None.
        before: called before each collective is issued; its result doesn't count in ``bytes`` yet.
    """
    recorder = Recorder()
    active_recorders.append(recorder)
    try:
        with RecordingMode(recorder, {}, before, meshes):
            yield recorder
    finally:
        active_recorders.remove(recorder)


# torch's op names, without underscores and suffixes, where they differ from this package's.
_OPS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "monitored_barrier": "barrier",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
    "recv_anysource": "recv",
}
_SUFFIXES = re.compile("(_base|_coalesced|_into_tensor|_tensor|_single|_out)+$")


def op_of(name: str) -> str:
    """Returns the name in ``Collective.op`` for a torch op or method; for an unknown one its own name."""
    name = _SUFFIXES.sub("", name.strip("_"))
    return _OPS.get(name, name)


@dataclass(frozen=True)
class Signature:
    """How to find group, sizes and mode in a call of one torch op."""

    op: str  # this package's name of it
    arguments: tuple[str, ...]  # their names
    group: str  # name of the argument that is the process group
    asynchronous: bool | None  # None if the argument ``async_op`` says so


@cache
def collective_signature(func: Any) -> Signature | None:
    """Returns the ``Signature`` of ``func``; None if it is no collective."""
    if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    arguments = tuple(argument.name for argument in func._schema.arguments)
    group = next((name for name in arguments if name in ("process_group", "group_name")), None)
    if group is None:  # a helper, such as wait_tensor
        return None
    asynchronous = None if "async_op" in arguments else func.namespace != "c10d"
    return Signature(op_of(func.overloadpacket.__name__), arguments, group, asynchronous)


class RecordingMode(TorchDispatchMode):
    """Dispatch mode that records the collectives of this thread, and of the backwards that it starts."""

    def __init__(
        self,
        recorder: Recorder,
        axes: dict[str, str],
        before: Before | None = None,
        meshes: Sequence[DeviceMesh] = (),
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._axes = axes
        self._meshes = meshes
        self._before = before
        self._last_call: object = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        signature = collective_signature(func)
        if signature is None:
            # A DTensor's op issues collectives in the subclass's own dispatch, which runs with this mode
            # active after NotImplemented. LocalTensor is handled by a mode below this one.
            if any(t is not LocalTensor and hasattr(t, "__tensor_flatten__") for t in types):
                return NotImplemented
            return self.other(func, args, kwargs)
        values = {**dict(zip(signature.arguments, args, strict=False)), **kwargs}
        return self.collective(func, signature, values, args, kwargs)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def collective(
        self,
        func: Any,
        signature: Signature,
        values: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls ``func``, a collective, and records it; ``values``: its arguments by name."""
        # The unit is read before the call; the call is recorded after it, unless it raises.
        unit = issuing.unit
        if self._before is not None and not (issuing.made_of and issuing.noted):
            call, group = self._describe(signature, unit, values, None)
            self._before(call, group, _is_uneven(call.op, values))
        result = func(*args, **kwargs)
        self.record(signature, unit, values, result)
        return result

    def record(self, signature: Signature, unit: str, values: dict[str, Any], result: Any) -> None:
        """Adds a collective; a member of a coalesced call only adds its bytes to the last one."""
        if issuing.made_of is not None:
            if issuing.noted:
                return
            issuing.noted = True
        call, _ = self._describe(signature, unit, values, result)
        calls = self._recorder.calls
        member = issuing.call is not None and issuing.call is self._last_call
        self._last_call = issuing.call
        if member and calls:
            calls[-1] = replace(calls[-1], bytes=calls[-1].bytes + call.bytes)
            return
        calls.append(call)

    def _axis_of(self, group_name: str) -> str | None:
        if group_name not in self._axes:  # its mesh may have been joined since
            for mesh in self._meshes:
                for axis, group in axis_groups(mesh).items():
                    self._axes.setdefault(group.group_name, axis)
        return self._axes.get(group_name)

    def _describe(
        self, signature: Signature, unit: str, values: dict[str, Any], result: Any
    ) -> tuple[Collective, ProcessGroup]:
        group = process_group_of(values[signature.group])
        op, size = signature.op, max(_bytes(value) for value in [*values.values(), result])
        asynchronous = signature.asynchronous
        if asynchronous is None:
            asynchronous = bool(values.get("async_op", True))
        if issuing.made_of is not None:
            (op, size), asynchronous = issuing.made_of, True
        call = Collective(
            order=len(self._recorder.calls),
            op=op,
            axis=self._axis_of(group.group_name),
            unit=unit,
            bytes=0 if op == "barrier" else size,
            group_size=group.size(),
            asynchronous=asynchronous,
        )
        return call, group


def _is_uneven(op: str, values: dict[str, Any]) -> bool:
    """Whether ranks may pass different numbers of bytes to the collective ``op``."""
    if op == "all_to_all":
        splits = [value for name, value in values.items() if "split" in name]
        return not splits or any(map(bool, splits))
    return op in ("gather", "scatter", "reduce")


def _bytes(value: Any) -> int:
    """Returns the bytes of the tensors in ``value``; of simulated ranks' those of the largest."""
    if isinstance(value, torch.Tensor):
        return max(inner.numel() * inner.element_size() for inner in inner_tensors(value))
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
