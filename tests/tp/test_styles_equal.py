"""Each style on simulated ranks against the plain module: output, input and parameter gradients.

Sizes that ``tp`` does not divide are among those of every style, down to ranks that hold nothing.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from _support.tp.tp_models import (
    COUNT,
    DIM,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    Conv1D,
    Counting,
    Cross,
    Encoded,
    ExpertWeights,
    FusedAttention,
    FusedMlp,
    Gate,
    Gated,
    GatedMlp,
    HeadNorm,
    Latent,
    Lm,
    Mlp,
    Moe,
    Norm,
    NormedEmbedding,
    NormedLinear,
    OffsetEmbedding,
    OfTwo,
    ScaledEmbedding,
    ScaledLinear,
    Scaling,
    Second,
    Sinks,
    Sums,
    TakingTurns,
    plan_for,
)
from _support.tp.tp_world import check_parity
from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp import (
    Colwise,
    LocalParams,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicated,
    RopeOutput,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    resolve_plan,
)

UP_DOWN = {"up": "colwise", "down": "rowwise"}
FUSED = {"gate_up": "packed_colwise", "down": "rowwise"}
SPLIT = SequenceParallel(input="replicate")  # begins parts of a sequence
GATHERED = Colwise(input="gathered")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM, dtype=torch.float64)


def ids(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


def equal(model: nn.Module, plan: dict, *inputs: Tensor, tp: tuple[int, ...], **options) -> None:
    for ranks in tp:
        check_parity(model, plan, ranks, *inputs, **options)


# ---- linears ----


def test_linears():
    # torch 2.13 fails on 13 and 5: "a and b must have same reduction dim".
    for hidden, bias in product([1, 3, 5, 8, 13], [True, False]):
        equal(Mlp(hidden, bias), UP_DOWN, x(2, 3), tp=(2, 3, 4))
    for size in (8, 7):
        equal(nn.Linear(DIM, size), {"": Colwise(output="replicate")}, x(2, 3), tp=(2, 4))
        into = nn.Sequential(nn.Linear(DIM, size), nn.Linear(size, 3))
        equal(into, {"1": Rowwise(input="replicate")}, x(2), tp=(2, 4))


@pytest.mark.parametrize("length", [8, 6, 5, 1])
def test_linears_on_parts_of_a_sequence(length):
    taken, given = Colwise(input="sequence"), Rowwise(output="sequence")
    plan = {"0": SPLIT, "1.up": taken, "1.down": given}
    model = nn.Sequential(nn.Identity(), Mlp(13))
    equal(model, plan, x(2, length), tp=(2, 4), sequence_out=True)
    model = nn.Sequential(nn.Identity(), ScaledLinear(DIM, 13), ScaledLinear(13, DIM))
    plan = {"0": SPLIT, "1": taken, "2": given}
    equal(model, plan, x(2, length), tp=(2,), sequence_out=True)
    model = nn.Sequential(nn.Identity(), nn.Linear(DIM, 26), nn.GELU(), nn.Linear(26, DIM))
    plan = {
        "0": SPLIT,
        "1": Colwise(packed=2, input="sequence"),
        "3": Rowwise(packed=2, output="sequence"),
    }
    equal(model, plan, x(2, length), tp=(2, 4), sequence_out=True)


def test_sections():
    for hidden in (1, 3, 5, 8, 13):
        equal(FusedMlp(hidden), FUSED, x(2, 3), tp=(2, 3, 4))
    for groups in (1, 3, 5):
        plan = {"gate_up": Colwise(packed=2, multiple_of=4), "down": Rowwise(multiple_of=4)}
        equal(FusedMlp(4 * groups), plan, x(2, 3), tp=(4,))
    attention = FusedAttention(8, 4, 3)
    plan = {"qkv": Colwise(packed=attention.sections, multiple_of=3), "o": Rowwise(multiple_of=3)}
    equal(attention, plan, x(2, 5), tp=(2, 4))
    for packed, tp in ((2, (2, 3, 4)), ((5, 3, 4), (2, 3)), ((5, 7), (4,))):
        plan = {"": Colwise(packed=packed, output="replicate")}  # in the plain order
        equal(nn.Linear(DIM, 12), plan, x(2, 3), tp=tp)
    model = nn.Sequential(nn.Linear(DIM, 14), nn.ReLU(), nn.Linear(14, DIM))
    equal(model, {"0": Colwise(packed=2), "2": "packed_rowwise"}, x(2, 3), tp=(2, 3, 4))
    plan = {"2": Rowwise(packed=(6, 8), input="replicate")}
    equal(model, plan, x(2, 3), tp=(2, 3, 4))
    rows = Packing(0, (((2, 3), (9, 1)), ((0, 2), (5, 4)), ((10, 1),)))
    model = nn.Sequential(nn.Linear(DIM, 11), nn.Linear(11, 4))
    equal(model, {"0": Colwise(packed=rows), "1": Rowwise(packed=rows)}, x(2), tp=(3,))


@pytest.mark.parametrize("length", [5, 7, 1])
@pytest.mark.parametrize("prepared", [True, False])
def test_sections_on_parts_of_a_sequence(length, prepared):
    plan = {
        "0": SPLIT,
        "1.gate_up": Colwise(packed=2, input="gathered" if prepared else "sequence"),
        "1.down": Rowwise(output="sequence"),
    }
    if prepared:
        plan["1"] = PrepareInput(layout="sequence")
    model = nn.Sequential(nn.Identity(), FusedMlp(13))
    equal(model, plan, x(2, length), tp=(2, 4), sequence_out=True)


def test_conv1d():
    for hidden in (8, 13):
        model = nn.Sequential(Conv1D(hidden, DIM), nn.GELU(), Conv1D(DIM, hidden))
        equal(model, {"0": "colwise", "2": "rowwise"}, x(2, 3), tp=(2, 3, 4))
        equal(model, {"0": "colwise_rep", "2": "rowwise_rep"}, x(2, 3), tp=(2, 3, 4))
    plan = {"": Colwise(packed=(6, 5, 4), output="replicate")}
    equal(Conv1D(15, DIM), plan, x(2, 3), tp=(2, 4))
    model = nn.Sequential(Conv1D(12, DIM), Conv1D(DIM, 12))
    equal(model, {"1": Rowwise(packed=2, input="replicate")}, x(2), tp=(2, 4))


@pytest.mark.ci
def test_transformers_conv1d_is_the_one_known_by_name():
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D(8, DIM)
    equal(real, {"": "colwise_gather_output"}, x(2, 3), tp=(2,))


def test_linears_that_do_something_of_their_own():
    model = nn.Sequential(ScaledLinear(DIM, 13), ScaledLinear(13, DIM))
    equal(model, {"0": "colwise", "1": "rowwise"}, x(2, 3), tp=(2, 4))
    for style in ("colwise_gather_output", "rowwise_split_input"):
        equal(NormedLinear(DIM, 5), {"": style}, x(2, 3), tp=(2,))


# ---- embeddings ----


def test_embeddings():
    # vocab 5 on tp 4: chunks of 2, 2, 1 and 0 rows.
    for vocab, padding in product([8, 11, 5], [None, 0, 4]):
        tokens = torch.cat([torch.arange(vocab), ids(5, below=vocab)])[None]
        plain = nn.Embedding(vocab, DIM, padding_idx=padding)
        equal(plain, {"": "embedding_rowwise"}, tokens, tp=(2, 4))
    sequence = {"": VocabParallel(output="sequence")}
    for length in (4, 5):
        tokens = ids(3, length, below=7)
        equal(nn.Embedding(7, DIM), sequence, tokens, tp=(2,), sequence_out=True)
    for width in (8, 7):
        plain = nn.Embedding(5, width, padding_idx=1)
        equal(plain, {"": Colwise(output="replicate")}, ids(2, 9, below=5), tp=(2,))


def test_embeddings_that_do_something_of_their_own():
    for make, style in product(
        [ScaledEmbedding, NormedEmbedding], ["embedding_rowwise", "embedding_colwise"]
    ):
        equal(make(67, 10), {"": style}, ids(3, 5, below=67), tp=(2, 4))
    plan = {"0.weight": "embedding_rowwise", "1": "colwise_rep"}  # the rule of its weight is its
    model = nn.Sequential(ScaledEmbedding(67, 10), nn.Linear(10, 3))
    equal(model, plan, ids(3, 5, below=67), tp=(2,))
    sequence = {"": VocabParallel(output="sequence")}
    tokens = ids(3, 5, below=67)
    equal(ScaledEmbedding(67, 8), sequence, tokens, tp=(2,), sequence_out=True)
    model = nn.Sequential(ScaledEmbedding(11, 7), nn.Linear(7, 3))
    equal(model, {"0": Colwise(), "1": "rowwise"}, ids(3, 5, below=11), tp=(2,))
    equal(OffsetEmbedding(9, 6), {"": "embedding"}, ids(3, 5, below=7), tp=(2,))


# ---- norms, and modules that stay whole ----


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(DIM), lambda: nn.RMSNorm(DIM), Norm])
def test_norms_on_parts_of_a_sequence(make):
    for tp, length in ((2, 4), (2, 5), (4, 5)):
        equal(make(), {"": SPLIT}, x(2, length), tp=(tp,), sequence_out=True)
        plan = {"": SequenceParallel(input="replicate", output="replicate")}
        equal(make(), plan, x(2, length), tp=(tp,))


def test_whole_modules():
    plan = {
        "q": Colwise(multiple_of=3),
        "norm": "replicated_with_grad_allreduce",
        "o": Rowwise(multiple_of=3),
    }
    equal(HeadNorm(heads=4, size=3), plan, x(2, 5), tp=(4,))
    model = nn.Sequential(nn.RMSNorm(DIM), Mlp(8))
    plan = {"0": Replicated(), "1.up": "colwise", "1.down": "rowwise"}
    equal(model, plan, x(2, 5), tp=(2,))


# ---- inputs that are prepared ----


@pytest.mark.parametrize("layout", ["replicate", "sequence"])
@pytest.mark.parametrize("length", [4, 5])
def test_an_input_is_prepared_once_for_all_children(layout, length):
    split = layout == "sequence"
    plan = {"1": PrepareInput(layout), "1.gate": GATHERED, "1.up": GATHERED}
    plan |= {"1.down": Rowwise(output=layout)} | ({"0": SPLIT} if split else {})
    model = nn.Sequential(nn.Identity(), GatedMlp(7))
    equal(model, plan, x(2, length), tp=(2,), sequence_out=split)


CROSS = {"q": GATHERED, "k": GATHERED, "o": "rowwise"}


def test_inputs_however_they_are_given():
    plan = {"": PrepareInput(), "gate": GATHERED, "up": GATHERED, "down": "rowwise"}
    for call in (
        lambda model, x, shift: model(x, 2.0, shift=shift),
        lambda model, x, shift: model(scale=3.0, x=x, shift=shift),
    ):
        equal(GatedMlp(7), plan, x(2, 3), x(2, 3), tp=(2,), call=call)
    plan = {**CROSS, "": PrepareInput(keywords=("memory",))}
    for call in (
        lambda model, x, memory: model(x, 2.0, memory),
        lambda model, x, memory: model(x, 2.0, memory=memory),
        lambda model, x, memory: model(memory=memory, scale=2.0, x=x),
    ):
        equal(Cross(), plan, x(2, 3), x(2, 3), tp=(2,), call=call)
    plan = {"": PrepareInput(), "mlp.up": GATHERED, "mlp.down": "rowwise"}
    equal(OfTwo(), plan, x(2, 3), tp=(2,), call=lambda model, x: model("first", x, 2.0))


def test_parameters_of_a_module_whose_input_is_prepared():
    plan = {**CROSS, "": PrepareInput(keywords=("memory",)), "gate": "colwise"}
    with pytest.raises(PlanError, match="scale of Gated has no rule"):
        resolve_plan(Gated(), plan, 2)
    plan["scale"] = "replicated_with_grad_allreduce"
    call = lambda model, x, memory: model(x, 1.0, memory)  # noqa: E731
    equal(Gated(), plan, x(2, 3), x(2, 3), tp=(2,), call=call)
    style = PrepareInput(wanted="whole")  # of which every rank computes the same
    assert style.traffic(Scaling(), 2) == ()
    assert style.plan(Scaling(), 2).keys() == {"scale"}
    plan = {"": style, "mlp.up": "colwise", "mlp.down": "rowwise"}
    equal(Scaling(), plan, x(2, 3), tp=(2,))


@pytest.mark.parametrize("length", [6, 5])
def test_modules_between_parts_of_a_sequence(length):
    plan = {f"cross.{name}": style for name, style in CROSS.items()}
    plan |= {
        "enter": SPLIT,
        "cross": PrepareInput("sequence", keywords=(("memory", "replicate"),)),
        "cross.o": Rowwise(output="sequence"),
    }
    equal(Encoded(), plan, x(2, length), x(2, length), tp=(2,), sequence_out=True)
    output = PrepareOutput("replicate", "sequence")
    plan = {
        "0": SPLIT,
        "1": PrepareInputOutput("sequence", wanted="whole", output=output),
        "1.mlp.gate": "colwise",
        "1.mlp.up": "colwise",
        "1.mlp.down": "rowwise",
        "2": "sequence_parallel",
    }
    model = nn.Sequential(nn.LayerNorm(DIM), Gate(), nn.LayerNorm(DIM))
    equal(model, plan, x(2, length), tp=(2, 3), sequence_out=True)


# ---- outputs that are prepared ----


def test_outputs():
    plan = {"inner.up": "colwise", "inner": LocalParams((("down", Colwise()),))}
    equal(Second(Sums(13)), {**plan, "": PrepareOutput()}, x(2, 5), tp=(2, 3, 4))
    plan[""] = PrepareOutput(wanted="sequence")
    equal(Second(Sums(13)), plan, x(2, 5), tp=(2, 3, 4), sequence_out=True)
    for length in (6, 5):
        model = nn.Sequential(nn.Linear(DIM, 4), nn.LayerNorm(4))
        plan = {"0": PrepareOutput("replicate", "sequence"), "1": "sequence_parallel"}
        equal(model, plan, x(2, length), tp=(2, 3), sequence_out=True)
        plan[""] = PrepareOutput("sequence", "replicate")
        equal(model, plan, x(2, length), tp=(2, 3))
    model = nn.Sequential(nn.Linear(DIM, 7), nn.ReLU(), nn.Linear(7, DIM))
    plan = {"0": PrepareOutput("replicate", "shard"), "2": "rowwise"}
    equal(model, plan, x(2, 3), tp=(2, 4))
    plan = {"0": "colwise", "1": PrepareOutput("shard", "replicate", features=7)}
    equal(model[:2], plan, x(2, 3), tp=(2, 4))


# ---- raw parameters, latent attention, experts ----


def test_parameters_split_by_heads():
    plan = {
        "q": Colwise(multiple_of=3),
        "o": Rowwise(multiple_of=3),
        "": "local_params",
        "sinks": "colwise",
        "scale": "replicated_with_grad_allreduce",
    }
    equal(Sinks(4, 3), plan, x(2, 5), tp=(2, 4))


def test_compressed_keys_and_values():
    plan = {
        "1.q": Colwise(multiple_of=5),
        "1.kv_a": "mla_kv_a_proj",
        "1.kv_b": Colwise(multiple_of=6),
        "1.o": Rowwise(multiple_of=3),
    }
    model = nn.Sequential(nn.LayerNorm(DIM), Latent(4, 3))
    equal(model, plan, x(2, 5), tp=(2, 4))
    assert resolve_plan(model, plan, 2).modules[1].style == RopeOutput(2)


def experts() -> Iterator[tuple[nn.Module, str, str, tuple[int, ...]]]:
    for hidden, bias in product([8, 5], [False, True]):
        yield ExpertWeights(hidden, bias=bias), "packed_colwise", "rowwise", (2, 3, 4)
    # Square: only is_transposed tells the dims apart.
    for hidden, bias in product([5, DIM // 2], [False, True]):
        made = ExpertWeights(hidden, transposed=True, bias=bias)
        yield made, "packed_rowwise", "colwise", (2, 4)
    # As transformers marks them: a packed style there would be silently wrong.
    for style in ("colwise", "packed_colwise"):
        yield TakingTurns(8, bias=True), style, "rowwise", (4,)
    for hidden in (8, DIM):  # it reads how wide an expert is
        yield Counting(hidden), "packed_colwise", "rowwise", (2,)


class OneUp(ExpertWeights):
    """With one projection up."""

    def __init__(self) -> None:
        super().__init__(7)
        self.gate_up_proj = nn.Parameter(torch.randn(COUNT, 7, DIM))

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, y


def test_experts():
    for module, up, down, tp in [*experts(), (OneUp(), "colwise", "rowwise", (2,))]:
        equal(Moe(module), plan_for(up, down), x(7), tp=tp)


# ---- models ----


@pytest.mark.parametrize("plan", [TENSOR_PARALLEL, SEQUENCE_PARALLEL], ids=["tp", "sequence"])
@pytest.mark.parametrize("tied", [False, True])
def test_language_models(plan, tied):
    # torch 2.13: a sequence of 5 on tp 2 becomes 6, and tied weights come apart.
    for tp, length in ((2, 4), (2, 5), (4, 5), (3, 7)):
        equal(Lm(11, 13, tied=tied), plan, ids(2, length, below=11), tp=(tp,))
    if tied:
        plan = {name: style for name, style in plan.items() if name != "embed"}
        equal(Lm(11, 13, tied=True), plan, ids(2, 5, below=11), tp=(2,))


@pytest.mark.parametrize("vocab", [2, 3, 67])
def test_a_vocabulary_that_tp_does_not_divide(vocab):
    """Complaint 18 and complaint 19 of docs/tensor_parallel.md."""
    tokens = torch.cat([torch.arange(vocab), torch.arange(5) % vocab])[None]
    for tied in (True, False):
        model = Lm(vocab, 13, tied=tied, blocks=1)
        equal(model, TENSOR_PARALLEL, tokens, tp=(2, 3, 4))
        equal(model, SEQUENCE_PARALLEL, tokens, tp=(2, 4))
