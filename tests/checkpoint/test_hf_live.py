"""hf_tensors and hf_shards: what save_hf writes, bit for bit, without files."""

from pathlib import Path

import pytest
import torch
from _support.checkpoint.hf_cases import CONFIGS, Sizes
from _support.checkpoint.live_cases import check_live

from parallel3d.testing import GlooPool

MESHES = [(1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equal_to_save_hf(gloo_pool: GlooPool, tmp_path: Path, sizes: Sizes) -> None:
    kinds = [kind for kind in CONFIGS if kind != "gpt2" or sizes[2] == 1]
    cases = [(kind, None) for kind in kinds] + [("mixtral", torch.bfloat16)]
    gloo_pool.run(check_live, cases, sizes, str(tmp_path), world_size=4)
