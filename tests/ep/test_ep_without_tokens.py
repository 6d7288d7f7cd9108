"""Ranks of ep whose experts get no token take part as the others do; experts that ep refuses."""

import re

import pytest
from _support.ep.without_tokens import other_dtype, refusal, second_derivative

from parallel3d import MeshLayout

MESHES = [MeshLayout(shard=4, ep=4), MeshLayout(shard=2, tp=2, ep=4)]


@pytest.mark.parametrize("layout", MESHES, ids=str)
def test_experts_that_return_another_dtype(gloo_pool, layout) -> None:
    gloo_pool.run(other_dtype, layout, world_size=4)


@pytest.mark.parametrize("layout", MESHES, ids=str)
def test_a_second_derivative(gloo_pool, layout) -> None:
    gloo_pool.run(second_derivative, layout, world_size=4, timeout=60)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "buffer",
            r"layers\.1\.experts\.scale is a buffer with an entry for each expert.*requires_grad=False",
        ),
        ("root", "Looped itself holds the experts; give parallelize the module around it"),
    ],
)
def test_refused(gloo_pool, what, said) -> None:
    for message in gloo_pool.run(refusal, what, world_size=4):
        assert re.search(said, message), message
