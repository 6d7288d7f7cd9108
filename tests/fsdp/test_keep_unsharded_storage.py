"""set_keep_unsharded_storage: one address for the model's life, and free to autograd as ever."""

import copy
from typing import ClassVar

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.wrapped import at_rest, buckets, held_bytes, shard_blocks
from torch import nn

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d.errors import StateError
from parallel3d.fsdp import fully_shard
from parallel3d.testing import local_world

parity = pytest.mark.parity("method: set_keep_unsharded_storage")
FSDP, HSDP, REPLICATE = MeshLayout(1, 2, 1), MeshLayout(2, 2, 1), MeshLayout(2, 1, 1)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def addresses(model: nn.Module) -> list[list[int]]:
    return [
        [inner.data_ptr() for inner in bucket.precision.unsharded._local_tensors.values()]
        for bucket in buckets(model)
    ]


def held(model: nn.Module) -> list[bool]:
    """Of each bucket whose unsharded parameters are no shards: whether they have memory."""
    own = [bucket for bucket in buckets(model) if bucket.precision.has_own_unsharded]
    return [held_bytes(bucket.precision.unsharded) > 0 for bucket in own]


@parity
@pytest.mark.parametrize("layout", [FSDP, HSDP, REPLICATE], ids=["fsdp", "hsdp", "ddp"])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_addresses_stay_and_numbers_are_the_plain_models(layout, reshard) -> None:
    with local_world(layout.world_size) as world:
        trial = Trial(
            world, layout, lambda m, mesh: shard_blocks(m, mesh, reshard_after_forward=reshard)
        )
        trial.model.set_keep_unsharded_storage(True)
        trial.backward(0)
        first = addresses(trial.model)
        assert all(held(trial.model))
        trial.check([0])
        trial.step()
        for step in range(1, 4):
            trial.backward(step)
            assert addresses(trial.model) == first
            trial.check([step])
            trial.step()
        with torch.no_grad():
            trial.forward(4)
        assert addresses(trial.model) == first
        trial.model.set_keep_unsharded_storage(False)
        assert at_rest(trial.model)
        assert not any(held(trial.model))
        trial.backward(5)
        trial.check([5])
        assert not any(held(trial.model))


@parity
def test_of_one_unit_or_all_inside() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True, recurse=False)
        trial.backward(0)
        own = [bucket for bucket in buckets(trial.model) if bucket.precision.has_own_unsharded]
        assert [bucket.unit for bucket in own if held_bytes(bucket.precision.unsharded)] == ["Net"]
        with pytest.raises(ValueError, match="keep"):
            trial.model.set_keep_unsharded_storage("yes")


@parity
@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": BF16},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True)},
        {"reshard_after_forward": 2},
        {"shard_optimizer_over_replicate": True},
    ],
    ids=["bf16", "eval", "smaller", "hfsdp"],
)
def test_with_other_options(options) -> None:
    """As the same model without it, and at one address."""
    layout = MeshLayout(1, 4, 1) if "reshard_after_forward" in options else HSDP
    grads = []
    for keep in (False, True):
        with local_world(4) as world:
            trial = Trial(world, layout, lambda m, mesh: shard_blocks(m, mesh, **options))
            trial.model.set_keep_unsharded_storage(keep)
            found = []
            for batch in range(3):
                trial.backward(batch)
                trial.model.eval()
                with torch.no_grad():
                    trial.forward(batch)
                trial.model.train()
                trial.backward(batch)
                found.append(addresses(trial.model))
            assert not keep or found[0] == found[1] == found[2]
            grads.append([inner for p in trial.model.parameters() for inner in locals_of(p.grad)])
            trial.model.set_keep_unsharded_storage(False)
            assert not any(held(trial.model))
            for bucket in buckets(trial.model):
                other = bucket.other_precision
                if other is not None and other.has_own_unsharded:
                    assert held_bytes(other.unsharded) == 0
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def locals_of(grad) -> list[torch.Tensor]:
    return list(grad._local_tensor._local_tensors.values())


class Hoarder(nn.Module):
    """Leaves what it has computed where the engine does not look."""

    hoard: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Hoarder.hoard = [self.linear(x).tanh() @ self.linear.weight]
        return x * 2


@parity
def test_what_is_kept_is_free_to_autograd() -> None:
    """A backward that the engine is not told of reads memory that is there: an error all the same."""
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_hoarder, build=lambda: nn.Sequential(Hoarder()))
        trial.model.set_keep_unsharded_storage(True)
        trial.forward(0)
        assert all(held(trial.model))
        with pytest.raises(StateError, match="reads parameters of the unit while they are freed"):
            Hoarder.hoard.pop().square().mean().backward()


def shard_hoarder(model: nn.Module, mesh) -> nn.Module:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@parity
def test_weights_that_change_between_forward_and_backward() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True)
        out = trial.forward(0)
        with torch.no_grad():
            for param in trial.model.parameters():
                param.mul_(2)
        with pytest.raises(StateError, match="changed"):
            out.backward()


@parity
def test_a_copy_keeps_its_own() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        trial.model.set_keep_unsharded_storage(True)
        trial.backward(0)
        before = addresses(trial.model)
        original, other = trial.model, copy.deepcopy(trial.model)
        trial.model = other
        trial.model.zero_grad()
        trial.backward(1)
        trial.check([1])
        assert all(held(other))
        assert not set(map(tuple, before)) & set(map(tuple, addresses(other)))
        assert all(held(original))  # so that no memory of it was given to the copy
