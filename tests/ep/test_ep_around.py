"""What surrounds expert parallelism, on real processes: it is as on the plain model, or refused."""

import re

import pytest
from _support.ep.around import (
    USES,
    balanced,
    compiled,
    in_sequence,
    muon,
    odd_room,
    other_dtype,
    refused,
    second_derivative,
)

from parallel3d import MeshLayout

MESHES = [
    MeshLayout(shard=4, ep=2),
    MeshLayout(shard=4, ep=4),
    MeshLayout(shard=2, tp=2, ep=4),
    MeshLayout(replicate=2, shard=2, ep=2),
]


@pytest.mark.parametrize("use", USES)
def test_as_the_plain_model(gloo_pool, use) -> None:
    for layout in MESHES:
        gloo_pool.run(USES[use], layout, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_compiled(gloo_pool, recompute) -> None:
    for layout in (MESHES[0], MESHES[2]):
        gloo_pool.run(compiled, layout, recompute, world_size=4)


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (MeshLayout(shard=4, ep=2), 8),  # each rank has its own experts whole
        (MeshLayout(shard=4, ep=2), 6),  # two ranks have parts of the same three experts
        (MeshLayout(shard=4, ep=4), 7),  # not evenly
        (MeshLayout(shard=2, tp=2, ep=4), 8),
        (MeshLayout(shard=4), 8),
        (MeshLayout(shard=4), 6),
        (MeshLayout(replicate=4), 4),
    ],
    ids=str,
)
def test_muon_steps_on_each_expert(gloo_pool, layout, experts) -> None:
    gloo_pool.run(muon, layout, experts, world_size=4)


@pytest.mark.parametrize("case", [in_sequence, odd_room], ids=lambda case: case.__name__)
def test_parts_of_the_tokens_on_tp(gloo_pool, case) -> None:
    for layout in (MeshLayout(shard=2, tp=2, ep=4), MeshLayout(tp=4, ep=2)):
        if case is odd_room or layout.tp == 2:  # the length is six
            gloo_pool.run(case, layout, world_size=4)


def test_biases_that_are_parameters(gloo_pool) -> None:
    found = [
        each
        for layout in (*MESHES, MeshLayout(shard=4))
        for each in gloo_pool.run(balanced, layout, world_size=4)
    ]
    assert all(each == found[0] for each in found)
    assert any(bias != 0 for layer in found[0] for bias in layer)


@pytest.mark.parametrize("layout", MESHES[1:3], ids=str)
def test_ranks_whose_experts_get_no_token(gloo_pool, layout) -> None:
    """They take part as the others do: in outputs of another dtype, in a second derivative."""
    gloo_pool.run(other_dtype, layout, world_size=4)
    gloo_pool.run(second_derivative, layout, world_size=4, timeout=60)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("engine", r'the mesh has ep=2, .* use ep=1, or engine="parallel3d"'),
        ("view", "parameter up is whole on each rank of ep.*give parallelize the model"),
        ("comm hook", "which holds experts, are a sum over ep.*Register it for other units"),
        ("Muon", r"three dims.*a parameter has the shape \(8,\).*such as AdamW"),
        ("fsdp", "fsdp is False, but the mesh has 4 data ranks"),
        (
            "buffer",
            r"layers\.1\.experts\.scale is a buffer with an entry for each expert.*requires_grad=False",
        ),
        ("root", "Looped itself holds the experts; give parallelize the module around it"),
    ],
)
def test_refused(gloo_pool, what, said) -> None:
    for message in gloo_pool.run(refused, what, world_size=4):
        assert re.search(said, message), message
