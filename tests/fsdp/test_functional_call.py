"""``torch.func.functional_call``: it must not change the model's weights."""

from collections.abc import Callable

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.func import functional_call

from parallel3d import Parallel3dError
from parallel3d.fsdp import fully_shard
from parallel3d.testing import local_world, shards_of

OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a plain tensor": lambda weight: torch.full(weight.shape, 3.0),
    "a DTensor": lambda weight: weight.detach() * 0 + 3.0,
}


@pytest.mark.parametrize("shard", [1, 2])
class TestFunctionalCall:
    def _model(self, shard: int) -> nn.Linear:
        torch.manual_seed(0)
        return fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(1, shard))

    @pytest.mark.parametrize("other", OTHERS)
    def test_other_tensors_are_an_error(self, shard: int, other: str) -> None:
        with local_world(shard):
            model, x = self._model(shard), torch.ones(2, 4)
            weight = model.weight
            values = [part.clone() for _, _, part in shards_of(weight)]
            expected = model(x)
            with pytest.raises(Parallel3dError, match="functional_call"):
                functional_call(model, {"weight": OTHERS[other](weight)}, (x,))
            assert model.weight is weight
            for (_, _, part), value in zip(shards_of(weight), values, strict=True):
                assert torch.equal(part, value)
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)

    def test_its_own_serve(self, shard: int) -> None:
        with local_world(shard):
            model, x = self._model(shard), torch.ones(2, 4)
            expected = model(x)
            for own in (model.weight, model.weight.detach()):
                y = functional_call(model, {"weight": own}, (x,))
                torch.testing.assert_close(y, expected, rtol=0, atol=0)
