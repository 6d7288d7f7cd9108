"""cp in the planner: what is divided, what attention sends, which layouts are tried and refused."""

import json
from dataclasses import replace

import pytest

from parallel3d.cp import choose
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, plan, predict, spec_from_shapes
from parallel3d.planner.cluster import AxisLink, collective_time, link_of
from parallel3d.planner.context import exchanges, kept, share_of
from parallel3d.planner.kernels import activations_of, attention_time, kernels_of
from parallel3d.planner.memory import state_memory
from parallel3d.planner.model_spec import AttentionSpec
from parallel3d.planner.planning import refusal, short
from parallel3d.planner.workload import CP_ATTENTION, Local

LLAMA = spec_from_shapes(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, name="llama-8b"
)
NODE, FOUR = Cluster.of("h100"), Cluster.of("h100", 4)
GPU = NODE.gpu
LONG = Workload(seq_len=131072, micro_batch=1, checkpointing="full", chunked_loss=True)
BLOCK = next(unit for unit in LLAMA.units if unit.kind == "block")
(ATTENTION,) = BLOCK.attention


def of(kind: str, **more) -> Workload:
    return replace(LONG, cp_attention=kind, **more)


def local(work: Workload, tp: int = 1, cp: int = 1) -> Local:
    return Local(GPU, work, tp, cp=cp)


class TestDivided:
    @pytest.mark.parametrize("checkpointing", ["none", "full"])
    def test_activations_and_logits(self, checkpointing: str) -> None:
        """A ring keeps nothing more."""
        work = of("ring", checkpointing=checkpointing, chunked_loss=False)
        whole, part = (activations_of(LLAMA, local(work, cp=cp)) for cp in (1, 8))
        assert part.kept * 8 == whole.kept
        assert part.logits * 8 == whole.logits
        assert part.block * 8 == whole.block

    def test_parameters_lie_on_shard_and_cp(self) -> None:
        joined = MeshLayout(2, 2, 2, cp=4), MeshLayout(2, 8, 2)
        held = [state_memory(LLAMA, layout, LONG) for layout in joined]
        numbers = [{k: v for k, v in vars(each).items() if k != "inputs"} for each in held]
        assert numbers[0] == numbers[1]
        assert held[0].inputs["cp"] == 4

    def test_their_gather_is_that_of_as_many_shards(self) -> None:
        found = [
            predict(LLAMA, layout, FOUR, of("ring"))
            for layout in (MeshLayout(1, 4, 1, cp=8), MeshLayout(1, 32, 1))
        ]
        gathers = [
            next(times for unit, times in each.time.units if unit.kind == "block").gather
            for each in found
        ]
        assert gathers[0] == gathers[1] > 0

    def test_tokens_and_flops(self) -> None:
        """Of the whole cluster they are the same, however its GPUs are divided."""
        layouts = MeshLayout(1, 8, 1), MeshLayout(1, 2, 1, cp=4), MeshLayout(1, 1, 2, cp=4)
        work = of("ulysses")
        found = [
            predict(LLAMA, each, NODE, replace(work, micro_batch=None, global_batch=8))
            for each in layouts
        ]
        assert [p.tokens_per_gpu for p in found] == [131072] * 3
        flops = [p.time.model_flops for p in found]
        assert flops == pytest.approx([flops[0]] * 3)
        again = [p.time.hardware_flops for p in found]
        assert again == pytest.approx([again[0]] * 3, rel=1e-3)

    def test_sequences_are_padded_to_two_parts_a_rank(self) -> None:
        assert Workload(seq_len=1001).local_tokens(1) == 1001
        assert Workload(seq_len=1001).local_tokens(4) == 252  # 8 parts of 126
        assert Workload(seq_len=1024).local_tokens(4) == 256


class TestAttention:
    @pytest.mark.parametrize("kind", CP_ATTENTION)
    def test_scores_are_shared_evenly(self, kind: str) -> None:
        share = share_of(ATTENTION, local(of(kind), cp=8))
        assert share.heads.query * share.part == 4
        seconds = attention_time(ATTENTION, local(of(kind), cp=8))
        plain = attention_time(ATTENTION, local(LONG, cp=1))
        for mine, all_of_it in zip(seconds, plain, strict=True):
            assert all_of_it / 8 <= mine < 1.25 * all_of_it / 8

    def test_a_ring_joins_one_result_a_step(self) -> None:
        assert share_of(ATTENTION, local(of("ulysses"), cp=8)).joins == 0
        assert share_of(ATTENTION, local(of("gather"), cp=8)).joins == 2
        assert share_of(ATTENTION, local(of("ring"), cp=8)).joins == 9
        both = replace(ATTENTION, causal=False)
        assert share_of(both, local(of("ring"), cp=8)).joins == 8

    def test_heads_that_cp_does_not_divide(self) -> None:
        six = AttentionSpec(6, 2, 128)
        assert share_of(six, local(of("ulysses"), cp=4)).heads.query == 2
        assert share_of(six, local(of("ring"), cp=4)).heads.query == 6

    def test_bytes_by_hand(self) -> None:
        """8B: 32 query heads, 8 of keys and values, of 128; 16,384 tokens on each of 8 ranks; bf16."""
        head = 16384 * 128 * 2

        def sent(kind: str) -> list[tuple[str, str, float, int]]:
            found = exchanges(ATTENTION, local(of(kind), cp=8))
            return [(e.way, e.operation, e.nbytes, e.count) for e in found]

        assert sent("ulysses") == [
            ("forward", "all_to_all", head * (32 + 16 + 32) / 2, 2),
            ("backward", "all_to_all", head * (32 + 16 + 32) / 2, 2),
        ]
        assert sent("gather") == [
            ("forward", "all_gather", 8 * head * 16, 1),
            ("backward", "reduce_scatter", 8 * head * 16, 1),
        ]
        assert sent("ring") == [
            ("forward", "send", head * 16, 7),
            ("backward", "send", head * 16, 15),
        ]
        assert exchanges(ATTENTION, local(LONG)) == ()

    def test_what_is_kept_by_hand(self) -> None:
        assert kept(ATTENTION, local(of("ring"), cp=8)).beyond == 0
        assert kept(ATTENTION, local(of("ulysses"), cp=8)).beyond == 32 * 128
        assert kept(ATTENTION, local(of("ulysses"), cp=16)).beyond == (32 + 2 * 8) * 128  # 16 for 8
        assert kept(ATTENTION, local(of("gather"), cp=8)).beyond == 7 * 2 * 8 * 128

    def test_a_ring_hides_what_it_sends(self) -> None:
        """Waited for is only what is longer than the kernels beside it: here nothing but the last send."""
        hidden = predict(LLAMA, MeshLayout(1, 1, 1, cp=8), NODE, of("ring"))
        slow = replace(NODE, gpu=replace(GPU, collectives={}, link=5.0))
        waited = predict(LLAMA, MeshLayout(1, 1, 1, cp=8), slow, of("ring"))
        part = [p.time.terms["context parallel"].value / p.step_seconds for p in (hidden, waited)]
        assert part[0] < 0.01 < 0.2 < part[1]

    def test_auto_is_what_the_library_takes(self) -> None:
        for cp, tp in ((8, 1), (4, 1), (4, 2), (2, 4)):
            layout = MeshLayout(8 // cp // tp or 1, 1, tp, cp=cp)
            found = predict(LLAMA, layout, NODE, LONG)
            numbers = {"size": cp, "batch": 1, "length": 131072, "channels": 128}
            heads = {"heads": 32 // tp, "kv_heads": 8 // tp}
            assert found.workload.cp_attention == choose(**numbers, **heads).kind


class TestNetwork:
    def test_on_one_node(self) -> None:
        """An all-to-all's bytes leave a rank as fast as an all-gather's do; of a send all bytes leave."""
        link, size = AxisLink(8, 8), 2.0**30
        gathered = 372e9
        seconds = collective_time("all_to_all", size, link, NODE)
        assert seconds == pytest.approx(11.4e-6 + size / gathered)
        seconds = collective_time("send", size, link, NODE)
        assert seconds == pytest.approx(11.4e-6 + size / (gathered * 7 / 8))

    def test_across_nodes_a_rank_has_its_own_card(self) -> None:
        size, card = 2.0**30, 0.96 * 50e9
        link = AxisLink(32, 8)
        seconds = collective_time("all_to_all", size, link, FOUR)
        assert seconds == pytest.approx(size * 24 / 32 / card, rel=0.02)
        assert collective_time("send", size, link, FOUR) == pytest.approx(size / card, rel=0.02)

    def test_cp_lies_between_shard_and_tp(self) -> None:
        assert link_of(MeshLayout(1, 4, 1, cp=8), "cp", FOUR) == AxisLink(8, 8)
        assert link_of(MeshLayout(1, 1, 4, cp=8), "cp", FOUR) == AxisLink(8, 2)
        within = predict(LLAMA, MeshLayout(1, 4, 1, cp=8), FOUR, of("ulysses"))
        across = predict(LLAMA, MeshLayout(1, 1, 4, cp=8), FOUR, of("ulysses"))
        waits = [
            p.time.terms["context parallel"].value / p.tokens_per_gpu for p in (within, across)
        ]
        assert waits[1] > waits[0]


class TestPlan:
    def test_only_long_sequences_are_cut(self) -> None:
        def sizes(length: int, **more) -> set[int]:
            work = Workload(seq_len=length, global_batch=8, checkpointing="full", chunked_loss=True)
            found = plan(LLAMA, NODE, work, **more)
            tried = (*found.candidates, *found.refused)
            return {each.layout.cp for each in tried}

        assert sizes(8192) == {1}
        assert sizes(32768) == {1, 2}
        assert sizes(131072) == {1, 2, 4, 8}
        assert sizes(8192, cp=(2, 4)) == {2, 4}
        assert sizes(131072, cp=1) == {1}

    def test_a_sequence_that_needs_it(self) -> None:
        """256k tokens of 8B on one node, without help by the host."""
        work = replace(LONG, seq_len=262144, micro_batch=None, global_batch=8)
        found = plan(LLAMA, NODE, work, tp=1)
        assert found.best.layout.cp > 1
        assert not found.of(MeshLayout(1, 8, 1)).fits
        assert "cp" in short(found.best) and "cp" not in short(found.of(MeshLayout(1, 8, 1)))

    @pytest.mark.parametrize(
        ("layout", "changes", "said"),
        [
            ((1, 1, 1, 8), {"seq_len": 14}, "cp 8 cuts sequences into 16 parts, and they have 14"),
            ((1, 1, 8, 8), {}, "cp 8 is more than the 4 heads of a tp rank, which ulysses shares"),
        ],
    )
    def test_refusals(self, layout: tuple, changes: dict, said: str) -> None:
        *sizes, cp = layout
        work = replace(of("ulysses"), **changes)
        assert said in str(refusal(LLAMA, MeshLayout(*sizes, cp=cp), FOUR, work))

    def test_a_model_without_attention(self) -> None:
        units = [replace(unit, attention=()) for unit in LLAMA.units]
        none = replace(LLAMA, units=tuple(units), heads=0)
        assert "has no attention" in str(refusal(none, MeshLayout(1, 4, 1, cp=2), NODE, LONG))

    def test_predictions_that_can_not_be(self) -> None:
        with pytest.raises(PlanningError, match="'ulysses': cp 8 is more than the 4 heads"):
            predict(LLAMA, MeshLayout(1, 1, 8, cp=8), Cluster.of("h100", 8), of("ulysses"))
        with pytest.raises(PlanningError, match="zero1 shards nothing over shard, which is 8"):
            predict(LLAMA, MeshLayout(1, 8, 1), NODE, of("ring", sharding="zero1"))
        with pytest.raises(PlanningError, match="must be one of auto, ulysses, gather, ring"):
            of("rings")

    def test_json_and_explanation(self) -> None:
        found = predict(LLAMA, MeshLayout(1, 1, 2, cp=4), NODE, of("ring"))
        data = json.loads(json.dumps(found.as_dict()))
        assert data["layout"] == {"replicate": 1, "shard": 1, "cp": 4, "tp": 2}
        assert data["cp_attention"] == "ring"
        text = found.explain()
        for words in ("cp send forward, 3 times", "context parallel", "joined results", "cp = 4"):
            assert words in text
        plain = predict(LLAMA, MeshLayout(1, 4, 2), NODE, LONG).as_dict()
        assert plain["layout"] == {"replicate": 1, "shard": 4, "tp": 2}
        assert "cp_attention" not in plain

    def test_without_cp_nothing_has_changed(self) -> None:
        one, other = (kernels_of(BLOCK, local(of(kind), tp=2)) for kind in ("auto", "ring"))
        assert one == other
