"""Two ranks' dry runs: the first place where they part, and what happens there."""

from dataclasses import replace

import pytest
from _support.tools.dryrun.made_runs import Llama, Program

from parallel3d.errors import DryRunError
from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.compare import Divergence, compare
from parallel3d.tools.dryrun.result import DryRun

LAYOUT = MeshLayout(2, 2, 2)


def with_calls(*calls: tuple[str, str, int], at: int = 1) -> Llama:
    """Blocks that make these (op, axis, bytes) at one place."""

    def before(program: Program, layer: int) -> None:
        if layer == at:
            for op, axis, size in calls:
                program.issue(op, axis, size, asynchronous=False)

    return Llama(before=before, steps=1)


def parted(a: DryRun, b: DryRun, *how: str) -> Divergence:
    """Where the two part; ``how``: the kind of difference and what follows, as they must be."""
    found = compare(a, b)
    assert found is not None
    assert not how or (found.kind, found.consequence) == how
    return found


@pytest.mark.parametrize("other", range(8))
def test_ranks_of_one_program_do_not_part(other: int) -> None:
    program = Llama(steps=1)
    assert compare(program.run(LAYOUT, 0), program.run(LAYOUT, other)) is None


def test_a_call_that_one_rank_makes() -> None:
    """``if rank == 2: all_reduce(...)`` in layer 1."""
    a, b = Llama(steps=1).run(LAYOUT, 0), with_calls(("all_reduce", "shard", 64)).run(LAYOUT, 2)
    found = parted(a, b)
    assert (found.kind, found.consequence, found.ranks) == ("extra calls", "hang", (0, 2))
    assert found.second is not None and found.second.module == "layers.1"
    assert found.second.call == b.collectives[found.position]
    assert "rank 2 issues 1 call more" in found.detail
    assert "all_gather on shard for layers.1" in found.why  # what meets it
    backwards = parted(b, a)
    assert (backwards.position, backwards.first) == (found.position, found.second)
    assert "rank 2 issues 1 call more" in backwards.detail


def test_a_skipped_layer_is_silently_wrong_before_it_hangs() -> None:
    a, b = Llama(steps=1).run(LAYOUT, 0), Llama(steps=1, skip=(1,)).run(LAYOUT, 2)
    found = parted(a, b)
    assert (found.kind, found.position) == ("extra calls", 1)
    assert found.first is not None and found.first.call.unit == "layers.1"
    assert found.consequence == "silently wrong, then hang"
    # Of equal blocks, one's parameters arrive in another's place.
    assert "all_gather on shard for layers.1" in found.why and "layers.2" in found.why
    assert "reduce_scatter" in found.why.split("Then:")[1]


def test_another_order_on_one_group_and_across_two() -> None:
    first, second = ("all_gather", "shard", 64), ("all_reduce", "shard", 64)
    a, b = with_calls(first, second).run(LAYOUT, 0), with_calls(second, first).run(LAYOUT, 2)
    found = parted(a, b, "another order", "hang")
    assert "the same 2 calls" in found.detail

    # The two are together on shard only: whether it hangs is for the tp groups to say.
    over_tp = ("all_reduce", "tp", 64)
    a, b = with_calls(first, over_tp).run(LAYOUT, 0), with_calls(over_tp, first).run(LAYOUT, 2)
    found = parted(a, b, "another order", "depends on other ranks")
    assert "ranks 0-1 and ranks 2-3 on tp" in found.why


def test_a_circle_of_two_groups() -> None:
    """Both groups have both ranks, and each sees its calls in one order: they wait for each other."""

    def run(rank: int) -> DryRun:
        def before(program: Program, layer: int) -> None:
            if layer == 1:
                for axis in ("tp", None) if rank else (None, "tp"):
                    program.issue("all_reduce", axis, 64, asynchronous=False)

        return Llama(before=before, steps=1).run(LAYOUT, rank)

    found = parted(run(0), run(1), "another order", "hang")
    assert "waits on another" in found.why


def test_equal_calls_for_different_units_are_silently_wrong() -> None:
    program = Llama(steps=1)
    a, b = program.run(LAYOUT, 0), program.run(LAYOUT, 2)
    names = {"layers.1": "layers.2", "layers.2": "layers.1"}
    swapped = tuple(replace(c, unit=names.get(c.unit, c.unit)) for c in b.collectives)
    parted(a, replace(b, collectives=swapped), "another order", "silently wrong")


def test_other_bytes_within_a_group() -> None:
    a, b = Llama(steps=1).run(LAYOUT, 0), Llama(steps=1, tokens=4096).run(LAYOUT, 1)
    found = parted(a, b, "other bytes", "hang")
    assert found.first is not None and found.first.module == "layers.0.attention"
    assert "differ in bytes" in found.detail


def test_other_bytes_in_another_group_are_legal() -> None:
    """A data rank with a shorter batch: its tp group is another."""
    a, b = Llama(steps=1).run(LAYOUT, 0), Llama(steps=1, tokens=4096).run(LAYOUT, 2)
    assert compare(a, b) is None


@pytest.mark.parametrize(
    ("op", "legal"), [("all_to_all", True), ("gather", True), ("all_gather", False)]
)
def test_operations_that_allow_uneven_shares(op: str, legal: bool) -> None:
    a, b = (
        with_calls((op, "shard", 64)).run(LAYOUT, 0),
        with_calls((op, "shard", 96)).run(LAYOUT, 2),
    )
    assert (compare(a, b) is None) == legal


def test_another_dtype_with_as_many_bytes_is_silently_wrong() -> None:
    program = Llama(steps=1, reduce_dtype="float16")
    a, b = program.run(LAYOUT, 0), replace(program, reduce_dtype="bfloat16").run(LAYOUT, 2)
    parted(a, b, "another dtype", "silently wrong")


def test_another_size_of_group() -> None:
    a = Llama(steps=1).run(LAYOUT, 0)
    calls = (replace(a.collectives[0], group_size=4), *a.collectives[1:])
    parted(a, replace(a, rank=2, collectives=calls), "another group size", "hang")


def test_one_rank_goes_on_when_the_other_has_ended() -> None:
    a, b = Llama(steps=1).run(LAYOUT, 0), Llama(steps=2).run(LAYOUT, 2)
    found = parted(a, b)
    assert found.first is None and found.position == len(a.collectives)
    assert (found.kind, found.consequence) == ("extra calls", "hang")
    assert "its program has ended" in str(found) and "which does not come" in found.why


def test_different_programs() -> None:
    a = with_calls(("broadcast", "shard", 8), ("all_reduce", "shard", 8)).run(LAYOUT, 0)
    b = with_calls(("reduce_scatter", "shard", 64)).run(LAYOUT, 2)
    found = parted(a, b)
    assert found.kind == "other calls"
    assert "broadcast" in found.detail and "reduce_scatter" in found.detail


def test_messages_are_two_ranks_own_matter() -> None:
    a, b = with_calls(("send", "shard", 8)).run(LAYOUT, 0), with_calls().run(LAYOUT, 2)
    assert compare(a, b) is None


def test_different_worlds_are_refused() -> None:
    program = Llama(steps=1)
    with pytest.raises(DryRunError, match=r"different worlds: 8 ranks .* and 4 ranks"):
        compare(program.run(LAYOUT, 0), program.run(MeshLayout(1, 2, 2), 1))


def test_a_divergence_late_in_many_calls() -> None:
    program = Llama(steps=3, layers=126)
    a, b = program.run(LAYOUT, 0), replace(program, skip=(100,)).run(LAYOUT, 2)
    found = parted(a, b)
    assert found.first is not None
    assert found.first.call.unit == "layers.100"
