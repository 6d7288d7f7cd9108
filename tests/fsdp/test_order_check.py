"""check_execution_order: where ranks part, and what changed place between iterations."""

import warnings
from datetime import timedelta

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn

from parallel3d import AgreementError, MeshLayout, Parallel3dError, parallelize
from parallel3d.fsdp import check_execution_order, fully_shard
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import assert_parity, fake_world, record_collectives


class Branching(Lm):
    """Runs its blocks in the order ``self.places``."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers=layers)
        self.places = list(range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for place in self.places:
            x = self.layers[place](x)
        return self.head(self.norm(x))


def checked(model: nn.Module, mesh) -> nn.Module:
    parallelize(model, mesh, LM_PLAN)
    check_execution_order(model)
    return model


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_parity_with_the_check(sizes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_parity(
            Lm, tokens, MeshLayout(*sizes), loss=lm_loss, steps=3, fp32=False, apply=checked
        )


class TestIterations:
    """On one rank of a world: no other is needed."""

    def model(self, mesh) -> Branching:
        torch.manual_seed(0)
        return checked(Branching(), mesh)

    def run(self, model: Branching, places: list[int], *, backward: bool = True) -> list[str]:
        model.places = places
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = lm_loss(model, tokens(0))
            if backward:
                loss.backward()
        return [str(w.message) for w in caught if "execution order" in str(w.message)]

    def test_first_unit_that_changed_place(self) -> None:
        with fake_world(0, 4):
            model = self.model(cpu_mesh(2, 2))
            assert self.run(model, [0, 1, 2]) == []
            assert self.run(model, [0, 1, 2]) == []
            (said,) = self.run(model, [0, 2, 1])
            assert "unit layers.2 runs at place 3, where layers.1 was before" in said
            # Compared with the one before, which did so too.
            assert self.run(model, [0, 2, 1]) == []
            (said,) = self.run(model, [0, 1, 2], backward=False)  # in evaluation too
            assert "unit layers.1 runs at place 3" in said
            check_execution_order(model, enabled=False)
            assert self.run(model, [2, 1, 0]) == []

    def test_units_that_are_missing_or_more(self) -> None:
        with fake_world(0, 4):
            model = self.model(cpu_mesh(1, 4))
            assert self.run(model, [0, 1]) == []
            (said,) = self.run(model, [0, 1, 2])
            assert "unit layers.2 runs at place 4, where norm was before" in said

    def test_one_that_ends_early(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(1, 4)
            blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            root = fully_shard(_FirstOf(blocks), mesh=mesh)
            check_execution_order(root)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in (3, 2, 2):
                    root.number = number
                    root(torch.ones(2, 3)).sum().backward()
            (said,) = [str(w.message) for w in caught if "execution order" in str(w.message)]
            assert "it ended after blocks.1; unit blocks.2 did not run" in said

    def test_units_run_alone_are_no_part_of_an_iteration(self) -> None:
        """And are not remembered, however often."""
        with fake_world(0, 4), warnings.catch_warnings():
            warnings.simplefilter("error")
            model = self.model(cpu_mesh(1, 4))
            for _ in range(2):
                lm_loss(model, tokens(0)).backward()
                for _ in range(3):
                    model.layers[1](torch.ones(2, 3, 12)).sum().backward()
                assert len(get_unit(model).options[0].order) == 6

    def test_one_that_broke_off_is_not_compared_with(self) -> None:
        with fake_world(0, 4):
            model = self.model(cpu_mesh(1, 4))
            assert self.run(model, [0, 1, 2]) == []

            def explode(*_: object) -> None:
                raise KeyError

            handle = model.layers[1].norm.register_forward_pre_hook(explode)
            with pytest.raises(KeyError):
                self.run(model, [0, 1, 2])
            handle.remove()
            model.reset_iter_state()
            assert self.run(model, [0, 1, 2]) == []

    def test_recomputed_forwards_are_no_change(self) -> None:
        with fake_world(0, 4), warnings.catch_warnings():
            warnings.simplefilter("error")
            model = parallelize(Lm(), cpu_mesh(1, 4), activation_checkpointing=True)
            check_execution_order(model)
            for _ in range(3):
                lm_loss(model, tokens(0)).backward()


class _FirstOf(nn.Module):
    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks
        self.number = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.number]:
            x = block(x)
        return x


def test_arguments() -> None:
    with pytest.raises(Parallel3dError, match="has no unit"):
        check_execution_order(nn.Linear(2, 2))
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(2, 2), mesh=cpu_mesh())
        with pytest.raises(Parallel3dError, match="enabled is 'no'"):
            check_execution_order(model, "no")
        with pytest.raises(Parallel3dError, match="timeout is 5; it must be"):
            check_execution_order(model, timeout=5)


def test_it_communicates_nothing_by_collectives() -> None:
    with fake_world(0, 4):
        mesh = cpu_mesh(2, 2)
        found = []
        for enabled in (False, True):
            model = parallelize(Lm(), mesh)
            check_execution_order(model, enabled)
            with record_collectives(mesh) as recorder:
                lm_loss(model, tokens(0)).backward()
            found.append([(c.op, c.axis, c.unit, c.bytes) for c in recorder.calls])
        assert found[0] == found[1]


# Real ranks


def parting(timeout: timedelta) -> list[str]:
    """What goes wrong on this rank when rank 2 runs its units otherwise."""
    messages = []
    odd = dist.get_rank() == 2
    mesh = cpu_mesh(2, 2)
    for places in ([0, 2, 1], [0, 1]):
        torch.manual_seed(0)
        model = parallelize(Branching(), mesh)
        check_execution_order(model)
        lm_loss(model, tokens(0)).backward()  # all alike
        if odd:
            model.places = places
        with pytest.raises(AgreementError) as error, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lm_loss(model, tokens(1)).backward()
        messages.append(str(error.value))
        model.reset_iter_state()
        model.places = [0, 1, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lm_loss(model, tokens(2)).backward()  # usable again; what broke off is no iteration
    # Only rank 2 does not go on: the others say where they have waited.
    torch.manual_seed(0)
    model = parallelize(Branching(), mesh)
    check_execution_order(model, timeout=timeout)
    if not odd:
        with pytest.raises(AgreementError, match="rank 2 of 4 did not report") as error:
            model(tokens(0))
        messages.append(str(error.value))
    return messages


@pytest.mark.slow
def test_processes_that_part(gloo_pool) -> None:
    by_rank = gloo_pool.run(parting, timedelta(seconds=4), world_size=4)
    for rank, (other, fewer, *silent) in enumerate(by_rank):
        for message, here in ((other, "layers.2"), (fewer, "norm")):
            assert "rank 2 differs from the majority" in message
            there = "layers.1" if here == "layers.2" else "layers.2"
            assert f"forward of {there} on ranks 0-1, 3; forward of {here} on rank 2" in message
            assert f"Rank {rank} was at the forward of {here if rank == 2 else there}" in message
        assert len(silent) == (rank != 2)
        assert all(f"Rank {rank} was at the forward of Branching" in text for text in silent)
