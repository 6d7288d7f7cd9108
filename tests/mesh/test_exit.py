"""A process that has talked over gloo ends with exit code 0."""

import subprocess
import sys

import pytest

# The main thread keeps the interpreter's lock, as a short program does that ends soon after its last
# collective: gloo's thread is left with a work to drop.
_PROGRAM = """
import sys, time, torch
from torch import distributed as dist
import parallel3d as p3d

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{talks}
sys.setswitchinterval(1000.0)
dist.all_reduce(torch.ones(1), async_op=True)
end = time.perf_counter() + 0.3
while time.perf_counter() < end:
    pass
"""


@pytest.mark.parametrize(
    "talks",
    [
        pytest.param(
            'p3d.build_mesh(p3d.MeshLayout(1, 1, 1), device_type="cpu")', marks=pytest.mark.slow
        ),
        pytest.param(
            "p3d.fully_shard(torch.nn.Linear(2, 2))(torch.ones(1, 2))", marks=pytest.mark.slow
        ),
    ],
    ids=["build_mesh", "fully_shard"],
)
def test_ends_in_peace(talks) -> None:
    program = _PROGRAM.format(talks=talks)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
