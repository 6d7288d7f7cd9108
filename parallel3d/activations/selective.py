"""Recomputation of a block in backward: of all of it, or of what its forward has not kept.

A selective forward keeps the results of some operations, detached from the graph, and frees them as they are
used. The calls of each operation are numbered. The recomputation makes the same calls in the same order; for
a call whose result was kept it returns that instead of computing. Results of collectives are kept by
``_util.recompute.kept``, whatever the policy says.

Buffers that the forward changes, such as BatchNorm's statistics, have in a recomputation the values that they
had when the forward began, and afterwards are as before it. So outputs, gradients and buffers are those of a
block without recomputation. A change is detected by a buffer's version counter, or if another tensor has
replaced it. Small buffers are copied before each forward; larger ones before the first, and later only if a
forward has changed them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel3d._torch.autograd import TorchDispatchMode, graph_is_kept
from parallel3d._torch.saved import (
    WRITTEN_WITHOUT_VERSION,
    noted_saves,
    preserved_versions,
    same_memory,
)
from parallel3d._torch.simulated import inner_tensors
from parallel3d._trace.kinds import arguments_of, kind_of, written_by
from parallel3d._util.dry_run import is_capturing
from parallel3d._util.forwards import Forward, as_if, without_cache
from parallel3d._util.recompute import begin_pass, end_pass, paused, with_hooks_of
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import Parallel3dError, StateError

Policy = Callable[..., Any]
"""torch's: (ctx, op, *args, **kwargs) -> CheckpointPolicy."""

# ---- what is kept ----

_FUNCTIONAL = "_c10d_functional"
_NEVER = ("wait_tensor", "detach", "empty", "empty_like", "device")


def keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy function of ``"selective"``: keeps matmuls, convolutions, attention and collectives."""
    return CheckpointPolicy.PREFER_SAVE if _is_costly(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_costly(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload):  # a higher-order one
        return "attention" in op.name()
    if op.namespace == _FUNCTIONAL:  # DTensor's and the compiler's
        return True
    name = op.overloadpacket.__name__
    return kind_of(name) in ("product", "convolution", "attention") and "backward" not in name


@cache
def _kind_of(op: Any) -> tuple[bool, bool]:
    """Returns (whether results of ``op`` are never kept, as of views; whether it writes to arguments)."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False, False
    # c10d's write to theirs, though their schemas do not say so.
    writes = schema.is_mutable or op.namespace == "c10d"
    aliases = any(each.alias_info is not None for each in schema.returns)
    return writes or aliases or op.overloadpacket.__name__ in _NEVER, writes


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers. Its result is then not kept: if the recomputation left the call
    out, later calls would draw other numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    if all(argument.name != "dropout_p" for argument in op._schema.arguments):
        return True
    return bool(arguments_of(op, args, kwargs).get("dropout_p", 0.0))


_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _decide(
    policy: Policy, op: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    answer = policy(_context_of(output), op, *args, **kwargs)
    if answer in _SAVES or answer is True:
        return not _draws(op, args, kwargs)
    if answer in _RECOMPUTES or answer is False:
        return False
    raise Parallel3dError(
        f"activation_checkpointing: the policy function returned {answer!r} for {op}; it must return "
        "CheckpointPolicy.MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE or PREFER_RECOMPUTE of "
        'torch.utils.checkpoint (activation_checkpointing="offload" moves activations to the CPU)'
    )


def _context_of(output: Any) -> SelectiveCheckpointContext:
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=output)
    except TypeError:  # of torch 2.11
        return SelectiveCheckpointContext(is_recompute=False)


# ---- a region: one forward of a block, and its recomputation ----


class _Kept:
    """A result that a forward has kept for the recomputation.

    Attributes:
        tensor: the result; a function that makes an empty one like it, if nobody reads its values; None after
            it was freed.
        version: the result's version when it was kept.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | Callable[[], Tensor] | None = same_memory(tensor)
        self.version = tensor._version


class _Region:
    """What one forward of a block has kept for its recomputation.

    Attributes:
        policy: see ``Policy``.
        operations: operation -> for each of its calls the kept result, or None.
        collectives: for each collective its name and the kept result.
        memory: id of a storage -> the storage, and the kept tensors in it.
        complete: whether the forward has ended.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.operations: dict[Any, list[Any]] = defaultdict(list)
        self.collectives: list[tuple[str, Any]] = []
        self.memory: dict[int, tuple[Any, list[_Kept]]] = {}
        self.complete = False

    def keep(self, output: Any) -> Any:
        """Returns ``output``, an operation's result, with each tensor replaced by a ``_Kept`` of it."""

        def keep(tensor: Tensor) -> Any:
            kept = _Kept(tensor)
            self._note(kept, tensor)
            return kept

        return map_tensors(keep, output)

    def _note(self, kept: _Kept, tensor: Tensor) -> None:
        for inner in inner_tensors(tensor):
            storage = inner.untyped_storage()
            self.memory.setdefault(id(storage), (storage, []))[1].append(kept)

    def take(self, output: Any, *, leave: bool) -> Any:
        """Returns a result that ``keep`` has kept as ``output``, as tensors again, and frees it unless
        ``leave``.

        Raises:
            StateError: a tensor was changed since ``keep``, or was freed before.
        """
        if isinstance(output, (tuple, list)):
            return type(output)(self.take(each, leave=leave) for each in output)
        if not isinstance(output, _Kept):
            return output
        kept, tensor = output, output.tensor
        if tensor is None:
            raise StateError(
                "selective recomputation: a backward comes a second time to a block whose kept results the "
                "first has freed; give the first backward retain_graph=True"
            )
        if not isinstance(tensor, Tensor):
            return tensor()
        if tensor._version != kept.version:
            raise StateError(
                f"selective recomputation: the result of an operation, {tuple(tensor.shape)} {tensor.dtype}, "
                "was kept for backward, and changed in place after its block's forward; change a copy "
                "(x = x + y, not x += y), or use activation_checkpointing=True"
            )
        if leave:
            return same_memory(tensor)
        kept.tensor = None
        self._forget(kept, tensor)
        return tensor

    def _forget(self, kept: _Kept, tensor: Tensor) -> None:
        for inner in inner_tensors(tensor):
            key = id(inner.untyped_storage())
            if key in self.memory:
                there = [each for each in self.memory[key][1] if each is not kept]
                if there:
                    self.memory[key] = self.memory[key][0], there
                else:
                    del self.memory[key]

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copies kept results whose memory an operation is about to overwrite: that of ``tensors``."""
        for tensor in tensors if self.memory else ():
            for kept in self._in_memory_of(tensor):
                old = kept.tensor
                assert isinstance(old, Tensor)
                self._forget(kept, old)
                kept.tensor = copy = old.clone()
                kept.version = copy._version
                self._note(kept, copy)  # a recomputation may give it out, and take it again

    def keep_no_value(self, tensor: Tensor) -> None:
        """Frees the kept results in the memory of ``tensor``, of which only the shape will be needed."""
        for kept in self._in_memory_of(tensor):
            old = kept.tensor
            assert isinstance(old, Tensor)
            if old.numel() == tensor.numel():
                self._forget(kept, old)
                like: Any = {"dtype": old.dtype, "device": old.device}
                kept.tensor = partial(torch.empty_strided, old.shape, old.stride(), **like)

    def _in_memory_of(self, tensor: Tensor) -> list[_Kept]:
        found: dict[int, _Kept] = {}
        for inner in inner_tensors(tensor) if self.memory else ():
            _, there = self.memory.get(id(inner.untyped_storage()), (None, []))
            found |= {id(kept): kept for kept in there}
        return list(found.values())


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    if op.namespace == "c10d":
        return tensors_in((args, kwargs))
    return written_by(op, args, kwargs)


class _Pass(TorchDispatchMode):
    """A dispatch mode around one run of a block, which sees every operation below autograd: the forward,
    whose results it keeps, or (``recomputes``) the recomputation, to which it gives them. A second backward
    enters the latter again.

    See ``_util.recompute.RecomputePass``.
    """

    supports_higher_order_operators = True

    def __init__(self, region: _Region, *, recomputes: bool) -> None:
        super().__init__()
        self.region, self.recomputes = region, recomputes
        self.paused = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: functions that the block has compiled itself stay compiled under this mode."""
        return True

    def __enter__(self) -> Any:
        self.calls: dict[Any, int] = defaultdict(int)
        self.collectives = 0
        # Known outside of ``__torch_dispatch__``: which backward this is. One within the forward comes first.
        self.leave = self.recomputes and (graph_is_kept() or not self.region.complete)
        entered = super().__enter__()
        begin_pass(self)
        return entered

    def __exit__(self, *error: Any) -> None:
        if not self.recomputes:
            self.region.complete = True
        end_pass(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        never, writes = _kind_of(func)
        if writes and self.region.memory:
            self.region.before_write(_written(func, args, kwargs))
        if never:
            return func(*args, **kwargs)
        call = self._call_again if self.recomputes else self._call
        return call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        region = self.region
        if region.policy is keep_costly and not _is_costly(func):  # decided without the call
            return output
        kept = None
        if _decide(region.policy, func, output, args, kwargs):
            kept = region.keep(output)
        region.operations[func].append(kept)
        return output

    def _call_again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = self.region.operations.get(func)
        if calls is None:
            return func(*args, **kwargs)
        number = self.calls[func]
        self.calls[func] = number + 1
        if number >= len(calls):
            raise _differs(f"{func} is called {number + 1} times, not {len(calls)}")
        if calls[number] is None:
            return func(*args, **kwargs)
        return self.region.take(calls[number], leave=self.leave)

    def keep(self, what: str, result: Any) -> None:
        self.region.collectives.append((what, self.region.keep(result)))

    def keep_no_value(self, tensor: Tensor) -> None:
        if not self.recomputes:
            self.region.keep_no_value(tensor)

    def take(self, what: str) -> Any:
        number = self.collectives
        self.collectives += 1
        collectives = self.region.collectives
        if number >= len(collectives):
            raise _differs(f"it comes to {what}, where the forward had no collective any more")
        known, kept = collectives[number]
        if known != what:
            raise _differs(f"it comes to {what}, where the forward had {known}")
        return self.region.take(kept, leave=self.leave)


def _differs(how: str) -> StateError:
    return StateError(
        f"selective recomputation: a block's recomputation in backward differs from its forward: {how}. The "
        "forward must not depend on what changes until then (random numbers of Python, a counter, a cache); "
        "or use activation_checkpointing=False"
    )


def _contexts(policy: Policy) -> tuple[_Pass, _Pass]:
    region = _Region(policy)
    return _Pass(region, recomputes=False), _Pass(region, recomputes=True)


# ---- buffers ----

SMALL = 1 << 16
"""Bytes; a mask or a table of a block's own may have many, and nobody changes it."""

# Module -> name of a large buffer -> whether a forward has changed it.
_changes: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Before:
    """A buffer as it was before a forward. ``value``: a copy of it, or None if none was made."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor | None

    def has_changed(self) -> bool:
        """Whether the buffer may have been changed or replaced since then."""
        return (
            self.name in WRITTEN_WITHOUT_VERSION
            or self.module._buffers.get(self.name) is not self.buffer
            or self.buffer._version != self.version
        )

    def is_large(self) -> bool:
        """Whether the buffer is so large that it is copied only if forwards are known to change it."""
        return self.buffer.nbytes > SMALL and self.name not in WRITTEN_WITHOUT_VERSION


class Buffers:
    """The buffers of a block as before its forward, so that the recomputation has the same values."""

    def __init__(self, before: list[_Before]) -> None:
        self._before = before
        for each in before:
            if not each.is_large() or _changes.get(each.module, {}).get(each.name, True):
                each.value = each.buffer.detach().clone()

    def forward(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``block``, the block's forward, and notes which large buffers it changes."""
        output = block(*args, **kwargs)
        for each in self._before:
            if each.is_large():
                known = _changes.setdefault(each.module, {})
                known[each.name] = each.has_changed() or known.get(each.name, False)
                if not known[each.name]:
                    each.value = None
        return output

    def recompute(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``block`` with the buffers as before ``forward``, then restores the present values."""
        changed = [each for each in self._before if each.has_changed()]
        for each in changed:
            if each.value is None and each.buffer._version != each.version:
                raise StateError(
                    f"buffer {each.name} of a {type(each.module).__name__}, {tuple(each.buffer.shape)}, was "
                    "changed in place since its block's forward began, which earlier forwards had not done: "
                    "there is no copy of it from which backward could recompute the block. Change it "
                    "outside of the block, between steps, or use activation_checkpointing=False"
                )
        now: list[tuple[_Before, Tensor | None, Tensor | None]] = []
        with preserved_versions([each.buffer for each in changed]):
            try:
                with paused(), torch.no_grad():
                    for each in changed:
                        value = None if each.value is None else each.buffer.detach().clone()
                        now.append((each, each.module._buffers.get(each.name), value))
                        each.module._buffers[each.name] = each.buffer
                        if each.value is not None:
                            each.buffer.copy_(each.value)
                return block(*args, **kwargs)
            finally:
                with paused(), torch.no_grad():
                    for each, buffer, value in reversed(now):
                        if value is not None:
                            each.buffer.copy_(value)
                        each.module._buffers[each.name] = buffer


def buffers_of(block: nn.Module) -> Buffers | None:
    """Records the buffers of ``block`` and its submodules before a forward; None if there are none."""
    found: list[_Before] = []
    waiting: list[nn.Module | None] = [block]
    while waiting:
        module = waiting.pop()
        if module is not None:
            waiting += module._modules.values()
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    found.append(_Before(module, name, buffer, buffer._version, None))
    if not found:
        return None
    with paused():
        return Buffers(found)


# ---- blocks ----


def recomputed(inner: Forward) -> Forward:
    """Wraps a block's forward for ``activation_checkpointing=True``: it keeps its inputs only, and backward
    recomputes the rest."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _checkpointed(self, inner, args, kwargs)

    return as_if(forward, inner)


class _NoDraws(TorchDispatchMode):
    """A dispatch mode that raises StateError for an operation that draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _draws(func, args, kwargs or {}):
            raise StateError(
                f"{func.overloadpacket.__name__} draws random numbers in a recomputed block: a CUDA graph "
                "would draw others then. Leave activation checkpointing out, or set dropout to 0"
            )
        return func(*args, **(kwargs or {}))


def _run_without_draws(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _NoDraws():
        return block(*args, **kwargs)


def _checkpointed(module: nn.Module, inner: Forward, args: Any, kwargs: Any, **options: Any) -> Any:
    """Calls ``inner``, the forward of ``module``, by torch's ``checkpoint``, to which ``options`` go, and
    with the module's buffers restored in the recomputation."""
    block = partial(inner, module)
    if torch.is_grad_enabled():
        kwargs = without_cache(kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, use_reentrant=False, **options, **kwargs)
    # torch looks at tensors among ``args`` alone: whether they are changed in place before the recomputation,
    # and on which devices the random state is to be restored for it.
    known = set(map(id, args))
    others = [t for t in tensors_in((args, kwargs)) if id(t) not in known and not t.is_inference()]

    if is_capturing():  # a graph can't save and restore the state of a generator
        options = {"preserve_rng_state": False, **options}
        block = partial(_run_without_draws, block)
    call: Callable[..., Any] = block
    again = with_hooks_of(module, partial(_unchanged, block))
    if torch.is_grad_enabled() and (buffers := buffers_of(module)) is not None:
        call, again = partial(buffers.forward, call), partial(buffers.recompute, again)

    def run(*given: Any) -> Any:
        nonlocal call
        now, call = call, again
        return now(*given[len(others) :], **kwargs)

    return checkpoint(run, *others, *args, use_reentrant=False, **options)


def _unchanged(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``block`` for a recomputation, and returns its output.

    Raises:
        StateError: the block changes in place a tensor that autograd has saved. Autograd itself does not
            check that for tensors saved through hooks, such as those of torch's checkpoint.
    """
    saved: list[tuple[Tensor, int]] = []
    try:
        with noted_saves(lambda tensor: saved.append((tensor, tensor._version))):
            return block(*args, **kwargs)
    finally:  # torch ends a recomputation by an exception
        changed = next((t for t, version in saved if t._version != version), None)
        # Its graph has the hooks, which have this list: a cycle that no garbage collector sees.
        saved.clear()
        if changed is not None:
            raise StateError(
                f"a tensor that backward needs, {tuple(changed.shape)} {changed.dtype}, is modified by an "
                "inplace operation of its block after it was saved; change a copy (x = x + y, not x += y)"
            )


def partly_recomputed(policy: Policy) -> Callable[[Forward], Forward]:
    """Returns a wrapper for a block's forward: the results that ``policy`` names, and all collectives, are
    kept, and backward recomputes the rest."""
    eager = partial(_contexts, policy)
    compiled = partial(create_selective_checkpoint_contexts, _for_compiler(policy))

    def wrapper(inner: Forward) -> Forward:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            contexts = compiled if torch.compiler.is_compiling() else eager
            return _checkpointed(self, inner, args, kwargs, context_fn=contexts)

        return as_if(forward, inner)

    return wrapper


def _for_compiler(policy: Policy) -> Policy:
    """Returns ``policy`` as a compiler reads it in torch's own contexts, with collectives kept."""

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(op, "namespace", "") == _FUNCTIONAL:
            return CheckpointPolicy.MUST_SAVE
        return policy(ctx, op, *args, **kwargs)

    return keep
