"""Inputs that differ within a tp group are an error on every rank: check_same_batch, and the first batch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from parallel3d import (
    AgreementError,
    MeshError,
    MeshLayout,
    Parallel3dError,
    build_mesh,
    parallelize,
)
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives
from parallel3d.testing.worlds import LocalWorld
from parallel3d.tp import check_same_batch
from parallel3d.tp.same_batch import _FirstForward, check_first_batch


def checked(model: nn.Module, mesh) -> nn.Module:
    check_same_batch(parallelize(model, mesh, LM_PLAN), mesh)
    return model


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_parity_with_the_check(sizes) -> None:
    """Ranks that read different samples, as data ranks do, are no error."""
    assert_parity(Lm, tokens, MeshLayout(*sizes), loss=lm_loss, steps=1, fp32=False, apply=checked)


class Passes(nn.Module):
    """Takes anything."""

    def forward(self, *args: object, **kwargs: object) -> None: ...


def of_six(
    world: LocalWorld,
    *changes: tuple[int, tuple[int, ...], float],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(3, 5) on ranks of (2, 1, 3), alike in both tp groups but for the ``changes``: rank, index, value."""

    def of(rank: int) -> torch.Tensor:
        x = (torch.arange(15).view(3, 5) + 100 * (rank // 3)).to(dtype)
        for changed, index, value in changes:
            if rank == changed:
                x[index] = value
        return x

    return world.map(of)


def test_first_rank_and_element() -> None:
    """Simulated: (2, 1, 3), the tp groups are ranks 0-2 and 3-5."""
    with local_world(6) as world:
        mesh = build_mesh(MeshLayout(2, 1, 3), device_type="cpu")
        model = Passes()
        check_same_batch(model, mesh)
        check_same_batch(model, mesh)  # once is enough

        given = partial(of_six, world)
        same = given()
        model(same, [same, {"mask": given(dtype=torch.bool)}], flag=True)
        nan = float("nan")
        model(given((0, (0, 0), nan), (1, (0, 0), nan), (2, (0, 0), nan)))
        model(world.map(lambda r: torch.empty(0, 3)), torch.ones(()))

        for values, message in (
            (
                [given((4, (2, 1), -0.5))],
                r"rank 4 .* than rank 3, .*: input 0, element \[2, 1\] is -0.5 on rank 4 and 111.0 on rank 3",
            ),
            # The lowest rank, its first element.
            (
                [same, given((5, (0, 0), 7), (2, (1, 4), 7), (2, (2, 0), 7))],
                r"rank 2 .* than rank 0, .*: input 1, element \[1, 4\] is 7.0 on rank 2 and 9.0 on",
            ),
            ([given((1, (0, 3), nan))], r"rank 1 .*element \[0, 3\] is nan on rank 1 and 3.0 on"),
            (
                [same, (same, given((3, (1, 1), 2**53 + 1), dtype=torch.int64))],
                # The first of its group is the odd one: seen from the second.
                r"rank 4 .*: input 1, tensor 1, element \[1, 1\] is 106 on rank 4 and 9007199254740993 on",
            ),
            (
                [world.map(lambda r: torch.tensor(r != 1))],
                r"rank 1 .*: input 0 is False on rank 1 and True on rank 0",
            ),
            ([world.map(lambda r: torch.tensor([1 + (r == 5) * 4j, 2]))], r"element \[0\] is 4.0"),
            (
                [world.map(lambda r: torch.tensor(2**63 + (r == 1), dtype=torch.uint64))],
                r"is 9223372036854775809 on rank 1 and 9223372036854775808 on rank 0",
            ),
            (
                [same, world.map(lambda r: torch.ones(4, 3 + (r == 5)))],
                r"rank 5 .*: the size of dim 1 of input 1 is 4 on rank 5 and 3 on rank",
            ),
        ):
            with pytest.raises(AgreementError, match=message):
                model(*values)
        with pytest.raises(AgreementError, match="input 'ids', element"):
            model(same, ids=given((1, (0, 0), 7)))
        model(same, world.map(lambda r: (torch.eye(3) * r).to_sparse()))  # not compared
        check_same_batch(model, mesh, enabled=False)
        model(given((1, (0, 0), 7)))
    with fake_world(0, 2):
        check_same_batch(model, build_mesh(MeshLayout(1, 1, 2), device_type="cpu"))
        model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


def test_arguments() -> None:
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
        model = Passes()
        with pytest.raises(Parallel3dError, match="needs a module"):
            check_same_batch(torch.ones(2), mesh)
        with pytest.raises(MeshError, match="must be a DeviceMesh"):
            check_same_batch(model, MeshLayout(2, 2, 1))
        with pytest.raises(Parallel3dError, match="enabled is None"):
            check_same_batch(model, mesh, None)
        for where in (mesh, mesh["shard"]):  # nothing to compare
            check_same_batch(model, where)
            with record_collectives(mesh) as recorder:
                model(torch.ones(2))
            assert not recorder.calls


def on_ranks() -> list[str]:
    """Every rank's errors, with a model whose engine is left at rest by them."""
    rank = dist.get_rank()
    layout = MeshLayout(1, 2, 2)
    mesh = build_mesh(layout, device_type="cpu")
    torch.manual_seed(0)
    model = checked(Lm(), mesh)
    copied = copy.deepcopy(model.layers[0])
    ids = tokens(layout.data_rank(rank))
    before = model(ids)
    odd = ids.clone()
    odd[1, 3] = 18 - odd[1, 3]
    messages = []
    for bad, inputs in (
        (3, (odd,)),
        (1, (ids[:, :4],)),
        (2, (ids.to(torch.int32),)),
        (3, (ids[0],)),
        (3, (ids, ids)),
    ):
        with pytest.raises(AgreementError) as error:
            model(*(inputs if rank == bad else (ids,)))
        messages.append(str(error.value).split(". ")[0])
    assert torch.equal(model(ids), before)
    assert copied is not model.layers[0]
    # The parity above is of simulated ranks.
    assert_parity(Lm, tokens, layout, loss=lm_loss, steps=1, fp32=False, apply=checked)
    return messages


@pytest.mark.smoke
def test_processes(gloo_pool) -> None:
    results = gloo_pool.run(on_ranks, world_size=4)
    assert all(messages == results[0] for messages in results)
    value, size, dtype, dims, number = results[0]
    start = "rank {} has another batch than rank {}, the first of its tp group: "
    assert value.startswith(start.format(3, 2) + "input 0, element [1, 3] is ")
    assert (
        size == start.format(1, 0) + "the size of dim 1 of input 0 is 4 on rank 1 and 5 on rank 0"
    )
    # Seen from the rank after the odd one.
    kinds = "torch.int64 on rank 3 and torch.int32 on rank 2"
    assert dtype == start.format(3, 2) + f"the dtype of input 0 is {kinds}"
    assert (
        dims == start.format(3, 2) + "the number of dims of input 0 is 1 on rank 3 and 2 on rank 2"
    )
    assert (
        number == start.format(3, 2) + "the number of input tensors is 2 on rank 3 and 1 on rank 2"
    )


# ---- the first batch, at which parallelize looks ----


def test_the_first_batch_on_simulated_ranks() -> None:
    """(2, 1, 3): the tp groups are ranks 0-2 and 3-5, which read different samples."""
    with local_world(6) as world:
        mesh = build_mesh(MeshLayout(2, 1, 3), device_type="cpu")

        given = partial(of_six, world)

        def check(*inputs: object, **named: object) -> nn.Module:
            model = Passes()
            check_first_batch(model, mesh)
            model(*inputs, **named)
            return model

        ids = given(dtype=torch.int64)
        check(ids, [ids, {"mask": given(dtype=torch.bool)}], x=given())
        check()
        check(world.map(lambda rank: torch.zeros(3, rank // 3)))
        check(given((4, (1, 2), 107 + 1e-4)))  # rounding, as of what a pipeline's stages are given
        nan = world.map(lambda rank: torch.full((2,), float("nan")))
        check(nan)
        for inputs, said in (
            (
                [given((4, (1, 2), 108), dtype=torch.int64)],
                "rank 4 .* element \\[1, 2\\] is 108 on rank 4 and 107 on rank",
            ),
            ([ids, given((2, (1, 2), 1e4))], "rank 2 .* input 1"),
            ([given((5, (1, 2), float("inf")))], "rank 5"),
            ([world.map(lambda rank: torch.ones(2, 2 + (rank == 1)))], "the size of dim 1"),
            ([world.map(lambda rank: torch.ones(4) * (2 - (rank == 3)))], "rank 4 .* rank 3"),
        ):
            with pytest.raises(AgreementError, match=said) as error:
                check(*inputs)
            assert "checks=Checks(same_batch=False)" in str(error.value)

        model = check(ids)
        assert not model._forward_pre_hooks
        model(given((4, (1, 2), 108), dtype=torch.int64))  # the first was looked at


def test_the_first_batch_is_one_of_training() -> None:
    with local_world(2) as world:
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        model = Passes()
        check_first_batch(model, mesh)
        odd = world.map(lambda rank: torch.tensor([rank]))
        with torch.no_grad():
            model(odd)
        model.eval()(odd)
        with pytest.raises(AgreementError):
            model.train()(odd)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_parity_with_the_check_of_the_first_batch(sizes) -> None:
    """Ranks that read different samples, as data ranks do, are no error."""
    assert_parity(
        Lm, tokens, MeshLayout(*sizes), tp_plan=LM_PLAN, loss=lm_loss, steps=1, fp32=False
    )


def test_nothing_where_there_is_nobody() -> None:
    with fake_world(0, 4):
        for layout in (MeshLayout(1, 2, 2), MeshLayout(1, 4, 1)):
            mesh = build_mesh(layout, device_type="cpu")
            model = parallelize(Lm(), mesh, LM_PLAN)
            with record_collectives(mesh) as recorder:
                model(tokens(0))
            assert not [call for call in recorder.calls if call.bytes == 64]


def first_on_ranks(compile: bool, check: bool) -> tuple[str, list[int]]:
    rank, layout = dist.get_rank(), MeshLayout(1, 2, 2)
    mesh = build_mesh(layout, device_type="cpu")
    torch.manual_seed(0)
    options = {"compile": "eager"} if compile else {}
    model = parallelize(Lm(), mesh, LM_PLAN, check_same_batch=check, **options)
    ids = tokens(layout.data_rank(rank))
    said = ""
    if check:
        odd = parallelize(Lm(), mesh, LM_PLAN, **options)
        with pytest.raises(AgreementError) as error:
            odd(tokens(rank))
        said = str(error.value)
    calls = []
    for _ in range(2):
        with record_collectives(mesh) as recorder:
            model(ids)
        calls.append(len(recorder.calls))
    return said, calls


@pytest.mark.parametrize("compile", [False, True])
def test_first_batches_of_processes(gloo_pool, compile) -> None:
    results = gloo_pool.run(first_on_ranks, compile, True, world_size=4)
    assert len({said for said, _ in results}) == 1
    assert "rank 1 has another batch than rank 0" in results[0][0]
    # Over tp, and over shard whether any group has found something.
    assert all(first == second + 2 for _, (first, second) in results)


def test_switched_off(gloo_pool) -> None:
    for _, (first, second) in gloo_pool.run(first_on_ranks, False, False, world_size=4):
        assert first == second


def test_an_input_that_is_declared_a_part_is_not_compared() -> None:
    """As in pytorch/examples' sequence parallelism: each rank has its own rows."""
    first: dict[str, Any] = {
        "rows": ColwiseParallel(input_layouts=Shard(0)),
        "whole": ColwiseParallel(input_layouts=Replicate()),
        "features": RowwiseParallel(),
    }
    for name, style in first.items():
        assert is_compared(nn.Linear(8, 8), style) is (name != "rows")


def is_compared(module: nn.Module, style: Any) -> bool:
    with fake_world(0, 2):
        model = nn.Sequential(module, nn.Linear(8, 8))
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        parallelize(model, mesh, {"0": style}, strict=True)
    return any(isinstance(h, _FirstForward) for h in model._forward_pre_hooks.values())


def test_a_norm_on_parts_of_a_sequence_comes_first() -> None:
    assert not is_compared(nn.LayerNorm(8), SequenceParallel())


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("outputs", [False, True])
def test_an_argument_that_is_declared_a_part(dim: int, outputs: bool) -> None:
    given: dict[str, Any] = {
        "input_kwarg_layouts": {"input": Shard(dim)},
        "desired_input_kwarg_layouts": {"input": Replicate()},
    }
    style: Any = PrepareModuleInput(**given)
    if outputs:
        whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
        style = PrepareModuleInputOutput(**given, **whole)
    assert is_compared(nn.Sequential(nn.Linear(8, 8)), style) is (dim == -1)
