"""A ViT as people write it, and Hugging Face models without a plan: derived, equal to the plain model."""

import pytest
import torch
from _support.tp.derive_models import Vit
from _support.tp.hf_families import FAMILIES, SIZES, check_family, family, perturbed

from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import auto_plan

LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2)]


def _image(number: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[1:])]
)
def test_vit_equals_the_plain_model(layout: tuple[int, int, int]) -> None:
    options = {"steps": 2, "fp32": False, "tp_plan": "auto"}
    assert_parity(lambda: perturbed(Vit()), _image, MeshLayout(*layout), **options)


@pytest.mark.slow
def test_vit_on_four_ranks() -> None:
    options = {"steps": 2, "fp32": False, "tp_plan": "auto"}
    assert_parity(lambda: perturbed(Vit()), _image, MeshLayout(1, 1, 4), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [*(("gpt2", layout) for layout in LAYOUTS), ("opt", LAYOUTS[1]), ("bert", LAYOUTS[2])],
)
def test_hugging_face_model_without_a_plan_equals_the_plain_model(
    name: str, layout: tuple[int, int, int]
) -> None:
    check_family(name, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_all_families_without_a_plan_equal_the_plain_model(
    name: str, layout: tuple[int, int, int]
) -> None:
    check_family(name, layout)


@pytest.mark.parametrize("name", ["gpt2", "stablelm", "bloom", "t5"])
def test_attention_is_split_where_it_can_be(name: str) -> None:
    plan = auto_plan(family(name)(), 2)
    assert any("attn" in p or "attention" in p.lower() for p in plan) == FAMILIES[name][2]
    assert any("mlp" in p or "Dense" in p for p in plan)


@pytest.mark.slow
def test_hugging_face_vit_equals_the_plain_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SIZES, intermediate_size=32, image_size=8, patch_size=4)
    assert_parity(
        lambda: perturbed(transformers.ViTModel(config, add_pooling_layer=False)),
        _image,
        MeshLayout(1, 1, 2),
        loss=lambda model, x: model(x).last_hidden_state.square().mean(),
        steps=2,
        fp32=False,
        tp_plan="auto",
    )
