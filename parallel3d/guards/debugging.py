"""debug: ranks compare every collective before it is issued; diagnose: reports where they differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel3d._util.recorder import Collective, Recorder, record_collectives
from parallel3d._util.trace import issuing
from parallel3d.errors import AgreementError, Parallel3dError
from parallel3d.guards.journal import (
    MESSAGES,
    Journal,
    RankEvent,
    describe_places,
    first_difference,
    read_journals,
)
from parallel3d.guards.session import at_begin, current_session, short, watch
from parallel3d.guards.timeouts import check_duration, here
from parallel3d.mesh.agreement import name_ranks


@torch.no_grad()
def compare_whole_gradients(model: nn.Module) -> None:
    """Compares, within each tp group, the gradients that are not sharded over tp. All ranks of the mesh call
    it, after a backward.

    Raises:
        AgreementError: they differ by more than rounding; on every rank, with the first parameter.
    """
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    mesh = next((mesh for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), None)
    if mesh is None or mesh.size((mesh.mesh_dim_names or ()).index("tp")) == 1:
        return
    group = mesh.get_group("tp")
    differences = {name: _difference(grad, group) for name, grad in _whole(model)}
    if not differences:
        return
    worst = torch.stack(list(differences.values()))
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    wrong = [pair for pair in zip(differences, worst.tolist(), strict=True) if pair[1]]
    if wrong:
        name, value = wrong[0]
        others = f", and those of {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise AgreementError(
            f"the gradient of {name}, which each rank of a tp group has whole, is not the same on all of "
            f"them: it differs by {value:.1e} of its largest number{others}. They compute it from "
            "different data. A module used on each rank's part of features or of a sequence needs "
            "the style 'replicated_with_grad_allreduce' or 'sequence_parallel'; and the ranks "
            "must read the same batch (tp.check_same_batch)"
        )


def _difference(grad: Tensor, group: ProcessGroup) -> Tensor:
    """Returns by how much ``grad`` differs from that of the group's first rank, relative to the largest
    value; 0 if by no more than rounding."""
    if not grad.numel():  # a shard without rows, on every rank of the group
        return torch.zeros((), device=grad.device)
    first = grad.clone()
    dist.broadcast(first, group_src=0, group=group)
    apart, largest = (torch.nan_to_num(t.float(), 0.0).abs().amax() for t in (grad - first, first))
    # nan equals only nan.
    apart = torch.where(grad.isnan().any() ^ first.isnan().any(), torch.inf, apart)
    rounding = float(torch.finfo(grad.dtype).eps ** 0.5)  # of another order of additions
    return torch.where(apart > rounding * largest, apart / largest, 0.0)


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, this rank's shard) of each gradient that is not sharded over tp."""
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            continue
        if isinstance(grad, DTensor):
            names = grad.device_mesh.mesh_dim_names or ()
            if "tp" in names and not isinstance(grad.placements[names.index("tp")], Replicate):
                continue
            grad = grad.to_local()
        yield name, grad.detach().contiguous()


KEEP = 200
TIMEOUT = timedelta(seconds=25)


@contextmanager
def debug(
    model: nn.Module | None = None,
    *meshes: DeviceMesh,
    timeout: timedelta = TIMEOUT,
    folder: str | os.PathLike[str] | None = None,
    keep: int = KEEP,
) -> Iterator[Debugger]:
    """Compares each collective in the body through the store before it is issued: operation, axis, unit,
    bytes, step and micro-batch. This includes your own collectives, and optimizer steps.

    If ranks differ, each gets an ``AgreementError`` with what every rank was about to do, instead of a hang
    or of values that belong to another collective. Before the first optimizer step it also compares the
    gradients of ``model`` that are not sharded over tp, which finds plans that let ranks compute them from
    different data. A collective costs a round trip to the store, so do not use it in production. ``watch`` is
    included. With simulated ranks, and in a single process, events are only recorded; so are sends and
    receives.

    Args:
        model: gives axes their names; the ranks of its mesh make optimizer steps together. Without a model
            all ranks do.
        meshes: more meshes that name axes.
        timeout: how long ranks wait for one that does not come.
        folder: gets one file per rank with all its events, for ``diagnose(folder)`` after a crash.
        keep: number of last events that are kept for each rank.

    Raises:
        Parallel3dError: an argument is wrong. In the body: AgreementError, as above, and PeerFailureError, as
            for ``watch``.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise Parallel3dError(f"debug: model is {model!r}; it must be an nn.Module or None")
    check_duration("debug: timeout", timeout)
    if not isinstance(keep, int) or keep < 1:
        raise Parallel3dError(f"debug: keep is {keep!r}; it must be a positive integer")
    params = () if model is None else model.parameters()
    named = [*dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor)), *meshes]
    with watch():
        debugger = Debugger([] if model is None else named, timeout, folder, keep, model)
        with record_collectives(*named, before=debugger.before_collective) as recorder:
            debugger.recorder = recorder
            _last[:] = [debugger]
            before, issuing.compared = issuing.compared, True
            hook = register_optimizer_step_pre_hook(debugger.before_step)
            try:
                yield debugger
            except BaseException as error:
                debugger.end(short(error, 500))
                raise
            else:
                debugger.end("")
            finally:
                issuing.compared = before
                hook.remove()


_last: list[Debugger] = []  # the debugger of this process's current or last debug mode


class Debugger:
    """Records this rank's collectives and optimizer steps, and compares each with the other ranks' before it
    is issued, once there is a process group of several ranks."""

    def __init__(
        self,
        meshes: list[DeviceMesh],
        timeout: timedelta,
        folder: str | os.PathLike[str] | None,
        keep: int,
        model: nn.Module | None = None,
    ) -> None:
        by_launcher = int(os.environ.get("RANK", "0"))
        rank = dist.get_rank() if dist.is_initialized() else by_launcher
        scope = sorted({int(r) for mesh in meshes for r in mesh.mesh.flatten().tolist()})
        self.journal = Journal(rank, keep, folder, scope, timeout)
        self.recorder: Recorder | None = None
        self._model = model  # until its gradients have been compared
        self._keep = keep
        self._number = 0
        self._messages = 0
        self._places: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def before_collective(self, call: Collective, group: ProcessGroup, uneven: bool) -> None:
        """Compares ``call``, a collective about to be issued. ``uneven``: whether its bytes may differ by
        rank."""
        assert self.recorder is not None
        if len(self.recorder.calls) > 10 * self._keep:
            self.recorder.clear()
        axis = call.axis or (group.group_desc or "a group").removeprefix("mesh_")
        ranks = () if call.op in MESSAGES else tuple(dist.get_process_group_ranks(group))
        size = None if uneven else call.bytes
        self._meet(call.op, axis, ranks, unit=call.unit, bytes=size)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ranks = tuple(self.journal.scope) if self.journal.open() else ()
        self._meet(f"optimizer step ({type(optimizer).__name__})", "", ranks)
        model, self._model = self._model, None
        if model is not None and self.journal.is_shared:
            compare_whole_gradients(model)

    def _meet(self, what: str, axis: str, ranks: tuple[int, ...], **fields: Any) -> None:
        session = current_session()
        if self.journal.open() and session is not None:
            session.last_known = lambda rank: str(self.journal.at(rank) or "")
        self._places[axis, ranks] += 1
        fields |= {"axis": axis, "ranks": ranks, "place": self._places[axis, ranks]}
        self.journal.meet(self._event(what, **fields))

    def _event(self, what: str, **fields: Any) -> RankEvent:
        self._number += 1
        self._messages += what in MESSAGES
        fields |= {"step": here.step + 1, "micro_batch": here.micro_batch}
        return RankEvent(self._number, what, messages=self._messages, **fields)

    def end(self, error: str) -> None:
        """Records that this rank leaves debug mode, with ``error`` if there is one."""
        with suppress(RuntimeError):  # the store may be gone
            self.journal.note(self._event(f"left: {error}" if error else "left debug mode"))
        self.journal.close()


_SHOWN = 5  # events of each rank in the report


@dataclass(frozen=True)
class Diagnosis:
    """The events of all ranks; ``str()`` is a report.

    Attributes:
        events: rank -> its last events, the latest last.
        failures: rank -> error, for ranks that ended with one.
        divergence: where the sequences first differ, in words; "" if they don't. Sends and receives, which
            are not compared, are only in ``events``.
    """

    events: Mapping[int, Sequence[RankEvent]]
    failures: Mapping[int, str]
    divergence: str

    def __str__(self) -> str:
        parts = [f"{len(self.events)} ranks; {self.divergence or 'their sequences do not differ.'}"]
        if self.failures:
            parts.append("Errors:" + describe_places(self.failures))
        running = [rank for rank, events in self.events.items() if events and not events[-1].is_end]
        if running:
            parts.append(f"{name_ranks(running)} neither left debug mode nor ended with an error.")
        for rank, events in self.events.items():
            lines = "".join(f"\n  {event.number}: {event}" for event in events[-_SHOWN:])
            parts.append(f"rank {rank}, last:{lines or ' nothing'}")
        return "\n".join(parts)


def diagnose(folder: str | os.PathLike[str] | None = None, *, keep: int = KEEP) -> Diagnosis:
    """Returns what ranks in ``guards.debug`` did last; print it.

    Args:
        folder: the folder of ``guards.debug(folder=)``; any process can read it, also after a crash. By
            default the events in the store of the job that this process is a rank of are read.
        keep: number of last events that are read from the folder for each rank.

    Raises:
        Parallel3dError: there is nothing to read.
    """
    if folder is not None:
        events = read_journals(folder, keep)
    elif not _last:
        raise Parallel3dError(
            "diagnose: this process was in no guards.debug(); give the folder that debug(folder=) wrote into"
        )
    elif not (journal := _last[0].journal).is_shared:
        events = {journal.rank: list(journal.events)}
    else:
        try:
            events = {rank: journal.log(rank) for rank in journal.scope}
        except RuntimeError as error:
            raise Parallel3dError(
                "diagnose: the store is gone, as the process that hosted it has ended; give the folder that "
                "debug(folder=) wrote into"
            ) from error
    last = {rank: log[-1].what.partition("left: ")[2] for rank, log in events.items() if log}
    failures = {rank: error for rank, error in last.items() if error}
    return Diagnosis(events, failures, find_divergence(events))


def find_divergence(events: Mapping[int, Sequence[RankEvent]]) -> str:
    """Returns a text that says where the ranks' events first differ, or which ranks stopped before the
    others; ``""`` if neither."""
    done = {rank: [event for event in log if not event.is_end] for rank, log in events.items()}
    where, _ = first_difference(done)
    if where:
        return where
    last = {rank: log[-1].position if log else 0 for rank, log in done.items()}
    behind = [rank for rank in last if last[rank] == min(last.values())]
    if len(behind) == len(last):
        return ""
    texts = {rank: str(done[rank][-1]) if done[rank] else "nothing" for rank in events}
    return f"{name_ranks(behind)} stopped first; last were:{describe_places(texts)}"


def _debug_if_asked(stack: ExitStack) -> None:
    """Enters debug mode with the outermost watch if the environment has ``PARALLEL3D_DEBUG=1``."""
    if os.environ.get("PARALLEL3D_DEBUG", "0") not in ("", "0"):
        stack.enter_context(debug(folder=os.environ.get("PARALLEL3D_DEBUG_DIR") or None))


at_begin.append(_debug_if_asked)
