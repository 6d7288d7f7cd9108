"""Modules beside nn.Linear and nn.Embedding: transformers' Conv1D, subclasses that call super().forward."""

import copy

import pytest
import torch
from _support.tp.module_kinds import Conv1D, ScaledEmbedding
from _support.tp.tp_models import DIM
from _support.tp.tp_world import check_parity, tp_mesh
from torch import Tensor, nn

from parallel3d.errors import PlanError
from parallel3d.testing.worlds import fake_world
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel, resolve_plan


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


# ---- transformers' Conv1D ----


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("hidden", [8, 13])
def test_conv1d(tp, hidden):
    model = nn.Sequential(Conv1D(hidden, DIM), nn.GELU(), Conv1D(DIM, hidden))
    check_parity(model, {"0": "colwise", "2": "rowwise"}, tp, floats(2, 3, DIM))
    check_parity(model, {"0": "colwise_rep", "2": "rowwise_rep"}, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_packed_conv1d(tp):
    plan = {"": Colwise(packed=(6, 5, 4), output="replicate")}
    check_parity(Conv1D(15, DIM), plan, tp, floats(2, 3, DIM))
    check_parity(Conv1D(DIM, 12), {"": Rowwise(packed=2, input="replicate")}, tp, floats(2, 12))


@pytest.mark.ci
def test_transformers_conv1d_is_the_one_known_by_name():
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D(8, DIM)
    check_parity(real, {"": "colwise_gather_output"}, 2, floats(2, 3, DIM))


# ---- subclasses that do something with what they look up or multiply ----


class NormedEmbedding(ScaledEmbedding):
    """Needs whole vectors; its forward calls that of a subclass."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__(vocab, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids))


class NormedLinear(nn.Linear):
    """Needs all features before the product and after it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.softmax(-1)).softmax(-1)


class BranchingEmbedding(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) if self.training else super().forward(input_ids) * 2


class ReadingEmbedding(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) / self.weight.norm()


class OffsetEmbedding(nn.Embedding):
    offset = 2

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids + self.offset)


class ScaledLinear(nn.Linear):
    factor = 0.5

    def forward(self, input: Tensor, extra: float = 1.0) -> Tensor:
        return super().forward(input * 2) * self.factor


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("make", [ScaledEmbedding, NormedEmbedding])
def test_embeddings_that_change_what_they_look_up(tp, style, make):
    check_parity(make(67, 10), {"": style}, tp, ids(3, 5, below=67))


def test_the_rule_of_its_weight_is_the_embeddings():
    plan = {"0.weight": "embedding_rowwise", "1": "colwise_rep"}
    model = nn.Sequential(ScaledEmbedding(67, 10), nn.Linear(10, 3))
    check_parity(model, plan, 2, ids(3, 5, below=67))


def test_a_scaled_embedding_onto_a_sequence_and_in_parts():
    plan = {"": VocabParallel(output="sequence")}
    check_parity(ScaledEmbedding(67, 8), plan, 2, ids(3, 5, below=67), sequence_out=True)
    model = nn.Sequential(ScaledEmbedding(11, 7), nn.Linear(7, 3))
    check_parity(model, {"0": Colwise(), "1": "rowwise"}, 2, ids(3, 5, below=11))


def test_an_embedding_that_changes_its_ids():
    check_parity(OffsetEmbedding(9, 6), {"": "embedding"}, 2, ids(3, 5, below=7))


@pytest.mark.parametrize("tp", [2, 4])
def test_linears_that_scale(tp):
    model = nn.Sequential(ScaledLinear(DIM, 13), ScaledLinear(13, DIM))
    check_parity(model, {"0": "colwise", "1": "rowwise"}, tp, floats(2, 3, DIM))
    model = nn.Sequential(nn.Identity(), *model)
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1": Colwise(input="sequence"),
        "2": Rowwise(output="sequence"),
    }
    check_parity(model, plan, 2, floats(2, 5, DIM), sequence_out=True)


@pytest.mark.parametrize(
    ("module", "style", "said"),
    [
        (NormedEmbedding(8, 4), VocabParallel(output="sequence"), "may need the whole sequence"),
        (NormedEmbedding(8, 4), Colwise(), "may need all features"),
        (NormedLinear(8, 4), "colwise", r"Colwise\(output=.replicate.\) gives it all"),
        (NormedLinear(8, 4), "rowwise", r"Rowwise\(input=.replicate.\) gives it all"),
        (
            BranchingEmbedding(8, 4),
            "embedding",
            r"with its own forward, not .*\.BranchingEmbedding",
        ),
        (ReadingEmbedding(8, 4), "embedding", r"with its own forward, not .*\.ReadingEmbedding"),
        (nn.Conv2d(4, 4, 1), "colwise", "not Conv2d"),
        (nn.Bilinear(4, 4, 4), "rowwise", "not Bilinear"),
        (nn.EmbeddingBag(8, 4), "embedding", r"not torch.nn.modules.sparse.EmbeddingBag"),
    ],
)
def test_what_can_not_be_judged_is_refused(module, style, said):
    with pytest.raises(PlanError, match=said):
        resolve_plan(nn.Sequential(module), {"0": style}, 2)


@pytest.mark.parametrize("style", ["colwise_gather_output", "rowwise_split_input"])
def test_linears_that_need_all_features_get_them(style):
    check_parity(NormedLinear(DIM, 5), {"": style}, 2, floats(2, 3, DIM))


def test_a_copy_of_a_scaled_embedding_looks_up_in_its_own_weight():
    model = ScaledEmbedding(8, 4)
    with fake_world(0, 2), torch.no_grad():
        resolve_plan(model, {"": "embedding"}, 2).apply(model, tp_mesh(2))
        model.weight = nn.Parameter(model.weight.to_local())
        twin = copy.deepcopy(model)
        model.weight.zero_()
        assert twin(torch.tensor([1, 2])).abs().sum() > 0
        assert isinstance(twin, ScaledEmbedding)
        assert type(twin).__name__ == "ScaledEmbedding"
