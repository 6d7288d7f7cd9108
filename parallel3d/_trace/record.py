"""Records the operations of a model's forward.

``record`` runs a copy of a model on meta and returns the list of its operations. Attention is one operation
of the list, whatever it consists of, and so is a module that is known to act on each position separately.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.copies import meta_copy
from parallel3d._trace.kinds import arguments_of
from parallel3d._trace.program import AttentionCall, ForwardProgram, Op, Ref, map_refs
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d._util.users_code import caller

Handle = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(function, args, kwargs) -> what the caller gets."""


class Operations(TorchDispatchMode):
    """Within it ``handle`` is called in the place of every operation, also in backward, below autograd."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, dict(kwargs or {}))


class Functions(TorchFunctionMode):
    """Within it ``handle`` is called in the place of every function and method of torch, above autograd."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, dict(kwargs or {}))


def instead_of(function: Any, call: Callable[..., Any]) -> Functions:
    """Within what it returns ``call`` is called in the place of ``function``."""

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
    """Records the operations of a model on meta. ``attention`` and ``leaf`` record one operation in place of
    the code that they replace.

    Attributes:
        quiet: the file whose code is not recorded.
        instead: function of torch -> the function that is called in its place.
        is_paused: whether nothing is recorded.
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
        """Returns the number of a tensor, a new one at its first appearance."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        place = tensor.untyped_storage()._cdata
        storage = self._storages.setdefault(place, len(self._storages))
        return Ref(number, storage, tuple(tensor.shape))

    def add(self, name: str, args: dict[str, Any], result: Any) -> None:
        """Adds one operation."""
        if self.quiet and _is_called_from(self.quiet):
            return
        line = caller()
        given = {k: map_refs(self.ref, v) for k, v in args.items()}
        made = tuple(self.ref(t) for t in tensors_in(result))
        self.program.ops.append(Op(name, given, made, self.where, line))

    @property
    def where(self) -> str:
        """Path of the module whose forward is running."""
        return self._stack[-1] if self._stack else ""

    def paused(self) -> AbstractContextManager[Any]:
        """Within it nothing is recorded."""
        return patch.object(self, "is_paused", True)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation, which runs and is recorded."""
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
        """A function of torch: it runs, or what is to run instead. A tensor is true where a model asks."""
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
        """Records a call of attention; returns its output, of ``shape``."""
        with self.paused():
            output = q.new_empty(shape)
        self.add("attention", {"q": q, "k": k, "v": v, "mask": mask, **options}, output)
        shapes = tuple(tuple(x.shape) for x in (q, k, v))
        call = AttentionCall(kind, shapes, {"mask": mask is not None, **options})
        self.program.attention.setdefault(self.where, []).append(call)
        return output

    def leaf(self, run: Callable[[], Any], inputs: Any) -> Any:
        """Records a module that acts on each position by itself; ``run`` computes its output."""
        with self.paused():
            try:
                output = run()
            except Exception:  # its code needs values
                first = next(t for t in tensors_in(inputs) if t.is_floating_point())
                output = first * 1
        self.add("leaf", {"inputs": list(tensors_in(inputs))}, list(tensors_in(output)))
        return output

    def watch(self, path: str, module: nn.Module) -> None:
        """Notes when the code of a module of the copy runs."""

        def before(*_: Any) -> None:
            self._stack.append(path)

        def after(*_: Any) -> None:
            self._stack.pop()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def _is_called_from(file: str) -> bool:
    """Whether code of ``file`` is running."""
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
    """Runs a meta copy of ``model`` and returns the list of its operations.

    Args:
        prepare: called with the copy and the recorder; gives attention and leaves other forwards.
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
