"""The recorder of collectives: what was communicated, over which axis, for which unit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._torch.autograd import TorchDispatchMode
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
    """What ``record_collectives`` yields; ``str()`` is a table.

    Attributes:
        calls: the collectives in the order they were issued.
    """

    calls: list[Collective] = field(default_factory=list)

    def select(
        self, op: str | None = None, axis: str | None = None, unit: str | None = None
    ) -> list[Collective]:
        """The calls that match all that is given, in order."""
        return [
            call
            for call in self.calls
            if (op is None or call.op == op)
            and (axis is None or call.axis == axis)
            and (unit is None or call.unit == unit)
        ]

    def count(self, op: str | None = None, axis: str | None = None, unit: str | None = None) -> int:
        """How many calls match all that is given."""
        return len(self.select(op, axis, unit))

    def by_unit(self) -> dict[str, list[Collective]]:
        """Calls by unit, units in the order they first communicated."""
        units: dict[str, list[Collective]] = {}
        for call in self.calls:
            units.setdefault(call.unit, []).append(call)
        return units

    def clear(self) -> None:
        """Forget the calls so far: what follows is recorded from order 0."""
        self.calls.clear()

    def __str__(self) -> str:
        head = ("order", "op", "axis", "unit", "bytes", "ranks", "")
        rows = [
            (
                str(call.order),
                call.op,
                call.axis or "-",
                call.unit or "-",
                f"{call.bytes:,}",
                str(call.group_size),
                "async" if call.asynchronous else "",
            )
            for call in self.calls
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        numbers = (0, 4, 5)  # columns aligned to the right
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [head, *rows]
        )


Before = Callable[[Collective, ProcessGroup, bool], None]


@contextmanager
def record_collectives(*meshes: DeviceMesh, before: Before | None = None) -> Iterator[Recorder]:
    """Record every collective issued in the body, forward and backward, ours and torch's.

    Works on any backend and under simulated ranks, where a collective counts once, not once per
    rank; enter it inside ``local_world``. A coalesced call counts once, also where the engine has issued its
    members one by one, for a backend that has none. Code compiled by ``torch.compile``
    runs eagerly while recording.

    Args:
        meshes: meshes with axis names, whose groups give calls their ``axis``. Where two axes
            share a group the first named wins. Without one every ``axis`` is None.
        before: called before each collective is issued, with what is known of it by then, its group, and
            whether ranks may legally bring different numbers of bytes.
    """
    recorder = Recorder()
    active_recorders.append(recorder)
    try:
        with RecordingMode(recorder, _axes_by_group(meshes), before):
            yield recorder
    finally:
        active_recorders.remove(recorder)


def _axes_by_group(meshes: tuple[DeviceMesh, ...]) -> dict[str, str]:
    axes: dict[str, str] = {}
    for mesh in meshes:
        for axis in mesh.mesh_dim_names or ():
            axes.setdefault(mesh.get_group(axis).group_name, axis)
    return axes


# The words of this package for torch's op names, without leading and trailing underscores.
_OPS = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "monitored_barrier": "barrier",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_GROUP_ARGUMENTS = ("process_group", "group_name")


@dataclass(frozen=True)
class Signature:
    """How to read a call of one torch op."""

    op: str
    arguments: tuple[str, ...]
    group: str  # the argument that names the process group
    asynchronous: bool | None  # None: an argument says so


_signatures: dict[Any, Signature | None] = {}


def collective_signature(func: Any) -> Signature | None:
    """How to read a call of ``func``; None if it is no collective, as most ops are not."""
    try:
        return _signatures[func]
    except KeyError:
        pass
    signature = None
    if func.namespace in _NAMESPACES:
        arguments = tuple(argument.name for argument in func._schema.arguments)
        groups = [name for name in arguments if name in _GROUP_ARGUMENTS]
        if groups:  # without one it is a helper, such as wait_tensor
            # An op of a later torch that the table does not know is recorded under torch's name.
            name = func.overloadpacket.__name__.strip("_")
            asynchronous = None if "async_op" in arguments else func.namespace != "c10d"
            signature = Signature(_OPS.get(name, name), arguments, groups[0], asynchronous)
    _signatures[func] = signature
    return signature


class RecordingMode(TorchDispatchMode):
    """Sees every op of this thread, and those of the backward passes it starts."""

    def __init__(
        self, recorder: Recorder, axes: dict[str, str], before: Before | None = None
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._axes = axes
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
            # A DTensor's op issues collectives from the subclass's own dispatch: step aside so
            # that it runs with this mode active. LocalTensor is played by a mode below this one.
            for kind in types:
                if kind is not LocalTensor and hasattr(kind, "__tensor_flatten__"):
                    return NotImplemented
            return self.other(func, args, kwargs)
        values = {**dict(zip(signature.arguments, args, strict=False)), **kwargs}
        return self.collective(func, signature, values, args, kwargs)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``func``, which is no collective."""
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
        # Read before the call; counted after it, so that a call that raises is not.
        unit = issuing.unit
        if self._before is not None and not (issuing.made_of and issuing.noted):
            call, group = self._describe(signature, unit, values, None)
            self._before(call, group, _is_uneven(call.op, values))
        result = func(*args, **kwargs)
        self.record(signature, unit, values, result)
        return result

    def record(self, signature: Signature, unit: str, values: dict[str, Any], result: Any) -> None:
        """Adds a call that has been made, or adds it to the last one, whose member it is."""
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
            axis=self._axes.get(group.group_name),
            unit=unit,
            bytes=0 if op == "barrier" else size,
            group_size=group.size(),
            asynchronous=asynchronous,
        )
        return call, group


_UNEVEN = ("gather", "scatter", "reduce")  # where one rank brings or gets more than the rest


def _is_uneven(op: str, values: dict[str, Any]) -> bool:
    if op == "all_to_all":
        return any("split" in name and value for name, value in values.items()) or not any(
            "split" in name for name in values
        )
    return op in _UNEVEN


def _bytes(value: Any) -> int:
    """Bytes of the tensors in ``value``; of simulated ranks, the largest rank's."""
    if isinstance(value, torch.Tensor):
        return max(inner.numel() * inner.element_size() for inner in inner_tensors(value))
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
