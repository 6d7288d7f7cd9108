"""Sizes tp doesn't divide, down to ranks that hold nothing: hidden sizes, vocabularies, lengths."""

import pytest
import torch
from _support.tp.tp_models import DIM, Mlp
from _support.tp.tp_world import check_parity, tp_mesh, use_local_tensors
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.testing.worlds import local_world
from parallel3d.tp import (
    Colwise,
    PrepareInput,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    resolve_plan,
)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(DIM, 2 * hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class LanguageModel(nn.Module):
    def __init__(self, vocab: int, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, DIM), nn.Linear(DIM, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


# ---- hidden sizes ----


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("hidden", [1, 3, 5, 13])
def test_ranks_may_hold_nothing_of_a_hidden_size(tp, hidden):
    check_parity(Mlp(hidden), {"up": "colwise", "down": "rowwise"}, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("hidden", [1, 3, 5, 13])
def test_fused_gate_and_up(tp, hidden):
    plan = {"gate_up": Colwise(packed=2), "down": "rowwise"}
    check_parity(Fused(hidden), plan, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_groups_that_are_never_cut(groups):
    plan = {
        "gate_up": Colwise(packed=2, multiple_of=4),
        "down": Rowwise(multiple_of=4),
    }
    check_parity(Fused(4 * groups), plan, 4, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("length", [5, 7, 1])
@pytest.mark.parametrize("prepared", [True, False])
def test_fused_gate_and_up_on_parts_of_a_sequence(tp, length, prepared):
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1.gate_up": Colwise(packed=2, input="gathered" if prepared else "sequence"),
        "1.down": Rowwise(output="sequence"),
    }
    if prepared:
        plan["1"] = PrepareInput(layout="sequence")
    model = nn.Sequential(nn.Identity(), Fused(13))
    check_parity(model, plan, tp, floats(2, length, DIM), sequence_out=True)


# ---- vocabularies (complaint 18 and complaint 19 of docs/tensor_parallel.md) ----


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("vocab", [2, 3, 67])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_tp_does_not_divide(tp, vocab, tied):
    ids = torch.cat([torch.arange(vocab), torch.arange(5) % vocab])[None]
    plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    check_parity(LanguageModel(vocab, tied), plan, tp, ids)


@pytest.mark.parametrize("length", [5, 7, 1])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_and_a_sequence_that_tp_does_not_divide(tp, length):
    ids = torch.arange(2 * length).view(2, length) * 6 % 67
    plan = {
        "embed": VocabParallel(output="sequence"),
        "head": Colwise(input="sequence", output="replicate"),
    }
    check_parity(LanguageModel(67, tied=True), plan, tp, ids)


@pytest.mark.parametrize(("tp", "rows"), [(2, [34, 33]), (4, [17, 17, 17, 16])])
def test_nothing_is_padded_at_rest_nor_in_logits_that_stay_split(tp, rows):
    plain = LanguageModel(67, tied=True).double()
    ids = torch.arange(67)[None]
    wanted = plain(ids).detach()
    with local_world(tp) as world:
        model = LanguageModel(67, tied=True).double()
        model.load_state_dict(plain.state_dict())
        plan = {"embed": "embedding_rowwise", "head": "colwise"}
        resolve_plan(model, plan, tp).apply(model, tp_mesh(tp))
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.shape == (67, DIM)
        use_local_tensors(model, world)
        parts = world.per_rank(model(torch.arange(67)[None]).detach())
    assert [part.shape[-1] for part in parts] == rows
    torch.testing.assert_close(torch.cat(parts, -1), wanted, rtol=1e-12, atol=1e-12)
