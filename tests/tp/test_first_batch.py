"""parallelize looks, at the first training forward, whether the ranks of a tp group read the same rows."""

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

from parallel3d import AgreementError, MeshLayout, build_mesh, parallelize
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives
from parallel3d.tp.same_batch import _FirstForward, check_first_batch


class Passes(nn.Module):
    """Takes anything."""

    def forward(self, *args: object, **kwargs: object) -> None: ...


def test_simulated_ranks() -> None:
    """(2, 1, 3): the tp groups are ranks 0-2 and 3-5, which read different samples."""
    with local_world(6) as world:
        mesh = build_mesh(MeshLayout(2, 1, 3), device_type="cpu")

        def given(odd: int | None, change: float, dtype: torch.dtype = torch.float32):
            def of(rank: int) -> torch.Tensor:
                x = (torch.arange(15).view(3, 5) + 100 * (rank // 3)).to(dtype)
                if rank == odd:
                    x[1, 2] += change
                return x

            return world.map(of)

        def check(*inputs: object, **named: object) -> nn.Module:
            model = Passes()
            check_first_batch(model, mesh)
            model(*inputs, **named)
            return model

        ids = given(None, 0, torch.int64)
        check(ids, [ids, {"mask": given(None, 0, torch.bool)}], x=given(None, 0))
        check()
        check(world.map(lambda rank: torch.zeros(3, rank // 3)))
        check(given(4, 1e-4))  # rounding, as of what a pipeline's stages are given
        nan = world.map(lambda rank: torch.full((2,), float("nan")))
        check(nan)
        for inputs, said in (
            (
                [given(4, 1, torch.int64)],
                "rank 4 .* element \\[1, 2\\] is 108 on rank 4 and 107 on rank",
            ),
            ([ids, given(2, 1e4)], "rank 2 .* input 1"),
            ([given(5, float("inf"))], "rank 5"),
            ([world.map(lambda rank: torch.ones(2, 2 + (rank == 1)))], "the size of dim 1"),
            ([world.map(lambda rank: torch.ones(4) * (2 - (rank == 3)))], "rank 4 .* rank 3"),
        ):
            with pytest.raises(AgreementError, match=said) as error:
                check(*inputs)
            assert "checks=Checks(same_batch=False)" in str(error.value)

        model = check(ids)
        assert not model._forward_pre_hooks
        model(given(4, 1, torch.int64))  # the first was looked at


def test_training_only() -> None:
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
def test_parity(sizes) -> None:
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


def on_ranks(compile: bool, check: bool) -> tuple[str, list[int]]:
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
def test_processes(gloo_pool, compile) -> None:
    results = gloo_pool.run(on_ranks, compile, True, world_size=4)
    assert len({said for said, _ in results}) == 1
    assert "rank 1 has another batch than rank 0" in results[0][0]
    # Over tp, and over shard whether any group has found something.
    assert all(first == second + 2 for _, (first, second) in results)


def test_switched_off(gloo_pool) -> None:
    for _, (first, second) in gloo_pool.run(on_ranks, False, False, world_size=4):
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
