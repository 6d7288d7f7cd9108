"""Replicated units: nothing is sharded, so that their unsharded parameters are the sharded ones' memory.

This is a mesh with a replicate axis alone. Such units gather and free nothing, so their hooks have nothing to
do: the root registers the unsharded parameters of all of them when its forward begins and the sharded ones
when it ends, and does so again around the backward (for what is recomputed there). Their gradients arrive at
an ``_Arrival``, by one call for several buckets, and are reduced by few calls, see ``CoalescedAllReduce``.

Which units are replicated units is decided whenever the root's forward begins. A unit that is called by
itself, or has a setting that asks for more, is run as any other unit.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, count, islice, pairwise, repeat, starmap
from operator import attrgetter, is_, is_not
from typing import Any

import torch

from parallel3d._torch.autograd import (
    functorch_is_active,
    functorch_left,
    have_gradient_hooks,
    set_backward_order,
    torch_function_off,
    untraced,
)
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext, root_options
from parallel3d.fsdp.gradients import make_gradients
from parallel3d.fsdp.group import ParamGroup, Retain
from parallel3d.fsdp.layout import NODE_BYTES, coalesced
from parallel3d.fsdp.options import ContextOption
from parallel3d.fsdp.param import OwnSetattr, mark_unsharded
from parallel3d.fsdp.reduction import (
    DEFAULT_REDUCER,
    AllReduce,
    Reduction,
    divisor_before_sum,
    stages_of,
)
from parallel3d.fsdp.same_order import SameOrder
from parallel3d.fsdp.unit import Unit

# _Arrival: where the gradients of a bucket's parameters arrive together, at one node of autograd's graph.
#
# The memory of a replicated unit's parameters is never freed, so the tensors that forward sees can
# be made once: outputs of one autograd function, each an alias of a parameter. When all gradients
# of a backward are there, autograd calls the function's backward once, with a gradient for each
# parameter that was used. Hooks on leaves would be a call for each parameter, behind a node that
# accumulates. The function saves nothing, so that the graphs of all steps can end in the same
# node. Small buckets share a node: their gradients wait for each other, as they do in a reduction
# that they share.

# Of all nodes that can run, backward runs the one with the highest number first. Leaves have this one.
_AT_ONCE = 2**64 - 1

Gradients = tuple[torch.Tensor | None, ...]


class Arrivals:
    """What autograd graphs hold of one bucket, also graphs that were made before another plan.

    Attributes:
        bucket: the bucket, weakly.
        unit: its unit, weakly.
        indices: the parameters that require a gradient.
        joint: the reduction that takes their gradients, weakly; where it is gone, the unit takes them one
            by one.
        place: the bucket's place in it.
    """

    __slots__ = ("bucket", "indices", "joint", "place", "unit")

    def __init__(
        self, bucket: Bucket, unit: weakref.ref[Unit], joint: CoalescedAllReduce, place: int
    ) -> None:
        self.bucket, self.unit = weakref.ref(bucket), unit
        self.joint, self.place = weakref.ref(joint), place
        self.indices = [i for i, p in enumerate(bucket.compute_params) if p.requires_grad]


def make_stand_ins(arrivals: dict[Bucket, Arrivals]) -> None:
    """Makes the tensors that forward sees of these buckets, which share a node and a reduction."""
    inputs = [bucket.compute_params[i] for bucket, each in arrivals.items() for i in each.indices]
    # Not within a transform of torch.func, in which the first forward may run: they serve all later forwards.
    with functorch_left(), torch.inference_mode(False), torch.enable_grad():
        anchor = torch.empty((), requires_grad=True)  # outputs want an input that does
        outputs = _Arrival.apply(anchor, list(arrivals.values()), inputs)
    set_backward_order(outputs[0].grad_fn, _AT_ONCE)
    made = iter(outputs)
    for bucket, each in arrivals.items():
        bucket.stand_ins = stand_ins = list[torch.Tensor](bucket.compute_params)
        for index in each.indices:
            stand_ins[index] = output = next(made)
            vars(output).update(bucket.params[index].attributes())
            output._is_param = True  # for isinstance(..., nn.Parameter)
            if type(output) is torch.Tensor:  # not of simulated ranks
                output.__class__ = torch.nn.Parameter  # for ``watch_data``
            mark_unsharded(output, bucket.params[index], is_freed=False)
            # Weakly, as the output holds it.
            output.__deepcopy__ = partial(_copy, weakref.ref(output))


def _copy(ref: weakref.ref[torch.Tensor], memo: dict[int, Any]) -> torch.nn.Parameter:
    """Lets ``copy.deepcopy`` copy an output as a Parameter."""
    output = ref()
    assert output is not None
    memo[id(output)] = copy = torch.nn.Parameter(output.detach().clone())
    return copy


class _Arrival(torch.autograd.Function):
    """Returns aliases of ``sources``, each with a version counter of its own."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, node: list[Arrivals], sources: list[Any]) -> Any:
        ctx.arrivals = node
        ctx.set_materialize_grads(False)
        return tuple(source.data for source in sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        _arrive(ctx.arrivals, grads)
        return None, None, None


# CoalescedAllReduce: one all-reduce for several buckets' gradients, where nothing is sharded.
#
# A call costs the same however little it sends, so small buckets go together, in the order in
# which backward comes to them: up to 1 MiB first, so that communication begins early, then up to
# 25 MiB (the defaults of torch's ``DistributedDataParallel``: ``_DEFAULT_FIRST_BUCKET_BYTES``,
# ``bucket_cap_mb``). What goes together follows from the order of the units alone, and is the same
# on every rank. It has the side of a ``Bucket`` that a comm's reduction deals with.

_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")
LARGE = 2**14
"""Elements of a gradient, on average, from which a call for each costs less than a pass over all."""


def plan_reductions(buckets: Sequence[Bucket]) -> list[CoalescedAllReduce]:
    """Groups ``buckets``, given in the order of their backwards, into reductions.

    Only neighbours share a reduction, if they have one dtype, are summed over the same ranks and divided by
    the same number. A bucket that is larger than the limit is reduced alone.
    """
    kinds = [
        (b.dtype, b.storage_device, [g.group_name for g in b.replicate_groups], b.divisor)
        for b in buckets
    ]
    groups = coalesced([bucket.flat.nbytes for bucket in buckets], kinds)
    return [CoalescedAllReduce([buckets[i] for i in group]) for group in groups]


class CoalescedAllReduce:
    """One all-reduce of the gradients of several buckets. S: the elements of all their parameters.

    Attributes:
        arrived: (S,), the gradients that have arrived in this backward; None before the first.
        comm: what reduces them in the backward under way; None at rest.
        same_order: the root's, see ``same_order``.
        accepts_all: whether ``accept_all`` may be called: all its units are still replicated units.
        used: for each bucket the indices of the parameters that have a gradient; None before the bucket's
            gradients have arrived.
        launched: whether this backward's reduction is under way.
    """

    scatter_group = tp_group = on_reduced = None
    reducer = DEFAULT_REDUCER
    pin = False
    partial_start = 0

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0]
        self.buckets = list(buckets)
        self.unit = first.unit
        self.over_replicate = [AllReduce(group) for group in first.replicate_groups]
        self.divisor = first.divisor
        self.dtype, self.grad_dtype = first.dtype, first.grad_dtype
        self.storage_device = first.storage_device
        self.sizes = self.segment_sizes = [bucket.numel for bucket in buckets]
        self.numel = sum(self.sizes)
        counts = [len(bucket.params) for bucket in buckets]
        self._places = list(starmap(slice, pairwise(accumulate(counts, initial=0))))
        # What gradients are multiplied by as they are copied, where that saves a pass over the sum: for large
        # ones, which are copied by a call each, and a power of two, which rounds nothing. Else None.
        exact = math.frexp(self.divisor)[0] == 0.5 and self.dtype is not torch.float16
        large = self.numel >= LARGE * sum(counts) and type(self.flat) is torch.Tensor
        self._share = 1.0 / self.divisor if exact and large and self.divisor != 1 else None
        self.in_flight: Any = None
        self.comm: Comm | None = None
        self.same_order: SameOrder | None = None
        self.accepts_all = False
        self.forget()

    def end(self) -> None:
        """Called when the root's backward has ended."""
        self.comm, self.accepts_all = None, False
        self.forget()

    @property
    def grads(self) -> CoalescedAllReduce:
        """What a comm starts and finishes. A property, as an attribute would be a reference cycle."""
        return self

    @property
    def flat(self) -> torch.Tensor:
        """The flat buffer of the first bucket."""
        return self.buckets[0].flat

    def forget(self) -> None:
        """Drops the gradients that have arrived."""
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
        """Groups the buckets that share a node of the graph; see ``_Arrival``."""
        sizes = [bucket.flat.nbytes for bucket in self.buckets]
        nodes = coalesced(sizes, first=NODE_BYTES, most=NODE_BYTES)
        return [[self.buckets[i] for i in node] for node in nodes]

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, place: int, indices: list[int], grads: Sequence[torch.Tensor]) -> bool:
        """Takes the gradients of parameters ``indices`` of bucket ``place``; ``pack`` copies them.

        Returns:
            False if they are not taken, since gradients of the bucket were in this backward before.
        """
        if self.used[place] is not None:
            return False
        if self.arrived is None:
            self._begin()
        parts = self._parts[self._places[place]]
        if len(indices) < len(parts):
            for index in set(range(len(parts))).difference(indices):
                parts[index].zero_()
            parts = [parts[index] for index in indices]
        self._targets += parts
        self._sources += grads
        self.used[place] = indices
        self.missing -= 1
        return True

    def accept_all(self, since: int, indices: list[list[int]], grads: Gradients) -> bool:
        """Takes the gradients of all parameters of the buckets from index ``since`` on, as ``accept`` does.

        Args:
            indices: for each bucket the parameters that require a gradient. Where these are not all, or one
                of ``grads`` is None, nothing is taken.
        """
        until = since + len(indices)
        start, end = self._places[since].start, self._places[until - 1].stop
        if len(grads) < end - start or any(map(is_, grads, repeat(None))):
            return False
        if any(each is not None for each in self.used[since:until]):
            return False
        if self.arrived is None:
            self._begin()
        self._targets += self._parts[start:end]
        self._sources += grads  # type: ignore[arg-type]
        self.used[since:until] = indices
        self.missing -= len(indices)
        return True

    def pack(self) -> None:
        """Copies what was accepted; when all gradients are there, issues the reduction."""
        if self._share is None:
            foreach_copy_(self._targets, self._sources)
        else:
            for target, source in zip(self._targets, self._sources, strict=True):
                torch.mul(source, self._share, out=target)
        self._targets, self._sources = [], []
        if not self.missing:
            self.launch()

    def _begin(self) -> None:
        self.arrived = torch.empty(self.numel, dtype=self.dtype, device=self.storage_device)
        pairs = zip(self.buckets, self.arrived.split(self.sizes), strict=True)
        self._parts = [part for bucket, piece in pairs for part in bucket.local_parts(piece)]

    # -- reduction ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Issues the reduction of what has arrived, if anything has."""
        if self.arrived is None or self.launched:
            return
        self.launched = True
        assert self.comm is not None
        if self.same_order is not None:
            self.same_order.reduces_jointly(self)
        self.comm.reduce(self, all_reduce=True)
        itself = weakref.ref(self)
        for bucket in self.buckets:
            bucket.grads.in_flight = itself

    def drain(self, _: Bucket) -> None:
        """Completes the reduction, before one of the buckets is reduced again by itself."""
        if self.launched and self.arrived is not None:
            assert self.comm is not None
            self.comm.drain(self)

    def start(self, *, all_reduce: bool) -> Reduction:
        """Returns the reduction of what has arrived: from the first bucket that has gradients to the last."""
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
            if self.over_replicate:  # see ``BucketGradients``
                scale, rest = rest, scale
        job = Reduction(self, [flat], [], scale, final_scale=rest)
        job.stages = stages_of(job, self.over_replicate, (), ())
        return job

    def _span(self, flat: torch.Tensor) -> torch.Tensor:
        there = [place for place, used in enumerate(self.used) if used is not None]
        pieces = flat.split(self.sizes)
        for place in range(there[0], there[-1]):
            if self.used[place] is None:
                pieces[place].zero_()
        return flat[slice(*self.span())]

    def span(self) -> tuple[int, int]:
        """Returns where in the buffer the first bucket that has gradients begins, and the last one ends."""
        there = [place for place, used in enumerate(self.used) if used is not None]
        return sum(self.sizes[: there[0]]), sum(self.sizes[: there[-1] + 1])

    def finish(self, job: Reduction) -> None:
        """Puts the result into ``.grad``, adding to what is there."""
        job.take()
        flat, parts, used, launched = self.arrived, self._parts, self.used, self.launched
        assert flat is not None
        each = zip(self.buckets, flat.split(self.sizes), self._places, strict=True)
        grads = [grad for b, piece, here in each for grad in make_gradients(b, piece, parts[here])]
        self.forget()
        self.launched = launched  # what comes now is of another reduction
        self.used = [[]] * len(self.buckets)
        if not self._put_all(used, grads):
            self._put_pieces(used, flat, parts, grads)
        elif have_gradient_hooks(self._sharded()):
            for bucket, indices in zip(self.buckets, used, strict=True):
                bucket.grads.run_hooks(indices or [])

    def _put_all(self, used: list[list[int] | None], grads: list[torch.Tensor]) -> bool:
        """Sets ``.grad`` of all parameters, if all get one, none has one, and none was frozen since. Returns
        whether it did."""
        params = self._sharded()
        if sum(map(len, filter(None, used))) < len(params):
            return False
        with torch_function_off():
            has_grads = any(map(is_not, map(_GRAD, params), repeat(None)))
            if has_grads or not all(map(_REQUIRES_GRAD, params)):
                return False
            deque(map(setattr, params, repeat("grad"), grads), maxlen=0)
        return True

    def _put_pieces(
        self,
        used: list[list[int] | None],
        flat: torch.Tensor,
        parts: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Sets ``.grad``, or adds to it, bucket by bucket."""
        pieces = flat.split(self.sizes)
        for place, indices in enumerate(used):
            if indices is not None:
                here, params = self._places[place], self.buckets[place].params
                gradients = self.buckets[place].grads
                indices = [i for i in indices if params[i].sharded.requires_grad]
                gradients.put_gradients(pieces[place], parts[here], grads[here], indices)
                gradients.run_hooks(indices)

    def _sharded(self) -> list[torch.nn.Parameter]:
        return [param.sharded for bucket in self.buckets for param in bucket.params]


# Which units are replicated units.


def is_replicated(unit: Unit) -> bool:
    """Whether ``unit`` can be run as a replicated unit, with the settings that it has now."""
    group = unit.group
    return (
        unit.sync
        and unit.all_reduce
        and not unit.observers
        and not (unit.context is not None and unit.context.root.manual_finalization)
        and not unit.tracked
        and unit.input_dtype is None
        and unit.policy.output_dtype is None
        and not group.beside
        and group.retain is not Retain.USER
        and not group.is_in_other_form
        and all(map(_is_plain, group.buckets))
    )


def _is_plain(bucket: Bucket) -> bool:
    return (
        (bucket.stand_ins is not None or _can_stand_in(bucket))
        and not bucket.reducer.averages
        and not bucket.on_result
        and not bucket.reduce_unused
        and bucket.grads.unsharded_accumulated is None
        and bucket.grads.partial_reduce_output is None
    )


def _can_stand_in(bucket: Bucket) -> bool:
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
            and not any(isinstance(holder, OwnSetattr) for holder, _ in param.module_infos)
            for param in bucket.params
        )
    )


class ReplicatedUnits(ContextOption):
    """Runs the replicated units of one root.

    Attributes:
        units: the replicated units, weakly.
        registers: whether their unsharded parameters are registered: within the root's forward, and in
            backward.
        joints: the reductions of their gradients, in the order of the units' backwards.
        changed: the groups whose weights have changed between the last forward and the backward under way.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.units: list[weakref.ref[Unit]] = []
        self.registers = False
        self.joints: list[CoalescedAllReduce] = []
        self.changed: list[ParamGroup] = []
        self._planned: list[tuple[Bucket, float | None]] | None = None

    def _alive(self) -> list[Unit]:
        return [unit for ref in self.units if (unit := ref()) is not None]

    # -- forward -------------------------------------------------------------------------------------

    def before_forward(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Takes those of ``units`` that are replicated units now; returns the others."""
        mine: list[Unit] = []
        others: list[Unit] = []
        for unit in units:
            (mine if self._prepare(unit) else others).append(unit)
        self.units = [unit.ref for unit in mine]
        planned = [
            (bucket, bucket.divide_factor)
            for unit in reversed(mine)
            for bucket in reversed(unit.group.buckets)
            if any(map(_REQUIRES_GRAD, bucket.compute_params))
        ]
        if planned != self._planned:
            self._plan([bucket for bucket, _ in planned], mine)
            self._planned = planned
        return others

    def begin_forward(self) -> None:
        """Registers their unsharded parameters."""
        units = self._alive()
        for unit in units:
            for bucket in unit.group.buckets:
                if bucket.versions.note_weights():
                    bucket.versions.set_unsharded()
        self._register(units)

    def end_forward(self, units: Sequence[Unit], *, backward_to_come: bool) -> Sequence[Unit]:
        """Registers the sharded parameters again."""
        mine = set(self._alive())
        self._unregister(mine)
        return [unit for unit in units if unit not in mine]

    def leave(self, unit: Unit) -> None:
        if unit.registrar is self:
            unit.registrar = None
            unit.group.register_sharded()
            unit.group.use_stand_ins(None)

    def _prepare(self, unit: Unit) -> bool:
        group, context = unit.group, self.context
        if unit.context is not context:  # also inside another root, which has run since
            return False
        if not is_replicated(unit):
            self.leave(unit)
            return False
        group.register_sharded()
        if not group.is_sharded:  # held since an evaluation, say
            group.reshard(context.comm)
        group.adopt()
        if group.on_meta:
            group.check_has_values()
        group.count_trainable()
        unit.registrar = self
        if not group.stands_in:
            group.use_stand_ins([bucket.compute_params for bucket in group.buckets])
            self._planned = None
            for bucket in group.buckets:
                bucket.versions.note_weights()
                bucket.versions.set_unsharded()
        return True

    def _plan(self, buckets: list[Bucket], units: list[Unit]) -> None:
        """Makes reductions and stand-ins anew; of graphs from before, units take gradients one by one."""
        ref_of = {bucket: unit.ref for unit in units for bucket in unit.group.buckets}
        self.joints = plan_reductions(buckets)
        for joint in self.joints:
            places = count()
            for node in joint.share_nodes():
                make_stand_ins({b: Arrivals(b, ref_of[b], joint, next(places)) for b in node})
        for unit in units:
            unit.group.list_module_infos()
            for bucket in unit.group.buckets:
                bucket.versions.set_unsharded()

    def _register(self, units: Iterable[Unit]) -> None:
        self.registers = True
        for unit in units:
            unit.group.register_unsharded()

    def _unregister(self, units: Iterable[Unit]) -> None:
        self.registers = False
        for unit in units:
            if unit.group.retain is not Retain.USER:
                unit.group.register_sharded()

    # -- what units ask, see ``Unit.registrar`` ------------------------------------------------------------

    def has_registered(self, unit: Unit) -> bool:
        group = unit.group
        return (
            self.registers
            and group.stands_in
            and group.is_registered
            and not unit.forward
            and not self.context.backward_has_failed
        )

    def before_unit(self, unit: Unit) -> None:
        if self.changed and unit.group in self.changed:
            raise unit.weights_changed()

    def after_unit(self, unit: Unit, output: Any) -> None:
        """Lets the first gradient that reaches one of ``output`` begin the backward."""
        context = self.context
        if not torch.is_grad_enabled() or context.backward is not None:
            return
        # Hooks are of one level of its transforms; gradients arrive alike.
        if functorch_is_active():
            return
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            # A parameter that is passed on outlives the graph.
            if tensor.requires_grad and not (tensor.is_leaf or getattr(tensor, "_is_param", False)):
                tensor.register_hook(partial(_begin_backward, unit))

    # -- backward ------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Registers them for what is recomputed."""
        units, context = self._alive(), self.context
        same = all(map(is_replicated, units)) and all(
            bucket.divisor == joint.divisor for joint in self.joints for bucket in joint.buckets
        )
        for joint in self.joints:
            joint.comm, joint.accepts_all = context.comm, same
            joint.same_order = context.same_order
        self.changed = [unit.group for unit in units if unit.group.note_changes()]
        if not self.registers:
            self._register(units)

    def reduce(self) -> None:
        """Issues the reductions that have waited for gradients that did not arrive."""
        for joint in self.joints:
            joint.launch()

    def end_backward(self, *, keep: bool) -> None:
        for joint in self.joints:
            joint.end()
        self.changed = []
        if not keep:
            self._unregister(self._alive())


def _of_context(context: RunContext) -> ReplicatedUnits | None:
    by_unit = (unit.group.buckets for unit in context.units)
    some = any(buckets and all(map(_can_stand_in, buckets)) for buckets in by_unit)
    return ReplicatedUnits(context) if some else None


root_options.append(_of_context)


@untraced
def _begin_backward(unit: Unit, _: torch.Tensor) -> None:
    """Hook on outputs, whose first gradient begins the backward. Graphs hold it, and it holds the unit."""
    assert unit.context is not None
    unit.context.enter_backward()
    issuing.unit = unit.label


@untraced
def _arrive(node: list[Arrivals], grads: Gradients) -> None:
    """Takes the gradients of one backward, of the buckets that share ``node``."""
    unit = node[0].unit()
    context = None if unit is None else unit.context
    if context is not None and not torch.is_grad_enabled():
        context.enter_backward()
        joint = node[0].joint()
        if joint is not None and joint.accepts_all:
            indices = [arrivals.indices for arrivals in node]
            if joint.accept_all(node[0].place, indices, grads):
                joint.pack()
                return
    given = iter(grads)
    taken = [_take(arrivals, list(islice(given, len(arrivals.indices)))) for arrivals in node]
    for joint in dict.fromkeys(filter(None, taken)):
        joint.pack()


def _take(arrivals: Arrivals, grads: list[torch.Tensor | None]) -> CoalescedAllReduce | None:
    """Takes the gradients of one bucket; returns the reduction that has taken them, if one has."""
    unit, bucket = arrivals.unit(), arrivals.bucket()
    if unit is None or bucket is None or unit.context is None:
        return None
    params = bucket.params
    unit.context.enter_backward()
    pairs = zip(arrivals.indices, grads, strict=True)
    taken = {i: g for i, g in pairs if g is not None and params[i].sharded.requires_grad}
    if not taken:
        return None
    indices, given = list(taken), list(taken.values())
    joint = arrivals.joint()
    if joint is not None and not torch.is_grad_enabled() and is_replicated(unit):
        fits = joint.comm is not None and joint.divisor == bucket.divisor
        if fits and joint.accept(arrivals.place, indices, given):
            return joint
    for index, grad in zip(indices, given, strict=True):
        unit.take_gradient(bucket, index, grad)
    return None
