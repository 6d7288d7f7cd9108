"""Runs cases on several processes, under a watchdog: a hang ends as a failed case that shows its stack.

All processes of a world use one device. NCCL refuses two ranks on one card unless it takes them for ranks on
different hosts, which ``NCCL_HOSTID`` makes it do. That is tried by one all-reduce. Where it fails or hangs,
the world runs on gloo, which sends the tensors of a card through the CPU's memory.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from runner import running, stack_in
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d import MeshLayout, build_mesh
from parallel3d.testing.gloo_pool import _PRELOAD

__all__ = ["FAULT", "Outcome", "Rank", "backend_of", "run_cases"]

TRIAL = "the first all-reduce"
TRIAL_SECONDS = 60.0
START_SECONDS = 120.0  # imports of all processes, which share the machine's cores
GRACE = 5.0  # seconds in which the other ranks may report what they have found, too
END = 3.0  # seconds before the end of this process in which it says what the ranks are at
MOST_LAUNCHES = 10  # of one world: each failure costs a launch

FAULT = "PARALLEL3D_GPU_TESTS_FAULT"
"""An environment variable: ``scaled_gradient`` makes our engine wrong, to show that the tests see it."""


@dataclass
class Rank:
    """What a case knows of the process it runs in.

    Attributes:
        rank, world: of this process. device_type: ``cuda`` or ``cpu``.
        device: where models are. folder: a folder that all ranks share.
    """

    rank: int
    world: int
    device_type: str
    folder: Path
    meshes: dict[MeshLayout, DeviceMesh] = field(default_factory=dict)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.device_type, 0) if self.is_cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def mesh(self, layout: MeshLayout) -> DeviceMesh:
        """Returns the layout's mesh, which is made once: its communicators take a second each."""
        if layout not in self.meshes:
            self.meshes[layout] = build_mesh(layout, device_type=self.device_type)
        return self.meshes[layout]

    def synchronize(self) -> None:
        """Waits for all kernels."""
        if self.is_cuda:
            torch.cuda.synchronize()


Work = Callable[[Rank, Any], Any]


@dataclass
class Outcome:
    """What ``run_cases`` has found.

    Attributes:
        results: by case, what each rank has returned.
        failed: by case, why there is no result: an error, or the stack of a hang.
        left_out: cases for which no time was left; of one that had begun, where the ranks were.
        backend: that of the device's tensors.
    """

    backend: str
    results: dict[str, list[Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a process is started with."""

    work: Work
    cases: list[tuple[str, Any]]
    world: int
    device_type: str
    backend: str  # "" for a process without a group
    port: int
    folder: str
    limit: float
    deadline: float
    exact: bool
    imports: tuple[str, ...]
    fault: str = ""


def run_cases(
    work: Work,
    cases: Sequence[tuple[str, Any]],
    *,
    world: int,
    device_type: str,
    backend: str,
    folder: Path,
    limit: float,
    deadline: float,
    exact: bool = True,
    imports: Sequence[str] = (),
    each: Callable[[str, Outcome], None] = lambda name, outcome: None,
) -> Outcome:
    """Runs ``work(rank, argument)`` for each case on every rank of a world.

    Args:
        work: a function of a module; it is called in new processes.
        cases: name and argument of each.
        backend: ``nccl``, ``gloo``, or "" for processes without a process group.
        folder: for the processes' files.
        limit: seconds that one case may take.
        deadline: the time (``time.monotonic``) after which no further case is begun.
        exact: whether kernels are deterministic and as exact as they can be. They take longer.
        imports: modules that the cases need and that take long to import.
        each: is called with each case that has been run, as soon as its result is there or it has failed.
    """
    outcome = Outcome(backend)
    folder.mkdir(parents=True, exist_ok=True)
    left = list(cases)

    def take(name: str, results: list[Any] | None, why: str) -> None:
        if results is None:
            outcome.failed[name] = why
        else:
            outcome.results[name] = results
        if name != TRIAL:
            each(name, outcome)

    for _ in range(MOST_LAUNCHES):
        if not left or time.monotonic() > deadline:
            break
        job = _Job(
            work=work,
            cases=left,
            world=world,
            device_type=device_type,
            backend=backend,
            port=0,
            folder=str(folder),
            limit=limit,
            deadline=deadline,
            exact=exact,
            imports=tuple(imports),
            fault=os.environ.get(FAULT, ""),
        )
        launch = _Launch(job, take)
        launch.run()
        # After an error the processes are not used any further: a collective may be half done.
        left = [c for c in left if c[0] not in outcome.results and c[0] not in outcome.failed]
        if launch.cut:
            outcome.left_out.append(launch.cut)
            left = [c for c in left if not launch.cut.startswith(f"{c[0]}: ")]
        if TRIAL in outcome.failed or launch.cut:
            break
    out_of_time = time.monotonic() > min(deadline, running().until - END)
    why = outcome.failed.pop(TRIAL, "too many cases before it have failed")
    for name, _ in left:
        if out_of_time:
            outcome.left_out.append(name)
        else:
            take(name, None, f"not run: {why}")
    return outcome


def try_nccl(world: int, folder: Path) -> str:
    """Returns "" if NCCL carries an all-reduce between ``world`` processes on one card, else why not."""
    deadline = time.monotonic() + TRIAL_SECONDS + START_SECONDS
    where = folder / "trial"
    where.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}

    def take(name: str, results: list[Any] | None, why: str) -> None:
        failed[name] = why

    job = _Job(
        work=_nothing,
        cases=[],
        world=world,
        device_type="cuda",
        backend="nccl",
        port=0,
        folder=str(where),
        limit=TRIAL_SECONDS,
        deadline=deadline,
        exact=True,
        imports=(),
    )
    launch = _Launch(job, take)
    launch.run()
    return "" if launch.started else failed.get(TRIAL, "a process did not start")


def backend_of(device_type: str, world: int, folder: Path) -> tuple[str, str]:
    """Returns the backend of ranks on this device, and why it isn't NCCL where it should be."""
    if device_type != "cuda":
        return "gloo", ""
    why = try_nccl(world, folder) if world > 1 else ""
    return "gloo" if why else "nccl", why


def _nothing(rank: Rank, argument: Any) -> None:
    """The work of a trial."""


class _Launch:
    """The processes of a world, from their start until they have run all cases or one has failed.

    Attributes:
        started: whether all ranks have done their first all-reduce.
        cut: the case that has no result as no time was left, and where the ranks were.
    """

    def __init__(self, job: _Job, take: Callable[[str, list[Any] | None, str], None]) -> None:
        self.names = [name for name, _ in job.cases]
        self.world, self.limit, self.deadline = job.world, job.limit, job.deadline
        self.folder, self.take = Path(job.folder), take
        self.results: dict[str, dict[int, Any]] = {name: {} for name in self.names}
        self.errors: dict[int, str] = {}
        self.ready: set[int] = set()
        self.done: set[int] = set()
        self.at = [TRIAL] * self.world  # what each rank does
        self.cut = ""
        # It is served here, and not by rank 0: it outlives the ranks.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = replace(job, port=self.store.port)
        context: Any = get_context("spawn")  # CUDA may have been used, and doesn't survive a fork
        if job.device_type == "cpu":  # few cores: what is needed is imported once
            context = get_context("forkserver")
            # Within pytest the server is that of all tests.
            first = _PRELOAD if "pytest" in sys.modules else []
            context.set_forkserver_preload([*first, "ranks", job.work.__module__])
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(self.world):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(rank, job, send), daemon=True)
            process.start()
            send.close()  # so that its end is seen when the process ends
            self.connections.append(receive)
            self.processes.append(process)

    @property
    def started(self) -> bool:
        return len(self.ready) == self.world

    def run(self) -> None:
        """Returns when all is done, or something has failed and the processes are gone."""
        open_ = dict(zip(self.connections, range(self.world), strict=True))
        begun, trouble = time.monotonic(), 0.0
        while open_ and len(self.done) < self.world:
            now = time.monotonic()
            if trouble and now > trouble + GRACE:
                break
            if not self.started and now > begun + START_SECONDS + TRIAL_SECONDS:
                break
            # A rank's own watchdog ends a case; this is for what that can't end.
            if self.started and now > self.deadline + 2 * self.limit:
                break
            if now > running().until - END:
                break
            for connection in wait(list(open_), timeout=0.5):
                assert isinstance(connection, Connection)
                rank = open_[connection]
                try:
                    self._take(rank, *connection.recv())
                except (EOFError, OSError):
                    del open_[connection]
                if rank in self.errors or (connection not in open_ and rank not in self.done):
                    trouble = trouble or time.monotonic()
        if len(self.done) < self.world:
            out_of_time = time.monotonic() > running().until - END
            name, where = self._explain()
            if out_of_time:
                self.cut = f"{name}: {where}"
            else:
                self.take(name, None, where)
        self._end()

    def _take(self, rank: int, kind: str, name: str, value: Any) -> None:
        if kind == "begin":
            self.at[rank] = name
        elif kind == "end":
            self.results[name][rank] = value
            if len(self.results[name]) == self.world:
                self.take(name, [self.results[name][each] for each in range(self.world)], "")
        elif kind == "failed":
            self.take(name, None, f"it raised {value}")
        elif kind == "ready":
            self.ready.add(rank)
        elif kind == "done":
            self.done.add(rank)
        else:
            self.at[rank] = name
            self.errors[rank] = value

    def _explain(self) -> tuple[str, str]:
        """Returns the case that failed, and what each rank has raised, or where it is."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None and hasattr(signal, "SIGUSR1"):
                with suppress(ProcessLookupError):  # it ends just now
                    os.kill(process.pid, signal.SIGUSR1)  # it writes its stack; see ``_main``
        time.sleep(0.5)
        first = min(self.at, key=lambda n: self.names.index(n) if n in self.names else -1)
        if self.errors:  # the others may be in a case before it, and never get to it
            first = self.at[min(self.errors)]
        texts = []
        for rank, process in enumerate(self.processes):
            if rank in self.errors:
                texts.append(f"rank {rank} raised {self.errors[rank]}")
            elif rank not in self.done:
                code = process.exitcode
                state = "hangs" if code in (None, 1) else f"ended with code {code}"
                texts.append(
                    f"rank {rank} {state} in {self.at[rank]}; "
                    + stack_in(self.folder / f"stack{rank}.txt", "_main")
                )
        return first, " | ".join(texts)

    def _end(self) -> None:
        for process in self.processes:
            process.join(timeout=GRACE if len(self.done) == self.world else 0.1)
            if process.is_alive():
                process.kill()
                process.join(timeout=GRACE)
        for connection in self.connections:
            connection.close()


# -- in a rank ------------------------------------------------------------------------------------------


def _main(rank: int, job: _Job, send: Connection) -> None:
    """What each process runs."""
    path = Path(job.folder) / f"stack{rank}.txt"
    stack = path.open("w", encoding="utf-8")
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    code, name = 0, TRIAL
    try:
        faulthandler.dump_traceback_later(START_SECONDS, exit=True, file=stack)
        for module in job.imports:
            importlib.import_module(module)
        here = _start(rank, job)
        faulthandler.dump_traceback_later(TRIAL_SECONDS, exit=True, file=stack)
        if job.backend:
            one = torch.ones(1, device=here.device)
            dist.all_reduce(one)
            if one.item() != job.world:
                raise RuntimeError(f"{TRIAL} of ones gave {one.item()} on {job.world} ranks")
        send.send(("ready", name, None))
        for number, (name, argument) in enumerate(job.cases):
            faulthandler.dump_traceback_later(job.limit, exit=True, file=stack)
            if not _goes_on(number, rank, job):
                break
            send.send(("begin", name, None))
            try:
                result = job.work(here, argument)
                here.synchronize()
            except Exception as error:
                # Alone, this process goes on, unless the error is the GPU's, which stays.
                if job.world > 1 or "CUDA error" in str(error):
                    raise
                send.send(("failed", name, _described(error)))
            else:
                send.send(("end", name, result))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:
        send.send(("error", name, _described(error)))
        code = 2
        time.sleep(
            GRACE
        )  # the others may raise too; without this rank they would raise other errors
    else:
        send.send(("done", "", None))
    send.close()
    # Without the interpreter's end, in which communicators with a peer that is gone may hang.
    sys.stdout.flush()
    os._exit(code)


def _described(error: BaseException) -> str:
    """The error, and where it was raised: innermost first."""
    text = "".join(traceback.format_exception(error)).strip().splitlines()
    where = " < ".join(line.strip() for line in reversed(text) if line.startswith("  File"))
    return f"{type(error).__name__}: {str(error)[:600]} [{where[:900]}]"


def _goes_on(number: int, rank: int, job: _Job) -> bool:
    """Whether there is time for case ``number``: rank 0 says so for all."""
    if rank == 0:
        goes_on = time.monotonic() < job.deadline
        if job.backend:
            dist.group.WORLD.get_group_store().set(f"case {number}", str(goes_on))  # type: ignore[union-attr]
        return goes_on
    return dist.group.WORLD.get_group_store().get(f"case {number}") == b"True"  # type: ignore[union-attr]


def _start(rank: int, job: _Job) -> Rank:
    """Sets this process up, and its process group."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    # Ranks differ in NCCL_HOSTID on purpose; the rest has nothing to do with what is tested.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = Rank(rank, job.world, job.device_type, Path(job.folder))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if here.is_cuda:
        # Read when NCCL and cuBLAS are first used.
        if job.world > 1:
            os.environ["NCCL_HOSTID"] = str(rank)
            os.environ["NCCL_P2P_DISABLE"] = os.environ["NCCL_SHM_DISABLE"] = "1"
            os.environ["NCCL_IB_DISABLE"], os.environ["NCCL_NVLS_ENABLE"] = "1", "0"
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(0)
    if job.exact:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        # What is uninitialized stays so: the tests fill freed memory themselves.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if job.backend:
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
        both = "gloo" if not here.is_cuda else f"cpu:gloo,cuda:{job.backend}"
        dist.init_process_group(
            both,
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=job.world,
            timeout=timedelta(seconds=300),
        )
    if job.fault == "scaled_gradient":
        _scale_gradients()
    return here


def _scale_gradients() -> None:
    """Makes our engine wrong: each reduced gradient is one percent too large."""
    from parallel3d.fsdp import reduction

    right = reduction.ReduceScatter.finish

    def finish(self: Any, job: Any, work: Any) -> None:
        right(self, job, work)
        job.tensor.mul_(1.01)

    reduction.ReduceScatter.finish = finish  # type: ignore[method-assign]
