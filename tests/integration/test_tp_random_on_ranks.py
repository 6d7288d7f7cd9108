"""Dropout on real tp ranks: whole tensors alike, parts different, the same again when recomputed."""

from typing import Any

import pytest
import torch
from _support.hf.uneven import uneven_lm
from _support.tp.tp_dropping import SEQUENCE, TENSOR, Attention, Dropping
from torch import Tensor, nn
from torch import distributed as dist

from parallel3d import AgreementError, MeshLayout, build_mesh, parallelize
from parallel3d.tp import Colwise, Rowwise

IDS = torch.arange(2 * 8).view(2, 8) % 20


def parallel(model: nn.Module, plan: dict, tp: int) -> nn.Module:
    layout = MeshLayout(1, dist.get_world_size() // tp, tp)
    model = parallelize(model, build_mesh(layout, device_type="cpu"), plan, audit=False)
    torch.manual_seed(7 + layout.data_rank(dist.get_rank()))
    return model


def step(model: Dropping) -> tuple[float, dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Loss, masks in forward, and in backward."""
    loss = model(IDS).pow(2).mean()
    forward = model.noted()
    loss.backward()
    norm = sum(float(p.grad.to_local().pow(2).sum()) for p in model.parameters())
    model.zero_grad()
    return loss.item() + norm, forward, model.noted()


def run(sequence: bool, tp: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = parallel(Dropping(), SEQUENCE if sequence else TENSOR, tp)
    start = torch.get_rng_state()
    first, masks, late = step(model)
    assert not any(late.values())
    between = torch.get_rng_state()
    second, _, _ = step(model)
    # the same again, from the start and from between
    torch.set_rng_state(start)
    again = step(model)[0], step(model)[0]
    torch.set_rng_state(between)
    resumed, _, _ = step(model)
    # recomputed
    torch.set_rng_state(start)
    model.recompute = True
    recomputed, forward, backward = step(model)
    ours = all(backward[name] for name in masks if name.startswith("layers")) and all(
        torch.equal(a, b)
        for name in masks
        if name.startswith("layers")
        for a, b in zip(forward[name], backward[name], strict=False)  # which stops early
    )
    end = torch.get_rng_state()
    model.eval()
    model.recompute = False
    model(IDS)
    return {
        "losses": (first, second),
        "again": again,
        "resumed": resumed,
        "recomputed": recomputed,
        "masks alike": ours and all(torch.equal(forward[n][0], masks[n][0]) for n in masks),
        "masks": masks,
        "state": between,
        "eval moved": not torch.equal(end, torch.get_rng_state()),
    }


WHOLE = ("embedded", "layers.0.residual", "layers.1.residual", "last")


@pytest.mark.parametrize(
    ("sequence", "tp", "world"), [(False, 2, 2), (True, 2, 2), (False, 2, 4), (True, 4, 4)]
)
def test_masks(gloo_pool, sequence: bool, tp: int, world: int) -> None:
    results = gloo_pool.run(run, sequence, tp, world_size=world)
    for r in results:
        assert r["losses"] == r["again"]
        assert r["losses"][0] != r["losses"][1] == r["resumed"]
        assert r["recomputed"] == r["losses"][0]
        assert r["masks alike"]
        assert not r["eval moved"]
    for first in range(0, world, tp):
        group = results[first : first + tp]
        assert all(torch.equal(r["state"], group[0]["state"]) for r in group)
        for name in group[0]["masks"]:
            whole = not sequence and name in WHOLE
            for i in range(len(group[0]["masks"][name])):
                of_ranks = [r["masks"][name][i] for r in group]
                for j, mask in enumerate(of_ranks):
                    assert all(torch.equal(mask, m) == whole for m in of_ranks[:j])
                rate = torch.cat([m.flatten() for m in of_ranks]).double().mean().item()
                assert 0.3 < rate < 0.7
    if world > tp:  # other data, other masks
        assert not torch.equal(
            results[0]["masks"]["embedded"][0], results[tp]["masks"]["embedded"][0]
        )


def attention(sdpa: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(0.5, sdpa))
    model[0].v_proj.weight.data.zero_()
    model[0].v_proj.bias.data.fill_(1.0)  # then the output tells what was dropped
    model[0].o_proj.weight.data.copy_(torch.eye(32))
    plan: dict[str, Any] = {f"0.{n}_proj": Colwise(multiple_of=8) for n in "qkv"}
    model = parallel(model, {**plan, "0.o_proj": Rowwise(multiple_of=8)}, 2)
    y = model(torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)))
    return [y.detach() - model[0].o_proj.bias.to_local().detach(), torch.rand(3)]


@pytest.mark.parametrize("sdpa", [False, True])
def test_attention_probabilities(gloo_pool, sdpa: bool) -> None:
    (y, after), (other, also) = gloo_pool.run(attention, sdpa, world_size=2)
    assert torch.equal(y, other)  # whole
    assert torch.equal(after, also)
    heads = y.unflatten(-1, (4, 8))[..., 0]  # two of each rank
    for a in range(4):
        assert all(not torch.equal(heads[..., a], heads[..., b]) for b in range(a))


def llama() -> tuple[list[Tensor], Tensor]:
    """A model of transformers: what its layers drop of the attention, and its output."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain = uneven_lm(hidden_size=32, intermediate_size=48, vocab_size=64, attention_dropout=0.5)
    plan = {
        **{f"model.layers.*.self_attn.{n}_proj": Colwise(multiple_of=8) for n in "qkv"},
        "model.layers.*.self_attn.o_proj": Rowwise(multiple_of=8),
    }
    model = parallel(plain.train(), plan, 2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    out = model(IDS, output_attentions=True, use_cache=False)
    out.logits.sum().backward()
    return [probs.detach() != 0 for probs in out.attentions], out.logits.detach()


@pytest.mark.full
def test_a_model_of_transformers(gloo_pool) -> None:
    (masks, logits), (others, also) = gloo_pool.run(llama, world_size=2)
    assert torch.equal(logits, also)
    for mask, other in zip(masks, others, strict=True):
        assert mask.shape == other.shape == (2, 2, 8, 8)  # two heads of four
        assert not (torch.equal(mask, other) or mask.all())


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        raise RuntimeError("no")


def failing() -> Tensor:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), Refuses(), nn.Linear(8, 8))
    model = parallel(model, {"0": Colwise(), "3": Rowwise()}, 2)
    with pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 8))
    return torch.rand(3)


def test_an_error_among_parts(gloo_pool) -> None:
    first, second = gloo_pool.run(failing, world_size=2)
    assert torch.equal(first, second)


def seeded_apart() -> str:
    torch.manual_seed(0)
    model = parallel(Dropping(), TENSOR, 2)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(AgreementError) as error:
        model(IDS)
    torch.manual_seed(3)
    model(IDS)
    return str(error.value)


def drawn_by_one() -> int:
    model = parallel(Dropping(), TENSOR, 2)
    for done in range(4):
        if done and dist.get_rank() == 0:
            torch.rand(1)  # to log something, say
        try:
            model(IDS)
        except AgreementError:
            return done
    return -1


def test_a_rank_that_draws_alone_is_noticed_later(gloo_pool) -> None:
    assert gloo_pool.run(drawn_by_one, world_size=2) == [1, 1]


def test_ranks_seeded_apart_are_refused(gloo_pool) -> None:
    for message in gloo_pool.run(seeded_apart, world_size=2):
        assert "ranks 0 and 1" in message
        assert "data_rank" in message
