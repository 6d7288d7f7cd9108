"""The SLURM file under real slurmctld, slurmd and munged, on two nodes in namespaces of this machine."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _support.tools.launch.slurm_cluster import SEARCH, Cluster, cluster, lacking

from parallel3d.mesh import MeshLayout
from parallel3d.tools.launch import LaunchJob, launch_file

pytest.importorskip("typer")
pytest.importorskip("rich")
pytestmark = [
    pytest.mark.xdist_group("gloo"),  # not beside the pool
    pytest.mark.skipif(bool(lacking()), reason=f"SLURM on this machine {lacking()}"),
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "llama"
ODD = "te xt'\"$(touch oops) `touch oops` \\ é\n#SBATCH --nodes=9"
"""The name of a file: all that a shell, sbatch or srun might read otherwise."""

STUB = """\
import json, os, pathlib, signal, sys, time
names = ("RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "ODD", "SLURM_RESTART_COUNT")
at = {name: os.environ.get(name) for name in names} | {"host": os.uname().nodename, "args": sys.argv[1:]}
with open("starts", "a") as file:
    file.write(json.dumps(at) + "\\n")
mark = pathlib.Path("failed")
if at["RANK"] == "1" and not mark.exists():
    mark.touch()
    sys.exit(3)
time.sleep(100 if not mark.exists() else 0)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(nodes=2) as running:
        yield running


def submit(slurm: Cluster, job: LaunchJob) -> tuple[str, Callable[[], str]]:
    """The job's id, and what it has printed so far."""
    file = slurm.folder / f"{job.name}.sbatch"
    file.write_text(launch_file("slurm", job))
    number = slurm.submit(file, PATH=f"{Path(sys.executable).parent}:{SEARCH}", OMP_NUM_THREADS="7")
    output = slurm.folder / f"{job.name}-{number}.out"
    return number, lambda: output.read_text(errors="replace") if output.exists() else ""


def wait_for(found: Callable[[], bool], said: Callable[[], str], limit: float = 120) -> None:
    end = time.monotonic() + limit
    while not found():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.full)])
def test_trains_and_saves_when_asked(slurm: Cluster, again: bool) -> None:
    """USR1, as SLURM sends it before the time limit: a last checkpoint, requeued; ``again``: and goes on."""
    (slurm.folder / ODD).write_bytes((EXAMPLES / "train.py").read_bytes()[:8000])
    words = ("--size", "nano", "--steps", "100000", "--batch", "2", "--data", ODD)
    run, log = slurm.folder / f"run-{again}", slurm.folder / f"steps-{again}"
    files = ("--checkpoint", str(run), "--step-log", str(log))
    job = LaunchJob(
        command=(str(EXAMPLES / "train.py"), *words, *files),
        nodes=2,
        gpus_per_node=1,
        layout=MeshLayout(shard=2),
        name="trains",
        device="cpu",
    )
    number, said = submit(slurm, job)
    wait_for(lambda: log.exists() and log.read_text().count('"step"') > 2, said)
    assert "mesh: replicate 1 x shard 2 x tp 1 = 2 ranks" in said()
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    wait_for(lambda: "DUE TO JOB REQUEUE" in said(), said)
    assert "stopped after step" in said() and len(list(run.glob("step-*"))) == 1
    wait_for(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", number), slurm.logs)
    if again:
        wait_for(lambda: "continues " in said(), said)
    slurm.run("scancel", number)
    assert slurm.until(number, "CANCELLED", "COMPLETED", "FAILED") == "CANCELLED"
    assert not list(slurm.folder.glob("oops"))


@pytest.mark.full
def test_starts_again_after_a_failure_with_every_argument_as_given(slurm: Cluster) -> None:
    (slurm.folder / "stub.py").write_text(STUB)
    job = LaunchJob(
        command=("stub.py", "", ODD, "--x=$SLURM_NODEID"),
        nodes=2,
        gpus_per_node=1,
        name="again",
        device="cpu",
        env={"ODD": ODD},
        max_restarts=1,
        time="5",
    )
    number, said = submit(slurm, job)
    assert slurm.until(number, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", said()
    starts = [json.loads(line) for line in (slurm.folder / "starts").read_text().splitlines()]
    assert "attempt 0 of 1 failed with" in said()
    for start in starts:
        assert start["args"] == ["", ODD, "--x=$SLURM_NODEID"] and start["ODD"] == ODD
        assert start["MASTER_ADDR"] == "node1" and start["WORLD_SIZE"] == "2"
        assert start["host"] == f"node{int(start['RANK']) + 1}"  # ranks in SLURM's order of nodes
    assert sorted(start["RANK"] for start in starts) in (["0", "0", "1", "1"], ["0", "1", "1"])
    assert not list(slurm.folder.glob("oops"))
