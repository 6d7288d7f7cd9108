"""Loss parallel with every family: what each does to its logits before its loss."""

import functools

import pytest

pytest.importorskip("transformers", minversion="5.20")

pytestmark = pytest.mark.ci

PARTS = 14
NO_SPLIT_HEAD = {
    "inkling_text",
    "inkling2_text",
    "nemotron_h",
}  # their plans split its input, or nothing


def compare(cases, mode):
    """Runs on every rank."""
    from _support.hf import side_by_side_hf

    plain = side_by_side_hf.parallelize
    side_by_side_hf.parallelize = functools.partial(plain, loss_parallel=mode)
    try:
        return side_by_side_hf.compare_cases(cases)
    finally:
        side_by_side_hf.parallelize = plain


def check(gloo_pool, names, mode) -> None:
    from _support.hf.side_by_side_hf import merged, refused_families

    cases = [(name, "odd", (1, 1, 2)) for name in names if name not in refused_families()]
    outcomes = merged(gloo_pool.run(compare, cases, mode, world_size=2, timeout=900.0))
    wrong = [
        f"{name}: {outcome.verdict}, {outcome.note}"
        for (name, _, _), outcome in zip(cases, outcomes, strict=True)
        if outcome.verdict != ("refused" if name in NO_SPLIT_HEAD else "equal")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_logits_that_are_scaled_and_capped(gloo_pool) -> None:
    check(gloo_pool, ["cohere", "gemma2"], "chunked")


@pytest.mark.full
@pytest.mark.parametrize("mode", [True, "chunked"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family(gloo_pool, part, mode) -> None:
    from _support.hf.tiny import families

    check(gloo_pool, families()[part::PARTS], mode)
