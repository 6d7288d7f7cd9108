"""Records the operations of a model's forward.

``record`` runs a copy of a model on meta and returns the list of its operations. Attention is one operation
of the list, whatever it consists of, and so is a module that is known to act on each position separately.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.copies import meta_copy
from parallel3d._trace.kinds import arguments_of
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d._util.users_code import caller


class Ref(NamedTuple):
    """A tensor in a recorded program: its number, its storage's number (by first appearance), its shape."""

    number: int
    storage: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One operation of a recorded program.

    Attributes:
        name: aten's name, with the overload, such as ``sum.dim_IntList``; or ``attention``, ``leaf``,
            ``branch``.
        args: by name, with a ``Ref`` for each tensor.
        outputs: the tensors that it returns.
        module: path of the module whose code runs it.
        line: ``file:line, in function`` of that code.
    """

    name: str
    args: dict[str, Any]
    outputs: tuple[Ref, ...]
    module: str
    line: str


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention by a module.

    Attributes:
        kind: ``"sdpa"`` (F.scaled_dot_product_attention), ``"mha"`` (nn.MultiheadAttention) or ``"hf"``.
        shapes: shapes of queries, keys and values.
        options: arguments that determine the scores: masks, windows, caps.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any]


@dataclass
class ForwardProgram:
    """The operations of one forward, as ``record`` returns them.

    Attributes:
        ops: the operations, in order.
        inputs: the tensors that the model was given.
        live: numbers of the parameters' storages.
        outputs: the tensors that the model has returned.
        attention: path of a module -> its calls of attention.
    """

    ops: list[Op] = field(default_factory=list)
    inputs: list[Ref] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    outputs: list[Ref] = field(default_factory=list)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)


def map_refs(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns ``value`` with ``fn(tensor)`` in place of each tensor in lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [map_refs(fn, item) for item in value]
    return value


Handle = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(function, args, kwargs) -> what the caller gets."""


class Operations(TorchDispatchMode):
    """Mode that calls ``handle(op, args, kwargs)`` in place of every ATen operation, also in backward."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, dict(kwargs or {}))


class Functions(TorchFunctionMode):
    """Mode that calls ``handle(function, args, kwargs)`` in place of torch's functions and methods."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, dict(kwargs or {}))


def instead_of(function: Any, call: Callable[..., Any]) -> Functions:
    """Returns a context manager in which torch's ``function`` is replaced by ``call``."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (call if func is function else func)(*args, **kwargs)

    return Functions(handle)


class Sdpa(NamedTuple):
    """The arguments of a call of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class ProgramRecorder:
    """Records the operations of a model that runs on meta.

    ``attention`` and ``leaf`` are called in place of code that is to be recorded as one operation.

    Attributes:
        quiet: a file; operations called from its code are not recorded.
        instead: function of torch -> the function to call in its place.
        is_paused: whether nothing is recorded now.
    """

    def __init__(self) -> None:
        self.program = ForwardProgram()
        self.quiet = ""
        self.instead: dict[Any, Callable[..., Any]] = {}
        self.is_paused = False
        self._stack: list[str] = []
        self._kept: list[Tensor] = []  # so that ids and addresses are not used again
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the ``Ref`` of ``tensor``, with a new number at its first appearance."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        place = tensor.untyped_storage()._cdata
        storage = self._storages.setdefault(place, len(self._storages))
        return Ref(number, storage, tuple(tensor.shape))

    def add(self, name: str, args: dict[str, Any], result: Any) -> None:
        """Adds an operation, unless it was called from ``quiet``; ``result``: its outputs."""
        if self.quiet and _is_called_from(self.quiet):
            return
        line = caller()
        given = {k: map_refs(self.ref, v) for k, v in args.items()}
        made = tuple(self.ref(t) for t in tensors_in(result))
        self.program.ops.append(Op(name, given, made, self.where, line))

    @property
    def where(self) -> str:
        return self._stack[-1] if self._stack else ""

    def paused(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which nothing is recorded."""
        return patch.object(self, "is_paused", True)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handler of ``Operations``: runs an ATen operation and records it."""
        result = func(*args, **kwargs)
        if (
            not self.is_paused and func.namespace != "prim"
        ):  # questions about a fake tensor's device
            schema = func._schema
            named = {a.name: a.default_value for a in schema.arguments}
            named |= arguments_of(func, args, kwargs)
            name = schema.name.removeprefix("aten::")
            if name == "lift_fresh" and not args[0].is_meta and args[0].numel() == 1:
                named["value"] = args[0].item()  # torch.tensor(length)
            if schema.overload_name:
                name = f"{name}.{schema.overload_name}"
            self.add(name, named, result)
        return result

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handler of ``Functions``: runs a function of torch, or the one to run ``instead``. A meta tensor
        used as a condition is True."""
        if getattr(func, "__name__", "") == "__bool__" and args[0].is_meta:
            self.add("branch", {"value": args[0]}, None)
            return True  # it has no value here; models ask whether a mask is of the usual kind
        return self.instead.get(func, func)(*args, **kwargs)

    # ---- what is one operation of the list ----

    def attention(
        self,
        kind: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        shape: tuple[int, ...],
        **options: Any,
    ) -> Tensor:
        """Records one call of attention; returns an empty output of ``shape``."""
        with self.paused():
            output = q.new_empty(shape)
        self.add("attention", {"q": q, "k": k, "v": v, "mask": mask, **options}, output)
        shapes = tuple(tuple(x.shape) for x in (q, k, v))
        call = AttentionCall(kind, shapes, {"mask": mask is not None, **options})
        self.program.attention.setdefault(self.where, []).append(call)
        return output

    def leaf(self, run: Callable[[], Any], inputs: Any) -> Any:
        """Records as one operation a module that acts on each position separately; ``run`` calls it."""
        with self.paused():
            try:
                output = run()
            except Exception:  # its code needs values
                first = next(t for t in tensors_in(inputs) if t.is_floating_point())
                output = first * 1
        self.add("leaf", {"inputs": list(tensors_in(inputs))}, list(tensors_in(output)))
        return output

    def watch(self, path: str, module: nn.Module) -> None:
        """Hooks ``module``, of the copied model, to know while its forward runs; ``path``: its name."""

        def before(*_: Any) -> None:
            self._stack.append(path)

        def after(*_: Any) -> None:
            self._stack.pop()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def _is_called_from(file: str) -> bool:
    """Whether a function in ``file`` is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def record(
    model: nn.Module,
    prepare: Callable[[nn.Module, ProgramRecorder], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ForwardProgram:
    """Runs a copy of ``model`` on the meta device and returns the list of its operations.

    Args:
        prepare: called with the copy and the recorder, to replace the forwards of modules that are to be
            recorded as one operation (attention, leaves).
        args, kwargs: arguments of the forward, on any device.

    Raises:
        Exception: whatever the model's code raises.
    """
    with simulation_off():
        twin = meta_copy(model).train()
        recorder = ProgramRecorder()
        prepare(twin, recorder)
        for path, module in twin.named_modules():
            recorder.watch(path, module)
        args, kwargs = map_tensors(lambda t: t.to("meta"), (args, kwargs))
        program = recorder.program
        program.live = {recorder.ref(p).storage for p in twin.parameters()}
        program.inputs = [recorder.ref(t) for t in tensors_in((args, kwargs))]
        # With gradients on, torch's own modules don't take their fast path for inference.
        with torch.enable_grad(), Operations(recorder.operation), Functions(recorder.function):
            output = twin(*args, **kwargs)
        program.outputs = [recorder.ref(t) for t in tensors_in(output)]
    return program
