"""The report of a resolved plan: shapes, what is communicated in which bytes, why each style is there."""

import re

import pytest
import torch
from torch import nn

from parallel3d.tp import (
    Colwise,
    HeadArguments,
    PrepareInput,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    resolve_plan,
)
from parallel3d.tp.styles.base import StyleTraffic


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)


PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def lines(model: nn.Module, plan: dict, tp: int = 4) -> dict[str, list[str]]:
    """First cell of a line of the report -> its cells."""
    cells = [re.split(r"  +", line) for line in str(resolve_plan(model, plan, tp)).splitlines()]
    return {line[0]: line for line in cells}


def test_it_prints_as_a_table():
    report = str(resolve_plan(Model(), PLAN, 4)).splitlines()
    assert report[0] == "Tensor parallel over 4 ranks"
    assert report[1].split()[:2] == ["module", "style"]
    assert report[1].rstrip().endswith("backward")  # nobody asks why their own rules are there
    assert "the model has no forward" in report[-1]
    assert report[-2] == "Not in the plan, whole on every rank: 3 parameters (layers.*.norm.weight)"


def test_rows_show_shapes_and_bytes():
    table = lines(Model(), PLAN)
    assert table["layers.*.up (x3)"] == [
        "layers.*.up (x3)",
        "Colwise()",
        "weight (12, 8) -> (3, 8), bias (12,) -> (3,)",
        "-",
        "all-reduce 32 B",  # 8 input features of 4 bytes
    ]
    assert table["layers.*.down (x3)"][-2:] == ["all-reduce 32 B", "-"]
    assert table["embed"][-2:] == ["all-reduce 32 B", "-"]
    assert table["head"][2:] == ["weight (11, 8) -> (3, 8)", "all-gather 44 B", "all-reduce 32 B"]


def test_bytes_are_in_the_parameters_dtype():
    table = lines(Model().bfloat16(), PLAN)
    assert table["head"][-2:] == ["all-gather 22 B", "all-reduce 16 B"]


def test_the_total_counts_every_layer():
    report = str(resolve_plan(Model(), PLAN, 4))
    # forward: embed 32, three downs 32 each, head 44; backward: three ups and the head, 32 each.
    assert "forward 172 B in 5, backward 128 B in 4 collectives" in report


def test_large_sizes_are_readable():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 300_000))
    table = lines(model, {"0": "rowwise_rep", "1": "colwise_rep"}, 2)
    assert table["0"][-2:] == ["all-reduce 16 KiB", "all-gather 16 KiB"]
    assert table["1"][-2:] == ["all-gather 1.144 MiB", "all-reduce 16 KiB"]


def test_one_rank_communicates_nothing():
    report = str(resolve_plan(Model(), PLAN, 1))
    assert "all-reduce" not in report and "Communicated" not in report


def test_layers_that_differ_have_a_row_each():
    model = Model()
    model.layers[1].up = nn.Linear(8, 16)
    table = lines(model, {"layers.*.up": "colwise"})
    assert "layers.*.up (x2)" in table and "layers.1.up" in table


def test_summed_gradients_are_marked():
    plan = {"layers.*.norm": "replicated_with_grad_allreduce"}
    table = lines(Model(), plan)
    assert table["layers.*.norm (x3)"][2] == "weight (8,) -> (8,) [gradient summed]"


@pytest.mark.parametrize(
    ("style", "module", "traffic"),
    [
        (Colwise(), nn.Linear(3, 5), [("all-reduce", "backward", 3)]),
        (
            Colwise(input="sequence"),
            nn.Linear(3, 5),
            [("all-gather", "forward", 3), ("reduce-scatter", "backward", 3)],
        ),
        (Colwise(input="gathered"), nn.Linear(3, 5), []),
        (
            Colwise(output="replicate"),
            nn.Linear(3, 5),
            [("all-reduce", "backward", 3), ("all-gather", "forward", 5)],
        ),
        (Colwise(output="replicate"), nn.Embedding(7, 5), [("all-gather", "forward", 5)]),
        (Colwise(), nn.Embedding(7, 5), []),
        (Rowwise(), nn.Linear(3, 5), [("all-reduce", "forward", 5)]),
        (
            Rowwise(output="sequence"),
            nn.Linear(3, 5),
            [("reduce-scatter", "forward", 5), ("all-gather", "backward", 5)],
        ),
        (
            Rowwise(input="replicate"),
            nn.Linear(3, 5),
            [("all-reduce", "forward", 5), ("all-gather", "backward", 3)],
        ),
        (VocabParallel(), nn.Embedding(7, 5), [("all-reduce", "forward", 5)]),
        (PrepareInput(), nn.Linear(3, 5), [("all-reduce", "backward", None)]),
        (SequenceParallel(), nn.RMSNorm(5), []),
        (SequenceParallel(output="replicate"), nn.RMSNorm(5), [("all-gather", "forward", 5)]),
        (HeadArguments(4, (("alibi", 0),)), nn.Identity(), [("all-gather", "backward", None)]),
    ],
)
def test_what_each_style_communicates(style, module, traffic):
    assert list(style.traffic(module, 2)) == [StyleTraffic(*t) for t in traffic]


def test_a_size_only_the_input_has_is_said():
    report = str(resolve_plan(Model(), {**PLAN, "layers.*": PrepareInput()}, 4))
    assert "and 3 of the input's size" in report


def test_it_holds_no_module():
    resolved = resolve_plan(Model(), PLAN, 2)
    held = [resolved]
    while held:
        value = held.pop()
        assert not isinstance(value, (nn.Module, torch.Tensor))
        if isinstance(value, (tuple, list)):
            held += value
        elif hasattr(value, "__dict__"):
            held += vars(value).values()
