"""Fused weights: each of the sections they are packed of is split, and the plain model's results stay."""

import pytest
import torch
from _support.tp.fused_models import FusedAttention, FusedMlp
from _support.tp.tp_models import DIM
from _support.tp.tp_world import check_parity
from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, resolve_plan


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(("tp", "length"), [(2, 6), (2, 5), (4, 5)])
def test_packed_inputs_and_parts_of_a_sequence(tp, length):
    model = nn.Sequential(nn.Identity(), nn.Linear(DIM, 26), nn.GELU(), nn.Linear(26, DIM))
    plan = {
        "0": SequenceParallel(input="replicate"),
        "1": Colwise(packed=2, input="sequence"),
        "3": Rowwise(packed=2, output="sequence"),
    }
    check_parity(model, plan, tp, floats(2, length, DIM), sequence_out=True)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("hidden", [8, 13, 5])
def test_gate_and_up_in_one_linear(tp, hidden):
    plan = {"gate_up": "packed_colwise", "down": "rowwise"}
    check_parity(FusedMlp(hidden), plan, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", [2, 4])
def test_q_k_and_v_in_one_linear(tp):
    model = FusedAttention(8, 4, 3)
    plan = {"qkv": Colwise(packed=model.sections, multiple_of=3), "o": Rowwise(multiple_of=3)}
    check_parity(model, plan, tp, floats(2, 5, DIM))


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("packed", [2, (5, 3, 4)])
def test_a_gathered_packed_output_has_the_plain_order(tp, packed):
    packed = packed if tp < 4 or packed == 2 else (5, 7)  # 3 features are too few for 4 ranks
    model = nn.Linear(DIM, 12)
    check_parity(model, {"": Colwise(packed=packed, output="replicate")}, tp, floats(2, 3, DIM))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_packed_input_is_split_alike(tp):
    model = nn.Sequential(nn.Linear(DIM, 14), nn.ReLU(), nn.Linear(14, DIM))
    plan = {"0": Colwise(packed=2), "2": "packed_rowwise"}
    check_parity(model, plan, tp, floats(2, 3, DIM))
    plan = {"2": Rowwise(packed=(6, 8), input="replicate")}
    check_parity(model, plan, tp, floats(2, 3, DIM))


def test_rows_given_one_by_one():
    rows = Packing(0, (((2, 3), (9, 1)), ((0, 2), (5, 4)), ((10, 1),)))
    plan = {"0": Colwise(packed=rows), "1": Rowwise(packed=rows)}
    model = nn.Sequential(nn.Linear(DIM, 11), nn.Linear(11, 4))
    check_parity(model, plan, 3, floats(2, DIM))


def test_an_even_split_is_packed_too():
    rules = Colwise(packed=2).plan(nn.Linear(4, 8), 2)
    assert rules["weight"].packing == Packing(0, (((0, 2), (4, 2)), ((2, 2), (6, 2))))


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (Colwise(packed=5), "out_features is 12, which can't be divided into 5 equal sections"),
        (Colwise(packed=(4, 4)), r"packed is \(4, 4\); .* must be positive and add up to 12"),
        (
            Colwise(packed=(8, 4), multiple_of=(2, 3)),
            "section 1 of out_features 4 is not a multiple",
        ),
        (Colwise(packed=2, multiple_of=(2, 3, 4)), "is for 3 sections"),
        (Colwise(packed=Packing(0, (((0, 12),),))), "12 rows on 1 ranks"),
    ],
)
def test_what_packed_refuses(style, said):
    with pytest.raises(PlanError, match=said):
        resolve_plan(nn.Linear(DIM, 12), {"": style}, 2)
