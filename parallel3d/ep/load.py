"""How many tokens each expert gets: counting, statistics, routers' correction biases, room of messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from parallel3d._torch.autograd import in_backward_pass
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._util.arguments import is_positive
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.ep.experts import experts_of, find_experts, state_of
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import units_of


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts of one module since it was last read, summed over all ranks.

    Attributes:
        tokens: for each expert the number of tokens that the router gave it.
        dropped: number of (token, expert) pairs that did not fit; 0 without ``set_capacity``.
    """

    tokens: tuple[int, ...]
    dropped: int

    @property
    def imbalance(self) -> float:
        """The largest number of tokens of an expert, relative to the mean over experts; 1 is balanced."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0


@dataclass
class _Counter:
    inner: Any
    experts: int
    counts: Any = field(default=None, repr=False)


_ATTRIBUTE = "_parallel3d_load"


def count(model: nn.Module) -> None:
    """Counts, in each training forward from now on, the tokens that each expert of ``model`` is given.

    On every mesh, with ep or without; it takes one small kernel a layer. The modules are those that hold
    stacked experts, as ``parallelize`` finds and ``ep.Experts`` declares them.

    Raises:
        StateError: no module of ``model`` holds experts.
    """
    divided = {name: m for name, m in model.named_modules() if state_of(m) is not None}
    modules = divided or find_experts(model)
    if not modules:
        raise StateError(f"{type(model).__name__} has no module that is known to hold experts")
    for module in modules.values():
        if _ATTRIBUTE in vars(module):
            continue
        state = state_of(module)
        experts = experts_of(module) if state is None else state.division.experts
        inner = wrap_forward(module, functools.partial(as_if, _counted), _counted)
        vars(module)[_ATTRIBUTE] = _Counter(inner, experts)


def _counted(self: Any, *args: Any, **kwargs: Any) -> Any:
    counter: _Counter = vars(self)[_ATTRIBUTE]
    if self.training and not in_backward_pass():  # a recomputation would count again
        index = next(t for t in (*args, *kwargs.values()) if not t.is_floating_point()).flatten()
        with torch.no_grad():
            valid = ((index >= 0) & (index < counter.experts)).to(torch.int64)
            if counter.counts is None or counter.counts.device != index.device:
                counter.counts = valid.new_zeros(counter.experts)
            counter.counts.scatter_add_(0, index.clamp(0, counter.experts - 1).long(), valid)
    return counter.inner(self, *args, **kwargs)


def stats(model: nn.Module, *, reset: bool = True) -> dict[str, ExpertLoad]:
    """Returns name of an experts module of ``model`` -> its load since the last call, equal on all ranks.

    It communicates: all ranks must call it.

    Args:
        model: as given to ``count``.
        reset: whether counting begins anew.

    Raises:
        StateError: ``count(model)`` was not called before.
    """
    found = {}
    for name, module, counts in _loads(model, reset):
        state, dropped = state_of(module), 0
        if state is not None and state.dropped is not None:
            groups = [*_axes_of(module, experts=True), state.axis.group]
            dropped = int(_summed(state.dropped.reshape(1), groups).item())
            if reset:
                state.dropped.zero_()
        found[name] = ExpertLoad(tuple(counts.tolist()), dropped)
    return found


def balance(model: nn.Module, rate: float = 1e-3) -> None:
    """Moves the correction biases of ``model``'s routers against their experts' load: by ``rate`` up for an
    expert with fewer tokens than the mean since the last call, down for one with more.

    The balancing without an auxiliary loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The load is
    summed over all data ranks, so the biases are the same on every mesh. Call it after ``optimizer.step()``,
    on all ranks; ``count(model)`` must have been called. The bias is the buffer or parameter with an entry
    for each expert, of the module around the experts, whose name ends in ``correction_bias`` or
    ``expert_bias``.

    Args:
        model: as given to ``count``.
        rate: what is added to or taken from a bias.

    Raises:
        Parallel3dError: ``rate`` is no positive number.
        StateError: ``count`` was not called, or a module has no such bias.
    """
    if not is_positive(rate):
        raise Parallel3dError(f"rate is {rate!r}; it must be a positive number, such as 1e-3")
    loads = list(_loads(model, reset=True))
    biases = [_bias_of(model, name, len(counts)) for name, _, counts in loads]
    with torch.no_grad():
        for (owner, attribute), (_, _, counts) in zip(biases, loads, strict=True):
            load = counts.double()
            step = rate * torch.sign(load.mean() - load)
            bias = getattr(owner, attribute).detach()
            step = step.to(bias.dtype)
            if isinstance(bias, DTensor):
                whole = [Replicate()] * bias.device_mesh.ndim
                spread = DTensor.from_local(step, bias.device_mesh, whole, run_check=False)
                step = get_local_tensor(spread.redistribute(placements=bias.placements))
                bias = get_local_tensor(bias)
            bias.add_(step)


def set_capacity(model: nn.Module, capacity: float | None) -> None:
    """Fixes the size of every message between ep ranks at ``capacity`` times the size with uniform routing.

    Sizes are then known before the routing is: there is no host synchronisation, and memory doesn't depend on
    the data. A (token, expert) pair that doesn't fit is dropped: the expert adds nothing to that token;
    ``stats`` returns how many were. The ranks of an ep group must then have equally many tokens in each
    forward, as sizes are not exchanged.

    Args:
        model: as ``parallelize`` has returned it.
        capacity: the factor. None: messages are as large as needed, and nothing is dropped.

    Raises:
        Parallel3dError: ``capacity`` is no positive number.
        StateError: no module of ``model`` is divided over ep.
    """
    if capacity is not None and not is_positive(capacity):
        raise Parallel3dError(f"capacity is {capacity!r}; it must be a positive number, or None")
    states = [state for m in model.modules() if (state := state_of(m)) is not None]
    if not states:
        raise StateError(f"no module of {type(model).__name__} is divided over ep")
    for state in states:
        state.capacity = capacity


def _loads(model: nn.Module, reset: bool) -> Iterator[tuple[str, nn.Module, Tensor]]:
    counted = [(n, m) for n, m in model.named_modules() if _ATTRIBUTE in vars(m)]
    if not counted:
        raise StateError(
            "call parallel3d.ep.count(model) before the forwards that are to be counted"
        )
    groups = _axes_of(model, experts=False)
    for name, module in counted:
        counter: _Counter = vars(module)[_ATTRIBUTE]
        counts = counter.counts
        if counts is None:
            device = next(p.device for p in model.parameters())
            counts = torch.zeros(counter.experts, dtype=torch.int64, device=device)
        yield name, module, _summed(counts, groups)
        if reset and counter.counts is not None:
            counter.counts.zero_()  # in place: a CUDA graph that is replayed adds to them too


def _axes_of(module: nn.Module, *, experts: bool) -> list[ProcessGroup]:
    """Returns the process groups over which the engine reduces gradients of ``module``: those of its experts'
    parameters, or of the other ones."""
    every = (b.axes for unit in units_of(module, recurse=True) for b in unit.group.buckets)
    axes = next((each for each in every if (each.mean_over is not None) == experts), None)
    found = [] if axes is None else [axes.replicate, axes.shard]
    return [axes.group(axis) for axis in found if axis is not None]  # type: ignore[union-attr]


def _summed(counts: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    counts = counts.clone()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
    return counts


_BIASES = ("correction_bias", "expert_bias")


def _bias_of(model: nn.Module, name: str, experts: int) -> tuple[nn.Module, str]:
    """Returns (module, attribute) of the correction bias for the experts module ``name``. ``experts``: how
    many it has. Raises StateError if there is none."""
    around = model.get_submodule(name.rpartition(".")[0])
    for owner in around.modules():
        for attribute, value in (*owner._buffers.items(), *owner._parameters.items()):
            if value is not None and value.numel() == experts and attribute.endswith(_BIASES):
                return owner, attribute
    raise StateError(
        f"{type(around).__name__} around {name} has no correction bias: a buffer or parameter of {experts} "
        f"numbers whose name ends in {' or '.join(_BIASES)}"
    )
