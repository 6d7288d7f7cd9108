"""Versions: which values the unsharded parameters of a bucket hold, told to autograd.

What an operation has saved for backward, autograd reads only if the tensor's version counter is what it was
then. So the engine sets the counters of the unsharded parameters: to a number of the weights' values while
these are there, and to another one while the memory is free, or an all-gather writes to it. A backward that
comes when the engine has not been told of it, or after the weights have changed, is then an error and never
computes with what happens to be in the memory. ``explain`` says in the engine's words what it was.

A counter has 32 bits. The highest is set while a bucket is free; the others are the bucket's number then, and
else a part of the bucket's number, a part of that of the values, and some room for in-place changes by the
user, which raise the counter by one each.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallel3d._torch.autograd import set_versions, torch_function_off, untraced, wrap_backward
from parallel3d._torch.dtensor import local_tensor_of
from parallel3d._torch.simulated import inner_tensors
from parallel3d.errors import StateError
from parallel3d.fsdp.param import ShardedParam, owner_of


class Gathered(Protocol):
    """A bucket, as far as it is looked at here; see ``Bucket``."""

    unit: str
    params: list[ShardedParam]
    compute_params: list[torch.nn.Parameter]
    stand_ins: Sequence[torch.Tensor] | None


# WeightsVersion: whether the weights at rest have changed since, as far as counters tell.
#
# Version counters alone don't tell: fused and foreach optimizers leave a DTensor's as it was. So
# optimizer steps are counted too, by a hook on every optimizer that is set when the first stamp is
# taken. Not those of optimizers without a DTensor: one rank may step such a one alone (a probe
# that rank 0 trains), and would then gather what no other rank does.
#
# No counter sees changes of ``param.data``, nor those of ``torch._foreach_`` functions on DTensors
# outside of an optimizer. So nothing is kept from one forward of the root to the next unless the
# user asks for it.

_version_of = attrgetter("_version")
_steps: int | None = None  # of all optimizers so far; None until the first stamp


class _Record:
    """Of one optimizer's steps.

    Attributes:
        step: the number, among the steps of all, of the last one.
        params: ids of what it optimizes.
        copies: whether it may write to others, of which it has copies: some of what it has is of no unit.
    """

    def __init__(self) -> None:
        self.step = -1
        self.params: set[int] = set()
        self.copies = False

    def note(self, optimizer: Optimizer, step: int) -> None:
        """Step ``step`` was made."""
        self.step = step
        groups = optimizer.param_groups
        if len(self.params) != sum(len(group["params"]) for group in groups):
            params = [param for group in groups for param in group["params"]]
            self.params = set(map(id, params))
            self.copies = any(isinstance(p, DTensor) and owner_of(p) is None for p in params)


_records: weakref.WeakKeyDictionary[Optimizer, _Record] = weakref.WeakKeyDictionary()
_of_deleted: deque[_Record] = deque(
    maxlen=8
)  # who makes that many between a forward and its backward?


@untraced
def _count(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    assert _steps is not None
    groups = optimizer.param_groups  # maybe of other DTensors, master weights that it copies from
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        _steps += 1
        record = _records.get(optimizer)
        if record is None:
            record = _records[optimizer] = _Record()
            weakref.finalize(optimizer, _of_deleted.append, record).atexit = False
        record.note(optimizer, _steps)


def _steps_so_far() -> int:
    global _steps
    if _steps is None:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    return _steps


class WeightsVersion:
    """Of the weights of ``buckets`` as they were when it was taken last.

    Attributes:
        number: of the values seen so far; another one after each change.
    """

    def __init__(self, buckets: Sequence[Gathered]) -> None:
        params = [param for bucket in buckets for param in bucket.params]
        self._sharded = [param.sharded for param in params]
        self._counted = [*self._sharded, *(param.local for param in params)]
        self._steps = -1
        self._versions = -1
        self.number = 0

    def take(self) -> int:
        """Looks at the weights as they are now; their number."""
        steps, versions = _steps_so_far(), self._read()
        if self._is_old(steps, versions):
            self.number += 1
        self._steps, self._versions = steps, versions
        return self.number

    def take_if_old(self) -> bool:
        """Takes it if the weights have changed since. Whether they had."""
        old = self.is_old()
        if old:
            self.take()
        return old

    def is_old(self) -> bool:
        """Whether the weights have changed since it was taken."""
        return self._is_old(_steps_so_far(), self._read())

    def _is_old(self, steps: int, versions: int) -> bool:
        return versions != self._versions or (steps != self._steps and self._were_stepped())

    def _read(self) -> int:
        with torch_function_off():
            return sum(map(_version_of, self._counted))

    def _were_stepped(self) -> bool:
        """Whether an optimizer that has one of the weights, or copies to them, has made a step since."""
        mine = set(map(id, self._sharded))
        return any(
            record.step > self._steps and (record.copies or not mine.isdisjoint(record.params))
            for record in chain(_records.values(), _of_deleted)
        )


_FREE = 1 << 31
_NUMBER, _VALUES, _CHANGES = 11, 12, 8  # bits of each part; they are all but the highest

_numbers = count(1)
_buckets: weakref.WeakValueDictionary[int, Gathered] = weakref.WeakValueDictionary()


class Versions:
    """Of one bucket, as it was built last.

    Attributes:
        weights: of the weights that were gathered last.
    """

    def __init__(self, bucket: Gathered) -> None:
        self.number = next(_numbers)
        self.weights = WeightsVersion([bucket])
        self._bucket = weakref.ref(bucket)
        self._of: Any = None
        self._counted: tuple[torch.Tensor, ...] = ()
        self._free: tuple[int, ...] = ()
        _buckets[self.number] = bucket

    def set_unsharded(self) -> None:
        """The parameters hold the values of ``weights``; what stands in for them does too."""
        bucket = self._bucket()
        tensors = self._tensors()
        if bucket is not None and bucket.stand_ins is not None:
            tensors += tuple(bucket.stand_ins)
        place = self.number % (1 << _NUMBER) << _VALUES | self.weights.number % (1 << _VALUES)
        set_versions(tensors, (place << _CHANGES,) * len(tensors))

    def set_free(self) -> None:
        """Their memory is free."""
        tensors = self._tensors()
        set_versions(tensors, self._free)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        bucket = self._bucket()
        assert bucket is not None
        if self._of is not bucket.compute_params:  # of another precision, or made anew
            self._of = params = bucket.compute_params
            local = [local_tensor_of(p) for p in params if isinstance(p, DTensor)]
            self._counted = (*params, *local)
            self._free = (_FREE | self.number,) * len(self._counted)
        return self._counted


_MISMATCH = re.compile(r"is at version (\d+); expected version (\d+)")
# What comes of asking a view of a subclass for its name in that message.
_NO_STORAGE = re.compile(r"setStorage: .*storage offset (\d+), .* storage of size 0")


def explain(error: BaseException) -> str | None:
    """What has happened where ``error``, of a backward, comes of versions of ours; None: it does not."""
    text = str(error)
    found = _MISMATCH.search(text)
    if found is None:
        missing = _NO_STORAGE.search(text)
        return None if missing is None else _read_while_free(_free_at(int(missing.group(1))))
    now, then = map(int, found.groups())
    if now & _FREE or then & _FREE:
        bucket = _buckets.get((now if now & _FREE else then) & ~_FREE)
        return _read_while_free([] if bucket is None else [bucket])
    shift = _VALUES + _CHANGES
    if now >> shift != then >> shift or not now >> shift:
        return None
    number = now >> shift
    names = _names(bucket for n, bucket in _buckets.items() if n % (1 << _NUMBER) == number)
    if not names:
        return None
    return (
        f"unit {names}: parameters that its forward has computed with were changed before the backward (an "
        "optimizer step, an in-place change), so that its gradient can't be computed any more; call backward "
        "before the weights change"
    )


def _free_at(offset: int) -> list[Gathered]:
    """The free buckets with a parameter at ``offset``."""
    return [
        bucket
        for bucket in _buckets.values()
        if any(p._version & _FREE and _offset_of(p) == offset for p in bucket.compute_params)
    ]


def _offset_of(param: torch.Tensor) -> int:
    return int(next(inner_tensors(param)).storage_offset())


def _read_while_free(buckets: Iterable[Gathered]) -> str | None:
    names = _names(buckets)
    return read_while_free(names) if names else None


def read_while_free(names: str) -> str:
    """What an error says of a backward that came to units, whose ``names`` these are, unnoticed."""
    return (
        f"unit {names}: a backward reads parameters of the unit while they are freed. It came there by a "
        "tensor that the engine does not know of: one that the unit's forward neither has returned nor left "
        "on an attribute of its modules (in a global list, an object of C++ ...). Return it from forward, or "
        "keep it on an attribute; with set_reshard_after_forward(False) and a single backward of the sum of "
        "all losses it may stay where it is"
    )


def _names(buckets: Iterable[Gathered]) -> str:
    return " or ".join(sorted({bucket.unit for bucket in buckets}))


WATCHED_BY = "_parallel3d_watched_by"  # on an unsharded parameter: the unit its gradient hook calls


def unit_that_watches(unsharded: torch.Tensor) -> Any:
    """The unit that has ``unsharded`` as one of its unsharded parameters; None: it is another tensor."""
    unit = getattr(unsharded, WATCHED_BY, None)
    return None if unit is None else unit()


_watched = False


def watch_backwards() -> None:
    """From now on backwards refuse what they can't do, and their errors name units.

    Hooks on tensors see a backward only when it comes to them. That sharded Parameters were given as its
    ``inputs``, which no graph leads to, and what its error was, is known where it is called alone.
    """
    global _watched
    if not _watched:
        _watched = True
        wrap_backward(_run)


def _run(run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs")
    if inputs:
        _check_inputs(args[0], inputs)
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        message = explain(error) or _explain_recomputed(error)
        if message is None:
            raise
        raise StateError(message) from error


def _explain_recomputed(error: BaseException) -> str | None:
    """The same where checkpointing recomputes within a unit that no tensor has told of the backward."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    label, frames = None, error.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_locals.get("self")
        for param in module._parameters.values() if isinstance(module, nn.Module) else ():
            owner = None if param is None else owner_of(param)
            unit = owner.unit() if owner is not None and owner.unit is not None else None
            label = label if unit is None else unit.label
        frames = frames.tb_next
    return None if label is None else read_while_free(label)


def _check_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises if a gradient is wanted of a sharded Parameter whose unit ``outputs`` were computed with."""
    owners = [owner_of(each) for each in inputs if isinstance(each, DTensor)]
    wanted = {id(owner) for owner in owners if owner is not None}
    if not wanted:
        return
    for found in _owners_in(outputs):
        if id(found) in wanted:
            unit = None if found.unit is None else found.unit()
            label = "" if unit is None else unit.label
            raise StateError(
                f"a backward was given parameter {found.name} of unit {label} as one of its inputs. It is "
                "the sharded Parameter; the graph leads to the unsharded one, whose gradient is reduced over "
                "ranks only by a backward without inputs. Call backward() without inputs, with "
                "requires_grad_(False) before the forward on the parameters that are to get none"
            )


def _owners_in(outputs: Iterable[Any]) -> Iterable[ShardedParam]:
    """Of the unsharded parameters that the graph of ``outputs`` leads to."""
    nodes = [
        t.grad_fn if isinstance(t, torch.Tensor) else getattr(t, "node", None) for t in outputs
    ]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield from _owners_of(variable)
        for arrivals in getattr(node, "sinks", ()):
            bucket = arrivals.bucket()
            if bucket is not None:
                yield from (bucket.params[index] for index in arrivals.indices)


def _owners_of(variable: torch.Tensor) -> Iterable[ShardedParam]:
    unit = unit_that_watches(variable)
    for bucket in () if unit is None else unit.group.buckets:
        for param, compute in zip(bucket.params, bucket.compute_params, strict=True):
            if compute is variable:
                yield param
