"""Hosts on one machine: namespaces with a name, an address and processes of their own, joined by a switch.

A host is the first process of new network, UTS, mount and PID namespaces; ``veth`` pairs lead to a bridge in
one more network namespace, so nothing is left in the machine's own. The first processes read from a pipe:
they end with the process that made them, whatever happened to it, and all that ran on the hosts with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_UNTIL_END_OF_FILE = ["sh", "-c", "echo up; read _"]
_HOST = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SWITCH = ["--net", "--fork", "--kill-child"]
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class Host:
    """One of ``hosts``.

    Attributes:
        name: what ``hostname`` says on it; every host resolves the names of all.
        address: of its ``eth0``.
    """

    def __init__(self, index: int, folder: Path, switch: _Holder) -> None:
        self.name, self.address = f"node-{index}", f"10.77.0.{index + 1}"
        self._port, self._switch = f"port{index}", switch
        self._holder = _Holder(_HOST)
        self._folder = folder

    def boot(self) -> None:
        """Gives it its name, its link to the switch, and the folder's ``hosts`` file."""
        names = f"mount --bind {self._folder}/hosts /etc/hosts"
        no_server = f"mount --bind {self._folder}/resolv.conf /etc/resolv.conf"
        shell = f"hostname {self.name} && {names} && {no_server}"
        self._holder.enter(["sh", "-c", shell])
        ends = f"name {self._port} netns {self._switch.pid} type veth peer name eth0 netns"
        _check(["ip", "link", "add", *ends.split(), str(self._holder.pid)])
        self._switch.ip(f"link set {self._port} master switch up")
        self._holder.ip(
            "link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"
        )

    def start(
        self,
        command: Sequence[str],
        *,
        output: Path | IO[str] | int = subprocess.DEVNULL,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Starts ``command`` on the host. Its environment is ours, plus ``variables``; ended with the host.

        Args:
            output: where stdout and stderr go; a path is appended to.
        """
        environment = os.environ | variables
        arguments = [*self._holder.entry, "env", f"--chdir={os.getcwd()}", *command]
        opened = output.open("a") if isinstance(output, Path) else nullcontext(output)
        with opened as file:
            return subprocess.Popen(
                arguments, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment
            )

    def run(self, command: Sequence[str], timeout: float = 30) -> str:
        """What ``command`` prints on the host."""
        process = self.start(command, output=subprocess.PIPE)
        text, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, text
        return text

    def lose_power(self) -> None:
        """All its processes are killed at once; those started later run as on a host that came up again."""
        self._holder.enter(["sh", "-c", "kill -9 -1"], check=False)

    def unplug(self) -> None:
        """The switch's end of its link goes down: nothing arrives any more, and nobody is told."""
        self._switch.ip(f"link set {self._port} down")

    def plug(self) -> None:
        """The link is up again."""
        self._switch.ip(f"link set {self._port} up")

    def ip(self, *lines: str) -> None:
        """Commands of ``ip`` on the host."""
        self._holder.ip(*lines)

    def end(self) -> None:
        """The host is gone."""
        self._holder.end()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """``count`` hosts, ``node-0`` to ``node-N``, that reach each other; gone at the end.

    See ``missing`` for what the machine must have.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        switch = _Holder(_SWITCH)
        stack.callback(switch.end)
        switch.ip("link add switch type bridge", "link set switch up")
        made = []
        for index in range(count):
            made.append(Host(index, folder, switch))
            stack.callback(made[-1].end)
        names = [f"{host.address} {host.name}" for host in made]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (folder / "resolv.conf").write_text("")
        for host in made:
            host.boot()
        yield made


def missing() -> str:
    """Why this machine can't play hosts; "" if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    tools = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if tools:
        return f"needs {', '.join(tools)} (packages {', '.join(sorted(set(tools.values())))})"
    try:
        with hosts(1):
            return ""
    except (OSError, RuntimeError) as error:
        return f"needs root, and a kernel with network namespaces, veth and bridges: {error}"


@dataclass(frozen=True)
class Site:
    """Hosts, and how a Python program starts at once on them: ``[*python, script]``, see forked.py."""

    hosts: list[Host]
    python: list[str]


class _Holder:
    """The first process of new namespaces, which live as long as it does."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["unshare", *kinds, *_UNTIL_END_OF_FILE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != "up":
            self._process.wait()
            raise RuntimeError(said)
        parent = self._process.pid
        self.pid = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
        kinds = [k for k in kinds if k in ("--net", "--uts", "--mount", "--pid")]
        self.entry = ["nsenter", "--target", str(self.pid), *kinds, "--"]

    def enter(self, command: Sequence[str], *, check: bool = True, text: str = "") -> None:
        _check([*self.entry, *command], check=check, text=text)

    def ip(self, *lines: str) -> None:
        self.enter(["ip", "-batch", "-"], text="\n".join(lines) + "\n")

    def end(self) -> None:
        """Ends all processes in the namespaces."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _check(command: Sequence[str], *, check: bool = True, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
