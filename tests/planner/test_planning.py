"""plan, MeshPlan and the rules that refuse layouts."""

import dataclasses
import json
from itertools import pairwise

import pytest

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import CHECKPOINTING, Cluster, Workload, plan, predict, spec_from_shapes
from parallel3d.planner.constants import CONSTANTS
from parallel3d.planner.planning import memory_groups
from parallel3d.planner.prediction import unit_terms
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
        speeds = [p.tokens_per_second_per_gpu for p in found.candidates]
        assert speeds == sorted(speeds, reverse=True)
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
        assert front[-1] is found.best
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
            speeds = [speed for _, speed, _ in answer[name]]
            assert speeds == sorted(speeds)

    @pytest.mark.parametrize("micro_batch", [1, 2])
    def test_sensitivity_has_half_as_it_is_and_twice(self, micro_batch) -> None:
        """Also of a micro-batch of 1, which can't be halved: the page and the terminal read columns."""
        work = Workload(seq_len=4096, global_batch=64, micro_batch=micro_batch)
        answer = plan(LLAMA_8B, H100, work, checkpointing="full")
        now = answer.best.tokens_per_second_per_gpu
        assert all(tried[1][1] == now for tried in answer.sensitivity().values())
        values = [value for value, *_ in answer.sensitivity()["micro_batch"]]
        assert values == ["1", str(micro_batch), str(2 * micro_batch)]

    def test_json(self, found) -> None:
        data = json.loads(json.dumps(found.as_dict(3)))
        assert len(data["candidates"]) == 3
        assert len(data["refused"]) == len(found.refused)
        first = data["candidates"][0]
        assert sum(first["memory_gib"].values()) == pytest.approx(first["allocated_gib"])
        assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])


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
