"""Python programs that start at once, anywhere: forked from a process that has imported torch.

    python -I -S forked.py SOCKET script.py ...        python -I -S forked.py SOCKET -m module ...

asks the process behind SOCKET to fork. What is forked has the caller's namespaces (so it runs on the caller's
host, see hosts.py), environment, folder, arguments and output; signals reach it, and it ends with the caller.
So ``torchrun --no-python`` starts its ranks as it always does, without one import of torch for each.
"""

import array
import json
import os
import select
import signal
import socket
import sys
from contextlib import contextmanager, suppress

# What is imported before the first fork, where it can be.
_PRELOAD = ["torch.distributed.run", "torch.distributed.elastic.agent.server.local_elastic_agent"]
_PRELOAD += ["parallel3d", "parallel3d.parallelize", "parallel3d.checkpoint.loading"]
_PRELOAD += ["parallel3d.checkpoint.saving", "torch._dynamo", "typer", "rich.progress", "runpy"]
_PRELOAD += [
    "parallel3d.checkpoint.stop",
    "parallel3d.tools.dryrun",
    "parallel3d.guards.session",
    "einops",
]
_PRELOAD += [
    "parallel3d.materialize",
    "parallel3d.observability",
    "parallel3d.observability.exposed",
]
_PRELOAD += ["parallel3d.observability.metrics", "parallel3d.observability.progress"]
_PRELOAD += ["parallel3d.optim.clip", "parallel3d.planner.from_module", "pydantic.type_adapter"]
_PRELOAD += ["parallel3d.tools.cli", "parallel3d.tools.doctor"]
_KINDS = ("net", "uts", "mnt", "pid")


# -- the caller: no import that takes time -----------------------------------------------------------


def call(address: str, arguments: list[str]) -> int:
    """Has ``arguments`` run; returns the exit code, or the negative number of the signal that ended it."""
    job = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        fds = array.array("i", [1, 2]).tobytes()
        connection.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        connection.sendall(json.dumps(job).encode() + b"\n")
        answers = connection.makefile("r")
        pid = int(answers.readline() or 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, frame: _pass_on(pid, number))
        return int(answers.readline() or 1)


def _pass_on(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# -- the server --------------------------------------------------------------------------------------


@contextmanager
def python_at(address: str):
    """Within it ``[*python, script]`` starts a program, with what this yields as ``python``."""
    import multiprocessing

    from parallel3d.testing.gloo_pool import _PRELOAD as first

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(first)
    ready, remote = context.Pipe()
    process = context.Process(target=_serve, args=(address, remote), daemon=True)
    process.start()
    remote.close()
    try:
        assert ready.poll(120), "no process to fork from"
        ready.recv()
        yield [sys.executable, "-I", "-S", __file__, address]
    finally:
        ready.close()  # which ends it
        process.join(10)
        process.kill()


def _serve(address: str, alive) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    for name in _PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        alive.send("ready")
        while True:
            readable, _, _ = select.select([listener, alive], [], [])
            if alive in readable:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                alive.close()
                os._exit(_watch(connection))
            connection.close()


def _watch(connection: socket.socket) -> int:
    """Forks the program in the caller's namespaces, tells how it ends, and ends it with the caller."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(8))
    fds = array.array("i")
    fds.frombytes(ancillary[0][2])
    job = json.loads(connection.makefile("r").readline())
    caller, _, _ = _credentials(connection)
    try:
        _enter_namespaces(caller)
    except FileNotFoundError:  # it was killed meanwhile
        return 1
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.sendall(f"{os.getpid()}\n".encode())  # as the caller's namespace counts
        connection.close()
        _become(job, list(fds))
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([connection, ended], [], [])
    if ended not in readable:  # the caller was killed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    return 0


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    import struct

    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", raw)


def _enter_namespaces(caller: int) -> None:
    """Those in which ``caller`` is; its PID namespace holds from the next fork on."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found = [(f"/proc/{caller}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in _KINDS]
    other = [theirs for theirs, ours in found if os.readlink(theirs) != os.readlink(ours)]
    fds = [os.open(path, os.O_RDONLY) for path in other]  # before one of them hides /proc
    for fd in fds:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)


def _become(job: dict, fds: list[int]) -> None:
    """Runs the program, as ``python`` would; does not return."""
    import runpy
    import traceback

    code = 1
    try:
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        for target, fd in zip((1, 2), fds, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        first, *rest = job["arguments"]
        if first == "-m":
            sys.argv[:] = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [first, *rest]
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    end = call(sys.argv[1], sys.argv[2:])
    if end < 0:
        signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    sys.exit(end)
