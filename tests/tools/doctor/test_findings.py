"""Every check fires on facts that are wrong, and on those alone."""

from dataclasses import replace

import pytest
from _support.tools.doctor import made_up
from _support.tools.doctor.made_up import BETWEEN, CASES, GOOD, Case

from parallel3d.mesh import MeshLayout
from parallel3d.planner.calibrate import COLLECTIVES
from parallel3d.planner.cluster import Cluster, collective_time
from parallel3d.tools.doctor.checks import KNOWN_NCCL, RENAMED, matches
from parallel3d.tools.doctor.collectives import SMALL, Measurement, lines_of, profile_of
from parallel3d.tools.doctor.facts import Facts, Interface
from parallel3d.tools.doctor.finding import (
    ACROSS,
    CHECKS,
    ON_AXES,
    Severity,
    all_checks,
    examine,
    examine_all,
)

ELSEWHERE = {"ranks-missing", "mesh-does-not-fit"}
"""Found where ranks meet: test_ranks_on_hosts."""


def names(findings) -> list[str]:
    return [each.name for each in findings]


def test_there_is_a_case_for_every_check() -> None:
    assert {case.name for case in CASES} | ELSEWHERE == set(CHECKS)
    assert {name for name, _, _ in BETWEEN} == set(ACROSS)
    assert set(AXES) == set(ON_AXES)


def test_a_node_that_is_well() -> None:
    assert not examine({0: GOOD})
    assert not examine({0: made_up.ONE_NODE})
    assert not examine(made_up.nodes())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_finding(case: Case) -> None:
    found = {each.name: each for each in examine({3: case.fires})}
    assert case.says in found[case.name].seen
    assert found[case.name].ranks == (3,)
    assert case.name not in names(examine({0: case.silent}))


@pytest.mark.parametrize(("name", "facts", "says"), BETWEEN, ids=[name for name, _, _ in BETWEEN])
def test_finding_between_nodes(name: str, facts: dict[int, Facts], says: str) -> None:
    found = {each.name: each for each in examine(facts)}
    assert says in found[name].seen


def test_the_rarer_value_is_the_odd_one() -> None:
    facts = made_up.nodes()
    facts[5] = replace(facts[5], versions=facts[5].versions | {"torch": "2.12.0"})
    (found,) = [each for each in examine(facts) if each.name == "versions-differ"]
    assert found.ranks == (5,)
    assert found.seen == "torch: 2.13.0 on ranks 0-4, 6-15; 2.12.0 on rank 5"


def test_the_same_on_several_ranks_is_one_finding_and_errors_come_first() -> None:
    facts = made_up.on_node_1(CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="wrong0")
    found = examine(facts)
    assert found[0].severity == Severity.error
    ranks = {each.name: each.ranks for each in found}
    assert ranks["one-connection"] == ranks["gloo-interface-missing"] == tuple(range(8, 16))
    assert ranks["settings-differ"] == tuple(range(8, 16))


def test_every_check_says_why_and_what_to_do() -> None:
    for each in all_checks():
        assert len(each.why) > 20 and len(each.do) > 10, each.name


def test_advice_fits_the_machine() -> None:
    found = {each.name: each for each in examine({0: made_up.env(GLOO_SOCKET_IFNAME="ens5")})}
    assert found["gloo-interface-missing"].do == "export GLOO_SOCKET_IFNAME=eth0"
    found = {each.name: each for each in examine({0: made_up.env(OMP_NUM_THREADS="16")})}
    assert found["too-many-threads"].do == "export OMP_NUM_THREADS=8"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^eth", ["lo", "ib0"]),
        ("^=eth0,lo", ["eth1", "ib0"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("=eth0:10", ["eth0"]),
    ],
)
def test_how_nccl_reads_names_of_interfaces(value: str, expected: list[str]) -> None:
    interfaces = tuple(
        Interface(name, True, ("10.0.0.1",)) for name in ("lo", "eth0", "eth1", "ib0")
    )
    assert [each.name for each in matches(interfaces, value)] == expected


def test_new_names_are_known() -> None:
    assert all(new in KNOWN_NCCL for new in RENAMED.values() if new.startswith("NCCL_"))
    assert not set(RENAMED) & set(KNOWN_NCCL)


# -- collectives -------------------------------------------------------------------------------------

LAYOUT = MeshLayout(2, 4, 2)
HOSTS = {rank: f"node-{rank // 8}" for rank in range(16)}
CLUSTER = Cluster.of("h100-80gb-sxm", 2, 8)


def times(**slower: float) -> Measurement:
    """As the profile says, but times ``slower`` of an axis, or of one rank (``rank_3``)."""
    whole = Measurement(LAYOUT, HOSTS, {}, {}, CLUSTER)
    seconds = {}
    for rank in HOSTS:
        factor = slower.get(f"rank_{rank}", 1.0)
        seconds[rank] = {
            (axis, name, count): collective_time(name, count, whole.link(axis), CLUSTER)
            * slower.get(axis, 1.0)
            * (slower.get("small", 1.0) if count == SMALL else factor)
            for axis in ("replicate", "shard", "tp")
            for name in COLLECTIVES
            for count in (SMALL, 2**28)
        }
    return replace(whole, seconds=seconds)


AXES = {
    "tp-across-nodes": (
        replace(times(), hosts={rank: f"node-{(rank + 1) // 8}" for rank in range(16)}),
        "2 of 8 tp groups lie on several nodes: ranks 6-7 on node-0, node-1",
    ),
    "collective-failed": (
        replace(times(), errors={3: "no route", 4: "no route"}),
        "ranks 3-4: no route",
    ),
    "axis-slow": (times(shard=2.0), "all_reduce on shard"),
    "axis-late": (times(small=5.0), "us for 4 KiB instead of"),
    "group-slow": (times(rank_3=2.0), "tp, ranks 2-3 on node-0: all_gather"),
}


def test_collectives_as_the_profile_says() -> None:
    assert not examine_all(ON_AXES, times())
    assert not examine_all(ON_AXES, times(shard=1.5))
    assert len(lines_of(times())) == 9


@pytest.mark.parametrize("name", AXES)
def test_finding_of_collectives(name: str) -> None:
    measurement, says = AXES[name]
    found = {each.name: each for each in examine_all(ON_AXES, measurement)}
    assert says in found[name].seen


def test_no_profile_no_verdict_but_odd_groups() -> None:
    found = replace(times(rank_3=3.0), cluster=None)
    assert [each.expected for each in lines_of(found)] == [None] * 9
    assert names(examine_all(ON_AXES, found)) == ["group-slow"]


@pytest.mark.parametrize(
    ("device", "gib", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb-sxm"),
        ("NVIDIA H100 PCIe", 79.1, "h100-80gb-pcie"),
        ("NVIDIA H100 NVL", 93.6, "h100-94gb-nvl"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb-sxm"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb-pcie"),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H200", 139.8, "h200-141gb-sxm"),
        ("NVIDIA B200", 178.4, "b200-sxm"),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, None),
    ],
)
def test_profile_of_a_device(device: str, gib: float, profile: str | None) -> None:
    assert profile_of(device, gib) == profile


def test_where_groups_lie() -> None:
    found = times()
    assert [line.nodes for line in lines_of(found)] == [2] * 3 + [1] * 6
    assert lines_of(times(rank_3=2.0))[-1].slowest == (2, 3)
