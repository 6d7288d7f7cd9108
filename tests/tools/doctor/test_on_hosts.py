"""doctor on the ranks of two hosts: it names the odd one, and ranks that can't be reached."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _support.hosts import Host, Site

pytest.importorskip("typer")
pytest.importorskip("rich")

TORCHRUN = (
    "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node-0:29401 --rdzv-id d"
)


def start(
    host: Host, site: Site, options: str, output: Path, **variables: str
) -> subprocess.Popen[str]:
    command = [*site.python, "-m", "torch.distributed.run", *TORCHRUN.split(), "--no-python"]
    command += [*site.python, "-m", "parallel3d", "doctor", "--json", *options.split()]
    return host.start(command, output=output, OMP_NUM_THREADS="1", **variables)


def run(
    site: Site, folder: Path, options: str, **of_node_1: str
) -> tuple[list[int], dict[str, Any]]:
    """Exit codes of torchrun, and what rank 0 has printed."""
    first, second = site.hosts[:2]
    outputs = [folder / "output-0", folder / "output-1"]
    jobs = [
        start(first, site, options, outputs[0]),
        start(second, site, options, outputs[1], **of_node_1),
    ]
    codes = [job.wait(120) for job in jobs]
    text = outputs[0].read_text()
    assert "{" in text, text
    assert '"findings"' not in outputs[1].read_text()
    return codes, json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]


def findings(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["findings"]}


@pytest.mark.slow
def test_hosts_that_are_well(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    codes, found = run(site, tmp_path, f"--replicate 2 --shard 1 --tp 2 --checkpoint {folder}")
    assert codes == [0, 0] and not found["failed"]
    assert [own["place"]["host"] for own in found["facts"].values()] == ["node-0"] * 2 + [
        "node-1"
    ] * 2
    assert all(own["disk"]["shared"] for own in found["facts"].values())
    assert not folder.exists()  # it is looked at, and not made
    clocks = [found["facts"][rank]["clock"] for rank in ("0", "2")]
    assert clocks[0] == 0 and abs(clocks[1]) < 0.05
    measured = {(each["axis"], each["operation"]): each for each in found["collectives"]}
    assert {axis for axis, _ in measured} == {"replicate", "tp"} and len(measured) == 6
    assert measured["tp", "all_reduce"]["nodes"] == 1
    assert measured["replicate", "all_reduce"]["nodes"] == 2
    assert all(each["bandwidth"] > 0 and each["latency"] > 0 for each in measured.values())
    assert "tp-across-nodes" in found["passed"]


@pytest.mark.slow
def test_a_host_set_up_in_another_way_is_named(site: Site, tmp_path: Path) -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_ALGO": "Ring"}
    codes, found = run(site, tmp_path, "--tp 2", **wrong)
    assert codes == [1, 1] and found["failed"]
    named = findings(found)
    missing = named["gloo-interface-missing"]
    assert missing["ranks"] == [2, 3] and missing["severity"] == "error"
    assert "ens5 is not up, or not there; here are eth0 (10.77.0.2)" in missing["seen"]
    assert missing["do"] == "export GLOO_SOCKET_IFNAME=eth0"
    assert named["settings-differ"]["ranks"] == named["interfaces-differ"]["ranks"] == [2, 3]
    assert "Ring on node-1 (ranks 2-3)" in named["settings-differ"]["seen"]
    assert found["not_measured"].startswith("first correct gloo-interface-missing")


def alone(site: Site, rank: int, output: Path) -> subprocess.Popen[str]:
    """A rank as srun starts it."""
    command = [*site.python, "-m", "parallel3d", "doctor", "--json", "--timeout", "3"]
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    nodes = {"SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": "node-[0-1]"}
    each = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_ID": "17", "OMP_NUM_THREADS": "1"}
    return site.hosts[rank].start(command, output=output, **slurm, **nodes, **each)


@pytest.mark.slow
def test_a_host_that_is_cut_off(site: Site, tmp_path: Path) -> None:
    """Both sides end in time and say what they can't reach, under srun."""
    outputs = [tmp_path / "output-0", tmp_path / "output-1"]
    site.hosts[1].unplug()
    try:
        jobs = [alone(site, rank, outputs[rank]) for rank in (0, 1)]
        assert [job.wait(60) for job in jobs] == [1, 1]
    finally:
        site.hosts[1].plug()
    first, second = (
        json.loads(path.read_text()[path.read_text().index("{\n") :]) for path in outputs
    )
    assert findings(first)["ranks-missing"]["ranks"] == [1]
    unreachable = findings(second)["store-unreachable"]["seen"]
    assert unreachable.startswith("node-0:29517: ")
