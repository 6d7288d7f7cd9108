"""Each warning where it is due, with its numbers, and none where it isn't."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import pytest
from _support.tools.dryrun.made_runs import Llama, Program

from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.compare import compare
from parallel3d.tools.dryrun.result import (
    DryRun,
    DryRunWarning,
    LiveTensor,
    MemorySample,
    ParameterPlacement,
    Peak,
    UnknownRead,
)
from parallel3d.tools.dryrun.timeline import timeline
from parallel3d.tools.dryrun.warnings import all_warnings, needed_bytes, warnings_of
from parallel3d.tools.dryrun.wording import counted, in_bytes, in_seconds, pattern_of, some

GIB = 2**30
LAYOUT = MeshLayout(2, 4, 2)
SOUND = Llama(layers=8, checkpointing=True)


def kinds(run: DryRun) -> list[str]:
    return [each.kind for each in warnings_of(run)]


def text(run: DryRun, kind: str) -> str:
    """Of the one warning of this kind."""
    (found,) = [each.text for each in warnings_of(run) if each.kind == kind]
    return found


def calling(*calls: tuple[str, str | None, int], **more: object) -> Llama:
    """A sound model whose blocks make these (op, axis, bytes) calls in forward."""

    def before(program: Program, layer: int) -> None:
        for op, axis, size in calls:
            program.issue(op, axis, size, **more)  # type: ignore[arg-type]

    return replace(SOUND, before=before)


def test_a_sound_run_has_none() -> None:
    assert warnings_of(SOUND.run(LAYOUT, unknown=())) == ()


def test_gathers_that_nothing_hides() -> None:
    behind = replace(SOUND, prefetch=False).run(LAYOUT)
    found = text(behind, "exposed gather")
    assert "14 gathers a step" in found  # of 15: something has to be first
    assert "7 in forward, 7 in backward" in found and "layers.*" in found
    lost = timeline(behind).exposed()["shard"]
    assert "ms of a step of" in found and "set_modules_to_forward_prefetch" in found
    assert "exposed gather" not in kinds(SOUND.run(LAYOUT))
    # The only gather of a step can't be hidden, and is no fault.
    assert "exposed gather" not in kinds(replace(SOUND, layers=1, steps=1).run(LAYOUT))
    assert lost > 0


def test_gathers_that_are_hidden_in_part_are_no_faults_of_order() -> None:
    slow = replace(SOUND, tokens=512).run(MeshLayout(1, 32, 1))
    found = kinds(slow)
    assert "exposed gather" not in found
    words = text(slow, "communication longer than computation")
    assert "on shard" in words and "HSDP" in words
    assert "communication longer than computation" not in kinds(SOUND.run(LAYOUT))


def test_tensor_parallelism_across_nodes() -> None:
    found = text(SOUND.run(MeshLayout(1, 2, 16)), "tp across nodes")
    assert "16 ranks) lies on 2 nodes of 8" in found and "Make tp 8" in found
    assert "50 GB/s" in found
    assert "tp across nodes" in kinds(SOUND.run(MeshLayout(1, 1, 8), gpus_per_node=4))
    assert "tp across nodes" not in kinds(SOUND.run(MeshLayout(1, 2, 8)))


def test_tiny_messages() -> None:
    tiny = calling(*[("all_gather", "shard", 4096)] * 100, asynchronous=False)
    found = text(tiny.run(LAYOUT), "tiny messages")
    assert "800 collectives a step on shard" in found
    assert "median 4.00 KiB, 3.12 MiB in all" in found and "larger units" in found
    over_tp = calling(*[("all_reduce", "tp", 4096)] * 300, asynchronous=False)
    assert "fewer ranks" in text(over_tp.run(LAYOUT), "tiny messages")
    once = calling(("all_gather", "shard", 4096), asynchronous=False)
    assert "tiny messages" not in kinds(once.run(LAYOUT))
    large = calling(*[("all_gather", "shard", 2**28)] * 100, asynchronous=False)
    assert "tiny messages" not in kinds(large.run(LAYOUT))


def test_groups_of_no_axis() -> None:
    odd = calling(("all_reduce", None, 64), group_size=3, asynchronous=False).run(LAYOUT)
    found = text(odd, "no known axis")
    assert "16 collectives" in found and "16 all_reduce of 3 ranks" in found
    assert "layers.0, layers.1, layers.2 and 5 more" in found
    # Over all ranks a few numbers are usual, a lot is not.
    assert "no known axis" not in kinds(calling(("all_reduce", None, 64)).run(LAYOUT))
    assert "no known axis" in kinds(calling(("all_reduce", None, 2**21)).run(LAYOUT))
    assert "no known axis" not in kinds(calling(("barrier", None, 0), group_size=3).run(LAYOUT))


def test_what_blocks_on_a_data_axis() -> None:
    slow = calling(("all_gather", "shard", 2**24), asynchronous=False).run(LAYOUT)
    found = text(slow, "blocking collective")
    assert "8 collectives a step" in found and "8 all_gather on shard" in found
    assert "async_op=True" in found
    for call in (
        calling(("all_reduce", "shard", 64), asynchronous=False),  # a norm
        calling(("all_reduce", "tp", 2**24), asynchronous=False),
        calling(("all_gather", "shard", 2**24)),
    ):
        assert "blocking collective" not in kinds(call.run(LAYOUT))


def test_parameters_gathered_twice_in_a_forward() -> None:
    def before(program: Program, layer: int) -> None:
        if layer in (3, 4):
            index = program.issue("all_gather", "shard", 2**24, "layers.0.shared")
            program.wait(index)

    found = text(replace(SOUND, before=before).run(LAYOUT), "gathered twice")
    assert "1 gather a step (16.0 MiB)" in found and "layers.0.shared" in found
    assert "gathered twice" not in kinds(SOUND.run(LAYOUT))  # in forward and in backward


def micro_batches(sum_each: bool) -> DryRun:
    program = Program(MeshLayout(2, 4, 1))
    for last in (False, True):
        program.phase = "forward"
        program.wait(program.issue("all_gather", "shard", 2**24, "layers.0"))
        program.elementwise(10**10)
        program.phase = "backward"
        program.elementwise(10**10)
        program.wait(program.issue("reduce_scatter", "shard", 2**24, "layers.0"))
        if sum_each or last:
            program.wait(program.issue("all_reduce", "replicate", 2**22, "layers.0"))
    program.step = 1
    return program.made()


def test_gradients_summed_over_replicate_in_each_micro_batch() -> None:
    found = text(micro_batches(sum_each=True), "reduced in every micro-batch")
    assert "up to 2 times" in found and "1 collective and 4.00 MiB" in found
    good = kinds(micro_batches(sum_each=False))
    assert "reduced in every micro-batch" not in good
    assert "gathered twice" not in good  # each micro-batch has a forward of its own


def test_reductions_of_low_precision_over_many_ranks() -> None:
    low = replace(SOUND, reduce_dtype="bfloat16")
    found = text(low.run(MeshLayout(1, 64, 1)), "reduction of low precision")
    assert "8 gradients' sums over 64 ranks of shard" in found
    assert f"{2**-9 * sqrt(64):.1%}" in found and "reduce_dtype=torch.float32" in found
    half = replace(SOUND, reduce_dtype="float16")
    assert "overflow" in text(half.run(MeshLayout(1, 64, 1)), "reduction of low precision")
    assert "reduction of low precision" not in kinds(low.run(LAYOUT))
    assert "reduction of low precision" not in kinds(SOUND.run(MeshLayout(1, 64, 1)))


def with_peak(run: DryRun, **by_kind: int) -> DryRun:
    named = {name.replace("_", " "): size for name, size in by_kind.items()}
    tensor = LiveTensor("activations", 2**20, (2**19,), "bfloat16", "output", "mm")
    peak = Peak(5, sum(named.values()), named, "backward", "output", "mm", (tensor,))
    return replace(run, peak=peak, memory=(MemorySample(5, named),))


def test_memory_above_capacity() -> None:
    run = Llama(layers=8).run(LAYOUT)
    above = with_peak(run, parameters=60 * GIB, optimizer_state=40 * GIB)
    found = text(above, "memory above capacity")
    assert "peak of 100 GiB" in found and "does not fit into the 79.1 GiB" in found
    assert "parameters (60.0 GiB): shard over more ranks" in found
    narrow = text(with_peak(run, temporaries=78 * GIB), "memory above capacity")
    assert "fits by itself, but not with the rest" in narrow and "loss parallel" in narrow
    below = with_peak(run, parameters=70 * GIB)
    assert needed_bytes(below) < 79.1 * GIB and "memory above capacity" not in kinds(below)
    smaller = warnings_of(below, timeline(below, "a100-40gb-sxm"))
    assert "memory above capacity" in [each.kind for each in smaller]


def test_activations_without_checkpointing() -> None:
    def run(recompute: bool, **by_kind: int) -> DryRun:
        return with_peak(Llama(layers=8, checkpointing=recompute).run(LAYOUT), **by_kind)

    full = {"activations": 50 * GIB, "parameters": 10 * GIB}
    found = text(run(False, **full), "no checkpointing")
    assert "50.0 GiB of the peak's 60.0 GiB (83%)" in found
    assert "activation_checkpointing=True" in found
    for good in (
        run(True, **full),
        run(False, activations=10 * GIB, parameters=50 * GIB),
        run(False, activations=5 * GIB),  # there is room
    ):
        assert "no checkpointing" not in kinds(good)


def placed(size: int, **placements: str) -> ParameterPlacement:
    shape = (size // 4096, 1024)
    return ParameterPlacement("head.weight", shape, shape, "float32", placements, size, True)


@pytest.mark.parametrize("axis", ["shard", "tp"])
def test_large_parameters_left_whole(axis: str) -> None:
    run = SOUND.run(LAYOUT)
    other = {"shard": "S(0)", "tp": "S(0)"}

    def given(how: str, size: int = 2**26) -> DryRun:
        return replace(run, parameters=(placed(size, **{**other, axis: how}),))

    found = text(given("R"), f"whole on {axis}")
    assert "64.0 MiB" in found and "head.weight (16384, 1024)" in found
    assert ("fully_shard" if axis == "shard" else "tp plan") in found
    plain = replace(run, parameters=(placed(2**26),))
    assert {"whole on shard", "whole on tp"} <= set(kinds(plain))
    for good in (given("_S(0, 2)"), given("S(1)"), given("PackedShard(dim=0)"), given("R", 2**20)):
        assert f"whole on {axis}" not in kinds(good)
    alone = replace(given("R"), mesh={"replicate": 16, "shard": 1, "tp": 1})
    assert f"whole on {axis}" not in kinds(alone)


def test_sharded_over_shard_and_cp_as_one() -> None:
    run = replace(SOUND.run(LAYOUT), mesh={"replicate": 2, "shard": 4, "cp": 2, "tp": 1})
    for how, want in (("S(0)", set()), ("R", {"whole on shard"})):
        given = replace(run, parameters=(placed(2**26, replicate="R", shard_cp=how, tp="R"),))
        assert {kind for kind in kinds(given) if kind.startswith("whole")} == want


def test_values_read_every_step() -> None:
    def run(count: int) -> DryRun:
        return SOUND.run(LAYOUT, unknown=(UnknownRead("train.py:7, in step", "item", count),))

    assert "item in train.py:7, in step" in text(run(2), "values read every step")
    assert "reads tensors' values 3 times a step" in text(run(6), "values read every step")
    assert "values read every step" not in kinds(run(1))


def test_a_host_that_is_too_slow() -> None:
    small = Llama(layers=4, hidden=64, ffn=128, vocab=256, tokens=64)
    found = text(small.run(MeshLayout(1, 1, 1)), "host too slow")
    assert "compile=True" in found and "%" in found
    assert "host too slow" not in kinds(SOUND.run(LAYOUT))


def test_barriers_within_steps() -> None:
    found = text(
        calling(("barrier", "shard", 0), asynchronous=False).run(LAYOUT), "barrier in a step"
    )
    assert "8 barriers a step" in found
    assert "barrier in a step" not in kinds(SOUND.run(LAYOUT))


def test_a_divergence_comes_first_and_what_the_run_has_last() -> None:
    a, b = SOUND.run(LAYOUT, 0), replace(SOUND, skip=(2,)).run(LAYOUT, 2)
    own = (DryRunWarning("mine", "x"), DryRunWarning("values read every step", "again"))
    a = replace(a, warnings=own, unknown=(UnknownRead("here", "item", 9),))
    found = all_warnings(a, divergence=compare(a, b))
    assert [each.kind for each in found] == [
        "rank-dependent order",
        "values read every step",
        "mine",
    ]
    assert "ranks 0 and 2" in found[0].text and "silently wrong, then hang" in found[0].text


@pytest.mark.parametrize(
    ("write", "value", "words"),
    [
        (in_bytes, 0, "0 bytes"),
        (in_bytes, 1, "1 byte"),
        (in_bytes, 1023, "1023 bytes"),
        (in_bytes, 1023.6, "1.00 KiB"),
        (in_bytes, 5 * 2**20, "5.00 MiB"),
        (in_bytes, 123.4 * GIB, "123 GiB"),
        (in_bytes, 99.96 * GIB, "100 GiB"),
        (in_seconds, 0.0, "0 s"),
        (in_seconds, 0.00087, "870 us"),
        (in_seconds, 0.0415, "41.5 ms"),
        (in_seconds, 2.314, "2.31 s"),
        (pattern_of, "model.layers.12.experts.3.w1", "model.layers.*.experts.*.w1"),
        (pattern_of, "conv1.weight", "conv1.weight"),
        (lambda names: some(names), ["a", "a", "b", "", "d"], "a, b, (no unit) and 1 more"),
        (lambda n: counted(n, "step"), 1, "1 step"),
        (lambda n: counted(n, "step"), 2000, "2,000 steps"),
    ],
)
def test_numbers_in_words(write: Callable[[object], str], value: object, words: str) -> None:
    assert write(value) == words
