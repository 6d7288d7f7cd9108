"""One job on several hosts: torchrun on each, a c10d rendezvous between them, real links that can be cut.

The hosts are namespaces of this machine, see hosts.py; the tests need root and say what else is missing.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest
from _support.hosts import Site
from _support.kill.verify import Record, different_end, different_steps

pytest.importorskip("typer")
pytest.importorskip("rich")

PROGRAM = Path(__file__).parents[1] / "_support" / "on_hosts.py"
TEXT = PROGRAM.parent  # to train on
STEPS, SAVE_EVERY = 6, 2
SILENCE = 5  # seconds
MESH = ("--replicate", "2", "--shard", "2", "--tp", "2")
SHORT = "keep_alive_interval=1,keep_alive_max_attempt=5"  # seconds until a host that is gone is forgotten


class Job:
    """train.py on the first hosts of a site, eight ranks in all."""

    def __init__(
        self, site: Site, folder: Path, count: int, *, restarts: int = 0, **variables: str
    ) -> None:
        self.site, self.folder, self.count, self.restarts = site, folder, count, restarts
        self.variables = variables
        folder.mkdir(exist_ok=True)
        self.log = folder / "log"
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def start(self, *which: int) -> None:
        """Starts torchrun on hosts, by default on all."""
        for index in which or range(self.count):
            self.agents[index] = self.site.hosts[index].start(
                self._command(),
                output=self._output(index),
                OMP_NUM_THREADS="1",
                HOSTS_FILE=str(self.folder / "hosts"),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # or a torchrun that starts later hangs
                **self.variables,
            )

    def _command(self) -> list[str]:
        python = self.site.python
        options = f"--nnodes {self.count} --nproc-per-node {8 // self.count} --rdzv-id job"
        options += " --rdzv-backend c10d --rdzv-endpoint node-0:29400"
        options += f" --rdzv-conf {SHORT}" if self.restarts else ""
        options += f" --max-restarts {self.restarts} --monitor-interval 0.2 --no-python"
        train = f"--steps {STEPS} --size nano --batch 8 --save-every {SAVE_EVERY}".split()
        train += ["--data", str(TEXT), "--step-log", str(self.log)]
        train += ["--checkpoint", str(self.folder / "checkpoint")]
        torchrun = [*python, "-m", "torch.distributed.run", *options.split()]
        return [*torchrun, *python, str(PROGRAM), *MESH, *train]

    def _output(self, index: int) -> Path:
        return self.folder / f"output-{index}"

    def end(self) -> None:
        """What a scheduler does with a job that has failed: nothing of it is left on any host."""
        for index, agent in self.agents.items():
            self.site.hosts[index].lose_power()
            agent.wait()

    def wait(self, *which: int, limit: float = 120) -> None:
        """Until torchrun has ended on these hosts, by default on all, with success."""
        for index in which or range(self.count):
            code = self.agents[index].wait(limit)
            assert code == 0, f"node-{index}: {self.output(index)[-5000:]}"

    def wait_for_step(self, step: int, limit: float = 120) -> None:
        """Until this step is in the log."""
        wait_until(lambda: f'"step": {step}, "samples": [' in self._text(), limit)

    def wait_for_output(self, index: int, text: str, limit: float = 120) -> float:
        """Until torchrun or a rank on that host has said ``text``; seconds that took."""
        start = time.monotonic()
        wait_until(lambda: text in self.output(index), limit)
        return time.monotonic() - start

    def _text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def output(self, index: int) -> str:
        return self._output(index).read_text()

    def record(self) -> Record:
        return Record.read(self.log)


def wait_until(done, limit: float) -> None:
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same job on one host, which nobody disturbs."""
    job = Job(site, tmp_path_factory.mktemp("whole"), 1)
    job.start()
    job.wait()
    return job


def check_hosts(job: Job) -> None:
    """Each rank's tp group is on one host; replicas are on different ones."""
    names = json.loads((job.folder / "hosts").read_text())
    every = [f"node-{rank * job.count // 8}" for rank in range(8)]
    assert names["tp"] == [[name, name] for name in every]
    assert all(len(set(group)) == 2 for group in names["replicate"])


def check_resumed(whole: Job, job: Job) -> None:
    """It went on from a checkpoint, and every loss, norm and the last weights are those of ``whole``."""
    record = job.record()
    assert len(record.starts) == 2 and record.starts[-1].step >= SAVE_EVERY
    assert different_steps(whole.record(), record, 0) == ([], 0)
    assert not different_end(whole.record(), record, 0)


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.slow)]
)
def test_several_hosts_train_what_one_does(
    site: Site, whole: Job, tmp_path: Path, count: int
) -> None:
    """Losses, gradient norms and the last weights, to the last bit."""
    job = Job(site, tmp_path, count)
    job.start()
    job.wait()
    assert lines(job.log) == lines(whole.log) and len(lines(job.log)) == STEPS + 2
    check_hosts(job)


@pytest.mark.slow
def test_a_host_loses_power(site: Site, whole: Job, tmp_path: Path) -> None:
    """The others learn it, and which ranks; torchrun on the survivor goes on when the host is back."""
    job = Job(site, tmp_path, 2, restarts=3)
    job.start()
    job.wait_for_step(SAVE_EVERY)
    site.hosts[1].lose_power()
    lost = "ranks 4-7 on node-1 are lost: killed or hung, or the network"
    assert job.wait_for_output(0, lost) < 20
    job.start(1)
    job.wait()
    check_hosts(job)
    check_resumed(whole, job)


@pytest.mark.full  # tests/guards has it in one network
def test_a_link_goes_down(site: Site, whole: Job, tmp_path: Path) -> None:
    """No connection is closed, and yet both sides learn it; started again, the job goes on."""
    job = Job(site, tmp_path, 2, SILENCE=str(SILENCE))
    job.start()
    job.wait_for_step(SAVE_EVERY)
    site.hosts[1].unplug()
    try:
        lost = "ranks 4-7 on node-1 are lost: killed or hung, or the network"
        seconds = job.wait_for_output(0, lost)
        seconds += job.wait_for_output(1, f"the store, on node-0, has not answered for {SILENCE} s")
        assert seconds < 30
    finally:
        site.hosts[1].plug()
    job.end()
    job.start()
    job.wait()
    check_resumed(whole, job)
