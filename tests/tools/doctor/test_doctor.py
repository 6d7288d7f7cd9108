"""What doctor reads of this machine, how ranks meet, and what the command prints."""

import json
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from _support.launch import free_ports
from _support.tools.doctor import findings_table
from torch import distributed as dist

from parallel3d.errors import MeshError, PlanningError
from parallel3d.tools.doctor import Diagnosis, Options, doctor
from parallel3d.tools.doctor.facts import (
    GIB,
    Facts,
    RankPlace,
    addresses_of,
    adopt_slurm,
    collect,
    first_host,
    parse_health,
    place_of,
    read_cgroup,
    read_disk,
    read_infiniband,
    read_interfaces,
    relevant_variables,
    try_store,
)
from parallel3d.tools.doctor.store_group import StoreGroup, clock_offset, connect
from parallel3d.tools.dryrun.result import decoded

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_the_table_in_the_documentation() -> None:
    assert findings_table.table() in DOCS.read_text()


# -- this machine ------------------------------------------------------------------------------------


def test_what_is_read_of_this_machine(tmp_path: Path) -> None:
    facts = collect(tmp_path / "new", {"NCCL_DEBUG": "INFO", "HOME": "/"})
    assert facts.environment == {"NCCL_DEBUG": "INFO"}
    assert facts.place.host == socket.gethostname() and facts.place.world_size == 1
    assert facts.versions["torch"] == torch.__version__
    assert {each.name for each in facts.interfaces} == {name for _, name in socket.if_nameindex()}
    assert facts.limits.cpus == len(os.sched_getaffinity(0))
    assert 0 < facts.limits.available <= facts.limits.memory
    assert len(facts.devices) == torch.cuda.device_count()
    assert (
        facts.disk is not None and facts.disk.free > 0 and facts.disk.kind and not facts.disk.error
    )
    assert not list(tmp_path.iterdir())
    assert decoded(Facts, json.loads(json.dumps(asdict(facts)))) == facts


def test_the_loopback_is_up() -> None:
    (lo,) = [each for each in read_interfaces() if each.name == "lo"]
    assert lo.up and lo.is_loopback and "127.0.0.1" in lo.addresses


def test_names() -> None:
    assert "127.0.0.1" in addresses_of("localhost")[0]
    found, error = addresses_of("no-such-host.invalid")
    assert not found and error


def test_a_port_where_nobody_is() -> None:
    (port,) = free_ports(1)
    assert "refused" in try_store("127.0.0.1", port, 1)


def test_infiniband(tmp_path: Path) -> None:
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE\n"), ("mlx5_1/ports/1", "1: DOWN\n")):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state)
    assert read_infiniband(tmp_path) == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        (
            {"job/cpu.max": "400000 100000", "memory.max": "8589934592"},
            "0::/job/step",
            (4.0, 8 << 30),
        ),
        ({"job/step/cpu.max": "max 100000", "memory.max": "max"}, "0::/job/step", (0.0, 0)),
        (
            {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"},
            "3:cpu:/a\n2:memory:/a",
            (1.5, 0),
        ),
    ],
)
def test_limits_of_a_container(files: dict[str, str], own: str, expected, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert read_cgroup(tmp_path, tmp_path / "own") == expected


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in read_disk(tmp_path / "file" / "folder").error


def test_a_folder_for_checkpoints_is_not_made(tmp_path):
    """Of a share that isn't mounted it would be one of this node's own."""
    found = read_disk(tmp_path / "share" / "run")
    assert not found.error and found.path == str(tmp_path) and found.total
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    assert "No such file" in read_disk(tmp_path / "run").error


def test_what_nvidia_smi_says() -> None:
    line = "GPU-5d, Disabled, 3, 81559, 5120, Active, Not Active, Not Active\n"
    line += "GPU-6e, Enabled, [N/A], 81559, 4, Not Active, Not Active, Active\n"
    found = parse_health(line)
    assert (found["5d"].persistence, found["5d"].errors) == (False, 3)
    assert (found["5d"].slowed, found["6e"].slowed) == ("hardware thermal", "power brake")
    assert found["6e"].errors == 0
    assert found["5d"].total - found["5d"].free == 5 * GIB
    assert not parse_health("Field is not a valid field to query\n")


def test_variables_that_steer() -> None:
    given = {"NCCL_ALGO": "Ring", "PATH": "/bin", "MASTER_ADDR": "a", "AWS_SECRET_ACCESS_KEY": "s"}
    assert relevant_variables(given) == {"NCCL_ALGO": "Ring", "MASTER_ADDR": "a"}


# -- the place in the job ----------------------------------------------------------------------------


def test_place_by_torchrun() -> None:
    given = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    given["GROUP_RANK"] = "1"
    assert place_of(given) == RankPlace(9, 16, 1, 8, 1, socket.gethostname())
    assert place_of(given).nodes == 2
    with pytest.raises(MeshError, match="RANK is 'nine'"):
        place_of(given | {"RANK": "nine"})


def test_place_by_srun() -> None:
    given = {"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    given |= {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"}
    given |= {"SLURM_JOB_ID": "12345"}
    assert adopt_slurm(given)
    assert place_of(given) == RankPlace(9, 16, 1, 8, 1, socket.gethostname())
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("gpu03", "29845")
    assert not adopt_slurm({"RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert not adopt_slurm({})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a,b", "a"), ("gpu[03-05,09],login1", "gpu03"), ("n[1,3]-ib", "n1-ib"), ("one", "one")],
)
def test_first_of_slurms_nodes(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    assert first_host(nodes) == first


# -- how ranks meet ----------------------------------------------------------------------------------


def as_ranks(body, count: int, seconds: float = 5) -> list:
    """``body(group)`` on so many threads, as ranks of one store."""
    store, results = dist.HashStore(), [None] * count

    def run(rank: int) -> None:
        results[rank] = body(StoreGroup(store, rank, count, seconds))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_gather_and_are_told() -> None:
    def body(group: StoreGroup):
        found = group.gather("n", group.rank * 2)
        told = group.broadcast("sum", sum(found.values()))
        group.finish()
        return found, told

    results = as_ranks(body, 3)
    assert results == [({0: 0, 1: 2, 2: 4}, 6), ({}, 6), ({}, 6)]


def test_who_does_not_come_is_waited_for_once() -> None:
    group = StoreGroup(dist.HashStore(), 0, 3, 0.3)
    start = time.monotonic()
    assert group.gather("a", 1) == {0: 1}
    assert time.monotonic() - start > 0.3
    group.seconds = 60
    assert group.gather("b", 2) == {0: 2}
    group.finish()
    assert time.monotonic() - start < 30


def test_rank_0_does_not_come() -> None:
    with pytest.raises(MeshError, match="rank 0 has not said 'go' within"):
        StoreGroup(dist.HashStore(), 1, 2, 0.1).broadcast("go")


def test_rank_0_goes_in_the_middle() -> None:
    class Gone(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(MeshError, match="rank 0 has gone: Connection reset by peer"):
        StoreGroup(Gone(), 1, 2, 0.1).gather("a", 1)


def test_clocks_are_compared() -> None:
    ahead = {0: 0.0, 1: 0.0, 2: 7.0, 3: -40.0}

    def body(group: StoreGroup):
        return clock_offset(group, [2, 3], lambda: time.time() + ahead[group.rank])

    (own, (none, _), (later, sure), (earlier, _)) = as_ranks(body, 4)
    assert own == (0.0, 0.0) and none is None
    assert abs(later - 7) <= sure + 0.01 and abs(earlier + 40) < 0.2


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshError, match=f"port {port} .MASTER_PORT.*Address already in use"):
            connect(
                RankPlace(0, 2, 0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, 1
            )


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(port)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    found = doctor(Options(timeout=0.5))
    assert found.failed and found.speaks
    (error,) = [each for each in found.findings if each.name == "store-unreachable"]
    assert error.seen.startswith(f"127.0.0.1:{port}: ")
    assert error.ranks == (1,)


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: str):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from parallel3d.tools.cli.app import app

    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command_alone(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    done = invoke()
    assert done.exit_code == 0, done.output
    assert "nccl-p2p-disabled" in done.output and "do: unset NCCL_P2P_DISABLE" in done.output
    assert "checks passed" in done.output and socket.gethostname() in done.output
    assert "machine: few-open-files, locked-memory" in done.output
    assert "not measured: this is one process; start doctor on all ranks" in done.output
    assert "17 not run: they compare processes" in done.output and "group-slow" not in done.output


def test_it_is_shown_before_others_may_end_the_job(alone: None) -> None:
    shown: list[Diagnosis] = []
    assert [doctor(Options(), shown.append)] == shown


def test_an_error_ends_with_1(alone: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = invoke("--json", "--checkpoint", str(tmp_path / "file"))
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["failed"] and found["findings"][0]["name"] == "checkpoint-not-writable"
    assert (
        len(found["findings"]) + len(found["passed"]) + len(found["not_run"])
        == len(findings_table.table().splitlines()) - 2
    )
    assert "clocks-apart" in found["not_run"] and "axis-slow" in found["not_run"]
    assert "little-memory" in found["passed"]


def test_bad_options_come_before_anything_else(alone: None) -> None:
    with pytest.raises(PlanningError, match="there is no GPU 'h1000'"):
        doctor(Options(gpu="h1000"))
    assert invoke("--profile", "own.toml").exit_code == 2
    assert invoke("--tp", "0").exit_code == 2
    assert "cp=0: the size of a mesh axis" in invoke("--cp", "0").output
