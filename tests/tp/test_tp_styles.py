"""Each style on simulated ranks against the plain module: output, input and parameter gradients."""

import copy
from collections import Counter

import pytest
import torch
from _support.tp.tp_models import DIM, GatedMlp, Lm, Mlp, Norm
from _support.tp.tp_world import check_parity, chunks, same, tp_mesh, use_local_tensors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._util.recorder import record_collectives
from parallel3d.errors import StateError
from parallel3d.testing.worlds import fake_world, local_world
from parallel3d.tp import (
    Colwise,
    PrepareInput,
    Replicated,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    resolve_plan,
)

TP = [2, 4]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


# ---- linears ----


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("hidden", [5, 8, 13])
@pytest.mark.parametrize("bias", [True, False])
def test_colwise_then_rowwise_at_any_hidden_size(tp, hidden, bias):
    # torch 2.13 fails on 13 and 5: "a and b must have same reduction dim".
    check_parity(Mlp(hidden, bias), {"up": "colwise", "down": "rowwise"}, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("out", [8, 7])
def test_colwise_gathers_its_output(tp, out):
    plan = {"": Colwise(output="replicate")}
    check_parity(nn.Linear(DIM, out), plan, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("size", [8, 7])
def test_rowwise_splits_a_whole_input(tp, size):
    check_parity(nn.Linear(size, 3), {"": Rowwise(input="replicate")}, tp, floats(2, size))


def test_rowwise_says_so_when_it_gets_a_whole_input():
    with fake_world(0, 2):
        model = nn.Sequential(nn.Linear(4, 3))
        resolve_plan(model, {"0": "rowwise"}, 2).apply(model, tp_mesh(2))
        model[0].weight = nn.Parameter(model[0].weight.to_local())
        with pytest.raises(StateError, match=r'Rowwise\(input="replicate"\) splits'):
            model(torch.ones(1, 4))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("length", [8, 5, 1])
def test_linears_on_parts_of_a_sequence(tp, length):
    model = nn.Sequential(nn.Identity(), Mlp(13))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1.up": Colwise(input="sequence"),
        "1.down": Rowwise(output="sequence"),
    }
    check_parity(model, plan, tp, floats(2, length, DIM), sequence_out=True)


@pytest.mark.parametrize("layout", ["replicate", "sequence"])
@pytest.mark.parametrize("length", [4, 5])
def test_prepare_input_prepares_once_for_all_children(layout, length):
    model = nn.Sequential(nn.Identity(), GatedMlp(7))
    split = layout == "sequence"
    plan = {
        "1": PrepareInput(layout),
        "1.gate": Colwise(input="gathered"),
        "1.up": Colwise(input="gathered"),
        "1.down": Rowwise(output=layout),
    }
    if split:
        plan["0"] = SequenceParallel(input="replicate")
    check_parity(model, plan, 2, floats(2, length, DIM), sequence_out=split)


def test_prepare_input_passes_other_arguments_and_finds_the_input_by_name():
    plan = {
        "": PrepareInput(),
        "gate": Colwise(input="gathered"),
        "up": Colwise(input="gathered"),
        "down": "rowwise",
    }
    x, shift = floats(2, 3, DIM), floats(2, 3, DIM)
    for call in (
        lambda model, x, shift: model(x, 2.0, shift=shift),
        lambda model, x, shift: model(scale=3.0, x=x, shift=shift),
    ):
        check_parity(GatedMlp(7), plan, 2, x, shift, call=call)


def test_prepare_input_refuses_a_call_without_its_input():
    with fake_world(0, 2):
        model = GatedMlp(8)
        plan = {"": PrepareInput(), "up": "colwise_rep"}
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        with pytest.raises(StateError, match="keyword arguments given: scale"):
            model(scale=2.0)


# ---- embeddings ----


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("vocab", [8, 11, 5])
@pytest.mark.parametrize("padding", [None, 0, 4])
def test_vocabulary_parallel(tp, vocab, padding):
    # vocab 5 on tp 4: chunks of 2, 2, 1 and 0 rows.
    plain = nn.Embedding(vocab, DIM, padding_idx=padding)
    tokens = torch.cat([torch.arange(vocab), ids(5, below=vocab)])[None]
    check_parity(plain, {"": "embedding_rowwise"}, tp, tokens)


@pytest.mark.parametrize("length", [4, 5])
def test_vocabulary_parallel_onto_a_sequence(length):
    plan = {"": VocabParallel(output="sequence")}
    check_parity(nn.Embedding(7, DIM), plan, 2, ids(3, length, below=7), sequence_out=True)


@pytest.mark.parametrize("width", [8, 7])
def test_embedding_split_in_its_width(width):
    plan = {"": Colwise(output="replicate")}
    check_parity(nn.Embedding(5, width, padding_idx=1), plan, 2, ids(2, 9, below=5))


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_outside_the_vocabulary_is_an_error(bad):
    model = nn.Embedding(7, DIM)
    with local_world(2) as world:
        resolve_plan(model, {"": "embedding"}, 2).apply(model, tp_mesh(2))
        use_local_tensors(model, world)
        with pytest.raises(RuntimeError, match="outside the vocabulary of 7"):
            model(torch.tensor([0, bad]))


# ---- norms and dropout ----


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(DIM), lambda: nn.RMSNorm(DIM), Norm])
@pytest.mark.parametrize(("tp", "length"), [(2, 4), (2, 5), (4, 5)])
def test_norm_on_parts_of_a_sequence(make, tp, length):
    plan = {"": SequenceParallel(input="replicate")}
    check_parity(make(), plan, tp, floats(2, length, DIM), sequence_out=True)
    plan = {"": SequenceParallel(input="replicate", output="replicate")}
    check_parity(make(), plan, tp, floats(2, length, DIM))


class HeadNorm(nn.Module):
    """A norm on each head between a column- and a row-parallel linear."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(DIM, heads * size)
        self.norm = nn.RMSNorm(size)
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (-1, self.size))
        return self.o(self.norm(y).flatten(-2))


def test_norm_on_this_ranks_heads_gets_its_gradient_summed():
    plan = {
        "q": Colwise(multiple_of=3),
        "norm": "replicated_with_grad_allreduce",
        "o": Rowwise(multiple_of=3),
    }
    check_parity(HeadNorm(heads=4, size=3), plan, 4, floats(2, 5, DIM))


def test_replicated_keeps_the_gradient_whole():
    model = nn.Sequential(nn.RMSNorm(DIM), Mlp(8))
    plan = {"0": Replicated(), "1.up": "colwise", "1.down": "rowwise"}
    check_parity(model, plan, 2, floats(2, 5, DIM))


# ---- models ----

TENSOR_PARALLEL = {
    "embed": "embedding_rowwise",
    "layers.*.mlp": PrepareInput(),
    "layers.*.mlp.gate": Colwise(input="gathered"),
    "layers.*.mlp.up": Colwise(input="gathered"),
    "layers.*.mlp.down": "rowwise",
    "head": "colwise_rep",
}
SEQUENCE_PARALLEL = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.norm": "sequence_parallel",
    "layers.*.drop": "sequence_parallel",
    "layers.*.mlp": PrepareInput("sequence"),
    "layers.*.mlp.gate": Colwise(input="gathered"),
    "layers.*.mlp.up": Colwise(input="gathered"),
    "layers.*.mlp.down": Rowwise(output="sequence"),
    "norm": "sequence_parallel",
    "head": Colwise(input="sequence", output="replicate"),
}


@pytest.mark.parametrize("plan", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["tp", "sequence"])
@pytest.mark.parametrize(("tp", "length"), [(2, 4), (2, 5), (4, 5), (3, 7)])
@pytest.mark.parametrize("tied", [False, True])
def test_language_model(plan, tp, length, tied):
    # torch 2.13: a sequence of 5 on tp 2 becomes 6, and tied weights come apart.
    check_parity(Lm(11, 13, tied=tied), plan, tp, ids(2, length, below=11))


@pytest.mark.parametrize("plan", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["tp", "sequence"])
def test_tied_embedding_without_a_rule_stays_tied(plan):
    plan = {name: style for name, style in plan.items() if name != "embed"}
    check_parity(Lm(11, 13, tied=True), plan, 2, ids(2, 5, below=11))


def test_tied_weights_are_one_parameter_after_apply():
    model = Lm(11, 13, tied=True)
    with fake_world(1, 2):
        resolve_plan(model, TENSOR_PARALLEL, 2).apply(model, tp_mesh(2))
        assert model.head.weight is model.embed.weight
        assert model.head.weight.shape == (11, DIM)
        assert model.head.weight.to_local().shape == (5, DIM)


def test_a_copy_of_a_parallel_model_has_its_own_forwards():
    plain = Mlp(13).double()
    x = floats(2, DIM)
    model = copy.deepcopy(plain)
    with local_world(2) as world:
        plan = {"": PrepareInput(), "up": Colwise(input="gathered"), "down": "rowwise"}
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        use_local_tensors(model, world)
        twin = copy.deepcopy(model)
        for module, other in zip(model.modules(), twin.modules(), strict=True):
            assert other.forward.__self__ is other is not module
        with torch.no_grad():
            model.up.weight.zero_()
        for got in world.per_rank(twin(world.map(lambda r: x.clone()))):
            same(got, plain(x))


def test_second_derivative_of_a_parallel_mlp():
    plain = Mlp(5).double()
    x = floats(2, DIM).requires_grad_()
    (first,) = torch.autograd.grad(plain(x).pow(2).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    model = copy.deepcopy(plain)
    with local_world(2) as world:
        resolve_plan(model, {"up": "colwise", "down": "rowwise"}, 2).apply(model, tp_mesh(2))
        params = use_local_tensors(model, world)
        for p in params.values():
            p.param.grad = None
        mine = world.map(lambda r: x.detach().clone()).requires_grad_()
        (first,) = torch.autograd.grad(model(mine).pow(2).sum(), mine, create_graph=True)
        first.pow(2).sum().backward()
        for name in ("up.weight", "up.bias", "down.weight"):
            same(params[name].full_grad(world), plain.get_parameter(name).grad)


# ---- what is communicated ----


def _collectives(plan: dict, tokens: Tensor) -> tuple[Counter, Counter]:
    """Collectives of one forward and one backward of a two-block model, by operation."""
    model = Lm(12, 8)
    with fake_world(0, 2):
        mesh = tp_mesh(2)
        resolve_plan(model, plan, 2).apply(model, mesh)
        for module in model.modules():
            for name, param in module._parameters.items():
                if isinstance(param, DTensor):
                    module._parameters[name] = nn.Parameter(param.to_local())
        with record_collectives(mesh) as forward:
            y = model(tokens)
        with record_collectives(mesh) as backward:
            y.sum().backward()
    assert all(call.axis == "tp" for call in forward.calls + backward.calls)
    return Counter(c.op for c in forward.calls), Counter(c.op for c in backward.calls)


def test_each_region_communicates_once_each_way():
    tokens = ids(2, 4, below=12)
    forward, backward = _collectives(TENSOR_PARALLEL, tokens)
    assert forward == {"all_reduce": 1 + 2, "all_gather": 1}  # embedding, blocks, head
    assert backward == {"all_reduce": 2 + 1}
    apart = {name: style for name, style in TENSOR_PARALLEL.items() if name != "layers.*.mlp"}
    apart |= {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise"}
    assert _collectives(apart, tokens)[1] == {"all_reduce": 2 + 1}  # they read one tensor


def test_sequence_parallel_communicates_the_halves():
    forward, backward = _collectives(SEQUENCE_PARALLEL, ids(2, 5, below=12))
    assert forward == {"reduce_scatter": 1 + 2, "all_gather": 2 + 2}  # the head gathers twice
    assert backward == {"all_gather": 1 + 2, "reduce_scatter": 2 + 1}


# ---- the length of a sequence ----


def _sequence_model(rank: int, tp: int) -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Linear(DIM, 8))
    plan = {"0": SequenceParallel(input="replicate"), "1": Colwise(input="sequence")}
    resolve_plan(model, plan, tp).apply(model, tp_mesh(tp))
    model[1]._parameters["weight"] = nn.Parameter(model[1].weight.to_local())
    model[1]._parameters["bias"] = nn.Parameter(model[1].bias.to_local())
    return model


def test_a_part_of_a_sequence_nothing_has_split_is_an_error():
    with fake_world(0, 2):
        model = _sequence_model(0, 2)
        with pytest.raises(StateError, match="nothing has split a sequence"):
            model[1](torch.ones(1, 3, DIM))
        assert model(torch.ones(1, 5, DIM)).shape == (1, 5, 4)


def test_a_part_that_is_not_of_the_sequence_split_last_is_an_error():
    with fake_world(1, 2):
        model = _sequence_model(1, 2)
        model(torch.ones(1, 5, DIM))
        with pytest.raises(StateError, match=r"got 3 rows along dim 1, but .* split last has 5"):
            model[1](torch.ones(1, 3, DIM))


def test_parts_helper_cuts_as_torch_does():
    assert [len(c) for c in chunks(torch.arange(5), 0, 4)] == [2, 2, 1, 0]
