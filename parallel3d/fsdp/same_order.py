"""SameOrder: all ranks issue the same collectives, in every pass.

Collectives are matched by their order alone. If a rank skips a unit that others run, or runs another one, its
all-gather is matched with that of another unit. If parameters of a unit have a gradient on some ranks only,
their shards diverge. Both are detected in every forward and backward before a wrong number is used:

- A rank records the collectives of the last forward, and of the last backward. While each next collective is
  the expected one, nothing is compared; one small all-reduce at the end of the pass confirms it on all ranks.
- A rank that is about to issue an unexpected collective first takes part in the remaining expected ones of
  this pass, with its shards, and with zeros as gradients. So no rank waits for it, or gets other values. At
  the end of the pass it tells the others which collective that is. If it is the same on all ranks, they
  continue.
- In a pass without expectations, such as the first, and after an unexpected collective, ranks compare each
  collective before they issue it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._torch.autograd import functorch_left
from parallel3d._torch.groups import max_over
from parallel3d._util.trace import issuing
from parallel3d.errors import AgreementError
from parallel3d.fsdp.gradients import ReduceInput
from parallel3d.fsdp.placement import DataAxes
from parallel3d.fsdp.reduction import Reduction, stages_of
from parallel3d.mesh.agreement import check_agreement
from parallel3d.mesh.failures import is_of_communication
from parallel3d.mesh.store import others

Context = Any
"""A ``context.RunContext``, which makes this."""
Unit = Any

Event = tuple[str, Any, Any, Any]
"""(operation, which unit, which part of it, which of its parameters have a gradient; None: all).

Two of the same first three can meet: they are of one size.
"""

_NONE = 2**31  # the place where no rank has left what is expected
_MOST_KINDS = 64  # of passes that are remembered
_ADVICE = "\nStart every rank with the same program, arguments and libraries."  # of another case
_HINT = (
    "In every step all ranks must run the same units, in one order. Where only some ranks have work for a "
    "module (an expert, a vision tower), run it on all of them, on zeros and times 0 if need be, or leave it "
    "in the unit around it. Of one unit, ranks may use different parameters with "
    "set_reduce_scatter_unused_params(True)."
)


@dataclass
class Known:
    """The collectives that the last pass of a kind (forward or backward) has issued on all ranks."""

    events: list[Event]
    digest: int  # of them
    repeated: bool = True  # whether the next pass is expected to issue the same


@dataclass
class Pass:
    """A forward or backward of the root that is under way, and the collectives it has issued."""

    name: str
    kind: Hashable  # passes of one kind are expected to issue the same
    expected: list[Event] | None  # what the last one issued; None: each collective is compared
    done: list[Event] = field(default_factory=list)
    differs: bool = False  # whether other parameters had a gradient than the last time


class SameOrder:
    """Checks that all ranks issue the same collectives for the units under one root.

    ``axes``: the data axes whose ranks are compared: they run the same program.
    """

    def __init__(self, context: Context, axes: DataAxes, device: torch.device) -> None:
        self._context = weakref.ref(context)
        self._device = device
        self._groups = [
            axes.group(axis)
            for axis in (axes.shard, axes.replicate)
            if axis is not None and axes.size(axis) > 1
        ]
        self._ranks = axes.data_ranks()
        self._numbers = {id(unit): number for number, unit in enumerate(context.units)}
        gathering = [
            unit
            for unit in context.units
            if any(bucket.shard_group is not None for bucket in unit.group.buckets)
        ]
        self._gathering = [unit.ref for unit in gathering]
        self._gathers = {id(u): ("all-gather", self._numbers[id(u)], 0, None) for u in gathering}
        self._known: dict[Hashable, Known] = {}
        self._ended: list[tuple[Pass, _Maximum]] = []  # not known yet to be equal
        self._order = self._backwards = 0
        self._standing_in = False
        self.forward: Pass | None = None  # under way
        self.backward: Pass | None = None

    @classmethod
    def of(cls, context: Context) -> SameOrder | None:
        """Returns the check for the units of ``context``; None if there is nothing to compare: one data rank,
        no other process (fake or simulated ranks), or parameters on meta."""
        buckets = [bucket for unit in context.units for bucket in unit.group.buckets]
        if not buckets or others() is None or any(b.device.type == "meta" for b in buckets):
            return None
        bucket = max(buckets, key=lambda bucket: bucket.axes.data_size)
        return None if bucket.axes.data_size == 1 else cls(context, bucket.axes, bucket.device)

    @property
    def context(self) -> Context:
        return self._context()

    # -- passes --------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Called when the root's forward begins. One that gathers nothing is not compared."""
        self.settle()
        self._backwards = 0
        units = [unit for ref in self._gathering if (unit := ref()) is not None]
        sharded = tuple(unit.group.is_sharded for unit in units)
        self.forward = self._begin("forward", sharded) if any(sharded) else None

    def end_forward(self, *, backward_to_come: bool) -> None:
        """Called when the root's forward ends. Without a backward it waits for the comparison (on CPU)."""
        each, self.forward = self.forward, None
        if each is not None:
            self._order = self._end(each)
            if not backward_to_come:
                self.settle()

    def begin_backward(self, name: str = "backward") -> None:
        self.settle()
        root = self.context.root
        self._backwards += 1
        kind = name, self._order, self._backwards, root.sync, root.all_reduce
        self.backward = self._begin(name, kind)

    def end_backward(self) -> None:
        if self.backward is not None:
            each, self.backward = self.backward, None
            self._end(each)

    def settle(self) -> None:
        """Waits for the comparisons of passes that have ended; raises AgreementError on every rank if ranks
        differ. On an accelerator the last comparison is left to the next call: it would block the host."""
        while len(self._ended) > (self._device.type != "cpu"):
            each, comparison = self._ended.pop(0)
            differ, place = comparison.result()
            if differ:
                self._refuse(each, place, None)
            if each.differs:
                self._learn(each)

    def note_error(self, error: BaseException) -> None:
        """Called after an exception in a forward. Drops the passes under way if the error stops the other
        ranks too: an AgreementError, a failed collective, or Ctrl-C. After an error of this rank alone, the
        rank still takes part in the expected collectives."""
        alone = isinstance(error, Exception) and not isinstance(error, AgreementError)
        if not alone or is_of_communication(error):
            self.abandon()

    def abandon(self) -> None:
        self.forward = self.backward = None
        self._ended.clear()

    def _begin(self, name: str, kind: Hashable) -> Pass:
        known = self._known.get(kind)
        if known is None or not known.repeated or issuing.compared:
            return Pass(name, kind, None)
        return Pass(name, kind, known.events)

    def _end(self, each: Pass) -> int:
        """Ends a pass, and begins its comparison. Returns a digest of its collectives."""
        if each.expected is not None and len(each.done) < len(each.expected):
            self._leave(each, None)
        if each.expected is None:
            self._meet(each, None)
            return self._learn(each)
        digest = self._digest(each, None) if each.differs else 0
        self._ended.append((each, self._compare(digest, _NONE)))
        return self._known[each.kind].digest

    def _learn(self, each: Pass) -> int:
        known = self._known.get(each.kind)
        if len(self._known) >= _MOST_KINDS and known is None:
            self._known.clear()
        earlier = each.done if known is None else known.events
        repeats = [event[:3] for event in earlier] == [event[:3] for event in each.done]
        self._known[each.kind] = new = Known(each.done, self._digest(each, None), repeats)
        return new.digest

    # -- collectives ---------------------------------------------------------------------------------

    def gathers(self, unit: Unit) -> None:
        """Called before the all-gathers of ``unit``; AgreementError if other ranks issue something else."""
        event = self._gathers.get(id(unit))
        if event is not None:
            self._note(event)

    def reduces(self, unit: Unit, index: int, *, all_reduce: bool) -> None:
        """Called before the gradients of bucket ``index`` of ``unit`` are reduced; raises as ``gathers``."""
        bucket = unit.group.buckets[index]
        used: tuple[int, ...] | None = None
        if not bucket.settings.reduce_unused:
            indices = bucket.grads.to_reduce()
            if len(indices) < len(bucket.params):
                used = tuple(sorted(indices))
        self._note(("reduction", self._numbers.get(id(unit)), (index, all_reduce), used))

    def reduces_jointly(self, joint: Any) -> None:
        """Called before a ``MergedBucket``, ``joint``, is reduced; raises as ``gathers``."""
        used = tuple(
            None if indices and len(indices) == len(bucket.params) else tuple(indices or ())
            for bucket, indices in zip(joint.buckets, joint.used, strict=True)
        )
        self._note(("joint reduction", joint, joint.span(), used))

    def _note(self, event: Event) -> None:
        each = self.forward if self.context.backward is None else self.backward
        if each is None or self._standing_in:
            return
        expected = each.expected
        if expected is None:
            self._meet(each, event)
        else:
            place = len(each.done)
            if place == len(expected) or expected[place][:3] != event[:3]:
                self._leave(each, event)
            elif expected[place][3] != event[3]:
                each.differs = True
        each.done.append(event)

    def _meet(self, each: Pass, event: Event | None) -> None:
        """Waits until all ranks are about to issue ``event`` (None: to end the pass); raises AgreementError
        if one is about to issue another."""
        place = len(each.done)
        since = place
        if issuing.compared:  # each collective is; but not which parameters have a gradient
            if event is not None:
                return
            since = 0
        differ, _ = self._compare(self._digest(each, event, since=since), place).result()
        if differ:
            self._refuse(each, place, event)

    def _leave(self, each: Pass, event: Event | None) -> None:
        """Called before ``event``, which was not expected (None: the pass ends early): takes part in the
        remaining expected collectives. Returns if all ranks issue ``event``; else raises AgreementError."""
        assert each.expected is not None
        rest, each.expected = each.expected[len(each.done) :], None
        self._standing_in = True
        try:
            if self.context.backward is not None:
                self.context.comm.finish()  # its all-reduces come before
            for other in rest:
                self._stand_in(*other[:3])
        finally:
            self._standing_in = False
        differ, place = self._compare(self._digest(each, event), len(each.done)).result()
        if differ:
            self._refuse(each, place, event)

    def _stand_in(self, operation: str, which: Any, part: Any) -> None:
        """Takes part in a collective (an ``Event``'s first elements) that this rank itself does not need."""
        context = self.context
        if operation == "joint reduction":
            zeros = torch.zeros(part[1] - part[0], dtype=which.dtype, device=which.storage_device)
            job = Reduction(which, [zeros], [])
            job.stages = list(which.over_replicate)
            _run(job)
            return
        unit = context.units[which]
        group, comm = unit.group, context.comm
        if operation == "reduction":
            index, all_reduce = part
            bucket = group.buckets[index]
            final = all_reduce or not bucket.over_replicate
            job = Reduction(bucket, ReduceInput(bucket).finish(1.0), [], final=final)
            job.stages = stages_of(job, bucket.over_replicate, ())
            _run(job)
            return
        if not group.is_sharded and not group.is_registered:
            group.reshard(comm)  # it was gathered ahead
        if group.is_sharded:
            unit.issue_unshard(context)
            group.unshard(comm)
            group.reshard(comm)
        else:  # a forward around this one uses the same values
            for bucket in group.buckets:
                comm.issue_gather(bucket)
                comm.finish_gather(bucket)

    # -- comparison ----------------------------------------------------------------------------------

    def _compare(self, digest: int, place: int) -> _Maximum:
        return _Maximum([digest, -digest, -place], self._groups, self._device)

    def _digest(self, each: Pass, event: Event | None, since: int = 0) -> int:
        what = [self._key(done) for done in (*each.done[since:], event)]
        return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest())

    def _key(self, event: Event | None) -> Any:
        """Returns the part of ``event`` that can be compared between ranks: names in place of objects."""
        if event is None or event[0] != "joint reduction":
            return event
        return event[0], [bucket.unit for bucket in event[1].buckets], *event[2:]

    def _text(self, event: Event | None, names: dict[int, str]) -> str:
        if event is None:
            return "nothing more"
        operation, which, part, used = event
        if operation == "joint reduction":
            buckets, lists = which.buckets, used
            label = " to ".join(dict.fromkeys((buckets[0].unit, buckets[-1].unit)))
        else:
            unit = self.context.units[which]
            buckets, lists, label = unit.group.buckets, [used], unit.label
            buckets = [] if operation == "all-gather" else [buckets[part[0]]]
        missing = [
            param_name(param, names)
            for bucket, indices in zip(buckets, lists, strict=False)
            for index, param in enumerate(bucket.params)
            if indices is not None and index not in indices
        ]
        text = f"{operation} of unit {label}"
        return f"{text}, without gradients of {', '.join(missing)}" if missing else text

    def _missing(self, names: dict[int, str]) -> list[str]:
        """Returns the names of parameters without a gradient in units whose inputs all have theirs."""
        return [
            param_name(param, names)
            for unit in self.context.units
            if unit.backward_begun and not unit.backward.calls
            for bucket in unit.group.buckets
            for index, param in enumerate(bucket.params)
            if bucket.precision.compute_params[index].requires_grad
            and index not in bucket.grads.arrived
        ]

    def _refuse(self, each: Pass, place: int, event: Event | None) -> NoReturn:
        names = module_names(self.context.root)
        events = [*each.done, event]
        places = range(len(events)) if place == _NONE else (place,)
        here = {
            f"collective {i + 1} of this {each.name}": self._text(events[i], names) for i in places
        }
        if missing := self._missing(names):
            here["gradients that have not arrived"] = ", ".join(missing)
        self.context.abandon(backward_only=False)
        topic = f"which units run, and which parameters have a gradient, in this {each.name}"
        timeout = None if self._device.type == "cpu" else timedelta(seconds=10)
        try:
            check_agreement(topic, here, ranks=self._ranks, timeout=timeout)
        except AgreementError as error:
            text = str(error).removesuffix(_ADVICE)
            raise AgreementError(f"{text}\n{_HINT}") from error
        raise AgreementError(f"The ranks disagree about {topic}.\n{_HINT}")


class _Maximum:
    """An asynchronous all-reduce of three integers over ``groups``, one after the other, to their maximum:
    (digest, -digest, -place), where place is an index among the pass's collectives."""

    def __init__(self, values: list[int], groups: list[ProcessGroup], device: torch.device) -> None:
        with functorch_left(), torch.inference_mode(False), torch.no_grad():
            self._values = torch.tensor(values).to(device, non_blocking=True)
            self._groups = groups[1:]
            self._event: Any = None
            self._start = max_over
            if issuing.compared:  # as any other collective
                self._start = partial(dist.all_reduce, op=dist.ReduceOp.MAX, async_op=True)
            self._work = self._start(self._values, group=groups[0])
            if device.type != "cpu":
                self._finish()
                # Read when the host wants to know: by then the device has usually come so far.
                self._values = self._values.to("cpu", non_blocking=True)
                self._event = torch.get_device_module(device).current_stream().record_event()

    def _finish(self) -> None:
        self._work.wait()
        # Over replicate the largest over shard.
        for group in self._groups:
            self._start(self._values, group=group).wait()

    def result(self) -> tuple[bool, int]:
        """Waits; returns (whether the ranks' digests differ, the smallest place of any rank)."""
        if self._event is None:
            self._finish()
        else:
            self._event.synchronize()
        largest, smallest, place = self._values.tolist()
        return largest != -smallest, -place


def _run(job: Reduction) -> None:
    for stage in job.stages:
        stage.finish(job, stage.start(job))


def module_names(root: Unit) -> dict[int, str]:
    """Returns {id of a module's ``_parameters`` dict: the module's name} for all modules in ``root``."""
    modules = [named for top in root.modules for named in top.named_modules()]
    return {id(module._parameters): name for name, module in modules}


def param_name(param: Any, names: dict[int, str]) -> str:
    """Returns all full names of a ShardedParam, joined by " = "; ``names`` are from ``module_names``."""
    return " = ".join(
        f"{prefix}.{attribute}" if (prefix := names.get(id(holder), "?")) else attribute
        for holder, attribute in param.module_infos
    )
