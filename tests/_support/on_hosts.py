"""examples/llama/train.py as it is started on several hosts.

It also writes down on which host each group's ranks are, and SILENCE in the environment is how many seconds
of it ``guards.watch`` bears.
"""

import json
import os
import runpy
import socket
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import distributed as dist
from torch.distributed import DeviceMesh

import parallel3d as p3d

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"


def write_down_hosts(mesh: DeviceMesh, path: str) -> None:
    """Axis -> for each rank the names of the hosts of its group, as these say themselves."""
    found = {}
    for axis in mesh.mesh_dim_names or ():
        names: list[str] = [""] * mesh[axis].size()
        dist.all_gather_object(names, socket.gethostname(), group=mesh.get_group(axis))
        by_rank: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(by_rank, names)
        found[axis] = by_rank
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))


def main() -> None:
    build_mesh = p3d.build_mesh

    def build_and_write(*args, **options):
        mesh = build_mesh(*args, **options)
        write_down_hosts(mesh, os.environ["HOSTS_FILE"])
        return mesh

    p3d.build_mesh = build_and_write
    if seconds := os.environ.get("SILENCE"):
        silence = timedelta(seconds=float(seconds))
        p3d.guards.watch = partial(p3d.guards.watch, silence=silence)
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
