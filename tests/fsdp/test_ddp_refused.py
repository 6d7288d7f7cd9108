"""A parallel model in DistributedDataParallel is refused, and the error says what to do."""

import copy
import inspect

import pytest
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel3d import parallelize
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import explain_mixed
from parallel3d.testing.worlds import fake_world


def sharded(sizes: tuple[int, int, int]) -> nn.Module:
    plan = {"0": "colwise", "1": "rowwise"} if sizes[2] > 1 else None
    return parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), cpu_mesh(*sizes), plan)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_parallel_models_are_refused(sizes: tuple[int, int, int]) -> None:
    with (
        fake_world(0, 2),
        pytest.raises(Parallel3dError, match=r"integrations\.transformers\.Trainer.*ParallelMixin"),
    ):
        DistributedDataParallel(sharded(sizes))


def test_a_module_of_fully_shard_is_refused() -> None:
    with fake_world(0, 2):
        model = nn.Linear(4, 4)
        fully_shard(model)
        with pytest.raises(Parallel3dError, match="reduces its gradients itself"):
            DistributedDataParallel(model)


def test_only_for_ddp() -> None:
    with fake_world(0, 2):
        model = sharded((1, 2, 1))
        name = "_ddp_params_and_buffers_to_ignore"
        assert not hasattr(model, name) and not hasattr(copy.deepcopy(model), name)
        assert name not in dict(inspect.getmembers(model))
        setattr(model, name, ["0.weight"])
        assert getattr(model, name) == ["0.weight"]


def test_accelerates_error_is_explained() -> None:
    error = ValueError("Your model contains `DTensor` parameters, which is incompatible with DDP.")
    assert "ParallelMixin" in (explain_mixed(error) or "")
    assert explain_mixed(ValueError("DTensor")) is None
