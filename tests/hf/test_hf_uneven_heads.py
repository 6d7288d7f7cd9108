"""transformers' attention of numbers of heads that tp doesn't divide, by the models' own plans."""

import functools

import pytest

pytest.importorskip("transformers")

from _support.hf.all_double import AllDouble
from _support.hf.uneven import batch, loss, uneven_lm

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import resolve_plan

pytestmark = pytest.mark.ci

LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 6, "num_hidden_layers": 1, "first_k_dense_replace": 1,
}  # fmt: skip
SIZES = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 4}, "gpt_neox": {}, "deepseek_v3": LATENT}
GROUPED = [(4, 1), (4, 2), (6, 2), (6, 3), (6, 6), (3, 3)]
GRID = dict.fromkeys(("llama", "qwen2", "qwen3"), GROUPED) | {
    name: [(6, 6), (3, 3)] for name in ("gpt_neox", "deepseek_v3")
}
ORDINARY = {"llama": [(6, 3)], "qwen3": [(6, 2)], "gpt_neox": [(6, 6)]}


def parity(name: str, grid: list[tuple[int, int]], mesh: tuple[int, int, int]) -> float:
    """Runs on every rank; returns the largest difference of a gradient."""
    worst = 0.0
    for heads, kv in grid:
        with AllDouble():
            result = assert_parity(
                functools.partial(uneven_lm, name, heads, kv, **SIZES[name]),
                batch,
                MeshLayout(*mesh),
                loss=loss,
                tp_plan="auto",
                steps=1,
                fp32=False,
            )
        worst = max(worst, result.grads["float64"])
    return worst


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] * (n == "gpt_neox")) for n in ORDINARY],
)
def test_uneven_heads(gloo_pool, name):
    worst = gloo_pool.run(parity, name, ORDINARY[name], (1, 1, 4), world_size=4)
    assert max(worst) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_all_of_them(gloo_pool, name, mesh):
    worst = gloo_pool.run(parity, name, GRID[name], mesh, world_size=mesh[0] * mesh[1] * mesh[2])
    assert max(worst) < 1e-12


def test_what_the_module_repeats_is_what_its_rank_has():
    resolved = resolve_plan(uneven_lm("llama", 8, 2), "auto", 4)
    values = {(a.module, a.name): (a.whole, a.values) for a in resolved.attributes}
    name = "model.layers.{}.self_attn"
    assert values == {(name.format(i), "num_key_value_groups"): (4, (2, 2, 2, 2)) for i in range(2)}
