"""What Metrics costs a step: one that is only timed, one where waits are measured, and each collective in it.

    python benchmarks/observability.py [--json PATH]

CPU time of steps in which nothing happens, with a file of JSON lines, as a rank of eight on a fake process
group, and of an all-reduce that is issued and waited for, with and without measuring. Lower quartiles of
thousands, which a busy machine leaves alone.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from measure import print_table, write_json
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.observability import ExposedTime, JsonLines, Metrics
from parallel3d.testing import fake_world

TIMES = 3000


def microseconds(function: Callable[[int], object]) -> float:
    """CPU time of a call: the lower quartile."""
    found = []
    for number in range(TIMES):
        start = time.process_time()
        function(number)
        found.append(time.process_time() - start)
    return sorted(found)[TIMES // 4] * 1e6


def of_a_step(mesh: dist.DeviceMesh, path: Path, every: int) -> float:
    """A step with nothing in it, of which each ``every``-th is sampled."""
    metrics = Metrics(mesh, tokens_per_step=1, sinks=[JsonLines(path)], every=every)

    def step(number: int) -> None:
        with metrics.step(number):
            metrics.log(loss=1.0, grad_norm=1.0)

    with metrics:
        return microseconds(step)


def of_a_collective(mesh: dist.DeviceMesh, measured: bool) -> float:
    """An asynchronous all-reduce of next to nothing, and its wait."""
    x, group = torch.ones(4), mesh.get_group("tp")

    def reduce(_: int) -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        if work is not None:
            work.wait()

    with ExposedTime(mesh) if measured else nullcontext():
        return microseconds(reduce)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(0, 8), tempfile.TemporaryDirectory() as folder:
        mesh = p3d.build_mesh(p3d.MeshLayout(2, 2, 2), device_type="cpu")
        plain, measured = (of_a_collective(mesh, each) for each in (False, True))
        found = {
            "a step": of_a_step(mesh, Path(folder, "a"), 0),
            "a step that is sampled": of_a_step(mesh, Path(folder, "b"), 1),
            "... and each collective in it": measured - plain,
        }
    print_table("CPU time of Metrics", ["of", "us"], [[k, f"{v:.0f}"] for k, v in found.items()])
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
