"""The host: what it takes, and where the GPU waits for it."""

from dataclasses import replace

import pytest

from parallel3d._play import Exposed, MicroBatch, PlayRules, UnitTimes, exposed_of
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, predict, spec_from_shapes
from parallel3d.planner.cluster import HostTimes, gpu, gpus
from parallel3d.planner.kernels import (
    attention_rate,
    best_attention,
    host_time,
    matmul_rate,
    measured_attention,
)
from parallel3d.planner.prediction import unit_terms
from parallel3d.planner.stacks import stack_of

RULES = PlayRules(0.19)
OURS = stack_of("parallel3d")
SMALL = spec_from_shapes(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=32000)


def host(*units: UnitTimes, optimizer: tuple[float, float] = (0.0, 0.0)) -> tuple[float, ...]:
    found = exposed_of(units, RULES, all_reduce=False, optimizer=optimizer)
    assert found[:5] == Exposed()[:5]
    return tuple(pytest.approx(seconds, abs=1e-9) for seconds in found[5:])


class TestPlay:
    """The GPU ends no unit before the host has issued it; the host runs ahead where it is the faster."""

    def test_max_of_both_where_all_units_are_alike(self) -> None:
        for count in (3, 40):
            unit = UnitTimes(count, 1.0, 4.0, host_forward=3.0, host_backward=3.5)
            assert (2.0 * count, 0.0, 0.0) == host(unit)

    def test_the_host_is_ahead_after_what_takes_the_gpu_long(self) -> None:
        first = UnitTimes(1, 10.0, 0.0)
        unit = UnitTimes(2, 1.0, 1.0, host_forward=4.0, host_backward=1.0)
        # The GPU has 12 to do in forward and the host 8; the other way round it waits.
        assert host(first, unit) == (0.0, 0.0, 0.0)
        assert host(unit, first) == (6.0, 0.0, 0.0)

    @pytest.mark.parametrize("count", [5, 30, 31, 100])
    def test_a_lead_that_many_units_use_up(self, count: int) -> None:
        """One unit stands for others only where it waits as they do."""
        tail = UnitTimes(1, 0.0, 20.0, host_forward=0.0)
        unit = UnitTimes(count, 2.0, 1.0, host_forward=0.0, host_backward=2.0)
        played = MicroBatch([unit, tail], RULES)
        assert host(unit, tail) == played.lost[5:]
        # 2 a unit in forward and 20 are the lead.
        assert played.lost.host_backward == pytest.approx(
            max(2 * count - 2 * count - 20 - count, 0)
        )
        slow = replace(unit, host_backward=4.0)
        lost = MicroBatch([slow, tail], RULES).lost
        assert host(slow, tail) == lost[5:]
        assert lost.host_backward == pytest.approx(max(4 * count - 3 * count - 20, 0.0))

    def test_collectives_run_while_the_gpu_waits_for_the_host(self) -> None:
        unit = UnitTimes(8, 1.0, 1.0, gather=3.0, gather_again=3.0, reduce=0.0)
        quick = exposed_of([unit], RULES, all_reduce=False)
        slow = replace(unit, host_forward=4.0, host_backward=4.0)
        found = exposed_of([slow], RULES, all_reduce=False)
        assert quick.gather > 2.5 * found.gather
        # The host's 64 seconds, and the first gather of each pass, which nothing hides.
        assert 64 <= 16 + sum(found) <= 64 + 2 * 3

    def test_experts_end_the_lead(self) -> None:
        first = UnitTimes(1, 10.0, 0.0)
        unit = UnitTimes(3, 2.0, 0.0, host_forward=4.0)
        assert host(first, unit) == (0.0, 0.0, 0.0)
        waits = replace(unit, ep_forward=1.0)
        found = exposed_of([first, waits], RULES, all_reduce=False)
        assert found.host_forward == pytest.approx(4.0)  # two units after the first that waited

    def test_the_optimizer(self) -> None:
        unit = UnitTimes(4, 1.0, 1.0, host_forward=0.5, host_backward=0.5)
        assert host(unit, optimizer=(1.0, 7.0)) == (0.0, 0.0, 2.0)  # 4 ahead
        assert host(unit, optimizer=(8.0, 12.0)) == (0.0, 0.0, 0.0)
        slow = replace(unit, host_backward=2.0)
        assert host(slow, optimizer=(1.0, 7.0)) == (0.0, 2.0, 6.0)


PROFILE = """
[gpu.mine]
peak = 989
capacity_gib = 139.8
bandwidth = 4.8
gemm_efficiency = 0.82
gemm_start_us = 3.9
node = 8
link = 450
nic = 50
watts = 700
source = "measured"
"""
MEASURED = """sustained = 0.6
attention_kernel = "cudnn"
attention = { 64 = [400, 300], 128 = [600, 500] }
host_times = { launch = 36, unit = 1100 }
"""


def profile(tmp_path, more: str = "", name: str = "mine"):
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE + more)
    return gpu(name, path)


class TestProfile:
    def test_an_old_profile(self, tmp_path) -> None:
        each = profile(tmp_path)
        assert (each.sustained, each.attention, each.host_times) == (0.0, (), HostTimes())
        assert matmul_rate(each) < 0.82 * 989e12 * 0.9  # clock, training
        assert host_time("launch", each, OURS) == 6e-6

    def test_measured_rates_stay_as_they_are(self, tmp_path) -> None:
        """Neither the power limit nor what training loses is taken off twice."""
        each = profile(tmp_path, MEASURED)
        assert matmul_rate(each) == pytest.approx(0.6 * 989e12)
        assert matmul_rate(replace(each, watts=100.0)) == matmul_rate(each)
        te = stack_of("nemo-te")  # what a stack does differently counts
        assert matmul_rate(each, te) / matmul_rate(each) == pytest.approx(1.25 / 1.15)
        fitted = OURS.with_values("fitted", {"gemm_sustained": 0.89 / 2}, "")
        assert matmul_rate(each, fitted) == pytest.approx(0.3 * 989e12)
        assert best_attention(each) == "cudnn"
        assert measured_attention(each, "cudnn", 100, 2) == (600, 500)
        assert attention_rate(each, "cudnn", 768, 64, 2) == pytest.approx(400e12 * 0.75)
        assert measured_attention(each, "flash2", 128, 2) is None

    def test_the_hosts_times_and_what_others_take_there(self, tmp_path) -> None:
        each = profile(tmp_path, MEASURED)
        assert host_time("launch", each, OURS) == pytest.approx(36e-6)
        assert host_time("unit", each, OURS) == pytest.approx(1.1e-3)
        assert host_time("unit", each, stack_of("fsdp2-2024")) == pytest.approx(1.1e-3 * 0.7 / 0.34)
        assert host_time("tp", each, OURS) == 120e-6  # not measured
        slower = OURS.with_values("slower", {"host_time": 2.0}, "")
        assert host_time("launch", each, slower) == pytest.approx(72e-6)

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("host_times = { lunch = 1 }", "host_times has 'lunch'; known are launch, unit"),
            (
                "host_times = { launch = -1 }",
                "host_times.launch is -1; it must be a number us above",
            ),
            ("host_times = 3", "host_times is 3"),
            ("sustained = -0.5", "sustained is -0.5"),
            (
                "attention = { 64 = [1, 2] }",
                "attention and attention_kernel must be given together",
            ),
            ("attention = { 64 = [0, 2] }", "TFLOP/s above 0"),
            ("attention = { wide = [1, 2] }", "head_dim = .forward, backward."),
        ],
    )
    def test_mistakes(self, tmp_path, line: str, says: str) -> None:
        with pytest.raises(PlanningError, match=says):
            profile(tmp_path, line)

    def test_two_of_one_name_are_told_apart(self) -> None:
        """Tables of collectives count too: predictions are kept by GPU."""
        h100 = gpus()["h100"]
        table = {"all_gather": {8: (1.0, 1.0, 1.0)}}
        assert replace(h100, collectives=table) != h100
        work = Workload(seq_len=2048, micro_batch=1)
        slow = replace(h100, collectives=dict.fromkeys(h100.collectives, table["all_gather"]))
        both = (
            predict(SMALL, MeshLayout(shard=8), Cluster(each), work).step_seconds
            for each in (h100, slow)
        )
        assert next(both) < next(both) / 5


def test_a_small_model_waits_for_the_host_in_each_part() -> None:
    base = gpu("h100")
    slow = replace(base, host_times=HostTimes(36.0, 1100.0, 360.0, 840.0, 32.0))
    work = Workload(seq_len=512, micro_batch=1)

    def found(each, layout=None, **more):
        layout = layout or MeshLayout(shard=8)
        given = replace(work, **more)
        return predict(SMALL, layout, Cluster(each), given)

    quick, late = found(base).time, found(slow).time
    assert late.total > 2 * quick.total
    assert set(late.host) == {"forward", "backward", "optimizer"} and min(late.host.values()) > 0
    assert late.terms["host"].value == pytest.approx(sum(late.host.values()))
    # Replicas and tp are more work for the host; recomputation issues operations twice.
    replicas, tp = found(slow, MeshLayout(2, 4)).time, found(slow, MeshLayout(1, 4, 2)).time
    assert replicas.total - late.total > 14 * 0.7e-3
    assert tp.total - late.total > 14 * 1.6e-3
    again = found(slow, checkpointing="full").time
    assert again.total - late.total > 12 * 15 * 36e-6
    twice = found(slow, global_batch=16).time
    assert twice.host["optimizer"] == pytest.approx(late.host["optimizer"])
    assert twice.host["forward"] == pytest.approx(2 * late.host["forward"], rel=0.1)
    # A large model's host is ahead.
    large = spec_from_shapes(layers=12, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000)
    work = Workload(seq_len=8192, micro_batch=1)
    time = predict(large, MeshLayout(shard=8), Cluster(slow), work).time
    assert time.terms["host"].value < 0.01 * time.total


def test_explain_says_what_was_measured(tmp_path) -> None:
    measured = Cluster(profile(tmp_path, MEASURED))
    text = predict(SMALL, MeshLayout(shard=8), measured, Workload(512, 1)).explain()
    assert "matmul rate = 5.934e+14 FLOP/s = peak * sustained" in text
    assert "power limit = " not in text
    assert "rate = 300 TFLOP/s  [measured]" in text  # attention's backward
    assert "host, launch = 3.6e-05" in text
    slower = OURS.with_values("slower", {"gemm_sustained": 0.445}, "")
    text = predict(SMALL, MeshLayout(shard=8), measured, Workload(512, 1, stack=slower)).explain()
    assert "gemm_sustained / 0.89 = 0.5" in text


class TestHostBound:
    """predict and plan say where the host decides, and what would help."""

    SLOW = Cluster(replace(gpu("h100"), host_times=HostTimes(36.0, 1100.0)))

    def found(self, cluster: Cluster, **work: object):
        given = Workload(**{"seq_len": 512, "micro_batch": 1, **work})
        return predict(SMALL, MeshLayout(shard=8), cluster, given)

    def test_what_would_help_is_predicted(self) -> None:
        each = self.found(self.SLOW)
        bound = each.host_bound
        assert bound is not None and bound.part > 0.5
        assert bound.waits == each.time.host
        changes = list(bound.helps)
        assert changes[0] == "compile=True"
        assert changes[1] == "micro-batch 16"
        assert changes[2] == "the step captured in a CUDA graph, at most"
        compiled, larger = (
            self.found(self.SLOW, compile=True),
            self.found(self.SLOW, micro_batch=16),
        )
        speeds = [p.tokens_per_second_per_gpu for p in (each, compiled, larger)]
        assert bound.helps["compile=True"] == pytest.approx(speeds[1] / speeds[0])
        assert bound.helps["micro-batch 16"] == pytest.approx(speeds[2] / speeds[0])
        device = each.step_seconds - each.time.terms["host"].value
        # At most: then collectives that the host's time hid are waited for.
        most = each.step_seconds / device
        assert 0.6 * most < bound.helps[changes[2]] <= 1.001 * most
        assert str(bound) in each.explain()
        assert str(bound).startswith(
            f"host-bound: the GPU waits for the host in {bound.part:.0%} of"
        )
        assert f"micro-batch 16 (+{speeds[2] / speeds[0] - 1:.0%} tokens/s)" in str(bound)
        assert each.as_dict()["host_bound"]["waits"] == each.time.host

    def test_changes_that_cannot_be_are_left_out(self) -> None:
        each = self.found(self.SLOW, compile=True, global_batch=8)
        assert each.host_bound is not None
        assert "compile=True" not in each.host_bound.helps
        assert each.accumulation == 1  # a larger micro-batch is a larger batch
        assert "micro-batch 16" in each.host_bound.helps
        twice = self.found(self.SLOW, global_batch=16)
        assert [name for name in twice.host_bound.helps if "micro" in name] == ["micro-batch 2"]
        small = Cluster(replace(self.SLOW.gpu, capacity_gib=3.9))
        assert self.found(small).fits and not self.found(small, micro_batch=8).fits
        (name,) = (n for n in self.found(small).host_bound.helps if "micro" in n)
        assert name in ("micro-batch 2", "micro-batch 4")

    def test_a_step_that_the_gpu_decides(self) -> None:
        large = spec_from_shapes(
            layers=4, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000
        )
        work = Workload(seq_len=8192, micro_batch=1)
        each = predict(large, MeshLayout(shard=8), Cluster.of("h100"), work)
        assert each.host_bound is None and each.as_dict()["host_bound"] is None
        assert "host-bound" not in each.explain()

    @pytest.mark.parametrize("command", [["predict", "--micro-batch", "1"], ["plan"]])
    def test_screens(self, command: list[str], tmp_path) -> None:
        testing = pytest.importorskip("typer.testing")
        from parallel3d.tools.cli.app import app

        path = tmp_path / "profile.toml"
        path.write_text(PROFILE + MEASURED)
        model = "layers=12,hidden=768,heads=12,kv_heads=12,ffn=2048,vocab=32000"
        words = [*command, "--model", model, "--seq-len", "512", "--gpu", "mine"]
        words += ["--profile", str(path)] + ["--global-batch", "8"] * (command == ["plan"])
        words += ["--shard", "8"]
        found = testing.CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
        assert found.exit_code == 0, found.output
        text = " ".join(found.output.split())
        assert "host-bound: the GPU waits for the host in" in text
        assert "compile=True (+" in text and "captured in a CUDA graph, at most (+" in text


@pytest.mark.parametrize("layout", [MeshLayout(8), MeshLayout(1, 8), MeshLayout(2, 2, 2)])
def test_explained_units_add_up_to_the_hosts_clock(layout: MeshLayout) -> None:
    each = predict(SMALL, layout, Cluster.of("h100"), Workload(2048, 1))
    for unit, times in each.time.units:
        terms = {term.name: term.value for term in unit_terms(each, unit)}
        assert terms["host forward"] == pytest.approx(times.host_forward)
        assert terms["host backward"] == pytest.approx(times.host_backward)
