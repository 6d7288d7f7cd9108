"""A SLURM cluster on this machine: each node in network, host name and process namespaces of its own.

That is what makes them nodes for SLURM: one address and one host name each. Needs root, and Debian's
slurm-wlm, munge, iproute2 and util-linux. Nothing outside the folder is changed, and all ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare", "nsenter", "ip", "pkill")
START = Path(__file__).with_name("slurm_cluster.sh")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NAMESPACES = ["--net", "--uts", "--mount", "--ipc", "--pid"]


def lacking() -> str:
    """Why there can't be one here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces and slurmd"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "needs namespaces, which this machine refuses"


class Cluster:
    """A running one; ``folder`` is shared by its nodes."""

    def __init__(self, folder: Path, inside: int) -> None:
        self.folder, self.inside = folder, inside

    def run(self, *command: str, **variables: str) -> str:
        """What ``command`` prints on the head node, in ``folder``."""
        enter = ["nsenter", "--target", str(self.inside), *NAMESPACES, f"--wd={self.folder}"]
        environment = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        done = subprocess.run(
            [*enter, *command],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment | variables,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, file: Path, **variables: str) -> str:
        """The id of the job that sbatch makes of ``file``."""
        return self.run("sbatch", "--parsable", str(file), **variables)

    def state(self, job: str) -> str:
        """Such as RUNNING, PENDING, COMPLETED, FAILED."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job)
        return shown.partition("JobState=")[2].split()[0]

    def until(self, job: str, *states: str, limit: float = 120) -> str:
        """Waits for one of these states; the state then.

        Raises:
            AssertionError: it took longer than ``limit`` seconds.
        """
        end = time.monotonic() + limit
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state}, not {states}: {self.logs()}"
            time.sleep(0.2)
        return state

    def logs(self) -> str:
        """The last of each daemon's."""
        ends = [(p.name, p.read_text(errors="replace")[-1500:]) for p in self.folder.glob("log/*")]
        return "\n".join(f"== {name}\n{text}" for name, text in ends)


@contextlib.contextmanager
def cluster(nodes: int = 2, cores: int = 4) -> Iterator[Cluster]:
    """One whose nodes are idle."""
    # Short: a socket's path has 107 letters at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    command += ["bash", str(START), str(folder), str(nodes), str(cores)]
    with (folder / "start").open("w") as log:
        outside = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PATH": SEARCH},
        )
    try:
        end = time.monotonic() + 30
        while not (folder / "ready").exists():
            failed = outside.poll() is not None or time.monotonic() > end
            assert not failed, (folder / "start").read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
        yield Cluster(folder, int(children.split()[0]))
    finally:
        outside.kill()  # and, by --kill-child, all that it started
        outside.wait()
        shutil.rmtree(folder, ignore_errors=True)
