"""Runs the parts of a script, each in a process of its own with a limit, and goes on where a run has ended.

What lies in the folder of a run:

    run.json        the device and size of models, which a resumed run takes over
    NAME.json       a part: its status, its rows so far, the machine; written again after each row
    NAME.log        what it has printed
    page.json, .md  all parts together, composed again after each

A part that is out of time or has raised is run again by a resumed run; its rows stay until there are as many.
"""

import argparse
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from page import Part, compose

__all__ = ["Share", "Status", "Task", "ask", "command_line", "run_parts", "running", "stack_in"]

LEAST_SECONDS = 1.0  # with less left no part is begun
AIM = 0.8  # of its share: when a part is to end by itself
MOST = 1.4  # of its share: when it is ended; the others then share what is left
LOAN = 0.1  # of all that is left, which it may take beside that
AHEAD = 0.4  # seconds before that in which a process writes its stack and ends itself
TICK = 0.2  # seconds between two looks at a part's rows
ASK_SECONDS = 120.0


class Status(StrEnum):
    """Where a part is: ``running`` in a file whose process is gone means that it was killed."""

    RUNNING = "running"
    DONE = "done"
    OUT_OF_TIME = "out of time"
    RAISED = "raised an error"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Task:
    """One part of a script.

    Attributes:
        name: on the command line and the page.
        module, function: what is called with the device and whether models are small; it returns a ``Part``.
        weight: its part of the time, against the others'.
    """

    name: str
    module: str
    function: str
    weight: float


class Share:
    """What is left of a part's seconds.

    Attributes:
        seconds: of the whole part, from its start on.
        folder: for its files; removed when it has ended.
        before: the part as an earlier run has left it, on the same machine; else empty. A part may go on
            from its rows.
        until: the time (``time.monotonic``) at which its process is ended.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path = Path(),
        before: Mapping[str, Any] | None = None,
        until: float = float("inf"),
    ) -> None:
        self.seconds, self.folder, self.before = seconds, folder, before or {}
        self.until = until
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 at least."""
        return max(0.0, self.end - time.monotonic())

    @property
    def used_up(self) -> bool:
        """Whether nothing is left."""
        return self.left == 0.0

    def limit(self, most: float) -> float:
        """Returns the seconds after which a case is taken to hang: ``most`` where there is time enough."""
        return min(most, max(30.0, 0.4 * self.seconds))


_running = Share(float("inf"))


def running() -> Share:
    """Returns the share of the part that runs in this process."""
    return _running


# -- the command line -----------------------------------------------------------------------------------


def command_line(
    doc: str, tasks: Sequence[Task], *, minutes: float, preload: Sequence[str] | None
) -> int:
    """The command line of a script of parts; returns its exit code.

    Args:
        doc: the script's docstring.
        tasks: its parts, the most valuable first.
        minutes: for all parts, unless given.
        preload: modules that are imported once for all processes, without using CUDA, beside torch and
            parallel3d. If a process then can't use it, each is started anew.
    """
    names = [task.name for task in tasks]
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="FOLDER", help="for the results: a new folder")
    where.add_argument("--resume", type=Path, metavar="FOLDER", help="of a run that is to go on")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--small", action="store_true", help="tiny models and few rounds")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"in all, {minutes:g} by default"
    )
    parser.add_argument("--only", default="", help=f"parts, by commas: {', '.join(names)}")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name] or names
    if unknown := [name for name in only if name not in names]:
        parser.error(f"there is no part {unknown[0]!r}: {', '.join(names)}")
    if not given.minutes > 0:
        parser.error(f"--minutes {given.minutes:g}: the time must be above 0")
    begun = time.monotonic()
    folder: Path = (given.resume or given.out).resolve()
    kept = folder / "run.json"
    if given.resume and not kept.exists():
        parser.error(f"--resume {given.resume}: no run has begun there; --out begins one")
    if given.out and kept.exists():
        parser.error(f"--out {given.out}: a run has begun there; --resume goes on with it")
    settings = {"device": given.device, "small": given.small}
    if given.resume:
        settings = json.loads(kept.read_text())
        if given.device not in (None, settings["device"]) or given.small > settings["small"]:
            parser.error(
                f"--resume {given.resume}: that run has {settings}, which can't be changed"
            )
    # Streams that share one of the 8 default queues would wait for each other's sleeping links.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # All processes are on one card, which they see as the only one.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = shown or "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # So that what is imported can ask for GPUs without using CUDA, which would not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        machine = ask("page", "card", settings["device"], preload=preload)
    except RuntimeError as error:
        print(f"processes are not forked from one that has imported torch: {error}", flush=True)
        preload = None
        machine = ask("page", "card", settings["device"], preload=preload)
    if settings["device"] not in (None, machine["device"]):
        parser.error("there is no GPU; --device cpu --small tries the script")
    settings["device"] = machine["device"]
    folder.mkdir(parents=True, exist_ok=True)
    _replace(kept, settings)
    return run_parts(
        [task for task in tasks if task.name in only],
        folder,
        device=machine["device"],
        small=settings["small"],
        seconds=given.minutes * 60 - (time.monotonic() - begun),
        machine=machine,
        order=names,
        preload=preload,
    )


_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "parallel3d",
)


def _context(preload: Sequence[str] | None) -> Any:
    """Processes are forked from a server that has imported ``preload`` and nothing else, which never uses
    CUDA; None: each is started anew."""
    if preload is None:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *preload] if preload else [])
    return context


def ask(module: str, function: str, *arguments: Any, preload: Sequence[str] | None = ()) -> Any:
    """Returns what a function gives in a process of its own.

    Raises:
        RuntimeError: if that process ended without an answer.
    """
    context = _context(preload)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, module, function, arguments), daemon=True)
    process.start()
    send.close()
    try:
        if receive.poll(ASK_SECONDS):
            return receive.recv()
    except EOFError:
        pass
    finally:
        process.kill()
    raise RuntimeError(f"{module}.{function}{arguments} gave no answer")


def _answer(send: Connection, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    send.send(getattr(importlib.import_module(module), function)(*arguments))


# -- all parts ------------------------------------------------------------------------------------------


def run_parts(
    tasks: Sequence[Task],
    folder: Path,
    *,
    device: str,
    small: bool,
    seconds: float,
    machine: Mapping[str, Any],
    order: Sequence[str] = (),
    preload: Sequence[str] | None = (),
) -> int:
    """Runs the parts whose result in ``folder`` isn't complete, in their order.

    Each gets its share of what is left by its weight. It knows ``AIM`` of that; at ``MOST`` of it, and
    ``LOAN`` of all that is left, it is ended.

    Args:
        tasks: the most valuable first.
        seconds: for all; none runs longer.
        machine: what a reader must know of it.
        order: of the parts on the page: of this run and earlier ones in ``folder``; by default ``tasks``.
        preload: see ``command_line``.

    Returns:
        The exit code: 1 if something is wrong; else 3 if a part isn't complete, which ``--resume`` runs
        again; else 0.
    """
    end = time.monotonic() + seconds
    names = list(order) or [task.name for task in tasks]
    waiting = [task for task in tasks if read(folder, task.name)["status"] != Status.DONE]
    while waiting:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            break
        task = waiting.pop(0)
        share = left * task.weight / (task.weight + sum(each.weight for each in waiting))
        start = time.monotonic()
        most = min(MOST * share + LOAN * left, left)
        _run(task, folder, (device, small), AIM * share, most, machine, preload)
        found = read(folder, task.name)
        wrong = "FAILED: " + "; ".join(found["part"]["failed"]) if found["part"]["failed"] else "ok"
        verdict = wrong if found["status"] == Status.DONE else f"{found['status']}; so far {wrong}"
        print(f"{task.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
        compose(folder, [read(folder, name) for name in names])
    with suppress(OSError):
        (folder / "work").rmdir()
    compose(folder, [read(folder, name) for name in names])
    results = [read(folder, task.name) for task in tasks]
    if any(result["part"]["failed"] for result in results):
        return 1
    return 0 if all(result["status"] == Status.DONE for result in results) else 3


def read(folder: Path, name: str) -> dict[str, Any]:
    """Returns what there is of a part in ``folder``."""
    with suppress(OSError, ValueError):
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    part = Part(name, "no result")
    return {"status": Status.NOT_RUN, "machine": {}, "seconds": 0.0, "part": asdict(part)}


def _run(
    task: Task,
    folder: Path,
    arguments: tuple[Any, ...],
    aim: float,
    most: float,
    machine: Mapping[str, Any],
    preload: Sequence[str] | None,
) -> None:
    """Runs one part until it ends, or until ``most`` seconds are over; its file then says which."""
    context = _context(preload)
    start, before = time.monotonic(), read(folder, task.name)
    hold, alive = context.Pipe(duplex=False)  # the part ends when our end of it is closed
    work = folder / "work" / task.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    process = context.Process(
        target=_main, args=(task, folder, work, arguments, aim, start + most, dict(machine), hold)
    )
    process.start()
    hold.close()
    try:
        process.join(most)
    finally:
        code = process.exitcode
        if code != 0:
            _end_group(process)
        alive.close()
    if code != 0:
        seconds = time.monotonic() - start
        in_time = code is not None and seconds < most - 2 * AHEAD
        where = stack_in(work / "stack.txt", "_main")
        found = read(folder, task.name)
        if (
            found != before or not found["machine"]
        ):  # else what an earlier run has left stays as it is
            found |= {"seconds": seconds, "machine": dict(machine)}
        found["status"] = Status.RAISED if in_time else Status.OUT_OF_TIME
        if in_time:
            found["part"]["failed"].append(f"its process ended with code {code}; {where}")
        else:
            found["part"]["notes"].append(f"ended at its limit of {most:.0f} s; {where}")
        _replace(folder / f"{task.name}.json", found)
    shutil.rmtree(work, ignore_errors=True)


def _end_group(process: Any) -> None:
    """Ends a part and all processes that it has started, which are in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not made its group yet, or is gone
        process.kill()
    process.join(10.0)


def stack_in(path: Path, function: str) -> str:
    """Returns the innermost lines of the thread in ``function``, of stacks that faulthandler has written."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "no stack"
    threads = text.split("\n\n")
    main = [thread for thread in threads if f" in {function}\n" in thread + "\n"] or threads
    lines = [line.strip() for line in main[-1].splitlines() if line.strip().startswith("File")]
    return "stack: " + " < ".join(lines[:10]) if lines else "no stack"


def _replace(path: Path, value: Any) -> None:
    """Writes ``value`` so that a reader finds the old file or the new one."""
    partly = path.with_name(path.name + ".part")
    partly.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partly.replace(path)


# -- in the process of a part ---------------------------------------------------------------------------


def _main(
    task: Task,
    folder: Path,
    work: Path,
    arguments: tuple[Any, ...],
    aim: float,
    until: float,
    machine: dict[str, Any],
    hold: Connection,
) -> None:
    """What the process of a part runs."""
    global _running
    os.setpgid(0, 0)
    with (folder / f"{task.name}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stack = (work / "stack.txt").open("w", encoding="utf-8")
    faulthandler.enable(file=stack)
    limit = max(0.1, until - time.monotonic() - AHEAD)
    faulthandler.dump_traceback_later(limit, exit=True, file=stack)
    threading.Thread(target=_end_with_parent, args=(hold,), daemon=True).start()
    before = read(folder, task.name)
    Part.latest = None
    writer = _Writer(folder / f"{task.name}.json", machine, before)
    status = Status.DONE
    try:
        same = {**before["machine"], "date": ""} == {**machine, "date": ""}
        _running = Share(aim, work, before["part"] if same else None, until)
        part = getattr(importlib.import_module(task.module), task.function)(*arguments)
        if part.left_out:
            status = Status.OUT_OF_TIME
    except Exception as error:
        part = Part.latest or Part(task.name, "raised an error")
        part.failed.append(f"{type(error).__name__}: {error}")
        part.notes += traceback.format_exc().splitlines()[-12:]
        status = Status.RAISED
    writer.end(part, status)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's end, in which threads of communicators may hang


def _end_with_parent(hold: Connection) -> None:
    """Ends this process and those that it has started when the one that has started it is gone."""
    wait([hold])  # nothing is ever sent: it is readable when the other end is closed
    os.killpg(0, signal.SIGKILL)


class _Writer:
    """Writes the part that this process is at whenever there is more of it.

    Args:
        before: what an earlier run has left: it stays until there is as much.
    """

    def __init__(self, path: Path, machine: dict[str, Any], before: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        self.rows = len(before["part"]["rows"])
        self.start = time.monotonic()
        self.written: tuple[int, ...] = ()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def end(self, part: Part, status: Status) -> None:
        """Writes the last state."""
        self.ended.set()
        self.thread.join()
        if status != Status.OUT_OF_TIME or len(part.rows) >= self.rows:
            self._write(part, status)

    def _follow(self) -> None:
        while not self.ended.wait(TICK):
            part = Part.latest
            if part is None or len(part.rows) < self.rows:
                continue
            now = (len(part.rows), len(part.failed), len(part.notes), len(part.left_out))
            if now != self.written:
                with suppress(RuntimeError):  # a dict has grown meanwhile: at the next look
                    self._write(part, Status.RUNNING)
                    self.written = now

    def _write(self, part: Part, status: Status) -> None:
        found = {
            "status": status,
            "machine": self.machine,
            "seconds": time.monotonic() - self.start,
        }
        _replace(self.path, {**found, "part": asdict(part) | {"name": self.path.stem}})
