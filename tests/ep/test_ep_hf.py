"""transformers' and peft's models whose experts ep divides."""

import re

import pytest

pytest.importorskip("transformers")

from _support.ep.hf import adapters_of_experts, exported, generated, imported, in_bf16, lora
from _support.hf.side_by_side_hf import compare_cases, merged

from parallel3d import MeshLayout, PlanError
from parallel3d.testing import fake_world

pytestmark = pytest.mark.ci

MESHES = [
    MeshLayout(shard=4, ep=4),
    MeshLayout(shard=4, ep=2),
    MeshLayout(shard=2, tp=2, ep=4),
]
CP = [(1, 2, 2, 1, 4), (1, 2, 2, 1, 2), (1, 1, 2, 2, 4), (2, 1, 2, 1, 2)]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_with_context_parallelism(gloo_pool, family) -> None:
    """Loss, each gradient and the weights after a step, with the audit."""
    cases = [(family, "base", sizes) for sizes in CP]
    for found in merged(gloo_pool.run(compare_cases, cases, world_size=4)):
        assert found.verdict == "equal", found.note


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_files(gloo_pool, tmp_path, family) -> None:
    folder = str(tmp_path / "exported")
    gloo_pool.run(exported, folder, family, MeshLayout(shard=8, ep=8), world_size=8)
    gloo_pool.run(imported, folder, family, MESHES[1], True, world_size=4)
    gloo_pool.run(imported, folder, family, MESHES[2], False, world_size=4)


@pytest.mark.parametrize("layout", MESHES, ids=str)
def test_lora(gloo_pool, tmp_path, layout) -> None:
    pytest.importorskip("peft")
    gloo_pool.run(lora, layout, {}, str(tmp_path / "lora"), world_size=4)


def test_experts_trained_beside_lora(gloo_pool, tmp_path) -> None:
    pytest.importorskip("peft")
    more = {"modules_to_save": ["experts"]}
    gloo_pool.run(lora, MESHES[1], more, str(tmp_path / "lora"), world_size=4)


def test_adapters_of_experts_are_refused() -> None:
    pytest.importorskip("peft")
    said = 'ParamWrapper of peft.*ep can\'t divide.*target_modules.*modules_to_save=["experts"]'
    with fake_world(0, 4), pytest.raises(PlanError, match=re.escape(said).replace(r"\.\*", ".*")):
        adapters_of_experts(MESHES[1])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_bf16(gloo_pool, family) -> None:
    for layout in MESHES[1:]:
        gloo_pool.run(in_bf16, layout, family, world_size=4)


def test_generation(gloo_pool) -> None:
    for layout in MESHES:
        gloo_pool.run(generated, layout, world_size=4)
