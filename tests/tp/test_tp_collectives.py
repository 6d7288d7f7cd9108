"""Each collective against plain autograd over all ranks' tensors at once."""

import copy

import pytest
import torch
from _support.tp.tp_world import chunks, same, tp_mesh

from parallel3d.testing.worlds import fake_world, local_world
from parallel3d.tp import (
    TpAxis,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_sequence,
    split_to_tp,
)

SIZES = [(2, 6), (2, 5), (4, 8), (4, 5), (4, 3), (4, 1), (3, 7)]
CASES = [(tp, size, dim) for tp, size in SIZES for dim in (0, 1, -1)]


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shape_with(size: int, dim: int) -> tuple[int, ...]:
    shape = [2, 3, 4]
    shape[dim] = size
    return tuple(shape)


def run(world, op, inputs, weights):
    """Per-rank outputs and input gradients of ``op`` for a loss that weighs each rank's output."""
    x = world.map(lambda r: inputs[r]).requires_grad_()
    y = op(x, TpAxis(tp_mesh(world.size)["tp"]))
    (y * world.map(lambda r: weights[r])).sum().backward()
    return world.per_rank(y), world.per_rank(x.grad)


def check(tp, op, inputs, weights, outputs, grads):
    with local_world(tp) as world:
        got, got_grads = run(world, op, inputs, weights)
    for r in range(tp):
        same(got[r], outputs[r])
        same(got_grads[r], grads[r])


@pytest.mark.parametrize("tp", [2, 3])
def test_copy_sums_the_gradient(tp):
    x, ws = sample(3, 4), [sample(3, 4, seed=r + 1) for r in range(tp)]
    check(tp, copy_to_tp, [x] * tp, ws, [x] * tp, [sum(ws)] * tp)


@pytest.mark.parametrize("tp", [2, 3])
def test_reduce_sums_and_passes_the_gradient(tp):
    xs, w = [sample(3, 4, seed=r + 1) for r in range(tp)], sample(3, 4)
    check(tp, reduce_from_tp, xs, [w] * tp, [sum(xs)] * tp, [w] * tp)
    check(
        tp,
        lambda x, axis: reduce_from_tp(x * 2, axis, in_place=True),
        xs,
        [w] * tp,
        [2 * sum(xs)] * tp,
        [2 * w] * tp,
    )


@pytest.mark.parametrize(("tp", "size", "dim"), CASES)
def test_what_cuts_and_joins(tp, size, dim):
    xs = [sample(*shape_with(size, dim), seed=r + 1) for r in range(tp)]
    ws = [sample(*shape_with(size, dim), seed=r + 9) for r in range(tp)]
    (x, *_), (w, *_) = xs, ws

    def cut(whole: torch.Tensor) -> list[torch.Tensor]:
        return chunks(whole, dim, tp)

    def split(whole: torch.Tensor, axis: TpAxis) -> torch.Tensor:
        return split_to_tp(whole, dim, axis)

    def gather(part: torch.Tensor, axis: TpAxis) -> torch.Tensor:
        return gather_from_tp(part, dim, size, axis)

    def gather_copies(part: torch.Tensor, axis: TpAxis) -> torch.Tensor:
        return gather_sequence(part, dim, size, axis)

    def reduce_scatter(whole: torch.Tensor, axis: TpAxis) -> torch.Tensor:
        return reduce_scatter_sequence(whole, dim, axis)

    check(tp, split, [x] * tp, cut(w), cut(x), [w] * tp)
    check(tp, gather, cut(x), [w] * tp, [x] * tp, cut(w))
    check(tp, gather_copies, cut(x), ws, [x] * tp, cut(sum(ws)))
    check(tp, reduce_scatter, xs, cut(w), cut(sum(xs)), [w] * tp)
    with local_world(tp) as world:  # what is gathered can be viewed
        axis, part = TpAxis(tp_mesh(tp)["tp"]), world.map(lambda r: cut(x)[r])
        for whole in (gather(part, axis), gather_copies(part, axis)):
            assert all(t.is_contiguous() for t in world.per_rank(whole))


def test_second_derivatives():
    x, w = sample(5, 3), sample(5, 3, seed=1)
    plain = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((plain.pow(3) * w).sum(), plain, create_graph=True)
    (wanted,) = torch.autograd.grad(first.pow(2).sum(), plain)
    with local_world(2) as world:
        axis = TpAxis(tp_mesh(2)["tp"])
        mine = world.map(lambda r: x.clone()).requires_grad_()
        y = gather_from_tp(split_to_tp(mine, 0, axis).pow(3), 0, 5, axis)
        weight = world.map(lambda r: w.clone())
        (first,) = torch.autograd.grad((y * weight).sum(), mine, create_graph=True)
        (got,) = torch.autograd.grad(first.pow(2).sum(), mine)
        for rank in world.per_rank(got):
            same(rank, wanted)


def test_an_axis_of_one_rank_costs_nothing():
    assert scatter_sequence is split_to_tp
    with fake_world(0, 1):
        axis = TpAxis(tp_mesh(1)["tp"])
        x = torch.randn(3, 4, requires_grad=True)
        for y in (
            copy_to_tp(x, axis),
            reduce_from_tp(x, axis),
            gather_from_tp(x, -1, 4, axis),
            split_to_tp(x, -1, axis),
            gather_sequence(x, 1, 4, axis),
            reduce_scatter_sequence(x, 1, axis),
        ):
            assert y is x


def test_gradients_shared_with_others_are_left_alone():
    # y + z hands one gradient tensor to both; an in-place all-reduce would double z's.
    with local_world(2) as world:
        axis = TpAxis(tp_mesh(2)["tp"])
        x, z = (world.map(lambda r: torch.ones(3)).requires_grad_() for _ in range(2))
        # (the product's gradient is a tensor of its own; the sum's would be copied as it is expanded)
        ((copy_to_tp(x, axis) + z) * world.map(lambda r: torch.ones(3))).sum().backward()
        assert [g.tolist() for g in world.per_rank(z.grad)] == [[1.0] * 3] * 2
        assert [g.tolist() for g in world.per_rank(x.grad)] == [[2.0] * 3] * 2


@pytest.mark.parametrize("rank", [0, 3])
def test_shapes_on_one_rank_of_a_fake_world(rank):
    with fake_world(rank, 4):
        axis = TpAxis(tp_mesh(4)["tp"])
        rows = [2, 2, 1, 0][rank]
        assert split_to_tp(torch.ones(5, 2), 0, axis).shape == (rows, 2)
        assert gather_from_tp(torch.ones(rows, 2), 0, 5, axis).shape == (5, 2)
        assert reduce_scatter_sequence(torch.ones(3, 5), 1, axis).shape == (3, rows)
        assert copy.deepcopy(axis) is axis


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_results_may_be_changed_in_place(size, dim):
    with fake_world(0, 2):
        axis = TpAxis(tp_mesh(2)["tp"])
        shape = [3, 3]
        shape[dim] = -(-size // 2)
        part = torch.randn(shape, requires_grad=True)
        shape[dim] = size
        whole = torch.randn(shape, requires_grad=True)
        for y in (
            gather_from_tp(part, dim, size, axis),
            gather_sequence(part, dim, size, axis),
            reduce_scatter_sequence(whole, dim, axis),
            split_to_tp(whole, dim, axis),
            reduce_from_tp(whole * 1, axis, in_place=True),
        ):
            y.relu_().sum().backward()


def test_a_sum_in_place_needs_a_contiguous_tensor():
    with fake_world(0, 2):
        axis = TpAxis(tp_mesh(2)["tp"])
        x = torch.randn(3, 2, requires_grad=True)
        # gloo and NCCL refuse others, or sum the wrong memory.
        assert reduce_from_tp((x * 1).t(), axis, in_place=True).is_contiguous()


@pytest.mark.parametrize("sizes", [(4, 2), (3, 2)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "op",
    [
        copy_to_tp,
        reduce_from_tp,
        lambda y, axis: gather_from_tp(y, 0, axis.global_size, axis),
        lambda y, axis: gather_sequence(y, -1, axis.global_size, axis),
        lambda y, axis: split_to_tp(y, 0, axis),
        lambda y, axis: reduce_scatter_sequence(y, -1, axis),
    ],
    ids=["copy", "reduce", "gather", "gather_sequence", "split", "reduce_scatter"],
)
def test_compiled_they_pass_the_same_gradients(op, sizes):
    """In a graph of torch 2.11 the gradients of what a collective had written came to nothing."""
    whole, part = sizes
    grads = []
    with fake_world(0, 2):
        axis = TpAxis(tp_mesh(2)["tp"])
        axis.global_size = whole
        for compiled in (False, True):

            def program(x, weight):
                return op(x @ weight, axis) * 2

            if compiled:
                torch._dynamo.reset()
                program = torch.compile(program, backend="aot_eager", fullgraph=True)
            x, weight = (sample(part, part, seed=s).requires_grad_() for s in (0, 1))
            program(x, weight).sum().backward()
            grads.append((x.grad, weight.grad))
    assert all(map(torch.equal, *grads)) and grads[0][0].any()
