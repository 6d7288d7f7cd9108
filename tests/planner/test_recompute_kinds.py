"""Kinds of recomputation: what each keeps, computes again, sends again and moves to the host."""

from dataclasses import replace

import pytest

from parallel3d.mesh import MeshLayout
from parallel3d.planner import CHECKPOINTING, Cluster, Workload, plan, predict, spec_from_shapes
from parallel3d.planner.cluster import collective_time, link_of
from parallel3d.planner.constants import constant
from parallel3d.planner.kernels import activations_of, memory_rate, offloaded
from parallel3d.planner.recompute import KINDS, OWN
from parallel3d.planner.step_time import host_rate, tp_collectives
from parallel3d.planner.workload import Local

LLAMA = spec_from_shapes(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, name="llama-8b"
)
H100 = Cluster.of("h100", 2)
WORK = Workload(seq_len=8192, micro_batch=1)
BLOCK = next(unit for unit in LLAMA.units if unit.kind == "block")


def kept(kind: str, tp: int = 1, **more):
    return activations_of(LLAMA, Local(H100.gpu, replace(WORK, checkpointing=kind, **more), tp))


def at(kind: str, layout: MeshLayout | None = None, cluster: Cluster = H100, **more):
    work = replace(WORK, checkpointing=kind, **more)
    return predict(LLAMA, layout or MeshLayout(1, 16, 1), cluster, work)


def test_parallelize_has_these() -> None:
    assert OWN == ("none", "selective", "offload", "full")
    assert [KINDS[kind].argument for kind in OWN] == [False, "selective", "offload", True]
    assert set(OWN) < set(CHECKPOINTING)


def test_what_selective_keeps_of_a_llama_block() -> None:
    h, q, kv, f, heads = 4096, 4096, 1024, 14336, 32
    matmuls = q + 2 * kv + h + 2 * f + h
    by_hand = 2 * (h + matmuls + q) + 4 * heads  # input, results, attention's and its sums
    others = kept("none").kept - 32 * WORK.seq_len * _whole_block()
    assert kept("selective").kept == others + 32 * WORK.seq_len * by_hand


def _whole_block() -> float:
    """Bytes a token that a block keeps without recomputation."""
    work = replace(WORK, checkpointing="offload")
    return offloaded(BLOCK, Local(H100.gpu, work))


def test_under_tp_selective_keeps_sums_and_gathered_inputs() -> None:
    h, q, kv, f, heads, tp = 4096, 4096, 1024, 14336, 32, 8
    results = (q + 2 * kv + 2 * f) / tp + 2 * h / tp + 2 * h
    by_hand = 2 * (h / tp + results + q / tp) + 4 * heads / tp
    others = kept("full", tp).kept - 32 * WORK.seq_len * 2 * h // tp
    assert kept("selective", tp).kept == others + 32 * WORK.seq_len * by_hand


def test_memory_and_time_in_their_order() -> None:
    none, selective, offload, full = (at(kind) for kind in OWN)
    sizes = [each.memory.allocated for each in (none, selective, full, offload)]
    assert sizes == sorted(sizes, reverse=True)
    assert none.step_seconds < selective.step_seconds < full.step_seconds
    again = [each.time.terms["recompute"].value for each in (none, selective, offload, full)]
    assert again[0] == again[2] == 0 < again[1] < again[3]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *(("none", 0), ("selective", 0), ("offload", 0), ("full", 1)),
        *(("full_offload", 1), ("selective_op", 0.5), ("selective_layer", 0.5)),
    ],
)
def test_collectives_that_are_sent_again(kind: str, part: float) -> None:
    """Of tp and of cp; selective recomputation repeats none. Nothing repeats the block's last matmul, and so
    not what sums its result over tp: of two sums and two gathers of equal size."""
    layout = MeshLayout(1, 2, 4, cp=2)
    each, plain = (at(k, layout, cp_attention="ulysses") for k in (kind, "none"))
    (_, times), (_, before) = (
        next(u for u in found.time.units if u[0].kind == "block") for found in (each, plain)
    )
    for axis in ("tp", "cp"):
        forward = getattr(times, f"{axis}_forward")
        assert forward == getattr(before, f"{axis}_forward") > 0
        repeated = getattr(times, f"{axis}_backward") - getattr(before, f"{axis}_backward")
        last = 0.0
        if axis == "tp":
            unit, link = plain.model.units[1], link_of(plain.layout, "tp", plain.cluster)
            calls = tp_collectives(unit, plain.local)
            (*_, (_, kind_of, nbytes)) = (call for call in calls if call[0] == "forward")
            last = 1.4 * collective_time(kind_of, nbytes, link, plain.cluster)
        assert repeated == pytest.approx(part * (forward - last))


class TestOffload:
    def test_what_is_not_here_is_there(self) -> None:
        """All but two blocks' are in the host's memory; the last block's never go."""
        offload, none = kept("offload"), kept("none")
        assert offload.kept + offload.host == none.kept
        assert offload.host == 31 * WORK.seq_len * _whole_block()
        assert offload.block == WORK.seq_len * _whole_block()
        assert none.host == kept("full").host == 0

    def test_full_offload_moves_inputs(self) -> None:
        moved, full = kept("full_offload"), kept("full")
        assert moved.host == 31 * WORK.seq_len * 2 * 4096
        assert moved.kept + moved.host == full.kept

    def test_what_blocks_wait_for(self) -> None:
        found = at("offload")
        _, times = next(u for u in found.time.units if u[0].kind == "block")
        copy = WORK.seq_len * _whole_block() / host_rate(H100)
        sent = times.gather - 6 * BLOCK.numel / 16 / memory_rate(H100.gpu)  # without the cast
        network = sent * H100.nic / (H100.gpu.host * constant("host_efficiency").value)
        assert times.offload == pytest.approx(copy + network)
        copy = times.offload
        # Copies back are issued with the block's all-gather, when the memory of a reduction is free.
        beside = (1 - times.freed) * times.backward
        waited = max(0.0, copy - times.forward) + max(0.0, copy - beside)
        assert waited > 0
        # The first copy has the first block's forward too. Where gathers make the computation slower it waits
        # less for the copies beside it.
        least = 31 * waited - times.forward - found.time.terms["slowdown"].value
        assert least < found.time.terms["exposed offload"].value <= 31 * waited

    def test_a_faster_link_hides_it(self) -> None:
        fast = replace(H100, gpu=replace(H100.gpu, host=1000.0))
        quick, none = at("offload", cluster=fast), at("none", cluster=fast)
        assert quick.time.terms["exposed offload"].value == 0
        assert quick.step_seconds == pytest.approx(none.step_seconds)

    @pytest.mark.parametrize(
        ("name", "part"), [("h100", 0.82), ("a100", 0.5), ("gb200", 0.95), ("gh200", 1)]
    )
    def test_the_gpus_of_a_node_share_the_way_to_its_memory(self, name: str, part: float) -> None:
        """One that is alone has its link; of two A100 each can have a switch of its own, of eight not."""
        node = Cluster.of(name)
        one = Cluster.of(name, nodes=node.world_size, gpus_per_node=1)
        assert host_rate(one) == node.gpu.host * 1e9 * constant("host_efficiency").value
        assert host_rate(node) == pytest.approx(part * host_rate(one))
        if name == "a100":
            assert host_rate(Cluster.of(name, gpus_per_node=4)) == host_rate(one)

    def test_eight_hopper_gpus_copy_as_measured(self) -> None:
        """8 H800 reach 359 GB/s to the host's memory together, one of them 55."""
        node, one = Cluster.of("h800"), Cluster.of("h800", gpus_per_node=1)
        assert 8 * host_rate(node) == pytest.approx(358.66e9, rel=0.03)
        assert host_rate(one) == pytest.approx(55.15e9, rel=0.03)

    def test_gathers_between_nodes_use_the_same_link(self) -> None:
        """Of PCIe; NVLink to a Grace isn't the way to the network card."""
        layout = MeshLayout(1, 16, 1)
        for name, shares in (("h100", True), ("gh200", False)):
            near = Cluster.of(name, gpus_per_node=16)
            far = Cluster.of(name, nodes=16, gpus_per_node=1)
            _, times = next(
                u for u in at("offload", layout, far).time.units if u[0].kind == "block"
            )
            copy = WORK.seq_len * _whole_block() / host_rate(far)
            assert (times.offload > 1.01 * copy) == shares
            _, times = next(
                u for u in at("offload", layout, near).time.units if u[0].kind == "block"
            )
            assert times.offload == pytest.approx(WORK.seq_len * _whole_block() / host_rate(near))

    def test_the_hosts_memory_is_a_limit(self) -> None:
        small = replace(H100, gpu=replace(H100.gpu, host_gib=8.0))
        found = at("offload", cluster=small)
        assert found.memory.needed < found.memory.capacity and not found.fits
        tried = plan(LLAMA, small, WORK, shard=16, tp=1, checkpointing="offload")
        assert not tried.candidates
        (reason,) = {r.reason for r in tried.refused}
        assert "of the host's memory, which has 6 for a GPU" in reason


class TestPlan:
    def test_all_that_parallelize_has_are_tried(self) -> None:
        found = plan(LLAMA, H100, WORK, tp=1, shard=16)
        assert {p.workload.checkpointing for p in found.candidates} == set(OWN)

    def test_but_the_workloads_own_if_it_has_one(self) -> None:
        found = plan(LLAMA, H100, replace(WORK, checkpointing="full"), tp=1, shard=16)
        assert {p.workload.checkpointing for p in found.candidates} == {"full"}
        found = plan(LLAMA, H100, WORK, tp=1, shard=16, checkpointing="none")
        assert {p.workload.checkpointing for p in found.candidates} == {"none"}

    def test_it_chooses(self) -> None:
        """The fastest that fits: the less memory there is, the more is computed again."""
        limits = {}
        for p in plan(LLAMA, H100, WORK, tp=1, shard=16).recomputation():
            limits[p.workload.checkpointing] = p.memory.needed / 2**30
        for kind in ("none", "selective", "full"):
            found = plan(LLAMA, H100, WORK, tp=1, shard=16, memory_limit_gib=limits[kind] + 0.1)
            assert found.best.workload.checkpointing == kind

    def test_what_each_kind_costs(self) -> None:
        found = plan(LLAMA, H100, WORK, tp=1, shard=16)
        each = found.recomputation()
        assert [p.workload.checkpointing for p in each] == list(OWN)
        assert {(p.layout, p.micro_batch) for p in each} == {
            (found.best.layout, found.best.micro_batch)
        }
        other = at("selective_op")
        kinds = [p.workload.checkpointing for p in found.recomputation(other)]
        assert kinds == [*OWN, "selective_op"]


class TestChunkedLoss:
    def test_a_chunk_has_as_many_logits_as_hidden_elements(self) -> None:
        whole, chunked = kept("none").logits, kept("none", chunked_loss=True).logits
        rows = WORK.seq_len * 4096 // 128256
        assert chunked == 128256 * (rows * 14 + 4 * 4096)
        assert whole == 128256 * WORK.seq_len * 14

    def test_the_head_multiplies_once_more(self) -> None:
        found, plain = at("none", chunked_loss=True), at("none")
        again = found.time.terms["recompute"].value
        assert 0 < again < plain.time.terms["matmul forward"].value / 4
        assert found.step_seconds > plain.step_seconds
        assert "matmul forward (chunked loss)" in found.explain()


def test_float8_is_faster_but_not_twice() -> None:
    half, eighth = at("none"), at("none", float8=True)
    ratio = half.time.terms["matmul forward"].value / eighth.time.terms["matmul forward"].value
    assert 1.2 < ratio < 1.8
    assert half.memory.allocated == eighth.memory.allocated
    assert "float8_cast = 5" in eighth.explain()
