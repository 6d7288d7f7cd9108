"""The parallel model is the plain model, on every mesh (simulated ranks)."""

import functools

import pytest
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity

MESHES = [
    (1, 1, 1),
    (8, 1, 1),
    (1, 8, 1),
    (1, 1, 4),
    (2, 4, 1),
    (1, 2, 4),
    (2, 1, 4),
    (1, 4, 2),
    (3, 1, 2),
    (2, 2, 2),
]
full = functools.partial(pytest.param, marks=pytest.mark.full)  # in the longer run only
lm_parity = functools.partial(assert_parity, batch=tokens, loss=lm_loss)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh(mesh: tuple[int, int, int]) -> None:
    """Vocabulary 19 and hidden 21: no axis divides them; width 12 is cut evenly by some.

    In float32 too where all three axes are there.
    """
    build = functools.partial(Lm, hidden=21, layers=1)
    options = {"steps": 5} if mesh == (2, 2, 2) else {"steps": 3, "fp32": False}
    lm_parity(build, layout=MeshLayout(*mesh), tp_plan=LM_PLAN, **options)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_in_float32_too(mesh: tuple[int, int, int]) -> None:
    build = functools.partial(Lm, hidden=21, layers=1)
    lm_parity(build, layout=MeshLayout(*mesh), tp_plan=LM_PLAN)


@pytest.mark.parametrize(
    "mesh", [(2, 2, 2), full((1, 2, 4)), full((3, 1, 2)), full((8, 1, 1))], ids=str
)
def test_accumulation_over_three_micro_batches(mesh: tuple[int, int, int]) -> None:
    build = functools.partial(Lm, layers=1)
    lm_parity(
        build, layout=MeshLayout(*mesh), tp_plan=LM_PLAN, micro_batches=3, steps=2, fp32=False
    )


@pytest.mark.parametrize("defer", ["sync", "nothing"])
def test_other_ways_to_accumulate(defer: str) -> None:
    build = functools.partial(Lm, layers=1)
    layout = MeshLayout(2, 2, 2)
    lm_parity(
        build, layout=layout, tp_plan=LM_PLAN, micro_batches=3, steps=2, fp32=False, defer=defer
    )


@pytest.mark.parametrize("dim,hidden", [(3, 5), (9, 17), full(16, 8)])
@pytest.mark.parametrize("mesh", [(1, 4, 2), full((3, 1, 2)), full((2, 2, 2))], ids=str)
def test_small_and_odd_sizes(dim: int, hidden: int, mesh: tuple[int, int, int]) -> None:
    """Fewer rows than ranks; 9 and 17 rows, which DTensor can't place on shard 4 x tp 2."""
    build = functools.partial(Lm, dim=dim, hidden=hidden, layers=1)
    lm_parity(build, layout=MeshLayout(*mesh), tp_plan=LM_PLAN, steps=2, fp32=False)


@pytest.mark.parametrize("mesh", [full((1, 2, 2)), (2, 1, 3)], ids=str)
def test_sequence_parallel(mesh: tuple[int, int, int]) -> None:
    """Sequence length 5, which neither tp divides; the norms' gradients are partial."""
    build = functools.partial(Lm, layers=1)
    lm_parity(build, layout=MeshLayout(*mesh), tp_plan=SEQUENCE_PLAN, steps=2, fp32=False)


@pytest.mark.parametrize("mesh", [(1, 2, 2), full((2, 2, 1))], ids=str)
def test_tied_embedding_and_head(mesh: tuple[int, int, int]) -> None:
    build = functools.partial(Lm, layers=1, tied=True)
    lm_parity(build, layout=MeshLayout(*mesh), tp_plan=LM_PLAN, steps=2, fp32=False)


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"reshard_after_forward": False}]
)
def test_options(options: dict) -> None:
    build = functools.partial(Lm, layers=2)
    lm_parity(build, layout=MeshLayout(2, 2, 1), steps=2, fp32=False, **options)
