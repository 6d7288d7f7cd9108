"""Running a model on the meta device, one of each kind of its units, with every operation recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from parallel3d._tree import map_tensors, tensors_in
from parallel3d.planner.layer_kernels import KernelMode
from parallel3d.planner.op_recorder import Op, OpRecorder, storage_of

__all__ = ["BEFORE", "Call", "MetaParams", "Recording", "Saved", "record", "record_root"]

BEFORE = "before the blocks"


@dataclass
class Saved:
    """A storage that forward keeps for backward, of ``nbytes``, first saved as elements of ``itemsize``."""

    nbytes: int
    itemsize: int
    label: str


@dataclass
class Recording:
    """What one forward and backward did.

    Attributes:
        saved: by storage. origin: storage -> index of the forward op that made it.
        split: storages that tensor parallelism divides, after forward.
        outputs: storages of the outputs. constant: those of inputs without a gradient.
        arrived: names of parameters, in the order in which their gradients came.
    """

    recorder: OpRecorder
    saved: dict[int, Saved] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)
    split: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    constant: set[int] = field(default_factory=set)
    arrived: list[str] = field(default_factory=list)


@dataclass
class Call:
    """Arguments of a unit's calls, the first one's kept; tensors that had a gradient are leaves with one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int = 1


class MetaParams:
    """Stand-ins on the meta device for a model's parameters and buffers, shared ones shared.

    Args:
        dims: parameter name -> dim that tensor parallelism shards.
        dtype: that floating parameters are computed in.
    """

    def __init__(self, model: nn.Module, dims: dict[str, int], dtype: torch.dtype) -> None:
        self._made: dict[int, Tensor] = {}
        self.buffers: set[int] = set()
        self.known: dict[int, tuple[str, Tensor, int | None]] = {}
        for name, param in model.named_parameters():
            kind = dtype if param.is_floating_point() else param.dtype
            made = torch.empty(param.shape, dtype=kind, device="meta")
            made.requires_grad_(param.requires_grad)
            self._made[id(param)] = made
            self.known[storage_of(made)] = (name, made, dims.get(name))
        for buffer in model.buffers():
            stand_in = torch.empty_like(buffer, device="meta")
            self._made[id(buffer)] = stand_in
            self.buffers.add(storage_of(stand_in))

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """Those of ``module``, by its names for them."""
        named: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
        named += module.named_buffers(remove_duplicate=False)
        return {name: self._made[id(t)] for name, t in named}


def record(module: nn.Module, params: MetaParams, call: Call, seq_len: int) -> Recording:
    """Runs ``module`` forward and backward with the arguments of ``call``."""
    recording = Recording(OpRecorder(params.known, seq_len))
    given = tensors_in((call.args, call.kwargs))
    recording.constant = params.buffers | {storage_of(t) for t in given if not t.requires_grad}
    labels: dict[Any, str] = {}
    with ExitStack() as stack:
        stack.enter_context(_watching(recording, module, labels))
        out = functional_call(module, params.of(module), call.args, call.kwargs)
        _backward(recording, list(tensors_in(out)), labels)
    return recording


def record_root(
    model: nn.Module,
    params: MetaParams,
    members: Sequence[tuple[str, nn.Module]],
    blocks: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seq_len: int,
    kind_of: Callable[[nn.Module], Any],
) -> tuple[Recording, dict[str, Call], Any]:
    """Runs ``model`` and records what it does outside ``members``, its units' modules.

    Returns:
        The recording, whose labels are ``BEFORE`` or "", the calls of the members, and the model's output.
    """
    recording = Recording(OpRecorder(params.known, seq_len))
    recording.constant = params.buffers
    recorder, passed = recording.recorder, list[Tensor]()
    calls: dict[str, Call] = {}
    labels: dict[Any, str] = {}
    outputs: dict[Any, Any] = {}
    recorder.label = BEFORE if blocks else ""

    def entered(name: str, inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.is_meta]
            passed.extend(tensors)
            if name in blocks and recorder.label == BEFORE:
                _label(tensors, [], BEFORE, labels)
                recorder.label = ""
            if name in calls:
                calls[name].times += 1
            else:
                given = map_tensors(_leaf, (args, kwargs))
                calls[name] = Call(*given)
            shapes = tuple(t.shape for t in tensors_in((args, kwargs)))
            key = (kind_of(module), shapes)
            if key not in outputs:
                with recorder.quiet(), torch.no_grad():
                    outputs[key] = inner(*args, **kwargs)
            trained = bool(tensors) or any(p.requires_grad for p in module.parameters())
            return map_tensors(lambda t: _fresh(t, trained), outputs[key])

        return forward

    with ExitStack() as stack:
        for name, module in members:
            stack.enter_context(_replaced_forward(module, entered, name))
        stack.enter_context(_watching(recording, None, labels))
        out = functional_call(model, params.of(model), args, kwargs)
        ends = [t for t in [*tensors_in(out), *passed] if t.grad_fn is not None]
        _backward(recording, ends, labels)
    return recording, calls, out


@contextmanager
def _replaced_forward(module: nn.Module, wrap: Callable[..., Any], name: str) -> Iterator[None]:
    own = vars(module).get("forward")
    vars(module)["forward"] = wrap(name, module.forward, module)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


@contextmanager
def _watching(
    recording: Recording, module: nn.Module | None, labels: dict[Any, str]
) -> Iterator[None]:
    """Records operations, what is saved, and which nodes belong to norms."""
    recorder = recording.recorder

    def pack(tensor: Tensor) -> Tensor:
        key = storage_of(tensor)
        if tensor.is_meta and key not in recorder.params and key not in recording.constant:
            storage = tensor.untyped_storage()
            recorder.kept[key] = storage
            seen = Saved(storage.nbytes(), tensor.element_size(), recorder.label)
            recording.saved.setdefault(key, seen)
        return tensor

    with ExitStack() as stack:
        for name, norm in _norms(module) if module is not None else ():
            stack.enter_context(_labelled(norm, name, recorder, labels))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(pack, lambda t: t))
        stack.enter_context(recorder)
        stack.enter_context(KernelMode(recorder))
        yield


def _norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if "norm" in type(child).__name__.lower() and not any(True for _ in child.children()):
            yield name or type(child).__name__, child


@contextmanager
def _labelled(
    norm: nn.Module, name: str, recorder: OpRecorder, labels: dict[Any, str]
) -> Iterator[None]:
    def before(_: nn.Module, args: Any) -> None:
        recorder.label = name

    def after(_: nn.Module, args: Any, out: Any) -> None:
        recorder.label = ""
        _label(list(tensors_in(out)), list(tensors_in(args)), name, labels)

    handles = [norm.register_forward_pre_hook(before), norm.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _label(ends: list[Tensor], starts: list[Tensor], label: str, labels: dict[Any, str]) -> None:
    """Gives ``label`` to the nodes between ``starts`` and ``ends``, but to those that have one."""
    stop = {t.grad_fn for t in starts if t.grad_fn is not None}
    for node in _nodes([t.grad_fn for t in ends], stop):
        labels.setdefault(node, label)


def _nodes(roots: list[Any], stop: set[Any]) -> Iterator[Any]:
    waiting, seen = [r for r in roots if r is not None], set(stop)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [n for n, _ in node.next_functions if n is not None]


def _backward(
    recording: Recording,
    outputs: list[Tensor],
    labels: dict[Any, str],
) -> None:
    """Goes back from ``outputs`` to all leaves, and says of every operation whose node it is in."""
    recorder = recording.recorder
    recording.outputs = {storage_of(t) for t in outputs}
    recording.origin = {
        key: at for key, (ops, at) in recorder.written.items() if ops is recorder.forward_ops
    }
    recording.split = set(recorder.split)
    ends = [t for t in outputs if t.grad_fn is not None]
    recorder.start_backward()
    if not ends:
        return
    handles = []

    def enter(label: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorder.label = label

        return hook

    nodes = list(_nodes([t.grad_fn for t in ends], set()))
    wanted = [node.variable for node in nodes if hasattr(node, "variable")]
    for leaf in wanted:
        if storage_of(leaf) in recorder.params:
            name = recorder.params[storage_of(leaf)][0]
            handles.append(leaf.register_hook(partial(_arrive, recording, name)))
    for node in nodes:
        handles.append(node.register_prehook(enter(labels.get(node, ""))))
        handles.append(node.register_hook(enter("")))
    with recorder.quiet():
        grads = [torch.empty_like(t) for t in ends]
    torch.autograd.grad(ends, wanted, grads, allow_unused=True)
    for handle in handles:
        handle.remove()
    _label_sums(recorder.backward_ops)


def _arrive(recording: Recording, name: str, grad: Tensor) -> None:
    recording.arrived.append(name)


def _label_sums(ops: list[Op]) -> None:
    """Autograd's sums of two gradients run in no node: those inside a norm are the norm's."""
    for op in ops:
        if op.label == "" and op.name == "add":
            writers = {ops[w].label if w is not None else "" for _, w, _ in op.reads}
            op.label = writers.pop() if len(writers) == 1 else ""


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fresh(tensor: Tensor, trained: bool) -> Tensor:
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor)
    return made.requires_grad_(trained and made.is_floating_point())
