"""The sizes that recipes name are those of the models they are called after."""

from dataclasses import replace

import pytest
import torch
from llama import Llama, LlamaConfig
from options import Options, Size, UsageError

import parallel3d as p3d

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


def test_positions_of_a_part_of_the_sequence() -> None:
    """Given as whole sequences have them, they change nothing; a part has its own."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig.named("nano"))
    tokens = torch.randint(0, 256, (2, 16))
    whole = torch.arange(16)[None]
    assert torch.equal(model(tokens, whole), model(tokens))
    rope, x = model.layers[0].attention.rope, torch.randn(2, 4, 16, 8)
    places = torch.tensor([[2, 3, 12, 13]])
    part = rope(x[:, :, places[0], : 2 * rope.cos.shape[1]], places)
    assert torch.equal(part, rope(x[..., : 2 * rope.cos.shape[1]])[:, :, places[0]])


def test_a_sequence_that_cp_does_not_divide() -> None:
    options = Options(size=Size.nano, seq_len=30)
    with pytest.raises(UsageError, match=r"--seq-len 30 .* the 8 parts .*; the next that is: 32"):
        options.check_sizes(p3d.MeshLayout(cp=4))
    replace(options, seq_len=32).check_sizes(p3d.MeshLayout(cp=4))
