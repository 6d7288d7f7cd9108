"""Flow: one forward of a model on the meta device, as a list of operations.

``record`` runs a copy of a model; ``mixing.find`` compares the lists of two lengths. Attention is one
operation of the list, whatever it consists of, and so is a module that is known to act on each position.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.simulated import simulation_off
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d._util.users_code import caller
from parallel3d.errors import PlanError


class Ref(NamedTuple):
    """A tensor in the list: its number and that of its storage, in the order of appearance, and its shape."""

    number: int
    storage: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One operation.

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
    """How a module has called attention.

    Attributes:
        kind: ``"sdpa"`` (F.scaled_dot_product_attention), ``"mha"`` (nn.MultiheadAttention) or ``"hf"``.
        shapes: of queries, keys and values.
        options: what decides about the scores: masks, windows, caps.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any]


@dataclass
class Flow:
    """The record of one forward.

    Attributes:
        ops: in order.
        inputs: the tensors that the model was given.
        live: storages of parameters.
        outputs: the tensors that it has returned.
        attention: path of a module -> its calls of attention.
    """

    ops: list[Op] = field(default_factory=list)
    inputs: list[Ref] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    outputs: list[Ref] = field(default_factory=list)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records what a model on meta runs. ``attention`` and ``leaf`` are called in place of what they stand
    for.

    Attributes:
        quiet: the file whose code is not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self.quiet = ""
        self._paused = False
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
        self.flow.ops.append(Op(name, given, made, self.where, line))

    @property
    def where(self) -> str:
        """Path of the module whose forward is running."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused and func.namespace != "prim":  # questions about a fake tensor's device
            schema = func._schema
            named = {a.name: a.default_value for a in schema.arguments}
            named |= {a.name: v for a, v in zip(schema.arguments, args, strict=False)}
            named |= kwargs
            name = schema.name.removeprefix("aten::")
            if name == "lift_fresh" and not args[0].is_meta and args[0].numel() == 1:
                named["value"] = args[0].item()  # torch.tensor(length)
            if schema.overload_name:
                name = f"{name}.{schema.overload_name}"
            self.add(name, named, result)
        return result

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
        self.flow.attention.setdefault(self.where, []).append(call)
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


class Functions(TorchFunctionMode):
    """What is seen above torch's operators: attention, and decisions by a value."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward and not self.recorder._paused:
            raise PlanError(
                f"{self.recorder.where!r} calls F.multi_head_attention_forward: with context parallelism use "
                "nn.MultiheadAttention, or F.scaled_dot_product_attention"
            )
        if getattr(func, "__name__", "") == "__bool__" and args[0].is_meta:
            self.recorder.add("branch", {"value": args[0]}, None)
            return True  # it has no value here; models ask whether a mask is of the usual kind
        return func(*args, **kwargs)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        check_not_recomputed_alone(self.recorder.where)
        shape = (*query.shape[:-1], value.shape[-1])
        return self.recorder.attention(
            "sdpa", query, key, value, attn_mask, shape, is_causal=is_causal, scaling=scale
        )


def _is_called_from(file: str) -> bool:
    """Whether code of ``file`` is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def check_not_recomputed_alone(path: str) -> None:
    """Raises PlanError if a part of a module's forward with its attention is checkpointed.

    Its recomputation would not go through the module's forward, in which attention is that of all ranks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._call_impl.__code__ or code.co_qualname.startswith("_with_sdpa"):
            return
        if code.co_filename == checkpoint.__file__:
            raise PlanError(
                f"context parallelism: {path!r} gives torch.utils.checkpoint a function that calls "
                "F.scaled_dot_product_attention. Its recomputation in backward would attend to this rank's "
                "part of the sequence only: checkpoint modules instead (the one that calls attention, or one "
                "around it), or use parallelize(activation_checkpointing=...)"
            )
        frame = frame.f_back  # type: ignore[assignment]


def map_refs(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn`` of each tensor in lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [map_refs(fn, item) for item in value]
    return value


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model`` on the meta device."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, memo)


def record(
    model: nn.Module,
    prepare: Callable[[nn.Module, Recorder], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Flow:
    """Runs a meta copy of ``model`` and returns the list of its operations.

    Args:
        prepare: called with the copy and the recorder; gives attention and leaves other forwards.
        args, kwargs: of the forward, on any device.

    Raises:
        Exception: whatever the model's code raises.
    """
    with simulation_off():
        twin = meta_copy(model).train()
        recorder = Recorder()
        prepare(twin, recorder)
        for path, module in twin.named_modules():
            recorder.watch(path, module)
        args, kwargs = map_tensors(lambda t: t.to("meta"), (args, kwargs))
        flow = recorder.flow
        flow.live = {recorder.ref(p).storage for p in twin.parameters()}
        flow.inputs = [recorder.ref(t) for t in tensors_in((args, kwargs))]
        with torch.enable_grad(), recorder, Functions(recorder):  # no fast path for inference
            output = twin(*args, **kwargs)
        flow.outputs = [recorder.ref(t) for t in tensors_in(output)]
    return flow
