"""Which operations a module runs, forward and backward, without computing them.

What depends on parameters or on a float input is on the meta device. Positions and masks, which don't, are
real: so a model may look at them (``if mask.all():``). Fake tensors would do neither that nor let Hugging
Face's models take the path without a mask, which they train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._util.trees import map_tensors, tensors_in

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm")


_LOOKUPS = ("embedding", "embedding_dense_backward", "index", "index_select", "gather")


_FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
)


@dataclass
class Op:
    """One operation.

    Attributes:
        kind: "matmul", "attention", "norm" (a kernel of its own), "score" (of attention, with all scores
            in memory) or "elementwise".
        label: the part of the module that it belongs to, such as a norm's name.
        moved: bytes read and written.
        reads: (storage, op that wrote it last or None, bytes).
        writes: (storage, bytes).
        split: whether tensor parallelism divides it. depth: matmuls before it on the longest path.
        sizes: (rows, n, k) of a matmul. weight: parameter in it. way: "n" or "k": what the plan shards.
    """

    name: str
    kind: str
    label: str
    reads: list[tuple[int, int | None, int]]
    writes: list[tuple[int, int]]
    split: bool = False
    depth: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
    weight: str = ""
    way: str | None = None
    input_gradient: bool = True
    read_by: list[int] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(size for *_, size in self.reads) + sum(size for _, size in self.writes)


def storage_of(tensor: Tensor) -> int:
    """A number for the storage of ``tensor``, as long as the storage is kept."""
    return id(tensor.untyped_storage())


class OpRecorder(TorchDispatchMode):
    """Records the operations that run under it.

    Args:
        params: storage -> (name, parameter, dim that is sharded or None).
        seq_len: by which the scores of an attention are known.

    Attributes:
        ops: forward and backward; what follows is by storage.
        split: what tensor parallelism divides. gathered: inputs of colwise layers. written: its last op.
        attentions: (heads of all sequences, KV heads, head dim, causal).
    """

    def __init__(self, params: dict[int, tuple[str, Tensor, int | None]], seq_len: int) -> None:
        super().__init__()
        self.params, self.seq_len = params, seq_len
        self._tables = {param.shape for _, param, _ in params.values() if param.ndim > 1}
        self.forward_ops: list[Op] = []
        self.backward_ops: list[Op] = []
        self.ops = self.forward_ops
        self.label = ""
        self.split: set[int] = set()
        self.gathered: dict[int, int] = {}
        self.summed: list[int] = []
        self.attentions: list[tuple[int, int, int, bool]] = []
        self.scores: dict[int, Op] = {}
        self.softmaxed: set[int] = set()
        self.masked: bool | None = None
        self.written: dict[int, tuple[list[Op], int]] = {}
        self._depth: dict[int, int] = {}
        self._quiet = 0
        self.kept: dict[int, Any] = {}  # a freed storage's id would be another's

    @property
    def recording_forward(self) -> bool:
        return self.ops is self.forward_ops and not self._quiet

    def start_backward(self) -> None:
        self.ops, self.label = self.backward_ops, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(tensors_in((args, kwargs)))
        if not any(t.is_meta for t in given):
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if given and not given[0].is_meta and func._schema.is_mutable and args[0] is given[0]:
            return args[0]  # a mask, changed by what isn't known
        self._look_at_mask(given)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        args, kwargs = map_tensors(_as_meta, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        if not self._quiet:
            self._note_call(func, args, kwargs, out)
        return out

    def _look_at_mask(self, given: list[Tensor]) -> None:
        """Whether real values that meet scores hide the future: what the first query sees of the last key."""
        if not any(storage_of(t) in self.scores for t in given):
            return
        for t in given:
            if t.ndim >= 2 and t.shape[-1] == self.seq_len == t.shape[-2] and not t.is_meta:
                self.masked = self.masked or hides_future(t)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Operations in here are not recorded."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _note_call(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        mutable = func._schema.is_mutable
        name = name.rstrip("_") if mutable else name
        reads, writes = list(tensors_in((args, kwargs))), list(tensors_in(out))
        known = {storage_of(t) for t in reads}
        if name in _FREE or (not mutable and all(storage_of(t) in known for t in writes)):
            return
        if name in _PRODUCTS:
            self._note_product(name, [a for a in args if isinstance(a, Tensor)], writes[0])
        elif name == "convolution":
            self._note_convolution(args, writes[0])
        elif name == "convolution_backward":
            self.note("convolution", "matmul", reads, writes)
        elif name in _NORMS or name.removesuffix("_backward") in _NORMS:
            self.note(name, "norm", reads, writes)
        else:
            self._note_elementwise(name, reads, writes)

    def note(
        self, name: str, kind: str, reads: list[Tensor], writes: list[Tensor], **more: Any
    ) -> Op:
        """Records one op; ``split`` is that of its inputs unless given."""
        if self._quiet:
            return Op(name, kind, "", [], [])
        index = len(self.ops)
        split = more.pop("split", any(storage_of(t) in self.split for t in reads))
        depth = max((self._depth.get(storage_of(t), 0) for t in reads), default=0)
        if kind in ("matmul", "attention"):
            depth += 1
        op = Op(name, kind, self.label, [], [], split, depth, **more)
        seen: set[int] = set()
        for t in reads:
            key = storage_of(t)
            if key in self.params or key in seen:
                continue
            seen.add(key)
            where = self.written.get(key)
            writer = where[1] if where is not None and where[0] is self.ops else None
            op.reads.append((key, writer, _bytes(t)))
            if where is not None:
                where[0][where[1]].read_by.append(index if where[0] is self.ops else -1)
        for t in writes:
            key = storage_of(t)
            self.kept[key] = t.untyped_storage()
            op.writes.append((key, _bytes(t)))
            self.written[key] = (self.ops, index)
            self._depth[key] = depth
            (self.split.add if split else self.split.discard)(key)
        for t in reads:
            self.kept[storage_of(t)] = t.untyped_storage()
        self.ops.append(op)
        return op

    def _note_elementwise(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        if any(storage_of(t) in self.scores for t in reads):
            origin = next(self.scores[storage_of(t)] for t in reads if storage_of(t) in self.scores)
            done = "softmax" in name or any(storage_of(t) in self.softmaxed for t in reads)
            self.note(name, "score", reads, writes)
            for t in writes:
                self.scores[storage_of(t)] = origin
                if done:
                    self.softmaxed.add(storage_of(t))
            return
        if not self.recording_forward and name == "add" and writes[0].shape in self._tables:
            return  # the gradients of a tied weight: not a token's
        op = self.note(name, "elementwise", reads, writes)
        if name in _LOOKUPS:
            self._note_lookup(name, op, reads)

    def _note_lookup(self, name: str, op: Op, reads: list[Tensor]) -> None:
        """Rows of a table: only those are read, and a split table's are summed."""
        if name == "embedding_dense_backward":  # gradients read; rows of the sum read and written
            op.writes = [(key, 2 * op.reads[0][2]) for key, _ in op.writes]
            return
        size = sum(size for _, size in op.writes)
        table = self.params.get(storage_of(reads[0]))
        op.reads = [(storage_of(reads[0]), None, size)] + op.reads[1 if table is None else 0 :]
        if name == "embedding" and table is not None and table[2] is not None:
            for key, _ in op.writes:
                self.split.discard(key)
            op.split = False
            self.summed.append(reads[0].shape[-1])

    def _note_product(self, name: str, given: list[Tensor], out: Tensor) -> None:
        a, b = given[-2:]
        rows, n, k = prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
        held = [self.params.get(storage_of(t)) for t in (a, b)]
        if held[0] is None and held[1] is None:
            self._note_free_product(given, out, (rows, n, k))
            return
        way = None
        which, weight = (1, b) if held[1] is not None else (0, a)
        if which == 0:
            rows, n = prod(b.shape[:-2]) * b.shape[-1], prod(a.shape[:-1])
        title, param, dim = held[which]  # type: ignore[misc]
        other = a if which == 1 else b
        split = storage_of(other) in self.split
        if dim is not None and param.ndim == 2:
            straight = weight.stride()[-2:] == param.stride()
            at = dim if straight else 1 - dim
            kept = at == which  # the dim of the weight that the product keeps
            way = "n" if kept else "k"
            split = kept
        if self.ops is self.forward_ops:
            if way == "n" and storage_of(other) not in self.split:
                self.gathered.setdefault(storage_of(other), k)
            if way == "k":
                self.summed.append(n)
        self.note(
            name,
            "matmul",
            given,
            [out],
            split=split,
            sizes=(rows, n, k),
            weight=title,
            way=way,
            input_gradient=other.requires_grad,
        )

    def _note_free_product(
        self, given: list[Tensor], out: Tensor, sizes: tuple[int, int, int]
    ) -> None:
        """Of two tensors that aren't parameters: attention's, or a gradient of one."""
        a, b = given[-2:]
        scored = next((t for t in (a, b) if storage_of(t) in self.scores), None)
        forward = self.ops is self.forward_ops
        if not forward:
            shapes = {op.sizes[1:2] for op in self.scores.values()}
            if out.ndim == 3 and (out.shape[-1],) in shapes and scored is None:
                self.note("bmm", "score", given, [out])
                self.scores[storage_of(out)] = next(iter(self.scores.values()))
            else:
                self.note("bmm", "matmul", given, [out])
            return
        if scored is not None:
            origin = self.scores[storage_of(scored)]
            if storage_of(scored) in self.softmaxed:
                origin.kind = "attention"
                heads = out.shape[0]
                self.attentions.append((heads, heads, origin.sizes[2], bool(self.masked)))
                self.note("attention", "attention", given, [out])
                return
        wanted = a.requires_grad or b.requires_grad
        kind = "matmul" if wanted else "elementwise"
        op = self.note("bmm", kind, given, [out], sizes=sizes)
        if wanted and out.ndim == 3 and out.shape[-1] == self.seq_len:
            self.scores[storage_of(out)] = op

    def _note_convolution(self, args: Any, out: Tensor) -> None:
        weight = args[1]
        title = self.params.get(storage_of(weight), ("convolution", weight, None))[0]
        n, k = weight.shape[0], prod(weight.shape[1:])
        given = [t for t in args if isinstance(t, Tensor)]
        self.note(
            "convolution", "matmul", given, [out], sizes=(out.numel() // n, n, k), weight=title
        )


def _as_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _bytes(tensor: Tensor) -> int:
    """Of the elements that are different: an expanded dim is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in sizes if step != 0) * tensor.element_size()


def hides_future(mask: Tensor) -> bool:
    """Whether the first query doesn't see the last key; a mask that isn't known is taken to hide it."""
    if mask.is_meta:
        return True
    last = mask[..., 0, -1]
    if mask.dtype == torch.bool:
        return mask.shape[-2] > 1 and bool((last != mask[..., -1, -1]).all())
    return bool((last.float() < -1e3).all())


class KernelMode(TorchFunctionMode):
    """Records ``scaled_dot_product_attention`` and ``rms_norm`` as one kernel each."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Any:
        causal = is_causal or (attn_mask is not None and hides_future(attn_mask))
        heads = query.shape[:-2].numel()
        pairs = key.shape[:-2].numel()
        if self.recorder.recording_forward:
            self.recorder.attentions.append((heads, pairs, query.shape[-1], causal))
        return _Attention.apply(self.recorder, query, key, value)

    def _rms_norm(
        self,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        return _RmsNorm.apply(self.recorder, input, weight)


class _Attention(torch.autograd.Function):
    """Flash attention: keeps its inputs, its output and a sum in fp32 for each query."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OpRecorder, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.recorder = recorder
        with recorder.quiet():
            out = torch.empty_like(
                query
            )  # in the memory order of the queries, as cuDNN and flash have it
            if value.shape[-1] != query.shape[-1]:
                out = query.new_empty(*query.shape[:-1], value.shape[-1])
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder.note("attention", "attention", [query, key, value], [out])
        recorder.note("attention", "attention", [query], [sums])
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        with ctx.recorder.quiet():
            grads = [torch.empty_like(t) for t in (query, key, value)]
        ctx.recorder.note("attention", "attention", [query, key, value, out, grad], grads)
        return None, *grads


class _RmsNorm(torch.autograd.Function):
    """One kernel: keeps its input and a sum in fp32 for each row."""

    @staticmethod
    def forward(ctx: Any, recorder: OpRecorder, input: Tensor, weight: Tensor | None) -> Tensor:
        ctx.recorder = recorder
        with recorder.quiet():
            out = torch.empty_like(input)
            sums = input.new_empty(input.shape[:-1], dtype=torch.float32)
        recorder.note("rms_norm", "norm", [input], [out, sums])
        ctx.save_for_backward(input, weight, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, sums = ctx.saved_tensors
        with ctx.recorder.quiet():
            back = torch.empty_like(input)
            weights = None if weight is None else torch.empty_like(weight)
        ctx.recorder.note("rms_norm", "norm", [input, grad, sums], [back])
        return None, back, weights


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
