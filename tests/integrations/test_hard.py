"""Models that are hard to shard: what cannot be guessed is said; units inside blocks. Rows: hard_rows.py."""

from typing import Any

import pytest
import torch
from _support.integrations import hard_rows
from torch import Tensor, nn

from parallel3d._util.units import find_units
from parallel3d.errors import PlanError
from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import resolve_plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("whisper", "forward(input_features, attention_mask, decoder_input_ids,"),
        ("clip", "forward(input_ids, pixel_values,"),
        ("dit", "forward(hidden_states, timestep, class_labels,"),
        ("unet", "forward(sample, timestep, encoder_hidden_states, class_labels,"),
        ("lstm", "forward(source, lengths, target)"),
    ],
)
def test_auto_says_what_to_write_where_inputs_cannot_be_guessed(name: str, takes: str) -> None:
    case = hard_rows.CASES[name]()
    model = case.build()
    with pytest.raises(PlanError) as raised:
        resolve_plan(model, "auto", 2)
    assert f"auto_plan the example: a small batch of its {takes}" in (str(raised.value))
    example = case.batch(torch.Generator().manual_seed(0))
    assert resolve_plan(model.double(), "auto", 2, example=example).modules


@pytest.mark.parametrize(
    ("name", "whole", "why"),
    [
        ("t5", "encoder.block.*.layer.*.SelfAttention.q.weight", "SelfAttention together"),
        ("unet", "conv_in.weight", "resnets.0.time_emb_proj"),
        ("lstm", "encoder.weight_ih_l0", "bridge"),
    ],
)
def test_a_plan_shows_what_it_leaves_whole(name: str, whole: str, why: str) -> None:
    case = hard_rows.CASES[name]()
    example = case.batch(torch.Generator().manual_seed(0))
    lines = str(resolve_plan(case.build().double(), "auto", 2, example=example)).splitlines()
    assert any(whole in line for line in lines if line.startswith("Not in the plan, whole"))
    assert any(why in line for line in lines if line.startswith("Note: derived, left whole"))


def dit_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    case = hard_rows.dit()
    (states,), others = case.batch(torch.Generator().manual_seed(0))
    return case.build(), {"hidden_states": states, **others}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"reshard_after_forward": False},
        {"units": ["transformer_blocks.*", "transformer_blocks.*.norm1.emb"]},
    ],
    ids=str,
)
def test_dit_on_three_ranks(options: dict[str, Any]) -> None:
    """Its forward calls ``transformer_blocks[0].norm1.emb`` after the blocks."""
    model, _ = dit_and_batch()
    found = find_units(model)
    assert [name for name, _ in found.inner] == ["transformer_blocks.0.norm1.emb"]
    assert_parity(
        lambda: dit_and_batch()[0],
        lambda i: {k: v.roll(i, -1) for k, v in dit_and_batch()[1].items()},
        MeshLayout(1, 3, 1),
        loss=lambda model, **inputs: model(**inputs).sample.square().mean(),
        steps=2,
        fp32=False,
        **options,
    )


@pytest.mark.parametrize("mesh", [(1, 3, 1), (1, 2, 2)], ids=str)
def test_experts_as_units_inside_blocks(mesh: tuple[int, int, int]) -> None:
    """Mixtral's code computes norms and routers in float32, so that float64 agrees as float32 does."""
    case = hard_rows.mixtral()
    assert_parity(
        case.build,
        lambda i: case.batch(torch.Generator().manual_seed(i))[1],
        MeshLayout(*mesh),
        steps=2,
        fp32=False,
        tolerance=1e-6,
        tp_plan="auto" if mesh[2] > 1 else None,
        units=["model.layers.*", "model.layers.*.mlp.experts"],
        activation_checkpointing=True,
    )
