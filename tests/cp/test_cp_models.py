"""Whole models under context parallelism compute what the plain ones do, on simulated ranks."""

import itertools

import pytest
from _support.cp.models import HF, MESHES, Encoder, Lm, batches, hf_model, parity
from _support.hf.all_double import AllDouble

KINDS = ("ulysses", "gather", "ring")
KINDS_OF_BATCHES = {
    "even": batches(16),
    "uneven": batches(13),
    "documents": batches(16, documents=(3, 7, 6)),
    "padding": batches(13, padding=4),
}


def sampled(number: int) -> pytest.MarkDecorator:
    """One case of seven runs in .ci/run, all in the longer run."""
    return pytest.mark.full if number % 7 else pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "kind", "length"),
    [
        pytest.param(*case, marks=() if case == ((1, 1, 2, 1), "ring", 13) else sampled(number))
        for number, case in enumerate(itertools.product(MESHES, KINDS, (16, 13)))
    ],
    ids=str,
)
def test_readme_model(sizes, kind, length) -> None:
    parity(Lm, batches(length), sizes, context_parallel=kind)


FAST = {("llama", (1, 1, 2, 1), "gather", "documents")}
CASES = [
    *itertools.product(HF, ((1, 1, 2, 1), (1, 1, 2, 2)), KINDS, ("uneven", "documents", "padding")),
    *itertools.product(("llama",), MESHES, ("auto",), ("uneven", "documents")),
    # gpt-oss, whose routing differs by data rank, is on real processes (tests/integration).
    *itertools.product(("gemma2",), MESHES[3:], ("auto",), ("uneven",)),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "sizes", "kind", "batch"),
    [
        pytest.param(*case, marks=() if case in FAST else sampled(number))
        for number, case in enumerate(CASES)
        # transformers' gpt-oss doesn't tell its masks of documents; and simulated ranks can't send other
        # numbers of tokens to an expert: tests/integration/test_cp_on_ranks.py has it on real ones.
        if case[0] != "gpt_oss" or case[3] == "uneven"
    ],
    ids=str,
)
def test_transformers_models(name, sizes, kind, batch) -> None:
    pytest.importorskip("transformers")
    with AllDouble():
        parity(lambda: hf_model(name), KINDS_OF_BATCHES[batch], sizes, context_parallel=kind)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (1, 1, 2, 2)], ids=str)
def test_torchs_attention(kind, sizes) -> None:
    plan = None if sizes[3] == 1 else "auto"
    parity(Encoder, batches(13), sizes, context_parallel=kind, tp_plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("loss_parallel", [True, "chunked"])
def test_split_logits_and_recomputation(loss_parallel) -> None:
    parity(
        Lm, batches(13), (1, 1, 2, 2), loss_parallel=loss_parallel, activation_checkpointing=True
    )
