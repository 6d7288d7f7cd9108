"""The sizes that recipes name are those of the models they are called after."""

import pytest
import torch
from llama import Llama, LlamaConfig

# Parameters as Meta's checkpoints have them.
COUNTS = {
    "1b": 1_235_814_400,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize("size", COUNTS)
def test_parameters(size: str) -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig.named(size))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[size]
    tied = model.output.weight is model.tok_embeddings.weight
    assert tied == (size == "1b")
