"""Checks of units: models compared over ranks, the execution order, and parameters updated in backward.

Collectives are matched by their order alone: a rank that runs its units in another order than the others
gathers wrong parameters or hangs. With ``check_execution_order`` ranks compare their positions through the
c10d store, which works even when their collectives no longer match.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parallel3d._torch.autograd import backward_id, node_is_in_backward
from parallel3d._util.arguments import as_bool
from parallel3d._util.storage import fill_unset, unset_in
from parallel3d.errors import AgreementError, Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import ContextUnit, Option
from parallel3d.fsdp.group import ShardedState
from parallel3d.fsdp.members import params_of, units_modules, units_of
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.same_order import module_names, param_name
from parallel3d.fsdp.unit import Call, Unit
from parallel3d.fsdp.watch import without_values
from parallel3d.guards.nan_losses import nan_losses
from parallel3d.guards.stalls import say_where_ranks_wait
from parallel3d.guards.timeouts import check_duration
from parallel3d.mesh.agreement import check_agreement
from parallel3d.mesh.store import others

# Ranks compare a model's units and parameters before it first communicates, as each may have changed them
# since ``fully_shard``. The ranks of each mesh compare the parameters on it: those of another mesh may have
# another model. What ranks do with them, ``same_order`` compares in each pass.


class RanksAgree(Option):
    """Compares the units and parameters of all ranks once, before the first collective.

    Attributes:
        before: the pass whose begin compares, "forward" or "backward"; "" once it was done. It is "backward"
            if nothing is sharded: forward then doesn't communicate, and a rank may run it alone.
    """

    def __init__(self, context: RunContext) -> None:
        buckets = (bucket for unit in context.units for bucket in unit.group.buckets)
        gathers = any(bucket.shard_group is not None for bucket in buckets)
        over_tp = any(param.tp_size > 1 for param in params_of(context.units))
        self.before = "forward" if gathers or over_tp else "backward"

    @classmethod
    def of_root(cls, context: RunContext) -> RanksAgree:
        return cls(context)

    def before_root_forward(self, context: RunContext) -> None:
        """Compares the models, unless this forward gathers nothing and has no gradients: one rank may
        evaluate a model alone that ``unshard()`` has gathered."""
        if self.before == "forward":
            groups = [unit.group for unit in context.units if unit.group.buckets]
            gathered = all(group.state is ShardedState.UNSHARDED for group in groups)
            if torch.is_grad_enabled() or not gathered:
                self.before_root_backward(context)

    def before_root_backward(self, context: RunContext) -> None:
        """Compares the models of each mesh's ranks, if that was not done; all ranks raise if they differ."""
        if not self.before:
            return
        self.before = ""
        context.options.remove(self)
        if others() is None:
            return
        say_where_ranks_wait()
        nan_losses.meet()
        names = module_names(context.root)
        by_ranks: dict[tuple[int, ...], _UnitParams] = {}
        for unit in context.units:
            for param in params_of([unit]):
                by_ranks.setdefault(_ranks(param), []).append((unit, param))
        for ranks in sorted(by_ranks):  # the same order on all ranks
            described = _describe_model(by_ranks[ranks], names)
            check_agreement("model", described, ranks=ranks, by_digest=True)


# ``to_empty`` gives memory to what is on meta. A state dict then brings the values of parameters and of
# persistent buffers; others, such as rotary tables, would stay as the memory was.

_NO_VALUES = "_parallel3d_no_values"  # attribute of a buffer that a conversion has given memory


def fill_from_meta(unit: Unit, convert: Callable[[], Any]) -> Any:
    """Calls ``convert``, such as ``to_empty``, which gives the unit's tensors memory, and returns its result.
    Buffers that it moves from meta have no values: unless they are filled, the root's next forward raises."""
    modules = list(units_modules(unit.modules))
    before = [
        (m, key) for m in modules for key, b in m._buffers.items() if b is not None and b.is_meta
    ]
    result = convert()
    for module, key in before:
        buffer = module._buffers[key]
        if type(buffer) is torch.Tensor and not buffer.is_meta:
            setattr(fill_unset(buffer), _NO_VALUES, True)
            options = unit.ready_context().options
            if not any(isinstance(option, BuffersAreFilled) for option in options):
                options.append(BuffersAreFilled())
    return result


class BuffersAreFilled(Option):
    """Raises StateError in the root's next forward if buffers that were on meta were not filled."""

    @classmethod
    def of_root(cls, context: RunContext) -> BuffersAreFilled | None:
        buffers = (buffer for top in context.root.modules for buffer in top.buffers())
        return cls() if any(hasattr(b, _NO_VALUES) for b in buffers) else None

    def before_root_forward(self, context: RunContext) -> None:
        named = (named for top in context.root.modules for named in top.named_buffers())
        names = [n for n, b in named if hasattr(b, _NO_VALUES) and bool(unset_in(b).all())]
        if names:
            raise StateError(without_values(names, "have memory from to_empty"))
        context.options.remove(self)


_UnitParams = list[tuple[ContextUnit, ShardedParam]]


def _ranks(param: ShardedParam) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in param.on.mesh.mesh.flatten().tolist()))


def _describe_model(pairs: _UnitParams, names: dict[int, str]) -> dict[str, str]:
    """Returns what ranks compare: name of a unit or parameter -> its description; and their orders."""
    units: dict[str, str] = {}
    params: dict[str, str] = {}
    for unit, param in pairs:
        units.setdefault(unit.label, f"reshard_after_forward={unit.reshards()} {unit.policy}")
        params[param_name(param, names)] = _describe(param)
    return {
        "units in order": ", ".join(units),
        **{f"unit {label}": text for label, text in units.items()},
        **params,
        "parameters in order": ", ".join(params),
    }


def _describe(param: ShardedParam) -> str:
    mesh = param.on.mesh
    names = mesh.mesh_dim_names or "?" * mesh.ndim
    axes = " x ".join(f"{name} {n}" for name, n in zip(names, mesh.shape, strict=True))
    trained = "trained" if param.sharded.requires_grad else "frozen"
    placements = ", ".join(map(str, param.spec.placements))
    layout = f"{param.layout.compute}, {param.layout.tp_grad} gradient"
    return f"{trained} {tuple(param.global_shape)} {param.dtype}, {placements} on {axes}, {layout}"


def check_execution_order(
    model: nn.Module, enabled: bool = True, *, timeout: timedelta | None = None
) -> None:
    """Makes ranks compare the order in which they run the units of ``model``, for debugging.

    Before the gathers and reductions of each unit, all ranks of the parameters' meshes compare which ones
    they are about to issue, which costs a round trip to the store. If ranks differ, every rank raises an
    error that names the units. If an iteration runs units in another order than the last one, there is a
    warning: prefetches follow the last order, so some were useless. Under simulated ranks, which run in step,
    only iterations are compared.

    Args:
        model: a model with units.
        enabled: False ends the check. All ranks must call it alike.
        timeout: how long a rank waits for the others at each comparison; by default the process group's.

    Raises:
        Parallel3dError: the model has no unit, or an argument is wrong. Later, in forward and backward,
            AgreementError on every rank, naming units and ranks.
    """
    enabled = as_bool("enabled", enabled)
    check_duration("check_execution_order: timeout", timeout, or_none=True)
    units = list(units_of(model, recurse=True)) if isinstance(model, nn.Module) else []
    if not units:
        raise Parallel3dError(
            f"check_execution_order: {type(model).__name__} has no unit; apply fully_shard or "
            "parallelize first"
        )
    ranks = sorted({rank for param in params_of(units) for rank in _ranks(param)})
    check = _OrderCheck(ranks, timeout)
    for unit in units:
        unit.options = [known for known in unit.options if not isinstance(known, _OrderCheck)]
        if enabled:
            unit.options.append(check)


class _OrderCheck(Option):
    """Compares which unit each rank is at, and the order of forwards with the last iteration.

    Attributes:
        order: labels of units in the order of their forwards in this iteration; those run alone are left out.
        last: the same for the last iteration.
        changed: whether a difference from the last iteration was already found in this one.
    """

    def __init__(self, ranks: list[int], timeout: timedelta | None) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.order: list[str] = []
        self.last: list[str] = []
        self.changed = False

    def _compare(self, event: str, unit: Unit) -> None:
        position = f"{event} of {unit.label}"
        try:
            check_agreement(
                "execution order", {"where": position}, timeout=self.timeout, ranks=self.ranks
            )
        except AgreementError as error:
            raise AgreementError(
                f"{error}\nRank {dist.get_rank()} was at the {position}. Units must run in one order on "
                "every rank: look for branches that depend on the rank or its data"
            ) from error

    def unshard(self, unit: Unit) -> None:
        self._compare("unshard()", unit)

    def begin_backward(self, unit: Unit) -> None:
        self._compare("backward", unit)

    def begin_reduction(self, unit: Unit) -> None:
        self._compare("reduction", unit)

    def end_backward(self, unit: Unit) -> None:
        self._compare("end of the backward", unit)

    def begin_forward(self, unit: Unit, *, begins: bool, within: bool, recomputes: bool) -> None:
        self._compare("recomputation" if recomputes else "forward", unit)
        if recomputes or not (begins or within):
            return
        if begins and self.order:
            missing = self.last[len(self.order) :]
            if missing and not self.changed:
                self._warn(f"it ended after {self.order[-1]}; unit {missing[0]} did not run")
            self.last, self.order = self.order, []
        if begins:
            self.changed = False
        place = len(self.order)
        self.order.append(unit.label)
        if self.changed or not self.last:
            return
        before = self.last[place] if place < len(self.last) else "nothing more"
        if before != unit.label:
            self._warn(f"unit {unit.label} runs at place {place}, where {before} was before")

    def abandon(self, unit: Unit) -> None:
        self.order = []

    def _warn(self, difference: str) -> None:
        self.changed = True
        warnings.warn(
            f"the execution order of an iteration differs from the one before: {difference}. Prefetches "
            "follow the order of the one before",
            stacklevel=2,
        )


# StepGuard: checks of a unit whose parameters are updated within the backward (``step_in_backward``).
#
# An update is right only if nothing in this backward, or in a later one of the same forward, still reads the
# parameters or adds to their gradients. Autograd ensures most of it: a gradient arrives when all uses in its
# backward have contributed. The remaining cases raise an error instead of computing wrong numbers:
#
# - a backward inside a backward (reentrant checkpointing) computes gradients one region at a time;
# - the graph of a forward before the update has saved the old weights;
# - a unit runs again after its update (recomputation for a region that needs only its outputs);
# - a loss uses the sharded Parameter itself, whose gradient arrives apart from the unit's.

_NO_BACKWARD = -1  # ``backward_id`` outside of a backward


class StepGuard(Option):
    """Calls ``update`` for each bucket of a unit when its gradients are reduced (``step_in_backward``).
    Raises StateError where an update within the backward would give wrong numbers.

    Args:
        update: updates the parameters of a bucket that have a gradient, and frees the gradients.

    Attributes:
        updates: number of updates so far.
        updated_in: ``backward_id`` of the last update's backward.
    """

    def __init__(self, unit: Unit, update: Callable[[Bucket], None]) -> None:
        self._unit = unit.ref
        self._update = update
        self.updates = 0
        self.updated_in = _NO_BACKWARD
        # For each forward call: the number of updates before it, and the backward that it ran in.
        self._calls: weakref.WeakKeyDictionary[Call, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._nodes: dict[int, Any] = {}  # id of a sharded Parameter -> its AccumulateGrad node

    def begin_call(self, unit: Unit) -> None:
        if backward_id() != _NO_BACKWARD and backward_id() == self.updated_in:
            raise self._error(
                "was updated in this backward and is now run again (activation checkpointing recomputes a "
                "region whose own result did not need the unit's gradient)",
                "keep the unit out of that checkpointed region",
            )

    def note_call(self, call: Call) -> None:
        self._calls[call] = (self.updates, backward_id())

    def reach_call(self, call: Call, context: RunContext) -> None:
        updates, ran_in = self._calls.get(call, (0, _NO_BACKWARD))
        if updates != self.updates:
            raise self._error(
                "was updated since this forward, so its gradient can't be computed any more",
                "do one backward for each forward: sum the losses, and leave out retain_graph=True",
            )
        self._check_backward(call.unit, nested=ran_in not in (_NO_BACKWARD, backward_id()))

    def take_gradient(self, unit: Unit) -> None:
        context = unit.context
        nested = context is not None and context.backward_id != backward_id()
        self._check_backward(unit, nested=nested)

    def update(self, bucket: Bucket, used: Sequence[int]) -> None:
        """Calls ``update`` for ``bucket``, after checks; ``used``: indices of parameters with a gradient."""
        if used:
            self._check_uses(bucket, used)
            self.updates += 1
            self.updated_in = backward_id()
            self._update(bucket)

    def _check_backward(self, unit: Unit, *, nested: bool) -> None:
        if nested:
            raise self._error(
                "is in a backward inside a backward, as of torch.utils.checkpoint(use_reentrant=True): "
                "it can't be known whether another one will bring gradients",
                "use use_reentrant=False",
            )
        if not (unit.sync and unit.all_reduce):
            raise self._error("accumulates gradients", _ACCUMULATION_HINT)

    def _check_uses(self, bucket: Bucket, used: Sequence[int]) -> None:
        unit = self._unit()
        assert unit is not None
        root = unit if unit.context is None else unit.context.root
        if unit.depth or root.depth:
            raise self._error(
                "would be updated by a backward inside a forward that goes on",
                "call backward after the forward",
            )
        if backward_id() == _NO_BACKWARD:
            return
        for index in used:
            param = bucket.params[index]
            node = self._nodes.get(id(param.sharded))
            if node is None:  # kept: graphs use this node as long as it exists
                node = self._nodes[id(param.sharded)] = get_gradient_edge(param.sharded).node
            if node_is_in_backward(node):
                raise self._error(
                    f"has parameter {param.name}, which the loss uses outside the unit's forward too: that "
                    "gradient comes apart from the others",
                    "use it inside the unit's forward, or weight_decay for a penalty on weights",
                )

    def _error(self, problem: str, hint: str) -> StateError:
        unit = self._unit()
        assert unit is not None
        return StateError(
            f"unit {unit.label}, whose parameters are updated in backward, {problem}; {hint}, or use an "
            "ordinary optimizer"
        )


_ACCUMULATION_HINT = "each backward updates, and has nothing to add to: make one backward a step"


def guard_of(unit: Unit) -> StepGuard | None:
    return next((known for known in unit.options if isinstance(known, StepGuard)), None)


def refuse_accumulation(units: Iterable[Unit], method: str) -> None:
    """Raises StateError, naming ``method``, if any of ``units`` updates its parameters in backward."""
    for unit in units:
        if guard_of(unit) is not None:
            raise StateError(
                f"{method}: the parameters of unit {unit.label} are updated in backward; "
                f"{_ACCUMULATION_HINT}, or use an ordinary optimizer"
            )
