"""Seconds of collectives, beside the numbers their constants were taken from."""

import random
from dataclasses import replace

import pytest

from parallel3d._play import Exposed, MicroBatch, Player, PlayRules, UnitTimes, exposed_of
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, gpu, gpus
from parallel3d.planner.cluster import AxisLink, collective_time, link_of

H100 = Cluster.of("h100", 32)


@pytest.mark.parametrize(
    ("layout", "axis", "size", "per_node"),
    [
        ((4, 8, 8), "tp", 8, 8),
        ((4, 8, 8), "shard", 8, 1),
        ((32, 8, 1), "shard", 8, 8),
        ((32, 8, 1), "replicate", 32, 1),
        ((1, 256, 1), "shard", 256, 8),
        ((16, 8, 2), "shard", 8, 4),
        ((128, 1, 2), "replicate", 128, 4),
        # Groups that straddle nodes: the worst one counts.
        ((4, 6, 1), "shard", 6, 2),
        ((8, 3, 1), "shard", 3, 1),
        ((4, 10, 1), "shard", 10, 2),
        ((3, 8, 1), "shard", 8, 8),
        ((6, 4, 1), "shard", 4, 4),
    ],
)
def test_where_the_ranks_of_an_axis_are(layout, axis: str, size: int, per_node: int) -> None:
    assert link_of(MeshLayout(*layout), axis, H100) == AxisLink(size, per_node)


@pytest.mark.parametrize(
    ("kind", "rate"), [("all_gather", 383), ("reduce_scatter", 384), ("all_reduce", 254)]
)
def test_within_a_node_as_measured(kind: str, rate: float) -> None:
    """Algorithm bandwidth of 512 MiB on 8 GPUs (GB/s), from the same tables as the fits."""
    seconds = collective_time(kind, 2**29, AxisLink(8, 8), H100)
    assert 2**29 / seconds / 1e9 == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("nodes", "per_node", "latency", "rate"),
    [
        (2, 1, 22, 96),
        (2, 8, 70, 410),
        (4, 2, 64, 110),
        (4, 8, 146, 396),
        (16, 8, 599, 387),
        (32, 1, 442, 49.5),
    ],
)
def test_across_nodes_as_nccl_expects(
    nodes: int, per_node: int, latency: float, rate: float
) -> None:
    """NCCL 2.27 tuning numbers for rings of H100 nodes, us and GB/s; 0.87 of the rate at large sizes."""
    link = AxisLink(nodes * per_node, per_node)
    assert collective_time("all_gather", 1, link, H100) * 1e6 == pytest.approx(latency, rel=0.35)
    size = 2**33
    most = min(rate, 372)  # what 8 GPUs reach within a node
    bandwidth = size / (collective_time("all_gather", size, link, H100) - latency * 1e-6) / 1e9
    assert bandwidth == pytest.approx(0.87 * most, rel=0.1)


def test_nothing_to_do() -> None:
    assert collective_time("all_gather", 2**20, AxisLink(1, 1), H100) == 0
    assert collective_time("all_reduce", 0, AxisLink(8, 8), H100) == 0


def test_links_without_a_table() -> None:
    mesh = Cluster.of("mi300x")
    two = collective_time("all_gather", 2**28, AxisLink(2, 2), mesh)
    eight = collective_time("all_gather", 2**28, AxisLink(8, 8), mesh)
    assert eight < two  # each GPU has a link of its own to each other


class TestOverlap:
    TAIL = UnitTimes(1, 10.0, 20.0)

    def test_compute_hides_what_is_shorter(self) -> None:
        units = [UnitTimes(4, 10.0, 20.0, gather=2.0, gather_again=2.0, reduce=3.0), self.TAIL]
        found = exposed_of(units, PlayRules(0.19), all_reduce=False)
        assert found.gather == pytest.approx(2.0)  # the first
        assert found.reduce == pytest.approx(3.0)  # the last
        # Forward three gathers; backward four, and three reductions.
        assert found.slowdown == pytest.approx(0.19 * (3 * 2.0 + 4 * 2.0 + 3 * 3.0) / 1.19)

    def test_a_kernel_is_as_slow_as_its_parts(self) -> None:
        """While a collective of 2 seconds runs, computation is slower, however it is cut into kernels."""
        ends = set()
        for count in (1, 4, 100):
            player = Player(0.25)
            player.beside(2.0, ("link",))
            for _ in range(count):
                player.compute(4.0 / count)
            ends.add(round(player.now, 9))
        assert ends == {4.0 + 0.25 * 2.0 / 1.25}

    def test_what_is_longer_is_waited_for(self) -> None:
        units = [UnitTimes(2, 1.0, 1.0, gather=5.0, gather_again=0.0, reduce=0.0)]
        found = exposed_of(units, PlayRules(0.19), all_reduce=False)
        assert found.gather == pytest.approx(5.0 + 5.0 - 1.19)

    def test_all_reduce_in_the_last_micro_batch_only(self) -> None:
        units = [UnitTimes(3, 1.0, 1.0, reduce=0.5, all_reduce=4.0)]
        each, last = (exposed_of(units, PlayRules(0.19), all_reduce=n) for n in (False, True))
        assert each.all_reduce == 0
        # On one network a reduction takes its turn after the all-reduce before it.
        assert last.all_reduce == pytest.approx(4.0) and last.reduce > each.reduce + 2 * 2.0
        apart = exposed_of(units, PlayRules(0.19, apart=True), all_reduce=True)
        assert apart.all_reduce > 2 * 4.0 and apart.reduce == pytest.approx(each.reduce)

    def test_gathers_are_put_off_until_the_inputs_of_a_reduction_are_free(self) -> None:
        unit = UnitTimes(4, 10.0, 20.0, gather=2.0, gather_again=12.0, reduce=8.0)
        early, late = (
            exposed_of([replace(unit, freed=freed), self.TAIL], PlayRules(0.0), all_reduce=False)
            for freed in (0.0, 0.5)
        )
        assert early.gather == pytest.approx(2.0) and late.gather == pytest.approx(2.0 + 2 * 2.0)

    def test_copies_to_the_host_and_back(self) -> None:
        """Those of all blocks but the last: beside its own forward, and the backward of the block after."""
        units = [UnitTimes(40, 1.0, 2.0, offload=3.0), self.TAIL]
        found = exposed_of(units, PlayRules(0.19), all_reduce=False)
        assert found.offload == pytest.approx(39 * (3.0 - 1.0) - 1.0 + 39 * (3.0 - 2.0))
        assert found._replace(offload=0.0) == Exposed()

    @pytest.mark.parametrize("seed", range(60))
    def test_one_block_stands_for_all(self, seed: int) -> None:
        """What few blocks lose, multiplied, is what all lose that are played one by one."""
        pick = random.Random(seed)

        def seconds(most: float) -> float:
            return pick.choice((0.0, pick.uniform(0, most)))

        units = []
        for kind, count in (
            ("first", 1),
            ("block", pick.choice((3, 5, 40))),
            ("block", 9),
            ("", 1),
        ):
            tp, gather = seconds(0.1), seconds(1.5)
            units.append(
                UnitTimes(
                    count,
                    pick.uniform(0.2, 1.2),
                    pick.uniform(0.3, 2.3),
                    gather,
                    gather if kind == "block" and seed % 3 else 0.0,
                    seconds(1.5),
                    seconds(3.0),
                    tp_forward=tp,
                    tp_backward=tp,
                    offload=seconds(1.0) if kind == "block" else 0.0,
                    freed=pick.choice((0.0, 0.5)),
                    parts=(2, True),
                )
            )
        rules = PlayRules(0.19, *(pick.random() < 0.5 for _ in range(3)))
        every = MicroBatch(units, rules)
        assert exposed_of(units, rules, all_reduce=True) == pytest.approx(every.lost, abs=1e-6)
        # Computation, what it waits for and what makes it slower are all of the time.
        computed = sum(unit.count * (unit.forward + unit.backward) for unit in units)
        end = max(end for *_, end, _ in MicroBatch(units, rules, records=True).spans)
        assert computed + sum(every.lost) == pytest.approx(end)


class TestClusters:
    def test_fast_links_end_at_the_node_or_the_rack(self) -> None:
        assert Cluster.of("h100", 4, gpus_per_node=2).domain == 2
        assert Cluster.of("gb200", 18).domain == 72
        assert Cluster.of("gb200", 36).domain == 72  # two whole racks
        assert Cluster.of("gb200", 2).domain == 8
        assert Cluster.of("gb200", 16).domain == 64  # all of a job in one rack
        assert Cluster.of("gb200", 64).domain == 64  # 16 of the 18 nodes of each rack

    def test_names(self) -> None:
        assert gpu("H100") is gpu("h100-80gb-sxm")
        assert {"a100-40gb-sxm", "h200", "b200", "gb200", "mi300x", "cpu", "h100-pcie"} <= set(
            gpus()
        )
        with pytest.raises(PlanningError, match="there is no GPU 'h1000'; the nearest: h100"):
            gpu("h1000")

    def test_every_gpu_has_a_source(self) -> None:
        assert all(each.source for each in gpus().values())

    OWN = (
        "[gpu.MyGpu]\npeak = 100\ncapacity_gib = 20\nbandwidth = 1\ngemm_efficiency = 0.5\n"
        "gemm_start_us = 5\nnode = 4\nlink = 10\nnic = 1\n"
    )

    def test_your_own(self, tmp_path) -> None:
        file = tmp_path / "own.toml"
        table = 'collectives = "t"\n[collectives.t]\nall_gather = { 2 = [10, 5, 1] }\n'
        file.write_text(self.OWN + table)
        mine = Cluster.of("mygpu", 2, profile=file)
        assert mine.world_size == 8 and mine.gpu.name == "MyGpu"
        seconds = collective_time("all_gather", 2**30, AxisLink(2, 2), mine)
        assert seconds == pytest.approx(10e-6 + (2**30 + 1e6) / 5e9, rel=1e-6)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[gpu.x]\npeak = -1\n", "gpu.x"),
            ("[gpu.x]\nspeed = 3\n", "gpu.x has 'speed'; known are"),
            ("[gpu", "is no TOML"),
            ("gpu = 3\n", "GPUs are tables"),
            ("[collectives.x]\nall_gather = 3\n", "collectives are by operation"),
            (OWN + 'collectives = "nope"\n', "there are no collectives 'nope'"),
            (OWN + "domain = 'a'\n", "domain is 'a'"),
            (OWN + "fp32_slowdown = inf\n", "fp32_slowdown is inf"),
            (None, "can't be read"),
        ],
    )
    def test_wrong_files(self, tmp_path, text: str | None, said: str) -> None:
        file = tmp_path / "own.toml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(PlanningError, match=said):
            gpus(file)
