"""Selective recomputation: a block's forward keeps the results of some operations, and backward recomputes
the others from them.

Kept results are detached from the graph, and freed as they are used. The calls of each operation are
numbered. The recomputation makes the same calls in the same order; for a call whose result was kept it
returns that instead of computing. Results of collectives are kept by ``_util.recompute.kept``, whatever the
policy says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel3d._torch.autograd import (
    TorchDispatchMode,
    graph_is_kept,
    noted_saves,
    same_memory,
)
from parallel3d._torch.simulated import inner_tensors
from parallel3d._trace.kinds import arguments_of, kind_of, written_by
from parallel3d._util.forwards import Forward, as_if, without_cache
from parallel3d._util.recompute import begin_pass, end_pass, with_hooks_of
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.activations.buffers import buffers_of
from parallel3d.errors import Parallel3dError, StateError

Policy = Callable[..., Any]
"""torch's: (ctx, op, *args, **kwargs) -> CheckpointPolicy."""

# ---- what is kept ----

_FUNCTIONAL = "_c10d_functional"
_NEVER = ("wait_tensor", "detach", "empty", "empty_like", "device")


def keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of ``"selective"``: keeps matmuls, convolutions, attention and collectives."""
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
    """(whether calls of ``op`` are never kept, as those of views are not; whether it writes to arguments)."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False, False
    # c10d's write to theirs, though their schemas do not say so.
    writes = schema.is_mutable or op.namespace == "c10d"
    aliases = any(each.alias_info is not None for each in schema.returns)
    return writes or aliases or op.overloadpacket.__name__ in _NEVER, writes


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: where it is not made again, later ones would differ."""
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


class _Shape:
    """Stands for a tensor whose values nobody reads."""

    def __init__(self, tensor: Tensor) -> None:
        self.like = partial(
            torch.empty_strided,
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )


class _Kept:
    """A tensor that is kept, as it was at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | _Shape | None = same_memory(tensor)
        self.version = tensor._version


class _Region:
    """The results that one forward of a block has kept.

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
        """Returns ``output`` with a ``_Kept`` for each tensor."""

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
        """Returns the tensors of ``output``, which ``keep`` has returned, and frees them unless ``leave``.

        Raises:
            StateError: a tensor was changed since ``keep``, or was freed before.
        """
        return _map_kept(partial(self._take_one, leave=leave), output)

    def _take_one(self, kept: _Kept, *, leave: bool) -> Tensor:
        tensor = kept.tensor
        if tensor is None:
            raise StateError(
                "selective recomputation: a backward comes a second time to a block whose kept results the "
                "first has freed; give the first backward retain_graph=True"
            )
        if isinstance(tensor, _Shape):
            made: Tensor = tensor.like()
            return made
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
        """Copies what is kept in the memory of ``tensors``, which is about to be overwritten."""
        if not self.memory:
            return
        for tensor in tensors:
            for kept in self._in_memory_of(tensor):
                old = kept.tensor
                assert isinstance(old, Tensor)
                self._forget(kept, old)
                kept.tensor = copy = old.clone()
                kept.version = copy._version
                self._note(kept, copy)  # a recomputation may give it out, and take it again

    def keep_no_value(self, tensor: Tensor) -> None:
        """Keeps nothing but the shape of what is kept in the memory of ``tensor``."""
        for kept in self._in_memory_of(tensor):
            old = kept.tensor
            assert isinstance(old, Tensor)
            if old.numel() == tensor.numel():
                self._forget(kept, old)
                kept.tensor = _Shape(old)

    def _in_memory_of(self, tensor: Tensor) -> list[_Kept]:
        if not self.memory:
            return []
        found: dict[int, _Kept] = {}
        for inner in inner_tensors(tensor):
            _, there = self.memory.get(id(inner.untyped_storage()), (None, []))
            found |= {id(kept): kept for kept in there}
        return list(found.values())


def _map_kept(fn: Callable[[_Kept], Tensor], value: Any) -> Any:
    if isinstance(value, _Kept):
        return fn(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_kept(fn, each) for each in value)
    return value


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    if op.namespace == "c10d":
        return tensors_in((args, kwargs))
    return written_by(op, args, kwargs)


class _Pass(TorchDispatchMode):
    """A pass through a region: it sees every operation of it, below autograd."""

    supports_higher_order_operators = True
    recomputes = False

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self.region = region
        self.paused = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that the block has compiled itself stay compiled within it."""
        return True

    def __enter__(self) -> Any:
        entered = super().__enter__()
        begin_pass(self)
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_pass(self)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        never, writes = _kind_of(func)
        if writes and self.region.memory:
            self.region.before_write(_written(func, args, kwargs))
        return func(*args, **kwargs) if never else self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``func``, whose result may be kept."""
        raise NotImplementedError

    def keep(self, what: str, result: Any) -> None:
        """See ``_util.recompute.RecomputePass``."""
        raise NotImplementedError

    def take(self, what: str) -> Any:
        """See ``_util.recompute.RecomputePass``."""
        raise NotImplementedError

    def keep_no_value(self, tensor: Tensor) -> None:
        """See ``_util.recompute.RecomputePass``."""


class _Forward(_Pass):
    """The forward, which keeps."""

    def __exit__(self, *error: Any) -> None:
        self.region.complete = True
        super().__exit__(*error)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        region = self.region
        if region.policy is keep_costly and not _is_costly(func):  # decided without the call
            return output
        kept = None
        if _decide(region.policy, func, output, args, kwargs):
            kept = region.keep(output)
        region.operations[func].append(kept)
        return output

    def keep(self, what: str, result: Any) -> None:
        self.region.collectives.append((what, self.region.keep(result)))

    def keep_no_value(self, tensor: Tensor) -> None:
        self.region.keep_no_value(tensor)


class _Recomputation(_Pass):
    """The recomputation, which takes what was kept. It may be entered again: by a second backward."""

    recomputes = True

    def __enter__(self) -> Any:
        self.calls: dict[Any, int] = defaultdict(int)
        self.collectives = 0
        # Known outside of ``__torch_dispatch__``: which backward this is. One within the forward comes first.
        self.leave = graph_is_kept() or not self.region.complete
        return super().__enter__()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = self.region.operations.get(func)
        if calls is None:
            return func(*args, **kwargs)
        number = self.calls[func]
        self.calls[func] = number + 1
        if number >= len(calls):
            raise _differs(f"{func} is called {number + 1} times, not {len(calls)}")
        kept = calls[number]
        if kept is None:
            return func(*args, **kwargs)
        return self.region.take(kept, leave=self.leave)

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


def _contexts(
    policy: Policy,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    region = _Region(policy)
    return _Forward(region), _Recomputation(region)


def recomputed(inner: Forward) -> Forward:
    """``activation_checkpointing=True``: the forward that keeps its inputs alone."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _checkpointed(self, inner, args, kwargs)

    return as_if(forward, inner)


def _checkpointed(module: nn.Module, inner: Forward, args: Any, kwargs: Any, **options: Any) -> Any:
    """Calls ``inner``, the forward of ``module``; backward recomputes it."""
    block = partial(inner, module)
    if torch.is_grad_enabled():
        kwargs = without_cache(kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, use_reentrant=False, **options, **kwargs)
    # torch looks at tensors among ``args`` alone: whether they are changed in place before the recomputation,
    # and on which devices the random state is to be restored for it.
    known = set(map(id, args))
    others = [t for t in tensors_in((args, kwargs)) if id(t) not in known and not t.is_inference()]

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
    """Calls ``block`` for a recomputation.

    Raises:
        StateError: the block changes a tensor that autograd has saved. Autograd itself does not check that
            for tensors saved through hooks, such as those of torch's checkpoint.
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
    """The wrapper of a forward that keeps what ``policy`` says, and all collectives."""
    eager = partial(_contexts, policy)
    compiled = partial(create_selective_checkpoint_contexts, _for_compiler(policy))

    def wrapper(inner: Forward) -> Forward:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            contexts = compiled if torch.compiler.is_compiling() else eager
            return _checkpointed(self, inner, args, kwargs, context_fn=contexts)

        return as_if(forward, inner)

    return wrapper


def _for_compiler(policy: Policy) -> Policy:
    """The policy for torch's own contexts, which a compiler reads: collectives are kept there too."""

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(op, "namespace", "") == _FUNCTIONAL:
            return CheckpointPolicy.MUST_SAVE
        return policy(ctx, op, *args, **kwargs)

    return keep
