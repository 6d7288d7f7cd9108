"""Checks of units: the execution order on all ranks, models compared once, parameters updated in backward.

Collectives are matched by their order alone. A rank that runs its units in another order than the rest
gathers other parameters than it thinks, or waits for ever. With ``check_execution_order`` ranks tell each
other where they are, through the c10d store: that works although their collectives do not match any more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parallel3d._torch.autograd import backward_id, node_is_in_backward
from parallel3d._util.arguments import as_bool
from parallel3d.errors import AgreementError, Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RootOption, RunContext, root_options
from parallel3d.fsdp.group import ShardedState
from parallel3d.fsdp.members import units_of
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.unit import Call, Observer, Unit
from parallel3d.guards.rendezvous import compare_digests
from parallel3d.mesh.agreement import DEFAULT_TIMEOUT, check_agreement
from parallel3d.mesh.store import others

# What the ranks of a model compare before it communicates for the first time.
#
# Each may have changed its parameters since ``fully_shard``, such as frozen one; and plain
# ``fully_shard`` compares nothing. The ranks of each mesh compare what lies on it: those of
# another may have another model.


def ranks_of(units: Iterable[Unit]) -> list[int]:
    """All ranks that the units' parameters lie on."""
    return sorted({rank for unit in units for param in _params(unit) for rank in _ranks(param)})


def begins_to_communicate(units: Iterable[Unit]) -> str:
    """Whether a "forward" of the units does, or only a "backward": where their parameters are whole.

    A rank may then run forward by itself.
    """
    for unit in units:
        for bucket in unit.group.buckets:
            if bucket.shard_group is not None or any(p.tp_size > 1 for p in bucket.params):
                return "forward"
    return "backward"


class RanksAgree(RootOption):
    """What the ranks of one root compare, each once: their models, and which parameters got a gradient.

    Attributes:
        before: the first "forward" or "backward" that communicates; "" as soon as the models were compared.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)
        self.before = begins_to_communicate(context.units)

    @property
    def context(self) -> RunContext:
        """The root's."""
        context = self._context()
        assert context is not None
        return context

    def before_forward(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Compares the models, where this forward may gather."""
        if self.before == "forward" and may_communicate(self.context.units):
            self._compare_models()
        return units

    def before_backward(self) -> None:
        """Compares the models, if no forward has."""
        if self.before:
            self._compare_models()

    def _compare_models(self) -> None:
        self.before = ""
        compare_ranks(self.context)

    def after_reductions(self) -> None:
        """Compares which parameters have a gradient, after the first backward that reduces all."""
        context = self.context
        if not context.running and compare_gradients(context):
            context.options.remove(self)


root_options.append(RanksAgree)


def may_communicate(units: Sequence[Unit]) -> bool:
    """Whether a forward may.

    Not one without gradients of units that ``unshard()`` has gathered: one rank may look at its model alone.
    """
    return torch.is_grad_enabled() or not _are_gathered(units)


def compare_ranks(context: RunContext) -> None:
    """Before the first communication.

    Raises:
        AgreementError: the ranks have other units or parameters; the same error on all of them.
    """
    units = context.units
    if others() is None:
        return
    by_ranks: dict[tuple[int, ...], list[tuple[Unit, ShardedParam]]] = {}
    for unit in units:
        for param in _params(unit):
            by_ranks.setdefault(_ranks(param), []).append((unit, param))
    names = _names(context)
    for ranks in sorted(by_ranks):  # in one order on all ranks: none waits in a circle
        found = by_ranks[ranks]
        compare_digests("model", ranks, lambda found=found: _texts(found, names))  # type: ignore[misc]


def compare_gradients(context: RunContext) -> bool:
    """After the first backward that reduces all: which parameters have a gradient. Whether it was that one.

    A parameter that some ranks alone have used has a gradient on those ranks alone: its shards would part.
    Only of the first one: later ones would cost a round trip each.

    Raises:
        AgreementError: other parameters have one on another rank; the same error on all of them.
    """
    units = context.units
    if any(not (unit.sync and unit.all_reduce) or guard_of(unit) is not None for unit in units):
        return False
    if others() is None or any(unit.reduce_unused for unit in units):
        return True
    names = _names(context)
    by_ranks: dict[tuple[int, ...], dict[str, str]] = {}
    for unit in units:
        for param in _params(unit):
            has = "has a gradient" if param.sharded.grad is not None else "has none"
            by_ranks.setdefault(_ranks(param), {})[_name(param, names)] = has
    for ranks in sorted(by_ranks):
        found = by_ranks[ranks]
        compare_digests(_GRADIENTS, ranks, lambda found=found: found)  # type: ignore[misc]
    return True


_GRADIENTS = (
    "gradients of the first backward (where ranks use different parameters: "
    "set_reduce_scatter_unused_params(True))"
)


def _are_gathered(units: Iterable[Unit]) -> bool:
    groups = [unit.group for unit in units if unit.group.buckets]
    return all(group.state is ShardedState.UNSHARDED for group in groups)


def _params(unit: Unit) -> Iterator[ShardedParam]:
    return (param for bucket in unit.group.buckets for param in bucket.params)


def _ranks(param: ShardedParam) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in param.on.mesh.mesh.flatten().tolist()))


def _names(context: RunContext) -> dict[int, str]:
    """Of the places that hold parameters (``module._parameters``): their modules' names."""
    return {
        id(module._parameters): name
        for top in context.root.modules
        for name, module in top.named_modules()
    }


def _texts(found: list[tuple[Unit, ShardedParam]], names: dict[int, str]) -> dict[str, str]:
    """What must be alike, by name; the order of names too."""
    units: dict[str, str] = {}
    params: dict[str, str] = {}
    for unit, param in found:
        units.setdefault(unit.label, f"reshard_after_forward={unit.reshards()} {unit.policy}")
        params[_name(param, names)] = _describe(param)
    return {
        "units in order": ", ".join(units),
        **{f"unit {label}": text for label, text in units.items()},
        **params,
        "parameters in order": ", ".join(params),
    }


def _name(param: ShardedParam, names: dict[int, str]) -> str:
    """All its names, as tied parameters have several."""
    return " = ".join(
        f"{prefix}.{attribute}" if (prefix := names.get(id(holder), "?")) else attribute
        for holder, attribute in param.slots
    )


def _describe(param: ShardedParam) -> str:
    mesh = param.on.mesh
    axes = " x ".join(
        f"{name} {size}"
        for name, size in zip(mesh.mesh_dim_names or "?" * mesh.ndim, mesh.shape, strict=True)
    )
    trained = "trained" if param.sharded.requires_grad else "frozen"
    placements = ", ".join(map(str, param.spec.placements))
    layout = f"{param.layout.compute}, {param.layout.tp_grad} gradient"
    return f"{trained} {tuple(param.global_shape)} {param.dtype}, {placements} on {axes}, {layout}"


_TOPIC = "execution order"


def check_execution_order(
    model: nn.Module, enabled: bool = True, *, timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """For debugging: says when ranks run the units of ``model`` in different orders, or an iteration in
    another than the one before, and which unit it was.

    Before each unit's gathers and reductions all ranks of the parameters' meshes compare where they are: a
    round trip to the store each, so not for production. Under simulated ranks, which run in step, only
    iterations are compared. A change between iterations is a warning: it is allowed, but what was gathered
    ahead by the old order was gathered for nothing.

    Args:
        model: a model with units; the check is on for all of them.
        enabled: False ends it. All ranks must call it alike.
        timeout: how long a rank waits for the others to get where it is.

    Raises:
        Parallel3dError: the model has no unit, or a wrong argument. Later, in forward and backward,
            AgreementError on every rank, naming units and ranks.
    """
    enabled = as_bool("enabled", enabled)
    if not isinstance(timeout, timedelta):
        raise Parallel3dError(
            f"check_execution_order: timeout is {timeout!r}; it must be a datetime.timedelta, such as "
            "timedelta(seconds=30)"
        )
    units = list(units_of(model, recurse=True)) if isinstance(model, nn.Module) else []
    if not units:
        raise Parallel3dError(
            f"check_execution_order: {type(model).__name__} has no unit; apply fully_shard or "
            "parallelize first"
        )
    check = OrderCheck(ranks_of(units), timeout)
    for unit in units:
        unit.observers = [each for each in unit.observers if not isinstance(each, OrderCheck)]
        if enabled:
            unit.observers.append(check)


class OrderCheck(Observer):
    """Where this rank is, told to the others and compared with the iteration before.

    Attributes:
        ranks: those that compare.
        order: units in the order of their forwards, this iteration. Not those that the user runs alone.
        last: the same of the iteration before.
        changed: whether this iteration was found to differ.
    """

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.order: list[weakref.ref[Unit]] = []
        self.last: list[weakref.ref[Unit]] = []
        self.changed = False

    def at(self, what: str, unit: Unit) -> None:
        """This rank is about to do ``what`` (forward, backward, ...) of ``unit``."""
        here = f"{what} of {unit.label}"
        try:
            check_agreement(_TOPIC, {"where": here}, timeout=self.timeout, ranks=self.ranks)
        except AgreementError as error:
            raise AgreementError(
                f"{error}\nRank {dist.get_rank()} was at the {here}. Units must run in one order on every "
                "rank: look for branches that depend on the rank or its data"
            ) from error

    def unshard(self, unit: Unit) -> None:
        """See ``Observer``."""
        self.at("unshard()", unit)

    def begin_backward(self, unit: Unit) -> None:
        """See ``Observer``."""
        self.at("backward", unit)

    def begin_reduction(self, unit: Unit) -> None:
        """See ``Observer``."""
        self.at("reduction", unit)

    def end_backward(self, unit: Unit) -> None:
        """See ``Observer``."""
        self.at("end of the backward", unit)

    def begin_forward(self, unit: Unit, *, begins: bool, within: bool, recomputes: bool) -> None:
        """See ``Observer``."""
        self.at("recomputation" if recomputes else "forward", unit)
        if recomputes or not (begins or within):
            return
        if begins:
            self._begin_iteration()
        place = len(self.order)
        self.order.append(unit.ref)
        if self.changed or not self.last:
            return
        before = self.last[place] if place < len(self.last) else None
        if before is not unit.ref:
            was = "nothing more" if before is None else _label(before)
            self._warn(f"unit {unit.label} runs at place {place}, where {was} was before")

    def abandon(self, unit: Unit) -> None:
        """After an exception: the iteration that broke off is not compared with."""
        self.order = []

    def _begin_iteration(self) -> None:
        missing = self.last[len(self.order) :] if self.order else []
        if missing and not self.changed:
            ran = _label(self.order[-1])
            self._warn(f"it ended after {ran}; unit {_label(missing[0])} did not run")
        if self.order:
            self.last, self.order = self.order, []
        self.changed = False

    def _warn(self, what: str) -> None:
        self.changed = True
        warnings.warn(
            f"the execution order of an iteration differs from the one before: {what}. What is gathered "
            "ahead follows the order before",
            stacklevel=2,
        )


def _label(ref: weakref.ref[Unit]) -> str:
    unit = ref()
    return "a deleted unit" if unit is None else unit.label


# StepGuard: a unit whose parameters are updated within the backward, and what must hold for that.
#
# An update is right only when nothing in this backward, nor in a later one of the same forward,
# reads the parameters or adds to their gradients any more. Autograd sees to most of it: a gradient
# arrives when all uses in its backward have contributed. The rest is checked here, and is an error
# rather than a wrong number:
#
# - a backward inside a backward (reentrant checkpointing) brings gradients one region at a time;
# - a graph that was made before an update computes with weights that are gone;
# - a unit runs again after its update (recomputation for a region that needs its values alone);
# - a loss uses the sharded Parameter itself, whose gradient comes apart from the unit's.

_NONE = -1  # what ``backward_id`` is outside a backward

Update = Callable[[Bucket], None]
"""Updates the parameters of a bucket that have a gradient, and frees it."""


class StepGuard(Observer):
    """Of one unit; its buckets have it too.

    Attributes:
        updates: how many updates there have been.
        updated_in: the backward of the last one.
    """

    def __init__(self, unit: Unit, update: Update) -> None:
        self._unit = unit.ref
        self._update = update
        self.updates = 0
        self.updated_in = _NONE
        # Of each forward call: how many updates there were before, and the backward that it was made in.
        self._calls: weakref.WeakKeyDictionary[Call, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._nodes: dict[int, Any] = {}  # id of a sharded Parameter -> what adds to its ``.grad``

    @property
    def unit(self) -> Unit:
        """The unit."""
        unit = self._unit()
        assert unit is not None
        return unit

    # -- what the unit tells -------------------------------------------------------------------------

    def begin_call(self, unit: Unit) -> None:
        """Before each forward."""
        if backward_id() != _NONE and backward_id() == self.updated_in:
            raise self._error(
                "was updated in this backward and is now run again (activation checkpointing recomputes a "
                "region whose own result did not need the unit's gradient)",
                "keep the unit out of that checkpointed region",
            )

    def note_call(self, call: Call) -> None:
        """A forward call that a backward may follow."""
        self._calls[call] = (self.updates, backward_id())

    def reach_call(self, call: Call, context: RunContext) -> None:
        """A gradient has reached ``call``."""
        updates, made_in = self._calls.get(call, (0, _NONE))
        if updates != self.updates:
            raise self._error(
                "was updated since this forward, so its gradient can't be computed any more",
                "do one backward for each forward: sum the losses, and no retain_graph=True",
            )
        if made_in not in (_NONE, backward_id()):
            self._raise_reentrant()
        self._check_sync()

    def take_gradient(self, unit: Unit) -> None:
        """A gradient has arrived."""
        if unit.context is not None and unit.context.backward_id != backward_id():
            self._raise_reentrant()
        self._check_sync()

    def update(self, bucket: Bucket, used: Sequence[int]) -> None:
        """The reduced gradients of ``bucket`` are in ``.grad``."""
        if not used:
            return
        self._check_uses(bucket, used)
        self.updates += 1
        self.updated_in = backward_id()
        self._update(bucket)

    # -- checks --------------------------------------------------------------------------------------

    def _check_sync(self) -> None:
        unit = self.unit
        if not (unit.sync and unit.all_reduce):
            raise self._error("accumulates gradients", _ACCUMULATION_HINT)

    def _check_uses(self, bucket: Bucket, used: Sequence[int]) -> None:
        unit = self.unit
        around = unit if unit.context is None else unit.context.root
        if unit.depth or around.depth:
            raise self._error(
                "would be updated by a backward inside a forward that goes on",
                "call backward after the forward",
            )
        if backward_id() == _NONE:
            return
        for index in used:
            param = bucket.params[index]
            node = self._nodes.get(id(param.sharded))
            if node is None:
                node = get_gradient_edge(param.sharded).node
                self._nodes[id(param.sharded)] = node  # kept, it is the one that graphs use
            if node_is_in_backward(node):
                raise self._error(
                    f"has parameter {param.name}, which the loss uses outside the unit's forward too: that "
                    "gradient comes apart from the others",
                    "use it inside the unit's forward, or weight_decay for a penalty on weights",
                )

    def _raise_reentrant(self) -> None:
        raise self._error(
            "is in a backward inside a backward, as torch.utils.checkpoint makes with use_reentrant=True: "
            "whether another one will bring gradients can't be known",
            "use use_reentrant=False",
        )

    def _error(self, what: str, hint: str) -> StateError:
        return StateError(
            f"unit {self.unit.label}, whose parameters are updated in backward, {what}; {hint}, or use an "
            "ordinary optimizer"
        )


_ACCUMULATION_HINT = (
    "there is nothing to accumulate in, as each backward updates: make one backward a step"
)


def guard_of(unit: Unit) -> StepGuard | None:
    """The guard of ``unit``; None: it is not updated in backward."""
    return next((each for each in unit.observers if isinstance(each, StepGuard)), None)


def refuse_accumulation(units: Iterable[Unit], what: str) -> None:
    """Raises StateError if any of ``units`` is updated in backward."""
    for unit in units:
        if guard_of(unit) is not None:
            raise StateError(
                f"{what}: the parameters of unit {unit.label} are updated in backward; "
                f"{_ACCUMULATION_HINT}, or use an ordinary optimizer"
            )
