"""Records the inputs and outputs of every module, and their gradients, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.fully_shard import plain_name
from parallel3d._torch.simulated import tensors_by_rank
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.testing.differences.fit import ALL, WHOLE

Values = dict[int, Tensor]  # by rank
Key = tuple[str, int]  # a call: the module's name, and the number of the call
Place = tuple[str, Key, int]  # "enter" or "exit" of a call, and which of its tensors

FUNCTION = "::"  # between the names of a module and of a function that it calls, which is recorded as a call


@dataclass
class RecordedCall:
    """One call of a module. ``tensors``: "enter" (inputs) or "exit" (outputs) -> index -> rank -> value;
    ``grads``: their gradients, likewise."""

    key: Key
    parent: Key | None  # the call in which it was made
    # (Index of an input, earlier place at which the same tensor was recorded).
    reads: list[tuple[int, Place]] = field(default_factory=list)
    tensors: dict[str, dict[int, Values]] = field(default_factory=lambda: {"enter": {}, "exit": {}})
    grads: dict[str, dict[int, Values]] = field(default_factory=lambda: {"enter": {}, "exit": {}})
    # Index of an output -> forms (see ``fit``) that it may have, if they are known.
    kinds: dict[int, frozenset[str]] = field(default_factory=dict)
    rate: float = 0.0  # probability of a dropout, 0 in evaluation mode
    mask: Values | None = None  # the elements that a dropout kept
    done: bool = False  # whether it returned


@dataclass
class ForwardTrace:
    """The calls of one forward and backward; ``events``: when each began ("enter") and ended ("exit")."""

    calls: dict[Key, RecordedCall] = field(default_factory=dict)
    events: list[tuple[str, Key]] = field(default_factory=list)


def merged(traces: list[ForwardTrace]) -> ForwardTrace:
    """Merges the ranks' traces into the first one, whose order of events is kept."""
    first = traces[0]
    for trace in traces[1:]:
        for key, call in trace.calls.items():
            into = first.calls.get(key)
            if into is None:
                continue
            into.done = into.done and call.done
            for event in ("enter", "exit"):
                for whole, part in zip(
                    (into.tensors, into.grads), (call.tensors, call.grads), strict=True
                ):
                    for at, values in part[event].items():
                        whole[event].setdefault(at, {}).update(values)
            if into.mask is not None and call.mask is not None:
                into.mask.update(call.mask)
    return first


class ForwardRecorder:
    """Records the calls of all modules of ``model``, by hooks, in ``trace`` while that is set.

    Each input of a module is replaced by a view of it, so that each reader of a tensor has its own gradient.
    The results of the model do not change. ``own``: the ranks that a plain tensor of this process belongs to.
    """

    def __init__(self, model: nn.Module, own: tuple[int, ...]) -> None:
        self.trace: ForwardTrace | None = None
        self.own = own
        # The calls that have not returned; after an exception those it passed through.
        self.stack: list[RecordedCall] = []
        self._places: dict[int, list[Place]] = {}
        self._alive: list[Tensor] = []
        for name, module in model.named_modules():
            self._watch(plain_name(name), module)

    @contextmanager
    def recording(self, trace: ForwardTrace) -> Iterator[None]:
        """Records the forward in the body, and later its backward, in ``trace``."""
        self.trace, self.stack = trace, []
        try:
            yield
        finally:
            self.trace = None
            self._places.clear()
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
                self._output(call, at, tensor, _known_kinds(module, tensor) if at == 0 else None)

        # First and last, so that what other hooks do counts as the module's work.
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def _new(self, name: str) -> RecordedCall:
        assert self.trace is not None
        number = 0
        while (name, number) in self.trace.calls:
            number += 1
        call = RecordedCall((name, number), self.stack[-1].key if self.stack else None)
        self.trace.calls[call.key] = call
        self.trace.events.append(("enter", call.key))
        return call

    def _input(self, call: RecordedCall | None) -> Callable[[Tensor], Tensor]:
        """Returns a function that replaces an input by a view of it and records it in ``call``."""
        count = 0

        def view(tensor: Tensor) -> Tensor:
            nonlocal count
            at, count = count, count + 1
            trained = tensor.requires_grad and torch.is_grad_enabled() and _is_usual(tensor)
            seen = tensor.view_as(tensor) if trained else tensor
            if call is not None:
                call.tensors["enter"][at] = self.values(tensor)
                before = self._places.get(id(tensor), [])
                call.reads += [(at, place) for place in before]
                self._keep(seen, [*before, ("enter", call.key, at)])
                if trained:
                    seen.register_hook(self._grad_hook(call.grads["enter"], at))
            return seen

        return view

    def _output(
        self, call: RecordedCall, at: int, tensor: Tensor, kinds: frozenset[str] | None
    ) -> None:
        call.tensors["exit"][at] = self.values(tensor)
        if kinds is not None:
            call.kinds[at] = kinds
        self._keep(tensor, [*self._places.get(id(tensor), []), ("exit", call.key, at)])
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(self._grad_hook(call.grads["exit"], at))

    def _keep(self, tensor: Tensor, places: list[Place]) -> None:
        """Notes where ``tensor`` was read and returned, and keeps it alive, so that its id stays its own."""
        self._places[id(tensor)] = places
        self._alive.append(tensor)

    def _grad_hook(self, into: dict[int, Values], at: int) -> Callable[[Tensor], None]:
        def note(grad: Tensor | None) -> None:
            if grad is not None:  # an autograd function may give none
                into[at] = self.values(grad)

        return note

    def function(
        self, name: str, inputs: tuple[Tensor, ...], rate: float, mask: Tensor | None
    ) -> None:
        """Records that the running module calls a function with dropout of this ``rate``."""
        if self.trace is None or not self.stack:
            return
        call = self._new(self.stack[-1].key[0] + FUNCTION + name)
        call.rate = rate
        call.tensors["enter"] = {at: self.values(t) for at, t in enumerate(inputs)}
        if mask is not None:
            call.mask = self.values(mask)

    def values(self, tensor: Tensor) -> Values:
        """Returns copies of what each rank holds of a tensor, by rank."""
        tensor = tensor.detach() if _is_usual(tensor) else tensor
        if isinstance(tensor, DTensor):
            tensor = get_local_tensor(tensor)
        if not _is_usual(tensor):  # such as vocabulary-parallel logits, or an async collective
            with torch.no_grad():
                full_tensor = getattr(tensor, "full_tensor", tensor.clone)
                tensor = full_tensor()
        by_rank = tensors_by_rank(tensor)
        if by_rank is not None:
            return {rank: part.detach().clone() for rank, part in by_rank.items()}
        return dict.fromkeys(self.own, tensor.detach().clone())


def _is_usual(tensor: Tensor) -> bool:
    """Returns whether it is an ordinary tensor, one of simulated ranks, or a DTensor."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        or isinstance(tensor, DTensor)
        or tensors_by_rank(tensor) is not None
    )


def _known_kinds(module: nn.Module, output: Tensor) -> frozenset[str] | None:
    """Returns the kinds of Fit that ``output`` may have by placements or its module's style; None: any."""
    cut = frozenset({"shard", "slices"})
    if isinstance(output, DTensor):
        names = output.device_mesh.mesh_dim_names or ()
        if "tp" not in names:
            return None
        placement = output.placements[names.index("tp")]
        if isinstance(placement, Replicate):
            return WHOLE
        return frozenset({"partial"}) if isinstance(placement, Partial) else cut
    style = getattr(getattr(module, "_parallel3d_tp", None), "style", None)
    known = ("Colwise", "Rowwise", "VocabParallel", "SequenceParallel")
    if not _is_usual(output) or type(style).__name__ not in known:
        return None
    after = style.random_after  # type: ignore[union-attr]
    return {"whole": WHOLE, "": ALL - {"partial"}}.get(after, cut)
