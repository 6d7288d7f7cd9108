"""Records what goes into and comes out of every module, and the gradients of it, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.simulated import tensors_by_rank
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.testing.differences.fit import ALL

Values = dict[int, Tensor]


Key = tuple[str, int]  # of a call: the module's name, and which call of it


Place = tuple[str, Key, int]  # what a call's "enter" or "exit" brought: which tensor


FUNCTION = (
    "::"  # between a module's name and that of a function its code calls, which counts as one too
)


# The wrappers that people put around modules, which names of the plain model don't have.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """A module's or parameter's name without torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass
class Call:
    """One call of one module.

    Attributes:
        parent: the call it was made in.
        reads: (which input, the place that just this tensor was at before).
        inputs, outputs, input_grads, output_grads: tensors by position, each by rank.
        kinds: in which forms its outputs may be, where that is known.
        rate: of a dropout: how much it drops, 0 in evaluation.
        mask: of a dropout: what it kept, if that was asked for.
        done: whether it returned.
    """

    key: Key
    parent: Key | None
    reads: list[tuple[int, Place]] = field(default_factory=list)
    inputs: dict[int, Values] = field(default_factory=dict)
    outputs: dict[int, Values] = field(default_factory=dict)
    input_grads: dict[int, Values] = field(default_factory=dict)
    output_grads: dict[int, Values] = field(default_factory=dict)
    kinds: dict[int, frozenset[str]] = field(default_factory=dict)
    rate: float = 0.0
    mask: Values | None = None
    done: bool = False


@dataclass
class Trace:
    """The calls of one forward and backward, and ("enter" or "exit", call) in the order they happened."""

    calls: dict[Key, Call] = field(default_factory=dict)
    events: list[tuple[str, Key]] = field(default_factory=list)


def merged(traces: list[Trace]) -> Trace:
    """One trace of what several ranks have recorded each by itself; the first says the order."""
    first = traces[0]
    for trace in traces[1:]:
        for key, call in trace.calls.items():
            into = first.calls.get(key)
            if into is None:
                continue
            into.done = into.done and call.done
            for name in ("inputs", "outputs", "input_grads", "output_grads"):
                for at, values in getattr(call, name).items():
                    getattr(into, name).setdefault(at, {}).update(values)
            if into.mask is not None and call.mask is not None:
                into.mask.update(call.mask)
    return first


class Recorder:
    """Hooks on every module of ``model``. They record while ``trace`` is set.

    A module's inputs pass through a view each, so that every reader of a tensor has a gradient of its
    own; what a model computes is the same.

    Attributes:
        trace: where to record; None: don't.
        own: which ranks an ordinary tensor is of.
        stack: the calls under way; after an exception those that it came through.
    """

    def __init__(self, model: nn.Module, own: tuple[int, ...]) -> None:
        self.trace: Trace | None = None
        self.own = own
        self.stack: list[Call] = []
        self._made: dict[int, list[Place]] = {}
        self._alive: list[Tensor] = []
        for name, module in model.named_modules():
            self._watch(plain_name(name), module)

    @contextmanager
    def recording(self, trace: Trace) -> Iterator[None]:
        """Within it a forward is recorded in ``trace``, and later its backward."""
        self.trace, self.stack = trace, []
        try:
            yield
        finally:
            self.trace = None
            self._made.clear()
            self._alive.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            call = None
            if self.trace is not None:
                call = self._new(name)
                self.stack.append(call)
            return map_tensors(self._input(call), (args, kwargs))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if self.trace is None:
                return
            call = self.stack.pop()
            call.done = True
            self.trace.events.append(("exit", call.key))
            for at, tensor in enumerate(tensors_in(output)):
                kinds = _known_kinds(module, tensor) if at == 0 else None
                self._output(call, at, tensor, kinds)

        # First and last: what other hooks do is the module's doing.
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def _new(self, name: str) -> Call:
        assert self.trace is not None
        number = 0
        while (name, number) in self.trace.calls:
            number += 1
        call = Call((name, number), self.stack[-1].key if self.stack else None)
        self.trace.calls[call.key] = call
        self.trace.events.append(("enter", call.key))
        return call

    def _input(self, call: Call | None) -> Callable[[Tensor], Tensor]:
        """What a module's input goes through: a view, and a place in ``call``."""
        count = 0

        def view(tensor: Tensor) -> Tensor:
            nonlocal count
            at, count = count, count + 1
            trained = tensor.requires_grad and torch.is_grad_enabled() and _is_usual(tensor)
            seen = tensor.view_as(tensor) if trained else tensor
            if call is not None:
                call.inputs[at] = self.values(tensor)
                before = self._made.get(id(tensor), [])
                call.reads += [(at, place) for place in before]
                self._keep(seen, [*before, ("enter", call.key, at)])
                if trained:
                    seen.register_hook(self._grad_hook(call.input_grads, at))
            return seen

        return view

    def _output(self, call: Call, at: int, tensor: Tensor, kinds: frozenset[str] | None) -> None:
        call.outputs[at] = self.values(tensor)
        if kinds is not None:
            call.kinds[at] = kinds
        self._keep(tensor, [*self._made.get(id(tensor), []), ("exit", call.key, at)])
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(self._grad_hook(call.output_grads, at))

    def _keep(self, tensor: Tensor, places: list[Place]) -> None:
        """Notes where ``tensor`` was, and keeps it, so that no other one gets its id."""
        self._made[id(tensor)] = places
        self._alive.append(tensor)

    def _grad_hook(self, into: dict[int, Values], at: int) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            into[at] = self.values(grad)

        return note

    def function(
        self, name: str, inputs: tuple[Tensor, ...], rate: float, mask: Tensor | None
    ) -> None:
        """Records that the code that runs calls a function that may drop out."""
        if self.trace is None or not self.stack:
            return
        call = self._new(self.stack[-1].key[0] + FUNCTION + name)
        call.inputs, call.rate = {at: self.values(t) for at, t in enumerate(inputs)}, rate
        if mask is not None:
            call.mask = self.values(mask)

    def values(self, tensor: Tensor) -> Values:
        """Copies of what each rank has."""
        tensor = tensor.detach() if _is_usual(tensor) else tensor
        if isinstance(tensor, DTensor):
            tensor = get_local_tensor(tensor)
        if not _is_usual(tensor):
            with (
                torch.no_grad()
            ):  # logits that are split, collectives under way: their plain values
                whole = getattr(tensor, "full_tensor", None)
                tensor = tensor.clone() if whole is None else whole()
        by_rank = tensors_by_rank(tensor)
        if by_rank is not None:
            return {rank: part.detach().clone() for rank, part in by_rank.items()}
        copy = tensor.detach().clone()
        return dict.fromkeys(self.own, copy)


def _is_usual(tensor: Tensor) -> bool:
    """An ordinary tensor, simulated ranks' or a DTensor."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        or isinstance(tensor, DTensor)
        or tensors_by_rank(tensor) is not None
    )


def _known_kinds(module: nn.Module, output: Tensor) -> frozenset[str] | None:
    """In which forms ``output`` may be: what its placements or the module's style say."""
    if isinstance(output, DTensor):
        names = output.device_mesh.mesh_dim_names or ()
        if "tp" not in names:
            return None
        placement = output.placements[names.index("tp")]
        if isinstance(placement, Replicate):
            return frozenset({"whole"})
        return frozenset({"partial"} if isinstance(placement, Partial) else {"shard", "slices"})
    if not _is_usual(output):
        return None
    style = getattr(getattr(module, "_parallel3d_tp", None), "style", None)
    if type(style).__name__ not in ("Colwise", "Rowwise", "VocabParallel", "SequenceParallel"):
        return None
    after = style.random_after  # type: ignore[union-attr]
    return {"whole": frozenset({"whole"}), "": ALL - {"partial"}}.get(
        after, frozenset({"shard", "slices"})
    )


def own_ranks(simulated: int | None) -> tuple[int, ...]:
    """Of which ranks an ordinary tensor here is: of all simulated ones, or of this process's."""
    if simulated is not None:
        return tuple(range(simulated))
    return (dist.get_rank() if dist.is_initialized() else 0,)
