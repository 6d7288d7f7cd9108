"""The styles in training: every kind of module through ``parallelize`` on meshes of data and tp axes."""

import copy
import functools

import pytest
import torch
from _support.tp.tp_models import (
    DIM,
    Conv1D,
    ExpertWeights,
    FusedAttention,
    FusedMlp,
    Latent,
    Mlp,
    Moe,
    ScaledEmbedding,
    Sinks,
)
from _support.tp.tp_world import check_parity, on_rank, on_ranks, same
from torch import Tensor, nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import assert_parity
from parallel3d.testing.worlds import fake_world, local_world
from parallel3d.tp import Colwise, Rowwise, VocabParallel


class Everything(nn.Module):
    """A module of each kind, one after the other."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(13, DIM)
        self.attention = FusedAttention(4, 2, 3)
        self.mlp = FusedMlp(hidden)
        self.conv = nn.Sequential(Conv1D(hidden, DIM), nn.GELU(), Conv1D(DIM, hidden))
        self.moe = Moe(ExpertWeights(hidden, bias=True))
        self.latent = Latent(4, 3)
        self.sinks = Sinks(4, 3)
        self.head = nn.Linear(DIM, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for part in (self.attention, self.mlp, self.conv):
            x = x + part(x)
        x = self.moe(x.flatten(0, 1)).unflatten(0, tokens.shape)
        for part in (self.latent, self.sinks):
            x = x + part(nn.functional.layer_norm(x, (DIM,)))
        return self.head(nn.functional.layer_norm(x, (DIM,)))


PLAN = {
    "embed": "embedding_rowwise",
    "attention.qkv": Colwise(packed=(12, 6, 6), multiple_of=3),
    "attention.o": Rowwise(multiple_of=3),
    "mlp.gate_up": "packed_colwise",
    "mlp.down": "rowwise",
    "conv.0": "colwise",
    "conv.2": "rowwise",
    "moe.experts": "moe_tp_experts",
    "moe.experts.gate_up_proj": "packed_colwise",
    "moe.experts.down_proj": "rowwise",
    "moe.experts.identity": "moe_identity_expert",
    "latent.q": Colwise(multiple_of=5),
    "latent.kv_a": "mla_kv_a_proj",
    "latent.kv_b": Colwise(multiple_of=6),
    "latent.o": Rowwise(multiple_of=3),
    "sinks": "local_params",
    "sinks.sinks": "colwise",
    "sinks.scale": "replicated_with_grad_allreduce",
    "sinks.q": Colwise(multiple_of=3),
    "sinks.o": Rowwise(multiple_of=3),
    "head": "colwise_gather_output",
}


def _tokens(sample: int) -> Tensor:
    return torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(sample))


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 2),
        pytest.param((1, 1, 2), marks=pytest.mark.full),
        pytest.param((2, 1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_kind_of_module_trains_as_the_plain_model(sizes):
    build = functools.partial(Everything, 7)
    assert_parity(build, _tokens, MeshLayout(*sizes), steps=2, fp32=False, tp_plan=PLAN)


def test_frozen_parameters_get_no_gradient_and_others_theirs():
    model = Everything(8)
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name and "qkv" not in name and "down" not in name)
    check_parity(model, PLAN, 2, _tokens(0))


def test_bf16_parameters_make_bf16_results_near_the_plain_ones():
    torch.manual_seed(0)
    plain = nn.Sequential(FusedMlp(13), Conv1D(4, DIM)).bfloat16()
    plan = {"0.gate_up": "packed_colwise", "0.down": "rowwise", "1": "colwise_rep"}
    x = torch.randn(4, DIM).bfloat16()
    model = copy.deepcopy(plain)
    with local_world(2) as world:
        on_ranks(model, plan, world)
        for got in world.per_rank(model(x)):
            torch.testing.assert_close(got, plain(x), rtol=0.05, atol=0.05)


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = Everything(8)
    with fake_world(1, 4):
        model = parallelize(model, build_mesh(MeshLayout(1, 2, 2), device_type="cpu"), tp_plan=PLAN)
        assert all(p.is_meta for p in model.parameters())
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert shapes["moe.experts.gate_up_proj"] == (4, 16, DIM)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ({"": Colwise(packed=2, output="replicate")}, lambda: nn.Linear(DIM, 10)),
        ({"": Rowwise(packed=2, input="replicate")}, lambda: nn.Linear(DIM, 4)),
        ({"gate_up": "packed_colwise", "down": "rowwise"}, lambda: FusedMlp(5)),
        ({"up": "colwise", "down": "rowwise"}, lambda: Mlp(5)),
    ],
)
def test_second_derivatives(plan, model):
    torch.manual_seed(0)
    plain = model().double()
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(plain(x).pow(3).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    parallel = copy.deepcopy(plain)
    with local_world(2) as world:
        params = on_ranks(parallel, plan, world)
        for p in params.values():
            p.param.grad = None
        mine = world.map(lambda r: x.detach().clone()).requires_grad_()
        (first,) = torch.autograd.grad(parallel(mine).pow(3).sum(), mine, create_graph=True)
        first.pow(2).sum().backward()
        for name, p in plain.named_parameters():
            same(params[name].full_grad(world), p.grad)


@pytest.mark.parametrize(
    ("plan", "make"),
    [
        ({"": VocabParallel()}, lambda: ScaledEmbedding(13, DIM)),
        ({"": Colwise(output="replicate")}, lambda: ScaledEmbedding(13, DIM)),
    ],
)
def test_a_subclass_compiles_in_one_graph(plan, make):
    model = make()
    with fake_world(0, 2), torch.no_grad():
        on_rank(model, plan)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(_tokens(0)), model(_tokens(0)))
