"""Tensors in the arguments and attributes of modules."""

from dataclasses import dataclass

import torch

from parallel3d._util.trees import map_tensors, tensors_in


@dataclass
class Config:
    """Refuses one of its fields, as configs of models with unlike layers do."""

    width: int
    head_dim: int
    table: torch.Tensor

    def __getattribute__(self, name: str) -> object:
        if name == "head_dim":
            raise RuntimeError("it varies across layers")
        return super().__getattribute__(name)


def test_a_field_that_can_not_be_read() -> None:
    config = Config(8, 4, torch.ones(2))
    (found,) = tensors_in({"config": config, "x": 1})
    assert found is config.table
    assert torch.equal(map_tensors(lambda t: t + 1, config).table, torch.full((2,), 2.0))
