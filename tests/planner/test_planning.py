"""plan, MeshPlan and the rules that refuse layouts."""

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import (
    CHECKPOINTING,
    Cluster,
    Workload,
    plan,
    predict,
    spec_from_hf_config,
    spec_from_shapes,
)
from parallel3d.planner.constants import CONSTANTS
from parallel3d.planner.planning import MeshPlan, memory_groups
from parallel3d.planner.prediction import Prediction, unit_terms
from parallel3d.planner.workload import CP_ATTENTION

LLAMA_70B = spec_from_shapes(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, name="llama-70b"
)
LLAMA_8B = spec_from_shapes(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, name="llama-8b"
)
H100 = Cluster.of("h100", 2)


@pytest.fixture(scope="module")
def found():
    work = Workload(seq_len=8192, global_batch=64)
    return plan(
        LLAMA_8B, H100, work, checkpointing=CHECKPOINTING, shard_optimizer_over_replicate=False
    )


class TestPlan:
    def test_ranked_and_fitting(self, found) -> None:
        worth = [p.tokens_per_second_per_gpu * p.fits_probability for p in found.candidates]
        assert worth == sorted(worth, reverse=True) == [p.expected for p in found.candidates]
        assert all(p.fits and p.layout.world_size == 16 for p in found.candidates)
        assert found.best is found.candidates[0]

    def test_every_layout_is_proposed_or_refused(self, found) -> None:
        proposed = {p.layout for p in found.candidates}
        refused = {r.layout for r in found.refused}
        every = {
            MeshLayout(r, n, 16 // r // n)
            for r in (1, 2, 4, 8, 16)
            for n in (1, 2, 4, 8, 16)
            if 16 % (r * n) == 0
        }
        assert proposed | refused == every
        assert not proposed & refused

    def test_reasons(self, found) -> None:
        reasons = {r.layout.sizes: r.reason for r in found.refused}
        assert reasons[1, 1, 16].startswith("tp 16 is more than the 8 GPUs that fast links join")
        assert "GiB" in reasons[16, 1, 1]

    def test_batches(self, found) -> None:
        for each in found.candidates:
            assert each.micro_batch * each.accumulation * each.layout.data_size == 64

    def test_axes_that_are_asked_for(self) -> None:
        work = Workload(seq_len=2048, micro_batch=1)
        few = plan(LLAMA_8B, H100, work, tp=(2, 4), replicate=1, checkpointing=["full"])
        assert {p.layout.sizes for p in few.candidates} == {(1, 8, 2), (1, 4, 4)}

    def test_memory_limit(self, found) -> None:
        work = Workload(seq_len=8192, global_batch=64)
        low = plan(LLAMA_8B, H100, work, checkpointing=CHECKPOINTING, memory_limit_gib=40)
        assert low.candidates
        assert all(p.memory.needed <= 40 * 2**30 for p in low.candidates)
        assert len(low.candidates) < len(found.candidates)

    def test_nothing_fits(self) -> None:
        none = plan(LLAMA_70B, Cluster.of("a100-40gb", 1), Workload(seq_len=8192, micro_batch=1))
        assert not none.candidates
        with pytest.raises(
            PlanningError, match=r"nothing fits; .* comes closest and needs .* GiB of 39"
        ):
            none.best  # noqa: B018

    def test_sixteen_thousand_gpus_take_few_predictions(self, monkeypatch) -> None:
        predicted = []

        def counted(*args):
            predicted.append(args)
            return predict(*args)

        monkeypatch.setattr("parallel3d.planner.planning.predict", counted)
        big = plan(LLAMA_70B, Cluster.of("h100", 2048), Workload(seq_len=8192, global_batch=16384))
        assert big.best.layout.world_size == 16384
        assert 100 < len(predicted) < 1000  # one takes about a millisecond


class TestQuestions:
    def test_explain_adds_up(self, found) -> None:
        a, b = found.layouts[:2]
        text = found.explain(a.layout, b.layout)
        assert "tokens/s/GPU" in text
        lines = [line for line in text.splitlines() if line.endswith(" us")]
        total = sum(float(line.rpartition(": ")[2].removesuffix(" us")) for line in lines)
        wanted = 1e6 / a.tokens_per_second_per_gpu - 1e6 / b.tokens_per_second_per_gpu
        assert total == pytest.approx(wanted, abs=0.02)

    def test_refused_layouts_can_be_asked_for(self, found) -> None:
        assert not found.of(MeshLayout(16, 1, 1)).fits
        with pytest.raises(PlanningError, match="was refused: tp 16"):
            found.of(MeshLayout(1, 1, 16))

    def test_pareto(self, found) -> None:
        front = found.pareto()
        assert front[-1] is found.fastest and found.best in front
        for a, b in pairwise(front):
            assert a.memory.needed < b.memory.needed
            assert a.tokens_per_second_per_gpu < b.tokens_per_second_per_gpu
        for each in found.candidates:
            assert any(
                f.memory.needed <= each.memory.needed
                and f.tokens_per_second_per_gpu >= each.tokens_per_second_per_gpu
                for f in front
            )

    def test_sensitivity(self, found) -> None:
        answer = found.sensitivity()
        assert set(answer) == {"micro_batch", "seq_len", "nic", "memory bandwidth"}
        for name in ("nic", "memory bandwidth"):
            speeds = [each.tokens_per_second_per_gpu for each in answer[name]]
            assert speeds == sorted(speeds)

    @pytest.mark.parametrize("micro_batch", [1, 2])
    def test_sensitivity_has_half_as_it_is_and_twice(self, micro_batch) -> None:
        """Also of a micro-batch of 1, which can't be halved: the page and the terminal read columns."""
        work = Workload(seq_len=4096, global_batch=64, micro_batch=micro_batch)
        answer = plan(LLAMA_8B, H100, work, checkpointing="full")
        now = answer.best.tokens_per_second_per_gpu
        for tried in answer.sensitivity().values():
            assert tried[1].tokens_per_second_per_gpu == now
            assert tried[1].fits_probability == answer.best.fits_probability
        values = [each.value for each in answer.sensitivity()["micro_batch"]]
        assert values == ["1", str(micro_batch), str(2 * micro_batch)]

    def test_json(self, found) -> None:
        data = json.loads(json.dumps(found.as_dict(3)))
        assert len(data["candidates"]) == 3
        assert len(data["refused"]) == len(found.refused)
        first = data["candidates"][0]
        assert sum(first["memory_gib"].values()) == pytest.approx(first["allocated_gib"])
        assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])


def replanned(candidates: Sequence[Prediction], found: MeshPlan) -> MeshPlan:
    ranked = sorted(candidates, key=lambda p: -p.expected)
    return dataclasses.replace(found, candidates=tuple(ranked))


class TestRank:
    """By tokens/s times the probability to fit."""

    def test_what_may_not_fit_is_first_only_if_it_is_faster_by_more_than_that(self) -> None:
        """405B on 512 H100: shard 512 leaves half a GiB, and is 4 % faster than what has room."""
        model = spec_from_hf_config("llama-3.1-405b")
        work = Workload(seq_len=8192, global_batch=512)
        found = plan(model, Cluster.of("h100", 64), work)
        assert found.fastest.fits_probability < 0.7
        assert found.best.fits_probability > 0.9
        speeds = [p.tokens_per_second_per_gpu for p in (found.fastest, found.best)]
        assert speeds[0] > speeds[1] and found.fastest.expected < found.best.expected
        assert found.close[0] is found.best
        assert found.fastest.layout not in [each.layout for each in found.close]

    def test_where_all_have_room_it_is_speed(self) -> None:
        """Above about 14 % of room the probability is 97 % for all: what is left are verdicts that were wrong
        for other reasons."""
        gpu = dataclasses.replace(H100.gpu, capacity_gib=600.0)
        work = Workload(seq_len=8192, global_batch=64)
        found = plan(LLAMA_8B, dataclasses.replace(H100, gpu=gpu), work, replicate=1)
        speeds = [p.tokens_per_second_per_gpu for p in found.candidates]
        assert speeds == sorted(speeds, reverse=True) and found.best is found.fastest
        assert {round(p.fits_probability, 3) for p in found.candidates} == {0.97}

    def test_what_a_little_speed_buys(self, found) -> None:
        near = [
            p
            for p in found.candidates
            if p.tokens_per_second_per_gpu >= 0.9 * found.best.tokens_per_second_per_gpu
        ]
        least = min(near, key=lambda p: p.memory.part())
        assert least.memory.part() < found.best.memory.part() - 0.05
        assert found.roomier(0.1) is least
        few = replanned([found.best, *(p for p in found.candidates if p not in near)], found)
        assert few.roomier(0.1) is None
        data = found.as_dict(1)
        assert data["fastest"]["tokens_per_second_per_gpu"] == max(
            p.tokens_per_second_per_gpu for p in found.candidates
        )
        nearby = found.roomier()
        assert data["roomier"] == (None if nearby is None else nearby.as_dict())

    def test_settings_that_need_less_are_tried_for_what_may_not_fit(self) -> None:
        """Not only for what doesn't: HFSDP and a loss in chunks."""
        work = Workload(seq_len=8192, global_batch=64)
        found = plan(LLAMA_8B, H100, work, replicate=4, checkpointing=["none"])
        unsure = [
            p
            for p in found.candidates
            if p.fits_probability < 0.9 and not p.workload.shard_optimizer_over_replicate
        ]
        hybrid = [p for p in found.candidates if p.workload.shard_optimizer_over_replicate]
        for each in unsure:
            assert any((p.layout, p.micro_batch) == (each.layout, each.micro_batch) for p in hybrid)


class TestRefused:
    """For the settings that come nearest to fitting, of the GPU's memory and of the host's."""

    def test_memory_of_the_gpu_and_of_the_host(self) -> None:
        work = Workload(seq_len=8192, micro_batch=8)
        gpu = dataclasses.replace(H100.gpu, host_gib=4.0)
        small = dataclasses.replace(H100, gpu=gpu)
        both = plan(
            *(LLAMA_8B, small, work),
            replicate=1,
            shard=16,
            tp=1,
            chunked_loss=False,
            checkpointing="offload",
            memory_limit_gib=20,
        )
        (only,) = both.refused
        assert only.part > 1 and only.part == only.prediction.memory.part(20 * 2**30)
        assert "GiB of 20.0 and " in only.reason and "which has 3 for a GPU," in only.reason
        assert only.reason.endswith("with micro-batch 8, checkpointing offload")
        with pytest.raises(PlanningError, match=r"nothing fits; .* comes closest and needs"):
            both.best  # noqa: B018

    def test_it_is_the_nearest_of_all_that_was_tried(self) -> None:
        """With a limit the nearest is what exceeds that least, not what exceeds the whole GPU least."""
        work = Workload(seq_len=8192, global_batch=64)
        gpu = dataclasses.replace(H100.gpu, host_gib=30.0)
        found = plan(
            LLAMA_8B, dataclasses.replace(H100, gpu=gpu), work, memory_limit_gib=6.0, replicate=1
        )
        assert not found.candidates
        for each in found.refused:
            if each.prediction is None:
                assert each.part == float("inf")
                continue
            for kind in ("none", "selective", "offload", "full"):
                for chunked in (False, True):
                    other = dataclasses.replace(
                        each.prediction.workload,
                        micro_batch=each.prediction.micro_batch,
                        checkpointing=kind,
                        chunked_loss=chunked,
                    )
                    memory = predict(LLAMA_8B, each.layout, found.cluster, other).memory
                    assert each.part <= memory.part(6 * 2**30) + 1e-9


class TestPredict:
    def test_explanation_names_every_constant_with_its_source(self, found) -> None:
        text = found.best.explain()
        for name in [*found.best.time.terms, *found.best.memory.terms]:
            assert name in text
        assert "arXiv:2507.03114" in text
        named = [c for c in CONSTANTS.values() if c.source in text]
        assert len(named) >= 12

    @pytest.mark.parametrize(
        ("layout", "changes"),
        [
            *((MeshLayout(*sizes), {}) for sizes in ((1, 16, 1), (2, 4, 2), (2, 1, 8))),
            *((MeshLayout(1, 2, 2, cp=4), {"cp_attention": kind}) for kind in CP_ATTENTION),
        ],
        ids=str,
    )
    def test_the_units_parts_add_up(self, layout: MeshLayout, changes: dict) -> None:
        work = Workload(seq_len=4096, micro_batch=2, checkpointing="selective_op", **changes)
        found = predict(LLAMA_8B, layout, H100, work)
        parts: dict[str, float] = {}
        for unit in found.model.units:
            for term in unit_terms(found, unit):
                parts[term.name] = parts.get(term.name, 0.0) + unit.count * term.value
        gradients = sum(v for name, v in parts.items() if name.endswith("gradient"))
        assert gradients == pytest.approx(found.time.terms["matmul backward"].value)
        for name in ("elementwise forward", "elementwise backward", "recompute"):
            assert parts[name] == pytest.approx(found.time.terms[name].value)
        for name in ("attention forward", "attention backward"):
            assert parts[f"{name} (cudnn)"] == pytest.approx(found.time.terms[name].value)

    def test_more_is_slower_or_larger(self) -> None:
        def at(**changes):
            work = dataclasses.replace(Workload(seq_len=4096, micro_batch=2), **changes)
            return predict(LLAMA_8B, MeshLayout(1, 16, 1), H100, work)

        base = at()
        assert at(checkpointing="full").step_seconds > base.step_seconds
        assert at(checkpointing="full").memory.allocated < base.memory.allocated
        assert at(compile=True).step_seconds < base.step_seconds
        assert at(attention="naive").memory.allocated > base.memory.allocated
        assert at(reshard_after_forward=False).memory.allocated > base.memory.allocated
        assert at(reshard_after_forward=False).step_seconds < base.step_seconds
        assert at(seq_len=8192).mfu > 0

    def test_flops_are_6n_plus_attention(self) -> None:
        work = Workload(seq_len=4096, micro_batch=1)
        found = predict(LLAMA_8B, MeshLayout(1, 16, 1), H100, work)
        dense = LLAMA_8B.numel - 128256 * 4096 - 65 * 4096  # without the embedding and norms
        attention = 32 * 2 * 4096 * 4096 * (1 + 2.5)
        assert found.time.model_flops == pytest.approx(4096 * (6 * dense + attention), rel=1e-6)


WORK = Workload(seq_len=8192, global_batch=64)


class TestWhatIsTriedBeside:
    """A chunked loss, and HFSDP."""

    def test_hfsdp_is_tried_where_there_are_replicas(self) -> None:
        found = plan(LLAMA_8B, H100, WORK)
        hybrid = [p for p in found.candidates if p.workload.shard_optimizer_over_replicate]
        assert hybrid and all(p.layout.replicate > 1 for p in hybrid)
        without = plan(LLAMA_8B, H100, WORK, shard_optimizer_over_replicate=False)
        assert not any(p.workload.shard_optimizer_over_replicate for p in without.candidates)

    def test_hfsdp_holds_a_part_of_the_optimizer_and_a_copy(self) -> None:
        work = dataclasses.replace(WORK, micro_batch=1, global_batch=None)
        layout, cluster = MeshLayout(4, 4, 1), H100
        plain, hybrid = (
            predict(
                LLAMA_8B,
                layout,
                cluster,
                dataclasses.replace(work, shard_optimizer_over_replicate=each),
            )
            for each in (False, True)
        )
        held, less = plain.memory.terms, hybrid.memory.terms
        assert less["optimizer"].value == pytest.approx(held["optimizer"].value / 4, rel=1e-3)
        # fp32 over 16 ranks, and a bf16 copy over 4
        wanted = held["parameters"].value * (1 / 4 + 1 / 2)
        assert less["parameters"].value == pytest.approx(wanted, rel=1e-3)
        assert hybrid.time.terms["optimizer"].value < plain.time.terms["optimizer"].value

    def test_what_it_reduces_over_replicate_is_explained(self) -> None:
        work = Workload(4096, 1, shard_optimizer_over_replicate=True)
        found = predict(LLAMA_8B, MeshLayout(4, 4, 1), H100, work)
        for unit, times in found.time.units:
            terms = {term.name: term.value for term in unit_terms(found, unit)}
            assert terms["reduce over replicate"] == times.all_reduce > 0
            assert "all-reduce" not in terms

    def test_a_chunked_loss_is_tried_where_logits_are_much(self) -> None:
        work = dataclasses.replace(WORK, micro_batch=8, global_batch=None)
        found = plan(LLAMA_8B, H100, work, shard=16)
        chunked = [p for p in found.candidates if p.workload.chunked_loss]
        assert chunked and all(memory_groups(p)["logits, loss"] < 8 * 2**30 for p in chunked)
        without = plan(LLAMA_8B, H100, work, shard=16, chunked_loss=False)
        assert not any(p.workload.chunked_loss for p in without.candidates)

    def test_other_stacks_have_neither(self) -> None:
        work = dataclasses.replace(WORK, stack="fsdp2-2024", micro_batch=8, global_batch=None)
        found = plan(LLAMA_8B, H100, work)
        every = [*found.candidates, *(r.prediction for r in found.refused if r.prediction)]
        assert not any(
            p.workload.chunked_loss or p.workload.shard_optimizer_over_replicate for p in every
        )
