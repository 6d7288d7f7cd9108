"""A stack that is fitted to measured steps, from a run's log."""

import dataclasses
import json

import pytest

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.observability.sinks import JsonLines
from parallel3d.planner import (
    Cluster,
    Workload,
    predict,
    spec_from_hf_config,
    spec_from_shapes,
)
from parallel3d.planner.measured import fit_stack, read_run, write_stack
from parallel3d.planner.stacks import read_stack_file, stack_of

LLAMA = spec_from_hf_config("llama-3.1-8b")
WORK = Workload(seq_len=4096, micro_batch=1)
LAYOUTS = [MeshLayout(1, 8, 1), MeshLayout(1, 4, 2), MeshLayout(2, 1, 4)]


def found(layout: MeshLayout, stack="parallel3d", name: str = "h100"):
    work = dataclasses.replace(WORK, stack=stack)
    return predict(LLAMA, layout, Cluster.of(name), work)


def log(path, steps, **about) -> None:
    sink = JsonLines(path)
    sink.start({"world_size": 8, "mesh": {"replicate": 1, "shard": 4, "tp": 2}} | about)
    for number, seconds in enumerate(steps):
        sink.write({"step": number, "step_seconds": seconds, "memory_reserved_peak": 2**30})
    sink.close()


class TestFit:
    def test_a_machine_that_is_slower_in_all(self) -> None:
        """One step of one layout: the others come nearer, most of the way."""
        values = {"gemm_sustained": 0.89 * 0.8, "attention_time": 1.25, "elementwise_time": 1.25}
        truth = stack_of("parallel3d").with_values("truth", values | {"collective_time": 1.25}, "")
        wanted = [found(each, truth).tokens_per_second_per_gpu for each in LAYOUTS]
        fitted = fit_stack([(found(LAYOUTS[0]), wanted[0])])
        for layout, speed in zip(LAYOUTS, wanted, strict=True):
            before = found(layout).tokens_per_second_per_gpu / speed - 1
            after = found(layout, fitted).tokens_per_second_per_gpu / speed - 1
            assert before > 0.15
            assert abs(after) < 0.05
        assert fitted.measured_on == "h100-80gb-sxm"
        assert "1 measured run on h100-80gb-sxm" in fitted.constant("gemm_sustained").source

    def test_steps_of_several_layouts_tell_what_is_slow(self) -> None:
        truth = stack_of("parallel3d").with_values("truth", {"collective_time": 1.5}, "")
        measured = [(found(each), found(each, truth).tokens_per_second_per_gpu) for each in LAYOUTS]
        fitted = fit_stack(measured)
        assert fitted.value("collective_time") > 1.25
        assert fitted.value("gemm_sustained") == pytest.approx(0.89, rel=0.05)

    def test_a_slow_host_is_told_from_a_slow_gpu(self) -> None:
        """Small steps are the host's: larger ones, that the GPU decides, are predicted as before."""
        small = spec_from_shapes(layers=12, hidden=768, heads=12, ffn=2048, vocab=32000)

        def of(micro_batch: int, shard: int = 8, stack="parallel3d"):
            work = Workload(seq_len=1024, micro_batch=micro_batch, stack=stack)
            return predict(small, MeshLayout(1, shard), Cluster.of("h100", 1, shard), work)

        truth = stack_of("parallel3d").with_values("truth", {"host_time": 4.0}, "")
        for sizes in ([1], [1, 64]):  # with one of each kind, and from a small one alone
            measured = [(of(n), of(n, 8, truth).tokens_per_second_per_gpu) for n in sizes]
            fitted = fit_stack(measured)
            assert fitted.value("host_time") == pytest.approx(4.0, rel=0.12)
            for name in ("gemm_sustained", "collective_time", "attention_time"):
                assert fitted.value(name) == pytest.approx(truth.value(name), rel=0.06)
            for micro_batch, shard in ((1, 4), (2, 8), (64, 4)):
                wanted = of(micro_batch, shard, truth).step_seconds
                assert of(micro_batch, shard, fitted).step_seconds == pytest.approx(wanted, rel=0.1)
        assert of(1, 4).step_seconds < 0.4 * of(1, 4, truth).step_seconds

    def test_the_host_is_found_where_it_was_ahead(self) -> None:
        """The GPU was predicted to decide, so that a slower host changes nothing at first."""
        truth = stack_of("parallel3d").with_values("truth", {"host_time": 12.0}, "")
        work = Workload(seq_len=1024, micro_batch=1)
        pairs = []
        for layout in (MeshLayout(1, 8), MeshLayout(2, 4)):
            before, after = (
                predict(LLAMA, layout, Cluster.of("h100"), dataclasses.replace(work, stack=stack))
                for stack in ("parallel3d", truth)
            )
            assert before.host_bound is None and after.host_bound is not None
            pairs.append((before, after.tokens_per_second_per_gpu))
        fitted = fit_stack(pairs)
        assert fitted.value("host_time") > 6
        assert fitted.value("gemm_sustained") > 0.8

    def test_what_was_predicted_moves_nothing(self) -> None:
        each = found(LAYOUTS[1])
        fitted = fit_stack([(each, each.tokens_per_second_per_gpu)])
        assert fitted.value("gemm_sustained") == pytest.approx(0.89)
        assert fitted.value("collective_time") == pytest.approx(1.0)

    def test_mistakes(self) -> None:
        with pytest.raises(PlanningError, match="measured is empty"):
            fit_stack([])
        with pytest.raises(PlanningError, match="several GPUs or stacks"):
            fit_stack([(found(LAYOUTS[0]), 1e4), (found(LAYOUTS[0], name="a100"), 1e4)])
        with pytest.raises(PlanningError, match="must be above 0"):
            fit_stack([(found(LAYOUTS[0]), 0.0)])

    def test_a_file_of_it(self, tmp_path) -> None:
        fitted = fit_stack([(found(LAYOUTS[0], "fsdp2-2024"), 5000.0)], "mine")
        again = read_stack_file(write_stack(fitted, tmp_path / "mine.toml"))
        assert (again.name, again.measured_on) == ("mine", "h100-80gb-sxm")
        assert again.attention == fitted.attention
        for layout in LAYOUTS:
            speeds = [found(layout, s).tokens_per_second_per_gpu for s in (fitted, again)]
            assert speeds[0] == pytest.approx(speeds[1], rel=1e-4)


class TestLog:
    def test_the_last_run_without_its_first_steps(self, tmp_path) -> None:
        path = tmp_path / "log.jsonl"
        log(path, [9.0] * 8, tokens_per_step=1)
        log(path, [30.0, 5.0, 3.0, 2.0, 2.2, 1.9, 8.0, 2.0], tokens_per_step=65536)
        run = read_run(path)
        assert run.layout == MeshLayout(1, 4, 2)
        assert (run.steps, run.step_seconds) == (5, 2.0)
        assert run.tokens_per_second_per_gpu == 65536 / 2.0 / 8
        assert run.memory_reserved == 2**30

    @pytest.mark.parametrize(
        ("about", "steps", "said"),
        [
            ({"tokens_per_step": None}, 9, "tokens_per_step is not known"),
            ({"tokens_per_step": 8}, 3, "has 3 steps; it must have more than 3"),
            ({"tokens_per_step": 8, "mesh": {"pp": 8}}, 9, "an axis 'pp'"),
        ],
    )
    def test_logs_that_say_too_little(self, tmp_path, about, steps: int, said: str) -> None:
        path = tmp_path / "log.jsonl"
        log(path, [1.0] * steps, **about)
        with pytest.raises(PlanningError, match=said):
            read_run(path)

    def test_what_is_no_log(self, tmp_path) -> None:
        path = tmp_path / "log.jsonl"
        with pytest.raises(PlanningError, match="can't be read"):
            read_run(path)
        path.write_text(json.dumps({"step": 1, "step_seconds": 1.0}) + "\n")
        with pytest.raises(PlanningError, match="no start line"):
            read_run(path)
