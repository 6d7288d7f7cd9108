"""The ranks that save or load together: if one fails, all raise; and saves in the background."""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from parallel3d._torch.groups import all_groups, set_group_timeout, wake_waiting
from parallel3d._util import dry_run
from parallel3d._util.arguments import text_of
from parallel3d.checkpoint.format.files import hidden_beside, replace_folder
from parallel3d.errors import AgreementError, CheckpointError, CorruptCheckpointError, DryRunError
from parallel3d.fsdp.inspect import parameters_at_rest
from parallel3d.guards.session import refuse_aborted
from parallel3d.guards.timeouts import keep_for_saving, saving_limit
from parallel3d.mesh.agreement import check_agreement, name_ranks, ranks_by_value

T = TypeVar("T")

_TIMEOUT = timedelta(hours=2)
"""All ranks wait for one that writes slowly. ``guards.Timeouts(save=)`` changes it."""

_groups: dict[tuple[int, ...], tuple[ProcessGroup, ProcessGroup]] = {}
"""Ranks -> (the default group at that time, a gloo group of these ranks)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that take part in one save or load.

    Attributes:
        group: a gloo group used for checkpoints only, so that it may be used from another thread than the
            model's groups; None for a single process.
        rank, size: this rank's number among them, and how many there are.
        ranks: their ranks in the default group.
        call: the function that the user called; the first communication checks that it is the same on all
            ranks.
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
        """Calls ``function`` on every rank and returns all ranks' results, on every rank. If it raises on any
        rank, all raise a CheckpointError, or a CorruptCheckpointError if each of the errors is one."""
        self._refuse_aborted()
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
        results: list = [None] * self.size
        dist.all_gather_object(results, (self.call, value, _portable(problem)), group=self.group)
        self._compared[:] = [True]
        calls = ranks_by_value(dict(zip(self.ranks, (r[0] for r in results), strict=True)))
        if len(calls) > 1:
            texts = ", ".join(f"{call} on {name_ranks(ranks)}" for call, ranks in calls.items())
            raise CheckpointError(
                f"the ranks call different functions: {texts}; all must call the same"
            ) from problem
        problems = {rank: p for rank, (_, _, p) in enumerate(results) if p is not None}
        if problems:
            raise as_checkpoint_error(problems, self.size) from problem
        return [v for _, v, _ in results]

    def on_each(self, function: Callable[[], T]) -> T:
        """As ``all``, but returns this rank's result only, which need not be picklable."""
        results: list[T] = []
        self.all(lambda: results.append(function()))
        return results[0]

    def first(self, function: Callable[[], T]) -> T:
        """Calls ``function`` on the first rank only and returns its result, or raises its error, on all."""
        self._refuse_aborted()
        if self.group is None:
            return self.all(function)[0]
        if not self._compared:  # a broadcast alone would accept the result of another call
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

    def with_undo(
        self, change: Callable[[], object], rest: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Calls ``change`` on every rank, then the collective ``rest``; if either fails, calls ``undo``."""
        try:
            self.all(change)
            rest()
        except BaseException:
            undo()
            raise

    def _refuse_aborted(self) -> None:
        """Raises PeerFailureError if ``guards.watch`` has aborted the model's collectives, which may have
        left undefined values in the tensors to be saved."""
        refuse_aborted(f"checkpoint.{self.call} was not finished")

    def is_whole(self) -> bool:
        """Whether the process group still exists: the user may have destroyed it."""
        return self.group is None or self.group in all_groups()

    def give_up(self) -> None:
        """Makes collectives fail in which other ranks wait for this one, because it can't take part."""
        if self.group is not None:
            wake_waiting(self.group)
            _groups.pop(self.ranks, None)


def ranks_of(model: nn.Module | None, call: str) -> Ranks:
    """Returns the ranks of the mesh of ``model``'s parameters; all ranks for a plain model or None.

    The first call is collective. Waits for a save in the background, which uses the same group, and raises
    its error if the user has not seen that yet: a CheckpointError on all ranks, any other error on its rank
    alone.

    Args:
        call: the function that the user has called, the same on all of them.

    Raises:
        DryRunError: in a dry run, which has neither values nor other ranks.
        CheckpointError: a rank does not join within ``guards.Timeouts(save=)`` or the default group's
            timeout, or calls another function.
        PeerFailureError: within ``guards.watch``: another rank has failed.
    """
    if dry_run.active():
        raise DryRunError(
            f"checkpoint.{call} in a dry run: there are no values, and no other ranks to exchange them with; "
            "skip it with parallel3d.tools.dryrun.active()"
        )
    refuse_aborted(f"checkpoint.{call} was not begun")
    failed = wait_for_background()
    shared = failed is not None and failed.is_shared
    if failed is not None and not shared:
        failed.report()  # without communication, as a rank may be gone
    ranks = _ranks_of(parameters_at_rest(model) if model is not None else [], call)
    if failed is not None and shared:
        ranks.all(failed.report)
    return ranks


def _ranks_of(params: Iterable[nn.Parameter], call: str) -> Ranks:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(None, 0, 1, (0,), call)
    ranks = tuple(range(dist.get_world_size()))
    # By id, because hashing a mesh is slow.
    meshes = {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}
    if meshes:
        ranks = tuple(sorted({r for m in meshes.values() for r in m.mesh.flatten().tolist()}))
    if len(ranks) == 1:
        return Ranks(None, 0, 1, ranks, call)
    world = dist.group.WORLD
    assert world is not None
    known = _groups.get(ranks)
    if known is None or known[0] is not world:
        known = _groups[ranks] = world, _new_group(ranks, call)
    return Ranks(known[1], dist.get_rank(known[1]), len(ranks), ranks, call)


def _new_group(ranks: tuple[int, ...], call: str) -> ProcessGroup:
    limit = saving_limit()
    try:
        # Creating a group waits for absent ranks without end; this raises when one has failed.
        check_agreement("checkpoint", {"call": call}, timeout=limit, ranks=ranks)
    except AgreementError as error:
        raise CheckpointError(str(error)) from error
    group = dist.new_group(
        list(ranks), timeout=limit, backend="gloo", use_local_synchronization=True
    )
    set_group_timeout(group, _TIMEOUT)
    keep_for_saving(group)
    return group


def check_same(call: str, arguments: Sequence[Mapping[str, object]]) -> None:
    """Raises CheckpointError unless ``arguments`` of ``call``, a dict for each rank, are equal."""
    for name in arguments[0]:
        ranks = ranks_by_value(dict(enumerate(values[name] for values in arguments)))
        if len(ranks) > 1:
            texts = ", ".join(f"{value!r} on {name_ranks(who)}" for value, who in ranks.items())
            raise CheckpointError(f"{call}: {name} differs: {texts}; give the same on all ranks")


def as_checkpoint_error(problems: dict[int, Exception], size: int) -> CheckpointError:
    """Returns one error for ``problems``, by rank; ranks with the same text are named together."""
    by_text = ranks_by_value({rank: _text(problem) for rank, problem in problems.items()})
    kind: type[CheckpointError] = CheckpointError
    if all(isinstance(problem, CorruptCheckpointError) for problem in problems.values()):
        kind = CorruptCheckpointError
    if len(by_text) == 1 and (size == len(problems) or size == 1):
        return kind(next(iter(by_text)))
    lines = [f"on rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    return kind(lines[0] if len(lines) == 1 else "\n".join(["ranks failed:", *lines]))


def _portable(problem: Exception | None) -> Exception | None:
    """Returns the error as a CheckpointError without traceback and cause, which any rank can unpickle."""
    if problem is None:
        return None
    kind = CorruptCheckpointError if type(problem) is CorruptCheckpointError else CheckpointError
    return kind(_text(problem))


def _text(problem: Exception) -> str:
    text = text_of(problem)
    return text if isinstance(problem, ValueError) else f"{type(problem).__name__}: {text}"


@contextmanager
def new_folder(
    ranks: Ranks, path: Path, is_ours: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Context manager: yields a temporary folder, which the first rank makes next to ``path`` and all ranks
    must see. At the end it is renamed to ``path``; after an error it is removed.

    Args:
        is_ours: whether an entry of an existing folder may be replaced; None: the folder must be empty.
    """

    def make() -> Path:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path} exists already and is not a folder")
        there = sorted(path.iterdir()) if path.exists() else []
        foreign = [entry.name for entry in there if is_ours is None or not is_ours(entry)]
        if foreign:
            others = "" if is_ours is None else f", which {ranks.call} did not write"
            raise CheckpointError(
                f"{path} exists already and holds {', '.join(foreign[:5])}{others}; give another folder"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = hidden_beside(path, "tmp")
        temporary.mkdir()
        return temporary

    def check_seen() -> None:
        if not temporary.is_dir():
            raise CheckpointError(
                f"this rank doesn't see {temporary}, which the first has made; the folder must be on a file "
                "system that all ranks share"
            )

    temporary = ranks.first(make)
    try:
        ranks.all(check_seen)
        yield temporary
        ranks.first(lambda: replace_folder(temporary, path))
    finally:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


HALF_READ = (
    "This was raised while values were read: some of the model's are the checkpoint's now, others are not. "
    "Load again before you go on"
)


@contextmanager
def dcp_errors(ranks: Ranks) -> Iterator[None]:
    """Context manager: turns a CheckpointException, which DCP raises on all ranks, into a CheckpointError."""
    try:
        with warnings.catch_warnings() if ranks.group is None else nullcontext():
            if ranks.group is None:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        problems = {rank: problem for rank, (problem, _) in error.failures.items()}
        for problem in problems.values():
            if not isinstance(problem, Exception):  # a KeyboardInterrupt
                raise problem from error
        result = as_checkpoint_error(problems, ranks.size)  # type: ignore[arg-type]
        if error.args[0] == "read":
            result = CheckpointError(f"{result}\n{HALF_READ}")
        raise result from error


class Saving(Future[Path]):
    """The future of a save in the background. It knows whether the user has seen its error (``reported``)."""

    reported = False  # whether ``result`` or ``exception`` has been called since it ended

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def is_shared(self) -> bool:
        """Whether all ranks have the save's error, and their process group still exists."""
        return isinstance(self.cause, CheckpointError) and self._ranks.is_whole()

    @property
    def cause(self) -> BaseException | None:
        """The save's error, as ``exception()`` returns it, but without marking it as reported."""
        return super().exception()

    def report(self) -> None:
        """Raises the save's error unless it has been reported."""
        if not self.reported:
            self.result()

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def run(self, work: Callable[[], Path]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


_EXIT_PRIORITY = -(10**6)  # after all others

_pending: Saving | None = None
_last: Saving | None = None
_thread: ThreadPoolExecutor | None = None
"""Kept, because starting a thread blocks its caller for a while."""


def run_in_background(work: Callable[[], Path], ranks: Ranks) -> Future[Path]:
    """Starts ``work``, a save, in a thread that the interpreter waits for at exit; returns its future. The
    save before must have ended."""
    global _pending, _last, _thread
    assert _pending is None
    if _last is None:
        if multiprocessing.parent_process() is None:
            atexit.register(_report_at_exit)
        else:  # multiprocessing's children call no atexit handlers
            Finalize(None, _exit_with_error, exitpriority=_EXIT_PRIORITY)
    _pending = _last = Saving(ranks)
    _pending.set_running_or_notify_cancel()  # it can't be cancelled
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="parallel3d-checkpoint")
    _thread.submit(_pending.run, work)
    return _pending


def _report_at_exit() -> None:
    """At exit: prints the error of the last save if nobody has seen it, and makes the exit code not 0."""
    if _print_unreported():
        # Python's only exit code at this stage is 120, when a standard stream cannot be flushed. Other
        # handlers still run, and open files are closed.
        sys.stdout = _FailingStream(sys.stdout)


def _exit_with_error() -> None:
    """As ``_report_at_exit``, in a child process of ``multiprocessing``."""
    if _pending is not None:
        wait([_pending])
    if _print_unreported():
        raise SystemExit(1)


def _print_unreported() -> bool:
    """Prints the error of the last save if nobody has seen it; returns whether there was one."""
    if _last is None or _last.reported or not _last.done():
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


class _FailingStream:
    """A standard stream whose last flush, at the interpreter's exit, raises, so that the exit code is 120."""

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


def wait_for_background() -> Saving | None:
    """Waits for the background save under way, if there is one; returns its future if it has failed."""
    global _pending
    pending, _pending = _pending, None
    return pending if pending is not None and pending.cause is not None else None
