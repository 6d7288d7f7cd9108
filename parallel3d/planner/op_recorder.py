"""Records the operations of a module's forward and backward, without computing them.

Tensors that depend on parameters or on a float input are on the meta device. Others, such as positions and
masks, are real, so that a model can read their values (``if mask.all():``). With fake tensors it could not,
and Hugging Face's models would always use a mask, which they don't in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F

from parallel3d._trace.kinds import bytes_of, kind_of, product_of
from parallel3d._trace.record import Functions, Operations, Sdpa
from parallel3d._util.trees import map_tensors, tensors_in


@dataclass
class RecordedOp:
    """One recorded operation.

    Attributes:
        kind: "matmul", "attention", "norm" (one kernel), "score" (elementwise work on materialized attention
            scores) or "elementwise".
        label: the part of the module that it belongs to, such as a norm's name; "": none.
        reads: (storage, index of the operation that wrote it last, bytes); the index is None for another
            pass.
        writes: (storage, bytes).
        split: whether tensor parallelism divides its tensors.
        whole: whether a rank of tp does it for all tokens even with sequence parallelism.
        depth: most matmuls and attentions on a path up to it, itself included.
        sizes: (rows, n, k) of a matmul.
        weight: name of the parameter that is a factor of a matmul.
        way: which size of a matmul the plan divides: "n" (colwise) or "k" (rowwise); None: neither.
        experts: number of experts of a grouped matmul, each row of which is multiplied by one expert's
            matrix; 0: no grouped matmul.
        input_gradient, weight_gradient: whether backward computes this gradient of a matmul.
        read_whole: bytes that it reads of tensors that tensor parallelism leaves whole, such as a table of
            positions.
        read_by: indices of the operations of the same pass that read its results; -1: one of backward does.
    """

    name: str
    kind: str
    label: str
    reads: list[tuple[int, int | None, int]]
    writes: list[tuple[int, int]]
    split: bool = False
    whole: bool = False
    depth: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
    weight: str = ""
    way: str | None = None
    experts: int = 0
    input_gradient: bool = True
    weight_gradient: bool = True
    read_whole: int = 0
    read_by: list[int] = field(default_factory=list)

    def fuses_with(self, reader: RecordedOp) -> bool:
        """Whether one kernel could do this operation and ``reader``, which reads its result."""
        mine, its = ((o.label, o.split, o.whole, o.depth) for o in (self, reader))
        return mine == its and self.kind != "norm"

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(size for *_, size in self.reads) + sum(size for _, size in self.writes)


BEFORE = "before the blocks"
"""Label of the root's operations before the first block."""


@dataclass
class Saved:
    """A storage of ``nbytes`` that forward keeps for backward; its elements have ``itemsize`` bytes."""

    nbytes: int
    itemsize: int
    label: str


def storage_of(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of ``tensor`` as long as the storage lives."""
    return id(tensor.untyped_storage())


class OpRecorder:
    """Records the operations of a forward and backward; attention and ``rms_norm`` count as one each.

    Keys are tensors' ``storage_of``.

    Args:
        params: key -> (name, parameter, dim that is sharded or None).
        seq_len: tokens of a sequence; a product with this many columns is taken for attention scores.
        constant: keys of inputs without a gradient, and of buffers.

    Attributes:
        forward_ops, backward_ops: the recorded operations.
        ops: the list that operations are added to now.
        label: the label of the operations that are added now.
        split: keys of tensors that tensor parallelism divides.
        gathered: key of a colwise layer's input -> its features.
        summed: for each output that is summed over tp, its features.
        looked_up: for each lookup in a table that tp divides, the features of a row.
        whole: keys of what is computed from buffers and inputs without a gradient alone, as a table of
            positions: tp divides neither its features nor its tokens.
        partial: keys of input gradients that are partial sums, to be summed over tp.
        attentions: (heads of all sequences, key and value heads, head dim, causal) of each attention.
        scores: key of materialized attention scores -> the matmul that made them.
        softmaxed: keys of scores after the softmax.
        masked: whether a mask that hides later tokens was applied to scores.
        written: key -> (list, index) of the operation that wrote it last.
        saved: key -> what forward keeps for backward.
        origin: key -> index of the forward operation that made it.
        split_in_forward: ``split`` at the end of forward.
        outputs: keys of the outputs.
        arrived: names of parameters, in the order in which their gradients arrived.
        labels: node of the autograd graph -> label.
    """

    def __init__(
        self, params: dict[int, tuple[str, Tensor, int | None]], seq_len: int, constant: set[int]
    ) -> None:
        self.params, self.seq_len, self.constant = params, seq_len, constant
        self.saved: dict[int, Saved] = {}
        self.origin: dict[int, int] = {}
        self.split_in_forward: set[int] = set()
        self.outputs: set[int] = set()
        self.arrived: list[str] = []
        self.labels: dict[Any, str] = {}
        self._tables = {param.shape for _, param, _ in params.values() if param.ndim > 1}
        self.forward_ops: list[RecordedOp] = []
        self.backward_ops: list[RecordedOp] = []
        self.ops = self.forward_ops
        self.label = ""
        self.split: set[int] = set()
        self.gathered: dict[int, int] = {}
        self.summed: list[int] = []
        self.looked_up: list[int] = []
        self.whole: set[int] = set()
        self.partial: set[int] = set()
        self.attentions: list[tuple[int, int, int, bool]] = []
        self.scores: dict[int, RecordedOp] = {}
        self.softmaxed: set[int] = set()
        self.masked = False
        self.written: dict[int, tuple[list[RecordedOp], int]] = {}
        self._depth: dict[int, int] = {}
        self.is_quiet = False
        self.kept: dict[int, Any] = {}  # a freed storage's id would be another's

    @property
    def in_forward(self) -> bool:
        return self.ops is self.forward_ops

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an ATen operation, on meta if an input is there, and then records it."""
        inputs = list(tensors_in((args, kwargs)))
        if not any(t.is_meta for t in inputs):
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if not inputs[0].is_meta and func._schema.is_mutable and args[0] is inputs[0]:
            return args[0]  # a mask, changed by values that aren't known
        if any(storage_of(t) in self.scores for t in inputs):  # real ones may be their mask
            square = (self.seq_len, self.seq_len)
            masks = [t for t in inputs if t.shape[-2:] == square and not t.is_meta]
            self.masked = self.masked or any(map(hides_future, masks))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        args, kwargs = map_tensors(self._as_meta, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        if not self.is_quiet:
            self._note_call(func, args, kwargs, out)
        return out

    def _as_meta(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.kept[storage_of(made)] = made.untyped_storage()
        self.whole.add(storage_of(made))
        return made

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch; attention and ``rms_norm`` are recorded as one kernel each."""
        if func is F.scaled_dot_product_attention:
            return self._attention(Sdpa(*args, **kwargs))
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, call: Sdpa) -> Any:
        query, key, value, mask = call[:4]
        causal = call.is_causal or (mask is not None and hides_future(mask))
        heads, kv_heads = query.shape[:-2].numel(), key.shape[:-2].numel()
        if self.in_forward and not self.is_quiet:
            self.attentions.append((heads, kv_heads, query.shape[-1], causal))
        return _Kernel.apply(self, "attention", value.shape[-1], query, key, value)

    def _rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
    ) -> Any:
        inputs = [input] if weight is None else [input, weight]
        return _Kernel.apply(self, "norm", input.shape[-1], *inputs)

    def quiet(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations are not recorded."""
        return patch.object(self, "is_quiet", True)

    def _note_call(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        mutable = func._schema.is_mutable
        name = name.rstrip("_") if mutable else name
        reads, writes = list(tensors_in((args, kwargs))), list(tensors_in(out))
        known = {storage_of(t) for t in reads}
        kind = kind_of(name)
        if kind == "free" or (not mutable and all(storage_of(t) in known for t in writes)):
            return
        tensors = [a for a in args if isinstance(a, Tensor)]
        if kind == "product":
            self._note_product(name, tensors, writes[0])
        elif name == "convolution":
            weight, rows = args[1], writes[0].numel() // args[1].shape[0]
            title = self.params.get(storage_of(weight), ("convolution",))[0]
            sizes = (rows, weight.shape[0], prod(weight.shape[1:]))
            wanted = {
                "input_gradient": args[0].requires_grad,
                "weight_gradient": weight.requires_grad,
            }
            self.note(name, "matmul", tensors, writes[:1], sizes=sizes, weight=title, **wanted)
        elif name == "convolution_backward":
            self.note("convolution", "matmul", reads, writes)
        elif kind == "norm":
            self.note(name, "norm", reads, writes)
        else:
            self._note_elementwise(name, reads, writes)

    def _is_whole(self, tensor: Tensor) -> bool:
        key = storage_of(tensor)
        return key in self.constant or key in self.whole

    def note(
        self, name: str, kind: str, reads: list[Tensor], writes: list[Tensor], **more: Any
    ) -> RecordedOp:
        """Records one operation, and returns it. ``split`` (in ``more``) is by default that of its inputs."""
        if self.is_quiet:
            return RecordedOp(name, kind, "", [], [])
        index = len(self.ops)
        split = more.pop("split", any(storage_of(t) in self.split for t in reads))
        depth = max((self._depth.get(storage_of(t), 0) for t in reads), default=0)
        if kind in ("matmul", "attention"):
            depth += 1
        fixed = bool(reads) and all(map(self._is_whole, reads))
        more["whole"] = more.get("whole", False) or fixed
        op = RecordedOp(name, kind, self.label, [], [], split, depth=depth, **more)
        first: dict[int, Tensor] = {}
        for t in reads:
            first.setdefault(storage_of(t), t)
        for key, t in first.items():
            if key not in self.params:
                op.read_whole += bytes_of(t) * self._is_whole(t)
                ops, writer = self.written.get(key, (None, -1))
                same_way = ops is self.ops
                op.reads.append((key, writer if same_way else None, bytes_of(t)))
                if ops is not None:
                    ops[writer].read_by.append(index if same_way else -1)
        for t in writes:
            key = storage_of(t)
            op.writes.append((key, bytes_of(t)))
            self.written[key] = (self.ops, index)
            self._depth[key] = depth
            (self.whole.add if fixed else self.whole.discard)(key)
            (self.split.add if split else self.split.discard)(key)
        self.kept.update((storage_of(t), t.untyped_storage()) for t in (*reads, *writes))
        self.ops.append(op)
        return op

    def _note_elementwise(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        origin = next((self.scores[k] for k in map(storage_of, reads) if k in self.scores), None)
        if origin is not None:
            done = "softmax" in name or any(storage_of(t) in self.softmaxed for t in reads)
            self.note(name, "score", reads, writes)
            for key in map(storage_of, writes):
                self.scores[key] = origin
                if done:
                    self.softmaxed.add(key)
            return
        if not self.in_forward and name == "add" and writes[0].shape in self._tables:
            return  # the sum of a tied weight's gradients, which is not per token
        op = self.note(name, "elementwise", reads, writes)
        if reads and all(storage_of(t) in self.partial for t in reads):
            op.whole = True
            self.partial.update(map(storage_of, writes))
        if kind_of(name) == "lookup" or name == "embedding_dense_backward":
            self._note_lookup(name, op, reads, writes)

    def _note_lookup(
        self, name: str, op: RecordedOp, reads: list[Tensor], writes: list[Tensor]
    ) -> None:
        """Corrects an embedding's operation: it reads only the rows that are looked up. If tp divides the
        table, each rank looks up all tokens, and the result is summed over tp."""
        if name == "embedding_dense_backward":  # gradients read; rows of the sum read and written
            op.writes = [(key, 2 * op.reads[0][2]) for key, _ in op.writes]
            divided = (param.shape for _, param, dim in self.params.values() if dim is not None)
            op.whole = writes[0].shape in divided
            return
        size = sum(size for _, size in op.writes)
        table = self.params.get(storage_of(reads[0]))
        op.reads = [(storage_of(reads[0]), None, size)] + op.reads[1 if table is None else 0 :]
        if name == "embedding" and table is not None and table[2] is not None:
            self.split.difference_update(key for key, _ in op.writes)
            op.split, op.whole = False, True
            self.summed.append(reads[0].shape[-1])
            self.looked_up.append(reads[0].shape[-1])

    def _note_product(self, name: str, inputs: list[Tensor], out: Tensor) -> None:
        """Records a matmul with a parameter, or a grouped one with experts' weights (experts, k, n)."""
        a, b, sizes = product_of(name, inputs)
        at = storage_of(b) in self.params  # of the factors the second one
        weight, other, (rows, n, k) = b, a, sizes
        if "grouped" in name:
            if not at or a.ndim != 2 or b.ndim != 3:
                self.note(name, "matmul", inputs, [out])  # in backward
                return
        elif not at and storage_of(a) in self.params:
            weight, other = a, b
            rows, n = prod(b.shape[:-2]) * b.shape[-1], prod(a.shape[:-1])
        elif not at:
            self._note_free_product(a, b, inputs, out, sizes)
            return
        title, param, dim = self.params[storage_of(weight)]
        split, way = storage_of(other) in self.split, None
        experts = weight.shape[0] if "grouped" in name else 0
        sharded = -1 if dim is None else dim - bool(experts)
        if sharded >= 0 and param.ndim == 2 + bool(experts):
            straight = weight.stride()[-2:] == param.stride()[-2:]
            # Whether the sharded dim of the weight is the one that the product keeps.
            way = "n" if (sharded if straight else 1 - sharded) == at else "k"
        if not self.in_forward:
            self.partial.update([storage_of(out)] if way == "k" else [])
        elif way == "n" and not split:
            self.gathered.setdefault(storage_of(other), k)
        elif way == "k":
            self.summed.append(n)
        self.note(
            name,
            "matmul",
            inputs,
            [out],
            split=split if way is None else way == "n",
            sizes=(rows, n, k),
            experts=experts,
            weight=title,
            way=way,
            input_gradient=other.requires_grad,
            weight_gradient=weight.requires_grad,
        )

    def _note_free_product(
        self, a: Tensor, b: Tensor, inputs: list[Tensor], out: Tensor, sizes: tuple[int, int, int]
    ) -> None:
        """Records a matmul of two tensors that aren't parameters: of attention, or in backward."""
        scored = next((k for k in map(storage_of, (a, b)) if k in self.scores), None)
        if not self.in_forward:
            lengths = {op.sizes[1] for op in self.scores.values()}
            if out.ndim == 3 and out.shape[-1] in lengths and scored is None:
                self.note("bmm", "score", inputs, [out])
                self.scores[storage_of(out)] = next(iter(self.scores.values()))
            else:
                self.note("bmm", "matmul", inputs, [out])
            return
        if scored is not None and scored in self.softmaxed:
            origin, heads = self.scores[scored], out.shape[0]
            origin.kind = "attention"
            self.attentions.append((heads, heads, origin.sizes[2], self.masked))
            self.note("attention", "attention", inputs, [out])
            return
        trained = a.requires_grad or b.requires_grad
        kind = "matmul" if trained else "elementwise"
        op = self.note("bmm", kind, inputs, [out], sizes=sizes)
        if trained and out.ndim == 3 and out.shape[-1] == self.seq_len:
            self.scores[storage_of(out)] = op


def hides_future(mask: Tensor) -> bool:
    """Whether ``mask`` hides the last key from the first query; one on meta is assumed to."""
    if mask.is_meta:
        return True
    last = mask[..., 0, -1]
    if mask.dtype == torch.bool:
        return mask.shape[-2] > 1 and bool((last != mask[..., -1, -1]).all())
    return bool((last.float() < -1e3).all())


class _Kernel(torch.autograd.Function):
    """An operation that is recorded as one kernel; saves what such a kernel saves: its inputs, an fp32 value
    for each row and, for attention, its output."""

    @staticmethod
    def forward(ctx: Any, recorder: OpRecorder, kind: str, features: int, *inputs: Tensor) -> Any:
        ctx.recorder, ctx.kind, first = recorder, kind, inputs[0]
        with recorder.quiet():
            # In the memory order of the queries, as cuDNN and flash have it.
            out = torch.empty_like(first)
            if features != first.shape[-1]:
                out = first.new_empty(*first.shape[:-1], features)
            sums = first.new_empty(first.shape[:-1], dtype=torch.float32)
        recorder.note(kind, kind, [*inputs], [out, sums])
        ctx.save_for_backward(*inputs, *([out] if kind == "attention" else []), sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, recorder = ctx.saved_tensors, ctx.recorder
        inputs = saved[: len(ctx.needs_input_grad) - 3]
        with recorder.quiet():
            grads = [torch.empty_like(t) for t in inputs]
        pairs = zip(inputs, grads, strict=True)
        writes = [made for t, made in pairs if storage_of(t) not in recorder.params]
        recorder.note(ctx.kind, ctx.kind, [*saved, grad], writes)
        return None, None, None, *grads


@dataclass
class UnitCall:
    """The arguments of a unit's first call, detached, and the number of its calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int = 1


class MetaParams:
    """Copies of a model's parameters and buffers on the meta device; shared parameters have one copy.

    Args:
        dims: name of a parameter -> the dim that tensor parallelism shards.
        dtype: dtype of the copies of floating parameters.
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
            self._made[id(buffer)] = made = torch.empty_like(buffer, device="meta")
            self.buffers.add(storage_of(made))

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the copies of the parameters and buffers of ``module``, by its own names for them."""
        named: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
        named += module.named_buffers(remove_duplicate=False)
        return {name: self._made[id(t)] for name, t in named}


def record(module: nn.Module, params: MetaParams, call: UnitCall, seq_len: int) -> OpRecorder:
    """Runs ``module`` forward and backward with the arguments of ``call``, and returns the recorder."""
    inputs = tensors_in((call.args, call.kwargs))
    constant = params.buffers | {storage_of(t) for t in inputs if not t.requires_grad}
    recorder = OpRecorder(params.known, seq_len, constant)
    with _watching(recorder), ExitStack() as stack:
        for name, child in module.named_modules():
            if "norm" in type(child).__name__.lower() and not any(True for _ in child.children()):
                stack.enter_context(_labelled(child, name or type(child).__name__, recorder))
        out = functional_call(module, params.of(module), call.args, call.kwargs)
        _backward(recorder, list(tensors_in(out)))
    return recorder


def record_root(
    model: nn.Module,
    params: MetaParams,
    members: Sequence[tuple[str, nn.Module]],
    blocks: Sequence[str],
    call: UnitCall,
    seq_len: int,
    kind_of: Callable[[nn.Module], Any],
) -> tuple[OpRecorder, dict[str, UnitCall], Any]:
    """Runs ``model`` and records the operations outside ``members``, its units.

    Args:
        blocks: names of the members that are blocks.
        kind_of: returns a key of a member. Of members with equal keys and equal input shapes only the first
            runs.

    Returns:
        The recorder (``BEFORE`` labels operations before the first block), each member's call by name, and
        the model's output.
    """
    recorder = OpRecorder(params.known, seq_len, params.buffers)
    passed: list[Tensor] = []
    calls: dict[str, UnitCall] = {}
    outputs: dict[Any, Any] = {}
    recorder.label = BEFORE if blocks else ""

    def replaced(name: str, module: nn.Module) -> Callable[..., Any]:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.is_meta]
            passed.extend(tensors)
            if name in blocks and recorder.label == BEFORE:
                _label(recorder, tensors, [], BEFORE)
                recorder.label = ""
            if name in calls:
                calls[name].times += 1
            else:
                leaves = map_tensors(
                    lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs)
                )
                calls[name] = UnitCall(*leaves)
            key = kind_of(module), tuple(t.shape for t in tensors_in((args, kwargs)))
            if key not in outputs:
                with recorder.quiet(), torch.no_grad():
                    outputs[key] = inner(*args, **kwargs)
            trained = bool(tensors) or any(p.requires_grad for p in module.parameters())
            return map_tensors(lambda t: _fresh(t, trained), outputs[key])

        return forward

    with ExitStack() as stack:
        for name, module in members:
            stack.enter_context(patch.object(module, "forward", replaced(name, module)))
        stack.enter_context(_watching(recorder))
        out = functional_call(model, params.of(model), call.args, call.kwargs)
        ends = [t for t in [*tensors_in(out), *passed] if t.grad_fn is not None]
        _backward(recorder, ends)
    return recorder, calls, out


@contextmanager
def _watching(recorder: OpRecorder) -> Iterator[None]:
    """Within this context ``recorder`` records operations and the tensors that are saved for backward."""

    def pack(tensor: Tensor) -> Tensor:
        key = storage_of(tensor)
        if tensor.is_meta and key not in recorder.params and key not in recorder.constant:
            storage = recorder.kept[key] = tensor.untyped_storage()
            seen = Saved(storage.nbytes(), tensor.element_size(), recorder.label)
            recorder.saved.setdefault(key, seen)
        return tensor

    saving = saved_tensors_hooks(pack, lambda t: t)
    operations, functions = Operations(recorder.operation), Functions(recorder.function)
    with torch.enable_grad(), saving, operations, functions:
        yield


@contextmanager
def _labelled(norm: nn.Module, name: str, recorder: OpRecorder) -> Iterator[None]:
    """Within this context the operations of ``norm``, in forward and backward, get the label ``name``."""

    def before(_: nn.Module, args: Any) -> None:
        recorder.label = name

    def after(_: nn.Module, args: Any, out: Any) -> None:
        recorder.label = ""
        _label(recorder, tensors_in(out), tensors_in(args), name)

    with norm.register_forward_pre_hook(before), norm.register_forward_hook(after):
        yield


def _label(
    recorder: OpRecorder, ends: Iterable[Tensor], starts: Iterable[Tensor], label: str
) -> None:
    """Gives ``label`` to the unlabelled autograd nodes between the tensors ``starts`` and ``ends``."""
    for node in _nodes([t.grad_fn for t in ends], {t.grad_fn for t in starts}):
        recorder.labels.setdefault(node, label)


def _nodes(roots: list[Any], stop: set[Any]) -> Iterator[Any]:
    """Yields the autograd nodes that can be reached from ``roots`` without passing those in ``stop``."""
    waiting, seen = [*roots], {None, *stop}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _backward(recorder: OpRecorder, outputs: list[Tensor]) -> None:
    """Runs backward from ``outputs`` to all leaves; each operation gets the label of its autograd node."""
    recorder.outputs = {storage_of(t) for t in outputs}
    recorder.origin = {key: at for key, (_, at) in recorder.written.items()}
    recorder.split_in_forward = set(recorder.split)
    ends = [t for t in outputs if t.grad_fn is not None]
    recorder.ops, recorder.label = recorder.backward_ops, ""
    if not ends:
        return

    def enter(label: str, *_: Any) -> None:
        recorder.label = label

    nodes = list(_nodes([t.grad_fn for t in ends], set()))
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    with ExitStack() as stack:
        for leaf in leaves:
            if storage_of(leaf) in recorder.params:
                name = recorder.params[storage_of(leaf)][0]
                arrive = partial(lambda name, _: recorder.arrived.append(name), name)
                stack.enter_context(leaf.register_hook(arrive))
        for node in nodes:
            label = recorder.labels.get(node, "")
            stack.enter_context(node.register_prehook(partial(enter, label)))
            stack.enter_context(node.register_hook(partial(enter, "")))
        with recorder.quiet():
            grads = [torch.empty_like(t) for t in ends]
        torch.autograd.grad(ends, leaves, grads, allow_unused=True)
    # Autograd's sums of two gradients run in no node: those inside a norm are the norm's.
    ops = recorder.backward_ops
    for op in ops:
        if op.label == "" and op.name == "add":
            writers = {ops[w].label if w is not None else "" for _, w, _ in op.reads}
            op.label = writers.pop() if len(writers) == 1 else ""


def _fresh(tensor: Tensor, trained: bool) -> Tensor:
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor)
    return made.requires_grad_(trained and made.is_floating_point())
