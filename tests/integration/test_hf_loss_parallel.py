"""Loss parallel on real processes with Hugging Face models: their own loss, their own generation."""

import copy
import functools

import pytest
import torch
from torch import distributed as dist

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.tp import VocabLogits
from parallel3d.tp.vocab_parallel import vocab_logits

pytest.importorskip("transformers")

pytestmark = pytest.mark.ci

SIZES = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What each does to its logits before the loss.
FAMILIES = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
}


def on_rank(family: str, tied: bool, mode: bool | str, sizes: tuple[int, int, int]) -> list[str]:
    """What differs from the plain model, and which functions gathered logits in training."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **SIZES, **FAMILIES[family], tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    plain = getattr(transformers, f"{family}ForCausalLM")(config)
    layout = MeshLayout(*sizes)
    mesh = build_mesh(layout, device_type="cpu")
    model = parallelize(copy.deepcopy(plain), mesh, "auto", loss_parallel=mode)
    rank = layout.data_rank(dist.get_rank())
    ids = torch.randint(3, 67, (2, 7), generator=torch.Generator().manual_seed(rank))
    wrong: list[str] = []
    gathers = functools.partial(wrong.append, "logits were gathered")
    inner, vocab_logits._gathered = vocab_logits._gathered, lambda *a: (gathers(), inner(*a))[1]
    try:
        losses = [
            m(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=9)
            for m in (plain, model)
        ]
        losses[1].loss.backward()
        model.zero_grad()
    finally:
        vocab_logits._gathered = inner
    difference = float((losses[0].loss - losses[1].loss).abs())
    if not difference < 1e-5:
        wrong.append(f"the loss differs by {difference}")
    if not isinstance(losses[1].logits, VocabLogits):
        wrong.append("the logits are plain")
    if dist.get_rank() == 0:
        repr(losses[1])  # one rank alone: it must not communicate
    with torch.no_grad():
        wanted, got = (
            m.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True)
            for m in (plain, model)
        )
    if not torch.equal(wanted, got):
        wrong.append(f"generated {got.tolist()}, not {wanted.tolist()}")
    return wrong


@pytest.mark.parametrize(
    ("family", "tied", "mode", "sizes"),
    [
        ("Gemma2", True, "chunked", (1, 1, 2)),
        *(
            pytest.param(family, tied, mode, sizes, marks=pytest.mark.full)
            for family in FAMILIES
            for tied in (False, True)
            for mode in (True, "chunked")
            for sizes in ((1, 1, 2), (1, 2, 2), (2, 1, 2))
            if (family, tied, mode, sizes) != ("Gemma2", True, "chunked", (1, 1, 2))
        ),
    ],
)
def test_their_loss_and_generation(gloo_pool, family, tied, mode, sizes):
    world = sizes[0] * sizes[1] * sizes[2]
    results = gloo_pool.run(on_rank, family, tied, mode, sizes, world_size=world)
    assert results == [[]] * world
