"""Plans derived on each rank of a job, by real processes: alike on all, and equal to the plain model."""

import pytest
import torch
from _support.tp.derive_models import Vit
from _support.tp.hf_families import FAMILIES, check_family
from torch import nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import assert_parity
from parallel3d.tp import auto_plan


def image(number: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def vit(sizes: tuple[int, int, int]) -> tuple[float, str]:
    found = assert_parity(Vit, image, MeshLayout(*sizes), steps=2, fp32=False, tp_plan="auto")
    return found.grads["float64"], repr(auto_plan(Vit(), sizes[2]))


@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 1, 3)])
def test_every_rank_derives_the_same_plan(gloo_pool, sizes: tuple[int, int, int]) -> None:
    results = gloo_pool.run(vit, sizes, world_size=sizes[0] * sizes[1] * sizes[2])
    assert all(difference < 1e-12 for difference, _ in results)
    assert len({plan for _, plan in results}) == 1
    assert "SplitHeads" not in results[0][1] and "packed=(16, 16, 16)" in results[0][1]


def encoder_in_eval() -> float:
    """Largest difference of torch's encoder in inference, where it would read weights directly."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).double().eval()
    mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, -1] = True
    with torch.no_grad():
        want = plain(x, src_key_padding_mask=padding)
        split = parallelize(plain, mesh, tp_plan="auto")
        got = split(x, src_key_padding_mask=padding)
    return float((got - want)[:, :-1].abs().max())


@pytest.mark.smoke
def test_torch_encoder_with_three_heads_on_two_ranks(gloo_pool) -> None:
    assert all(difference < 1e-12 for difference in gloo_pool.run(encoder_in_eval, world_size=2))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 1, 3), (2, 1, 2)])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_hugging_face_models(gloo_pool, name: str, sizes: tuple[int, int, int]) -> None:
    gloo_pool.run(check_family, name, sizes, world_size=sizes[0] * sizes[1] * sizes[2])
