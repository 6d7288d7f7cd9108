"""Residents: units whose unsharded parameters are the shards themselves, as on a replicate axis alone.

Nothing of theirs is gathered or freed, so that no unit has anything to do before its forward or backward: the
root shows all of them when its forward begins and hides them when it ends, and again around the backward
(for what is recomputed there). Their gradients arrive at a ``Gate``, one call for several buckets, and are
reduced by few calls, see ``JointReduce``. A unit's own hooks only look whether that is so.

A unit that is called by itself goes the general way, as does one with a setting that asks for more; that is
decided anew whenever the root's forward begins.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, compress, islice, repeat
from operator import attrgetter, call, is_, is_not
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._torch.autograd import (
    functorch_is_active,
    has_gradient_hooks,
    hook_gradient,
    torch_function_off,
    untraced,
)
from parallel3d._torch.dtensor import local_tensor_of
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.gradients import make_gradients
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.options.gate import Arrivals, Gate, Gradients, open_gates
from parallel3d.fsdp.options.hooks_off import HooksOff
from parallel3d.fsdp.param import OwnSetattr
from parallel3d.fsdp.reduction import SUMS, AllReduce, Reduction, divisor_before_sum, stages_of
from parallel3d.fsdp.versions import WeightsStamp

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.comm import Comm
    from parallel3d.fsdp.context import RunContext
    from parallel3d.fsdp.group import ParamGroup
    from parallel3d.fsdp.options.gate import Gradients
    from parallel3d.fsdp.unit import Unit


# Swap: puts the parameters of many groups into their modules and back, in one pass.

_HOLDERS = attrgetter("holders")
_SHOWN = attrgetter("shown")
_KEPT = attrgetter("kept")


class Swap:
    """Does what ``show`` and ``hide`` of each of ``groups`` do, which cast no buffers."""

    def __init__(self, groups: Sequence[ParamGroup] = ()) -> None:
        self.groups = groups
        self._note()

    def _note(self) -> None:
        self._holders = [group.holders for group in self.groups]
        places = [place for holders in self._holders for place in holders]
        self._updates = [holder.update for holder, _, _ in places]
        self._at_rest = [at_rest for _, at_rest, _ in places]
        self._computing = [computing for _, _, computing in places]

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if any(map(_SHOWN, self.groups)):
            for group in self.groups:
                group.show()
        else:
            self._put(self._computing, shown=True)

    def hide(self) -> None:
        """Puts the sharded ones back, but for what ``unshard()`` shows."""
        if not all(map(_SHOWN, self.groups)) or any(map(_KEPT, self.groups)):
            for group in self.groups:
                if not group.kept:
                    group.hide()
        else:
            self._put(self._at_rest, shown=False)

    def _put(self, values: list[dict[str, Any]], *, shown: bool) -> None:
        if not all(map(is_, map(_HOLDERS, self.groups), self._holders)):
            at_rest = values is self._at_rest
            self._note()  # the groups have listed theirs anew
            values = self._at_rest if at_rest else self._computing
        if shown:  # first: hiding then undoes what an interruption has left
            _exhaust(map(setattr, self.groups, repeat("shown"), repeat(True)))
        _exhaust(map(call, self._updates, values))
        if not shown:
            _exhaust(map(setattr, self.groups, repeat("shown"), repeat(False)))


def _exhaust(iterator: Any) -> None:
    deque(iterator, maxlen=0)


# Snapshot: whether anything that ``Residents`` rest on is another than it was.
#
# What they show and reduce stays the same from step to step, unless the user changes a setting, a
# parameter or a module. Looking for that one unit after the other costs more than all else they
# do, so everything is read in a few passes that stay within C, and compared by identity: a False
# for a False, a list for the same list. What is equal and not the same only costs a look at the
# units themselves.

_OF_UNIT = attrgetter(
    "sync",
    "all_reduce",
    "order_check",
    "guard",
    "tracked",
    "input_dtype",
    "policy",
    "follows_mode",
    "group",
)
_CONTEXT = attrgetter("context")
_OF_GROUP = attrgetter("state", "kept", "gated", "buffers")
_OF_BUCKET = attrgetter(
    "gate", "policy", "reducer", "on_result", "reduce_unused", "divide_factor", "grads"
)
_OF_GRADS = attrgetter("whole", "partial")
_IS_TRAINABLE = attrgetter("requires_grad")
_LISTED = attrgetter("holders", "shown")


class Snapshot:
    """Of the ``units`` of one root, some of which are ``resident``, as they are now, at rest."""

    def __init__(self, units: Sequence[Unit], resident: Sequence[ParamGroup]) -> None:
        buckets = [bucket for group in resident for bucket in group.buckets]
        self._resident = resident
        self._groups = [unit.group for unit in units]
        self._buckets = [bucket for group in self._groups for bucket in group.buckets]
        self._grads = [bucket.grads for bucket in self._buckets]
        self._sharded = [param.sharded for bucket in buckets for param in bucket.params]
        self._views = [view for bucket in buckets for view in bucket.local_views]
        self._contexts = _contexts_of(units)
        self._settings = list(self._read_settings(units))
        self._trainable = self._read_trainable()
        self._listed = list(self._read_lists())
        self._dicts = [holder for group in resident for holder, _, _ in group.holders]
        self._names = list(chain.from_iterable(self._dicts))
        self._found = list(self._read_modules())

    def _read_settings(self, units: Iterable[Unit]) -> Iterable[Any]:
        return chain(
            chain.from_iterable(map(_OF_UNIT, units)),
            chain.from_iterable(map(_OF_GROUP, self._groups)),
            chain.from_iterable(map(_OF_BUCKET, self._buckets)),
            chain.from_iterable(map(_OF_GRADS, self._grads)),
        )

    def _read_lists(self) -> Iterable[Any]:
        return chain.from_iterable(map(_LISTED, self._resident))

    def _read_modules(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def has_settings_of(self, units: Sequence[Unit]) -> bool:
        """Whether what has been set is the same, but for ``requires_grad``; and no other root has run."""
        return _contexts_of(units) == self._contexts and _are_same(
            self._read_settings(units), self._settings
        )

    def _read_trainable(self) -> list[bool]:
        with torch_function_off():  # takes a third of the time
            return list(map(_IS_TRAINABLE, self._sharded))

    def is_of(self, units: Sequence[Unit]) -> bool:
        """Whether parameters and modules are too, and everything is at rest."""
        return (
            self.has_settings_of(units)
            and _are_same(self._read_lists(), self._listed)
            and self._read_trainable() == self._trainable
            and _are_same(map(local_tensor_of, self._sharded), self._views)
            and _are_same(chain.from_iterable(self._dicts), self._names)
            and _are_same(self._read_modules(), self._found)
        )


def _contexts_of(units: Iterable[Unit]) -> list[int]:
    """Their ids: the contexts have the snapshots. A unit holds its own, so that another has another id."""
    return list(map(id, map(_CONTEXT, units)))


def _are_same(values: Iterable[Any], before: list[Any]) -> bool:
    now = list(values)
    return len(now) == len(before) and all(map(is_, now, before))


# JointReduce: one all-reduce for several buckets' gradients, where nothing is sharded.
#
# A call costs the same however little it sends, so small buckets go together, in the order in
# which backward comes to them: up to 1 MiB first, so that communication begins early, then up to
# 25 MiB (the defaults of torch's ``DistributedDataParallel``: ``_DEFAULT_FIRST_BUCKET_BYTES``,
# ``bucket_cap_mb``). What goes together follows from the order of the units alone, and is the same
# on every rank. It has the side of a ``Bucket`` that a comm's reduction deals with.

_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")
FIRST_BYTES = 2**20
MOST_BYTES = 25 * 2**20
LARGE = 2**14
"""Elements of a gradient, on average, from which a call for each costs less than a pass over all."""
NODE_BYTES = 2**20
"""Buckets whose gradients may wait for each other before they are copied together."""


def plan_reductions(buckets: Iterable[Bucket]) -> list[JointReduce]:
    """Which of ``buckets``, in the order of their backwards, are reduced together.

    A bucket that is larger than the limit is by itself. Only neighbours go together, of one dtype, summed
    over the same ranks and divided by the same number.
    """
    plan: list[list[Bucket]] = []
    size, before = 0, None
    for bucket in buckets:
        groups = [group.group_name for group in bucket.replicate_groups]
        kind = (bucket.dtype, bucket.home, groups, bucket.divisor)
        limit = FIRST_BYTES if len(plan) == 1 else MOST_BYTES
        if kind != before or size + bucket.flat.nbytes > limit:
            plan.append([])
            size = 0
        plan[-1].append(bucket)
        size += bucket.flat.nbytes
        before = kind
    return [JointReduce(together) for together in plan]


class JointReduce:
    """See the module's docstring. Shapes: S, the slots of all parameters of all buckets.

    Attributes:
        arrived: (S,), the gradients that have arrived in this backward; None before the first.
        comm: what reduces them in the backward under way; None at rest.
        accepts_all: whether ``accept_all`` may be asked: nothing was changed since the forward.
        used: by bucket the indices of the parameters that got one; None before the bucket's have arrived.
        launched: whether this backward's reduction is under way.
    """

    scatter_group = tp_group = on_reduced = None
    reducer = SUMS
    pin = False
    partial_start = 0

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0]
        self.buckets = list(buckets)
        self.unit = first.unit
        self.over_replicate = [AllReduce(group) for group in first.replicate_groups]
        self.divisor = first.divisor
        self.dtype, self.grad_dtype, self.home = first.dtype, first.grad_dtype, first.home
        sizes = [bucket.numel for bucket in buckets]
        self.sizes = self.slot_sizes = sizes
        self.numel = sum(sizes)
        counts = [len(bucket.params) for bucket in buckets]
        self._ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self._starts = [end - count for end, count in zip(self._ends, counts, strict=True)]
        self._share = self._early_share(sum(counts))
        self.in_flight: Any = None
        self.comm: Comm | None = None
        self.accepts_all = False
        self.forget()

    def _early_share(self, params: int) -> float | None:
        """What gradients are multiplied by as they are copied, where that spares a pass over the sum.

        For large ones, which take a call each; and where it rounds nothing: a power of two.
        """
        exact = math.frexp(self.divisor)[0] == 0.5 and self.dtype is not torch.float16
        large = self.numel >= LARGE * params and type(self.flat) is torch.Tensor
        return 1.0 / self.divisor if exact and large and self.divisor != 1 else None

    def begin(self, comm: Comm, *, accepts_all: bool) -> None:
        """A backward begins, of the root that these are of."""
        self.comm, self.accepts_all = comm, accepts_all

    def end(self) -> None:
        """It has ended."""
        self.comm, self.accepts_all = None, False
        self.forget()

    @property
    def grads(self) -> JointReduce:
        """As of a bucket: what a comm starts and finishes. No attribute: it would keep itself alive."""
        return self

    @property
    def flat(self) -> torch.Tensor:
        """Shards of the kind whose gradients these are."""
        return self.buckets[0].flat

    def forget(self) -> None:
        """Drops what a backward has brought."""
        self.arrived: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.used: list[list[int] | None] = [None] * len(self.buckets)
        self.missing = len(self.buckets)
        self.launched = False
        self.in_flight = None
        for bucket in self.buckets:
            bucket.grads.in_flight = None

    def share_nodes(self) -> list[list[Bucket]]:
        """Which of the buckets have a node of the graph together; see ``gate``."""
        nodes: list[list[Bucket]] = []
        size = 0
        for bucket in self.buckets:
            if not nodes or size + bucket.flat.nbytes > NODE_BYTES:
                nodes.append([])
                size = 0
            nodes[-1].append(bucket)
            size += bucket.flat.nbytes
        return nodes

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, place: int, indices: list[int], grads: Sequence[torch.Tensor]) -> bool:
        """Takes gradients of parameters ``indices`` of bucket ``place``, which ``pack`` copies.

        Returns:
            False if they are not taken, as the bucket's have been already in this backward.
        """
        if self.used[place] is not None:
            return False
        if self.arrived is None:
            self._begin()
        start, end = self._starts[place], self._ends[place]
        parts = self._parts[start:end]
        if len(indices) < end - start:
            for index in set(range(end - start)).difference(indices):
                parts[index].zero_()
            parts = [parts[index] for index in indices]
        self._targets += parts
        self._sources += grads
        self.used[place] = indices
        self.missing -= 1
        return True

    def accept_all(self, since: int, indices: list[list[int]], grads: Gradients) -> bool:
        """The same with the gradients of all parameters of the buckets from ``since`` on.

        Args:
            indices: those that get one, by bucket. Where they are not all, or one of ``grads`` is None,
                nothing is taken.
        """
        until = since + len(indices)
        start, end = self._starts[since], self._ends[until - 1]
        used = self.used[since:until]
        if len(grads) < end - start or any(map(is_, grads, repeat(None))):
            return False
        if any(each is not None for each in used):
            return False
        if self.arrived is None:
            self._begin()
        self._targets += self._parts[start:end]
        self._sources += grads  # type: ignore[arg-type]
        self.used[since:until] = indices
        self.missing -= len(indices)
        return True

    def pack(self) -> None:
        """Copies what was accepted; once all is there, issues the reduction."""
        if self._share is None:
            foreach_copy_(self._targets, self._sources)
        else:
            for target, source in zip(self._targets, self._sources, strict=True):
                torch.mul(source, self._share, out=target)
        self._targets, self._sources = [], []
        if not self.missing:
            self.launch()

    def _begin(self) -> None:
        self.arrived = torch.empty(self.numel, dtype=self.dtype, device=self.home)
        self._parts = self.local_parts(self.arrived)

    def slices(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each bucket's part of ``flat``."""
        return flat.split(self.sizes)

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``flat``."""
        return [
            part
            for bucket, piece in zip(self.buckets, self.slices(flat), strict=True)
            for part in bucket.local_parts(piece)
        ]

    def gradients(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What ``.grad`` of the parameters is."""
        return [
            grad
            for bucket, piece, start, end in zip(
                self.buckets, self.slices(flat), self._starts, self._ends, strict=True
            )
            for grad in make_gradients(bucket, piece, parts[start:end])
        ]

    # -- reduction ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Issues the reduction of what has arrived, if anything has."""
        if self.arrived is None or self.launched:
            return
        self.launched = True
        assert self.comm is not None
        self.comm.reduce(self, all_reduce=True)  # type: ignore[arg-type]
        itself = weakref.ref(self)
        for bucket in self.buckets:
            bucket.grads.in_flight = itself

    def drain(self, _: Bucket) -> None:
        """Completes the reduction, before one of the buckets is reduced again by itself."""
        if self.launched and self.arrived is not None:
            assert self.comm is not None
            self.comm.drain(self)  # type: ignore[arg-type]

    def start(self, *, all_reduce: bool) -> Reduction:
        """Hands over what has arrived: from the first bucket that has gradients to the last."""
        flat = self.arrived
        assert flat is not None and all_reduce
        if self.missing:
            flat = self._span(flat)
        before = divisor_before_sum(self.divisor, self.dtype)
        scale, rest = before / self.divisor, 1.0
        if self._share is not None:
            scale = 1.0
        elif before != 1:
            flat.div_(before)
            if self.over_replicate:  # see ``GradientSlots``
                scale, rest = rest, scale
        job = Reduction(self, [flat], [], scale, rest=rest)  # type: ignore[arg-type]
        job.stages = stages_of(job, self.over_replicate, (), ())
        return job

    def _span(self, flat: torch.Tensor) -> torch.Tensor:
        there = [place for place, used in enumerate(self.used) if used is not None]
        pieces = self.slices(flat)
        for place in range(there[0], there[-1]):
            if self.used[place] is None:
                pieces[place].zero_()
        start = sum(self.sizes[: there[0]])
        return flat[start : sum(self.sizes[: there[-1] + 1])]

    def finish(self, job: Reduction) -> None:
        """Puts the result into ``.grad``, adding to what is there."""
        job.take()
        flat, parts = self.arrived, self._parts
        assert flat is not None
        grads = self.gradients(flat, parts)
        used = self.used
        launched = self.launched
        self.forget()
        self.launched = launched  # what comes now is of another reduction
        self.used = [[]] * len(self.buckets)
        if self._put_all(used, grads):
            self._run_hooks(used)
        else:
            self._put_pieces(used, flat, parts, grads)

    def _put_all(self, used: list[list[int] | None], grads: list[torch.Tensor]) -> bool:
        """Puts ``grads`` where there are none, if every parameter gets one: none was frozen meanwhile."""
        count = sum(map(len, filter(None, used)))
        params = self._sharded()
        if count < len(params):
            return False
        with torch_function_off():
            if any(map(is_not, map(_GRAD, params), repeat(None))):
                return False
            if not all(map(_REQUIRES_GRAD, params)):
                return False
            deque(map(setattr, params, repeat("grad"), grads), maxlen=0)
        return True

    def _run_hooks(self, used: list[list[int] | None]) -> None:
        if any(map(has_gradient_hooks, self._sharded())):
            for bucket, indices in zip(self.buckets, used, strict=True):
                bucket.grads.run_hooks(indices or [])

    def _put_pieces(
        self,
        used: list[list[int] | None],
        flat: torch.Tensor,
        parts: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Bucket by bucket."""
        pieces = self.slices(flat)
        for place, indices in enumerate(used):
            if indices is not None:
                start, end = self._starts[place], self._ends[place]
                slots, params = self.buckets[place].grads, self.buckets[place].params
                indices = [i for i in indices if params[i].sharded.requires_grad]
                slots.put_piece(pieces[place], parts[start:end], grads[start:end], indices)
                slots.run_hooks(indices)

    def _sharded(self) -> list[torch.nn.Parameter]:
        return [param.sharded for bucket in self.buckets for param in bucket.params]


_BEGUN = attrgetter("backward_begun", "begun", "arrived", "reduced")
_BUSY = attrgetter("grads.arrived", "grads.input", "grads.whole", "grads.partial", "reduce_unused")


def is_resident(unit: Unit) -> bool:
    """Whether nothing that the user has set asks for more than ``Residents`` do."""
    group = unit.group
    return (
        unit.sync
        and unit.all_reduce
        and unit.order_check is None
        and unit.guard is None
        and not (unit.context is not None and unit.context.finalization.manual)
        and not unit.tracked
        and unit.input_dtype is None
        and unit.policy.output_dtype is None
        and not unit.follows_mode
        and group.buffers is None
        and not group.kept
        and group.state is not GroupState.WHOLE
        and all(map(_is_plain, group.buckets))
    )


def _is_plain(bucket: Bucket) -> bool:
    return (
        (bucket.gate is not None or _can_have_gate(bucket))
        and not bucket.reducer.averages
        and not bucket.on_result
        and not bucket.reduce_unused
        and bucket.grads.whole is None
        and bucket.grads.partial is None
    )


def _has_no_tp(bucket: Bucket) -> bool:
    """Whether the unit's name need not be noted for collectives in its forward."""
    return all(param.tp_size == 1 for param in bucket.params)


def _can_have_gate(bucket: Bucket) -> bool:
    dtypes = {bucket.dtype, bucket.compute_dtype, bucket.reduce_dtype, bucket.grad_dtype}
    return (
        type(bucket) is Bucket
        and not bucket.has_own_unsharded
        and bucket.shard_group is None
        and bucket.tp_group is None
        and len(dtypes | {bucket.sum_dtype}) == 1
        and not bucket.policy.keep_low_precision_grads
        and all(
            param.even
            and (param.on.compute_mesh is None or param.layout.compute == "local")
            and not any(isinstance(holder, OwnSetattr) for holder, _ in param.slots)
            for param in bucket.params
        )
    )


class Residents:
    """Those of one root.

    Attributes:
        groups: theirs.
        others: the other units, weakly.
        shown: whether they are: within the root's forward, and in backward.
        joints: the reductions of their gradients, in the order of the units' backwards.
        changed: those whose weights have changed between the last forward and the backward under way.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.others: list[weakref.ref[Unit]] = []
        self.shown = False
        self.joints: list[JointReduce] = []
        self._units: list[weakref.ref[Unit]] = []
        self._swap = Swap()
        self._hooks_off = HooksOff()
        self._planned: list[tuple[Gate, float | None]] = []
        self._before: Snapshot | None = None
        self._stamp: WeightsStamp | None = None  # of all weights together: one look at most times
        self.changed: list[ParamGroup] = []

    # -- forward -------------------------------------------------------------------------------------

    def are_as_before(self, units: Sequence[Unit]) -> bool:
        """Whether the root's forward that begins finds everything as the last one has left it."""
        return self._before is not None and self._before.is_of(units)

    def find(self, units: Sequence[Unit], context: RunContext) -> None:
        """Which of ``units`` they are now, with what the user has changed."""
        self._hooks_off.end(backward_to_come=False)  # where an exception has left them off
        resident = [unit for unit in units if self._prepare(unit, context)]
        ids = set(map(id, resident))
        self.groups = [unit.group for unit in resident]
        self._units = [unit.ref for unit in resident]
        self.others = [unit.ref for unit in units if id(unit) not in ids]
        gates = [
            (bucket.gate, bucket.divide_factor)
            for group in reversed(self.groups)
            for bucket in reversed(group.buckets)
            if bucket.gate is not None and bucket.gate.arrivals.indices
        ]
        if gates != self._planned:
            self._plan(gates)
        self._swap = Swap(self.groups)
        self._hooks_off.modules = [
            weakref.ref(module)
            for unit in resident
            if not unit.is_root and all(map(_has_no_tp, unit.group.buckets))
            for module in unit.modules
        ]
        # On meta every forward is looked at anew: the next one's inputs may have values.
        fixed = self.groups and not any(group.on_meta for group in self.groups)
        self._before = Snapshot(units, self.groups) if fixed else None
        buckets = [bucket for group in self.groups for bucket in group.buckets]
        for bucket in buckets:
            bucket.versions.stamp.take()
            bucket.versions.set_unsharded()
        self._stamp = WeightsStamp(buckets) if buckets else None
        self._note_changes()

    def _note_changes(self) -> list[ParamGroup]:
        """Those whose weights have changed since the last look; autograd is told of it."""
        if self._stamp is None or not self._stamp.is_old():
            return []
        self._stamp.take()
        return [group for group in self.groups if group.note_changes()]

    def look_again(self) -> None:
        """Something else has changed that makes units residents."""
        self._before = None

    def begin_forward(self) -> None:
        """Shows them."""
        self._note_changes()
        self.show()
        self._hooks_off.begin()

    def end_forward(self, *, backward_to_come: bool) -> None:
        """At rest again."""
        self._hooks_off.end(backward_to_come=backward_to_come)
        self.hide()

    def _prepare(self, unit: Unit, context: RunContext) -> bool:
        group = unit.group
        if unit.context is not context:  # also inside another root, which has run since
            return False
        if not is_resident(unit):
            if group.gated:
                group.hide()
                group.use_gates(None)
            return False
        group.hide()
        if group.state is not GroupState.SHARDED:  # held since an evaluation, say
            group.reshard(context.comm)
        group.adopt()
        group.check_has_values()
        group.count_trainable()
        if not group.gated:
            group.use_gates(unit.ref)
        return True

    def _plan(self, gates: list[tuple[Gate, float | None]]) -> None:
        self._planned = gates
        for gate, _ in gates:
            gate.renew()
        by_bucket = {gate.arrivals.bucket(): gate for gate, _ in gates}
        self.joints = plan_reductions(bucket for bucket in by_bucket if bucket is not None)
        for joint in self.joints:
            for place, bucket in enumerate(joint.buckets):
                by_bucket[bucket].arrivals.joint = weakref.ref(joint), place
            for node in joint.share_nodes():
                sources = [bucket.compute_params for bucket in node]
                open_gates([by_bucket[bucket] for bucket in node], sources, _arrive)
        for group in self.groups:
            group.list_slots()

    def show(self) -> None:
        """Puts their unsharded parameters into the modules."""
        self.shown = True
        self._swap.show()

    def hide(self) -> None:
        """Puts the sharded ones back, but for what ``unshard()`` shows."""
        self.shown = False
        self._swap.hide()

    # -- backward ------------------------------------------------------------------------------------

    def begin_backward(self, units: Sequence[Unit], comm: Comm) -> None:
        """Shows them to what is recomputed."""
        same = self._before is not None and self._before.has_settings_of(units)
        for joint in self.joints:
            joint.begin(comm, accepts_all=same)
        self.changed = self._note_changes()
        if not self.shown:
            self.show()

    def are_untouched(self) -> bool:
        """Whether a backward has brought something to the gates only; False if there are none."""
        if self._before is None:
            return False
        begun = map(_BEGUN, (unit for ref in self._units if (unit := ref()) is not None))
        busy = chain.from_iterable(map(_BUSY, group.buckets) for group in self.groups)
        return not any(chain.from_iterable(chain(begun, busy)))

    def reduce(self) -> None:
        """At the end of a backward: issues what has waited for gradients that did not come."""
        for joint in self.joints:
            joint.launch()

    def end_backward(self, *, keep: bool) -> None:
        """After the reductions. ``keep``: a forward around this backward goes on."""
        for joint in self.joints:
            joint.end()
        self.changed = []
        if not keep:
            self._hooks_off.end(backward_to_come=False)
            self.hide()


@untraced
def _arrive(node: list[Arrivals], grads: Gradients) -> None:
    """The gradients of one backward have arrived, for the buckets that share ``node``."""
    unit = node[0].unit()
    context = None if unit is None else unit.context
    if context is not None and not torch.is_grad_enabled():
        context.enter_backward()
        place = node[0].joint
        joint = None if place is None else place[0]()
        if joint is not None and joint.accepts_all and place is not None:
            indices = [arrivals.indices for arrivals in node]
            if joint.accept_all(place[1], indices, grads):
                joint.pack()
                return
    _arrive_one_by_one(node, grads)


def _arrive_one_by_one(node: list[Arrivals], grads: Gradients) -> None:
    given = iter(grads)
    taken = [_take(arrivals, list(islice(given, len(arrivals.indices)))) for arrivals in node]
    for joint in dict.fromkeys(filter(None, taken)):
        joint.pack()


def _take(arrivals: Arrivals, grads: list[torch.Tensor | None]) -> JointReduce | None:
    """The gradients of one bucket; returns the reduction that has them, if one has."""
    unit, bucket = arrivals.unit(), arrivals.bucket()
    if unit is None or bucket is None or unit.context is None:
        return None
    params, indices = bucket.params, arrivals.indices
    unit.context.enter_backward()
    wanted = [
        grad is not None and params[index].sharded.requires_grad
        for index, grad in zip(indices, grads, strict=True)
    ]
    if not all(wanted):
        indices = list(compress(indices, wanted))
        grads = list(compress(grads, wanted))
        if not indices:
            return None
    given = [grad for grad in grads if grad is not None]
    if arrivals.joint is not None and not torch.is_grad_enabled() and is_resident(unit):
        joint, place = arrivals.joint[0](), arrivals.joint[1]
        fits = joint is not None and joint.comm is not None and joint.divisor == bucket.divisor
        if joint is not None and fits and joint.accept(place, indices, given):
            return joint
    for index, grad in zip(indices, given, strict=True):
        unit.take_gradient(bucket, index, grad)
    return None


def hook_outputs(unit: Unit, output: Any) -> None:
    """Lets the first gradient that reaches one of ``output`` begin the backward."""
    if functorch_is_active():  # hooks are of one level of its transforms; gradients arrive alike
        return
    for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
        # A parameter that is passed on outlives the graph.
        if tensor.requires_grad and not (tensor.is_leaf or getattr(tensor, "_is_param", False)):
            hook_gradient(tensor, unit.begin_backward)
