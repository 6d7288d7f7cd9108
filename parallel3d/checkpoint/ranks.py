"""The ranks that save or load together, and how they agree: what fails on one raises on all."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.groups import set_group_timeout, wake_waiting
from parallel3d._util.arguments import text_of
from parallel3d.errors import AgreementError, CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import parameters_at_rest
from parallel3d.guards.timeouts import keep_for_saving, saving_limit
from parallel3d.mesh.agreement import check_agreement, name_ranks

# One save at a time in a thread of its own.


class _Saving(Future[Path]):
    """The future of a save; knows whether somebody has been told how it ended."""

    told = False

    @property
    def cause(self) -> BaseException | None:
        """As ``exception()``, but nobody counts as told."""
        return super().exception()

    def tell(self) -> None:
        """Raises what it has raised, if nobody has been told."""
        error = None if self.told else self.exception()
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> Path:
        found = self.exception(timeout)
        if found is not None:
            raise found
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.told = True
        return found

    def run(self, work: Callable[[], Path]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


_LAST = -(10**6)  # after all others

_pending: _Saving | None = None
_last: _Saving | None = None
_thread: ThreadPoolExecutor | None = None
"""Kept: who starts a thread waits until it has run a little."""


def run_in_background(work: Callable[[], Path]) -> Future[Path]:
    """Runs ``work`` in a thread, which the interpreter's end waits for; the one before must be done."""
    global _pending, _last, _thread
    assert _pending is None
    if _last is None:
        if multiprocessing.parent_process() is None:
            atexit.register(_tell_at_exit)
        else:
            Finalize(None, _end_with_error, exitpriority=_LAST)
    _pending = _last = _Saving()
    _pending.set_running_or_notify_cancel()  # it can't be cancelled
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="parallel3d-checkpoint")
    _thread.submit(_pending.run, work)
    return _pending


def _tell_at_exit() -> None:
    """Says what the last save has raised, if nobody has been told; the process then ends with an error.

    Threads have ended by then.
    """
    if _tell():
        # Python's own way to an exit code at this stage: 120, when a standard stream can't be flushed. All
        # else is still done: other handlers, files that are open.
        sys.stdout = _FailsAtTheEnd(sys.stdout)


def _end_with_error() -> None:
    """The same in a process of ``multiprocessing``, which calls no exit handlers, nor ends as Python does."""
    if _pending is not None:
        wait([_pending])
    if _tell():
        raise SystemExit(1)


def _tell() -> bool:
    """Whether the last save has failed and nobody knew."""
    if _last is None or _last.told or not _last.done():
        return False
    error = _last.exception()
    if error is None:
        return False
    print(
        "parallel3d: the last save in the background has failed, and nobody has asked for its result:\n"
        + "".join(traceback.format_exception(error)),
        file=sys.stderr,
        flush=True,
    )
    return True


class _FailsAtTheEnd:
    """A standard stream whose last flush, when the interpreter ends, fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise RuntimeError("parallel3d: the last save in the background has failed; see above")


def wait_for_background() -> _Saving | None:
    """Returns when no save is under way: the last one, if it has failed."""
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return None
    return pending if pending.cause is not None else None


T = TypeVar("T")

_TIMEOUT = timedelta(hours=2)
"""For a rank that writes slowly, all others wait; a dead one is noticed at once. ``guards.Timeouts(save=)``
says otherwise."""

_groups: dict[tuple[int, ...], tuple[ProcessGroup, ProcessGroup]] = {}
"""Ranks -> (the default group at that time, a gloo group of these ranks)."""


@dataclass(frozen=True)
class Ranks:
    """Those that take part in one save or load.

    Attributes:
        group: a gloo group of its own, which may be used from another thread than the model's are;
            None for a process alone.
        rank, size: this one's number among them, and how many there are.
        ranks: their numbers in the default group.
        call: what they save or load by, ``load_hf`` say; compared when they first agree on something.
    """

    group: ProcessGroup | None
    rank: int
    size: int
    ranks: tuple[int, ...]
    call: str = ""
    _compared: list[bool] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all(self, function: Callable[[], T]) -> list[T]:
        """What ``function`` returns on each rank, by rank, on every rank.

        Raises:
            CheckpointError: on every rank, if it raised on any; a CorruptCheckpointError if all that it
                raised were.
        """
        value: T | None = None
        problem: Exception | None = None
        try:
            value = function()
        except Exception as error:
            problem = error
        if self.group is None:
            if problem is not None:
                raise as_checkpoint_error({0: problem}, 1) from problem
            return [value]  # type: ignore[list-item]
        found: list = [None] * self.size
        dist.all_gather_object(found, (self.call, value, _portable(problem)), group=self.group)
        self._compared[:] = [True]
        calls = [call for call, _, _ in found]
        if len(set(calls)) > 1:
            raise CheckpointError(self._other_calls(calls)) from problem
        problems = {rank: p for rank, (_, _, p) in enumerate(found) if p is not None}
        if problems:
            raise as_checkpoint_error(problems, self.size) from problem
        return [v for _, v, _ in found]

    def _other_calls(self, calls: list[str]) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank, call in zip(self.ranks, calls, strict=True):
            ranks_of.setdefault(call, []).append(rank)
        texts = [f"{call} on {name_ranks(ranks)}" for call, ranks in ranks_of.items()]
        return f"the ranks call different functions: {', '.join(texts)}; all must call the same"

    def first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on the first rank, the only one that calls it, on every rank.

        Raises:
            CheckpointError: on every rank, if it raised.
        """
        if self.group is None:
            return self.all(function)[0]
        if (
            not self._compared
        ):  # by ``all``: a broadcast alone would take another call's for an answer
            self.all(lambda: None)
        answer: list = [None, None]
        problem: Exception | None = None
        if self.is_first:
            try:
                answer[0] = function()
            except Exception as error:
                problem = error
                answer[1] = _portable(error)
        dist.broadcast_object_list(answer, src=self.ranks[0], group=self.group)
        if answer[1] is not None:
            raise as_checkpoint_error({0: answer[1]}, 1) from problem
        return answer[0]

    def undone_unless(
        self, change: Callable[[], object], rest: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """``change`` on every rank, then ``rest``, a collective; ``undo`` if either fails on any.

        Raises:
            CheckpointError: as ``all``, or by ``rest``.
        """
        try:
            self.all(change)
            rest()
        except BaseException:
            undo()
            raise

    def give_up(self) -> None:
        """This rank can't go on: lets those fail that wait for it, or for others who wait for it.

        They would wait as long as this process lives, which may itself wait for one of theirs.
        """
        if self.group is not None:
            wake_waiting(self.group)
            _groups.pop(self.ranks, None)


def ranks_of(
    model: nn.Module | None, call: str, at_rest: Iterable[nn.Parameter] | None = None
) -> Ranks:
    """The ranks of the mesh that ``model``'s parameters lie on; all, of a plain model or none.

    Collective among them when first called. Waits for a save that is under way in the background, which
    uses the same group.

    Args:
        call: the function that the user has called, in which they take part; the same on all of them.
        at_rest: the model's parameters at rest, if the caller has them.

    Raises:
        CheckpointError: on all of them: what that save has raised, if it hasn't been told on one of them.
            When first called, on those that have come: another doesn't within ``guards.Timeouts(save=)``
            or the default group's timeout, or calls another function.
        PeerFailureError: when first called, within ``guards.watch``: another rank has failed.
        Exception: what has ended that save on this rank alone, as that of a collective that lost a rank.
    """
    failed = wait_for_background()
    shared = failed is not None and isinstance(failed.cause, CheckpointError)  # all have it
    if failed is not None and not shared:
        failed.tell()  # at once: the others can't be asked, one may be gone
    if at_rest is None:
        at_rest = parameters_at_rest(model) if model is not None else []
    ranks = _ranks_of(at_rest, call)
    if failed is not None and shared:
        ranks.all(failed.tell)
    return ranks


def _ranks_of(params: Iterable[nn.Parameter], call: str) -> Ranks:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(None, 0, 1, (0,))
    ranks = tuple(range(dist.get_world_size()))
    # By id: a mesh's own hash takes longer than all else here.
    meshes = {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}
    if meshes:
        found = {int(r) for mesh in meshes.values() for r in mesh.mesh.flatten().tolist()}
        ranks = tuple(sorted(found))
    if len(ranks) == 1:
        return Ranks(None, 0, 1, ranks)
    world = dist.group.WORLD
    assert world is not None
    known = _groups.get(ranks)
    if known is None or known[0] is not world:
        known = _groups[ranks] = world, _new_group(ranks, call)
    return Ranks(known[1], dist.get_rank(known[1]), len(ranks), ranks, call)


def _new_group(ranks: tuple[int, ...], call: str) -> ProcessGroup:
    limit = saving_limit()
    try:
        # Making a group can't be interrupted where a rank doesn't come; this ends when one has failed.
        check_agreement("checkpoint", {"call": call}, timeout=limit, ranks=ranks)
    except AgreementError as error:
        raise CheckpointError(str(error)) from error
    group = dist.new_group(
        list(ranks), timeout=limit, backend="gloo", use_local_synchronization=True
    )
    set_group_timeout(group, _TIMEOUT)
    keep_for_saving(group)
    return group


def check_same(what: str, given: Sequence[Mapping[str, object]]) -> None:
    """Raises a CheckpointError, the same on all ranks, if ranks have given ``what`` different arguments.

    Args:
        given: argument -> value, of each rank; alike on all.
    """
    for name in given[0]:
        ranks: dict[object, list[int]] = {}
        for rank, values in enumerate(given):
            ranks.setdefault(values[name], []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{value!r} on {name_ranks(who)}" for value, who in ranks.items())
            raise CheckpointError(f"{what}: {name} differs: {said}; give the same on all ranks")


def as_checkpoint_error(problems: dict[int, Exception], size: int) -> CheckpointError:
    """One error for what ``problems``, by rank, say; ranks with the same text are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        text = (
            text_of(problem)
            if isinstance(problem, ValueError)
            else f"{type(problem).__name__}: {text_of(problem)}"
        )
        by_text.setdefault(text, []).append(rank)
    kind: type[CheckpointError] = CheckpointError
    if all(isinstance(problem, CorruptCheckpointError) for problem in problems.values()):
        kind = CorruptCheckpointError
    if len(by_text) == 1 and (size == len(problems) or size == 1):
        return kind(next(iter(by_text)))
    lines = [f"on rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    return kind(lines[0] if len(lines) == 1 else "\n".join(["ranks failed:", *lines]))


def _portable(problem: Exception | None) -> Exception | None:
    """Without traceback and context, and of a kind that any rank can load."""
    if problem is None:
        return None
    if type(problem) in (CheckpointError, CorruptCheckpointError):
        return type(problem)(str(problem))
    if isinstance(problem, ValueError):
        return CheckpointError(text_of(problem))
    return CheckpointError(f"{type(problem).__name__}: {text_of(problem)}")
