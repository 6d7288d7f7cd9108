"""A sequence gathered in chunks while others are multiplied equals one gathered at once."""

import pytest
import torch
from _support.tp.tp_world import check_parity, on_rank, tp_mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d import PlanError
from parallel3d.testing import fake_world, record_collectives
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, TpAxis
from parallel3d.tp.overlap import obstacle


class Block(nn.Module):
    """Like an MLP whose gate and up are one layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fused = nn.Linear(8, 12, bias=bias)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.fused(self.norm(x)).tanh())


def plan(chunks: int, dim: int = 1) -> dict:
    return {
        "norm": SequenceParallel(input="replicate", sequence_dim=dim),
        "fused": Colwise(input="sequence", chunks=chunks, sequence_dim=dim),
        "down": Rowwise(),
    }


EVEN = [(2, 8, 2, 1, True), (2, 12, 4, 0, False), (2, 4, 5, 1, True), (3, 9, 2, 1, True)]
UNEVEN = (2, 7, 2, 1, True)
CASES = [(*case, way) for case in EVEN for way in ("plain", "checkpoint", "second")]


@pytest.mark.filterwarnings("ignore:.*is gathered at once")  # of uneven sizes
@pytest.mark.parametrize(
    ("tp", "size", "chunks", "dim", "bias", "way"),
    [*CASES, (*UNEVEN, "plain"), (*UNEVEN, "checkpoint")],
)
def test_equals_the_plain_module(
    tp: int, size: int, chunks: int, dim: int, bias: bool, way: str
) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        if way == "checkpoint":
            return checkpoint(model, x, use_reentrant=False)
        y = model(x)
        if way == "second":
            (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
            return y + grad**2
        return y

    shape = (3, size, 8) if dim == 1 else (size, 3, 8)
    x = torch.randn(shape, dtype=torch.float64)
    check_parity(Block(bias), plan(chunks, dim), tp, x, call=call)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_output_may_be_changed_in_place(batch: int) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model.down(model.fused(model.norm(x)).relu_())

    check_parity(Block(), plan(2), 2, torch.randn(batch, 8, 8, dtype=torch.float64), call=call)


def test_collectives() -> None:
    found = []
    for chunks in (1, 4):
        with fake_world(0, 2):
            model = on_rank(Block(), plan(chunks))
            with record_collectives(tp_mesh(2)) as recorder:
                model(torch.randn(2, 16, 8, requires_grad=True)).sum().backward()
            found.append(recorder)
    one, four = found
    assert four.count("all_gather") == one.count("all_gather") + 3
    assert sum(c.asynchronous for c in four.select("all_gather")) == 4
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert sum(c.bytes for c in one.select(op)) == sum(c.bytes for c in four.select(op))
    assert [c.asynchronous for c in four.select("reduce_scatter")] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 0, "input": "sequence"}, "1 or more"),
        ({"chunks": "2", "input": "sequence"}, "'2'"),
        ({"chunks": 2}, 'input="sequence"'),
    ],
)
def test_refused(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Colwise(**options)


def test_what_stands_in_the_way() -> None:
    with fake_world(0, 2):
        axis = TpAxis(tp_mesh(2)["tp"])
        assert obstacle(torch.ones(2, 4, 3), 1, 8, axis) == ""
        assert "last dim" in obstacle(torch.ones(2, 4), 1, 8, axis)
        assert "divisible" in obstacle(torch.ones(2, 4, 3), 1, 7, axis)
