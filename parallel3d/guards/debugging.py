"""debug: every collective is compared between its ranks before it is issued."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from parallel3d._util.recorder import Collective, Recorder, record_collectives
from parallel3d.errors import AgreementError, Parallel3dError
from parallel3d.guards.rendezvous import MESSAGES, Event, Journal, Rendezvous
from parallel3d.guards.session import at_begin, current_session, short, watch
from parallel3d.guards.timeouts import counting_steps, here
from parallel3d.mesh.store import next_table, others

# Gradients that each rank of a tp group has whole must be alike in it.


@torch.no_grad()
def compare_whole_gradients(model: nn.Module) -> None:
    """Compares the gradients that lie whole on each tp rank, with those of the first rank of its group.

    Every rank of the model's mesh calls it, with gradients there.

    Raises:
        AgreementError: on every rank, naming the first parameter whose gradients differ by more than
            rounding.
    """
    mesh = next(
        (
            p.device_mesh
            for p in model.parameters()
            if isinstance(p, DTensor) and _tp(p) is not None
        ),
        None,
    )
    if mesh is None or mesh.size((mesh.mesh_dim_names or ()).index("tp")) == 1:
        return
    group = mesh.get_group("tp")
    names, found = [], []
    for name, mine in _whole(model):
        names.append(name)
        found.append(_difference(mine, group))
    if not found:
        return
    worst = torch.stack(found)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    values = worst.tolist()
    wrong = [(name, value) for name, value in zip(names, values, strict=True) if value]
    if wrong:
        name, value = wrong[0]
        others = f", and those of {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise AgreementError(
            f"the gradient of {name}, which each rank of a tp group has whole, is not alike in it: it "
            f"differs by {value:.1e} of its largest number{others}. They compute it from different data. "
            "A module used on each rank's part of features or of a sequence needs the style "
            "'replicated_with_grad_allreduce' or 'sequence_parallel'; and the ranks must read the same batch "
            "(tp.check_same_batch)"
        )


def _difference(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Of this rank's from the first one's, relative to the largest number; 0 where it may be rounding."""
    if not mine.numel():  # a shard without rows, on every rank of the group
        return torch.zeros((), device=mine.device)
    first = mine.clone()
    dist.broadcast(first, group_src=0, group=group)
    off, largest = _largest(mine - first), _largest(first)
    # nan is like nothing but nan.
    off = torch.where(mine.isnan().any() ^ first.isnan().any(), torch.inf, off)
    return torch.where(off > _tolerance(mine) * largest, off / largest, 0.0)


def _tp(param: DTensor) -> int | None:
    names = param.device_mesh.mesh_dim_names or ()
    return names.index("tp") if "tp" in names else None


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's shard of each gradient that isn't split over tp."""
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            continue
        if isinstance(grad, DTensor):
            axis = _tp(grad)
            if axis is not None and not isinstance(grad.placements[axis], Replicate):
                continue
            grad = grad.to_local()
        yield name, grad.detach().contiguous()


def _largest(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor.float(), 0.0).abs().amax()


def _tolerance(tensor: Tensor) -> float:
    """What another order of additions may make of it."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)


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
    """Within it, before a collective is issued, its ranks compare it through the store: operation, axis,
    unit, bytes, step and micro-batch. So for collectives of the user's own, and for optimizer steps.

    Ranks that part get an ``AgreementError`` each, which says what each rank was about to do, instead of
    a hang or numbers that belong to something else. Before the first optimizer step those gradients of
    ``model`` are compared too that each rank of a tp group has whole: a plan that makes ranks compute them
    from other data shows there. A round trip to the store for each collective, so not for production.
    ``watch`` is included. Under simulated ranks, and in a single process, events are only kept. Sends and
    receives are kept, not compared.

    Args:
        model: whose meshes give axes their names, and whose ranks make optimizer steps together; without
            one all ranks do.
        meshes: others that give names.
        timeout: how long ranks wait for one that does not come.
        folder: for a file of each rank with all it did, for ``diagnose(folder)`` after a crash.
        keep: how many of the last events of each rank are kept.

    Raises:
        Parallel3dError: a wrong argument. Within it AgreementError, as said, and PeerFailureError, as
            ``watch`` says.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise Parallel3dError(f"debug: model is {model!r}; it must be an nn.Module or None")
    if not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise Parallel3dError(f"debug: timeout is {timeout!r}; it must be a positive timedelta")
    if not isinstance(keep, int) or keep < 1:
        raise Parallel3dError(f"debug: keep is {keep!r}; it must be a positive integer")
    found = [*_meshes_of(model), *meshes]
    with watch():
        debugger = Debugger(found if model is not None else [], timeout, folder, keep, model)
        before = counting_steps(before=debugger.before_step)
        recording = record_collectives(*found, before=debugger.before_collective)
        with before, recording as recorder:
            debugger.recorder = recorder
            _last[:] = [debugger]
            try:
                yield debugger
            except BaseException as error:
                debugger.end(short(error, 500))
                raise
            debugger.end("")


_last: list[Debugger] = []


def last_debugger() -> Debugger | None:
    """That of the debug mode this process is or was in."""
    return _last[0] if _last else None


def _meshes_of(model: nn.Module | None) -> list[DeviceMesh]:
    params = () if model is None else model.parameters()
    found = {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}
    return list(found.values())


class Debugger:
    """One rank's events.

    Attributes:
        journal: the last of them.
        rendezvous: where they are compared; None where there are no other ranks.
        recorder: the recorder of collectives.
    """

    def __init__(
        self,
        meshes: list[DeviceMesh],
        timeout: timedelta,
        folder: str | os.PathLike[str] | None,
        keep: int,
        model: nn.Module | None = None,
    ) -> None:
        by_launcher = int(os.environ.get("RANK", "0"))
        self.rank = dist.get_rank() if dist.is_initialized() else by_launcher
        self.journal = Journal(self.rank, keep, folder)
        self.rendezvous: Rendezvous | None = None
        self.recorder: Recorder | None = None
        self._whole_gradients: nn.Module | None = model  # to be compared
        self._number = 0
        self._messages = 0
        self._places: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._ranks = sorted({int(r) for mesh in meshes for r in mesh.mesh.flatten().tolist()})
        self._timeout, self._keep = timeout, keep

    def _open(self) -> Rendezvous | None:
        """As soon as there are other ranks."""
        if self.rendezvous is None and (found := others()) is not None:
            store, rank, world_size = found
            self.rank = rank
            table = next_table(store, "guards/debug", rank)
            scope = self._ranks or range(world_size)
            self.rendezvous = Rendezvous(
                table, rank, scope, self.journal, self._keep, self._timeout
            )
            session = current_session()
            if session is not None:
                session.last_known = self._last_known
        return self.rendezvous

    def _last_known(self, rank: int) -> str:
        return str(self.rendezvous.at(rank) or "") if self.rendezvous is not None else ""

    # -- events --------------------------------------------------------------------------------------

    def before_collective(self, call: Collective, group: ProcessGroup, uneven: bool) -> None:
        """The recorder calls it."""
        assert self.recorder is not None
        if len(self.recorder.calls) > 10 * self._keep:
            self.recorder.clear()
        axis = call.axis or (group.group_desc or "a group").removeprefix("mesh_")
        ranks = () if call.op in MESSAGES else tuple(dist.get_process_group_ranks(group))
        self._meet(call.op, axis, call.unit, None if uneven else call.bytes, ranks)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        rendezvous = self._open()
        ranks = () if rendezvous is None else tuple(rendezvous.scope)
        self._meet(f"optimizer step ({type(optimizer).__name__})", "", "", None, ranks)
        model, self._whole_gradients = self._whole_gradients, None
        if model is not None and rendezvous is not None:
            compare_whole_gradients(model)

    def _meet(
        self, what: str, axis: str, unit: str, size: int | None, ranks: tuple[int, ...]
    ) -> None:
        rendezvous = self._open()
        self._places[axis, ranks] += 1
        event = self._event(what, axis, unit, size, ranks, self._places[axis, ranks])
        if rendezvous is None:
            self.journal.note(event)
        elif ranks:
            rendezvous.meet(event)
        else:
            rendezvous.note(event)

    def _event(
        self,
        what: str,
        axis: str = "",
        unit: str = "",
        size: int | None = None,
        ranks: tuple[int, ...] = (),
        place: int = 0,
    ) -> Event:
        self._number += 1
        self._messages += what in MESSAGES
        return Event(
            number=self._number,
            what=what,
            axis=axis,
            unit=unit,
            bytes=size,
            step=here.step + 1,
            micro_batch=here.micro_batch,
            ranks=ranks,
            place=place,
            messages=self._messages,
        )

    def end(self, error: str) -> None:
        """This rank leaves, with ``error`` if there is one."""
        event = self._event(f"left: {error}" if error else "left debug mode")
        if self.rendezvous is not None:
            self.rendezvous.leave(event)
        else:
            self.journal.note(event)
        self.journal.close()


def _debug_if_asked(stack: ExitStack) -> None:
    """``PARALLEL3D_DEBUG=1`` debugs without a line of code."""
    if os.environ.get("PARALLEL3D_DEBUG", "0") not in ("", "0"):
        stack.enter_context(debug(folder=os.environ.get("PARALLEL3D_DEBUG_DIR") or None))


at_begin.append(_debug_if_asked)
