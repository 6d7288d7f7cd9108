"""What ``import parallel3d`` costs beyond ``import torch``, in fresh processes that take turns.

    python benchmarks/import_time.py [--quick] [--json PATH]

All that torch itself loads for us counts as ours: ``import torch`` loads neither torch.distributed.tensor
nor torch.distributed.fsdp, nor what these need (sympy above all). The names of the package are therefore
loaded when they are first asked for (``parallel3d/_util/lazy.py``), and a user of the engine pays then. So
that nothing is hidden, the second table has that cost: of all that a first script uses, beside torch's
``fully_shard`` and ``parallelize_module``; both load DTensor.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from measure import Claim, command_line, print_table, range_of

LIMIT = 0.1
"""Seconds beyond ``import torch`` that the import may take."""
FIRST_SCRIPT = 0.5
"""Seconds of CPU beyond torch's engine that what a first script uses may take to import."""

PROGRAMS = {
    "import torch": "",
    "import torch, parallel3d": "import parallel3d",
    "torch's engine": (
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor.parallel import parallelize_module"
    ),
    "a first script": (
        "import parallel3d as p3d\n"
        "p3d.MeshLayout, p3d.build_mesh, p3d.parallelize, p3d.materialize, p3d.optim.clip_grad_norm_"
    ),
}

_CHILD = """
import json, os, resource, sys, time
import torch
loaded = set(sys.modules)
start, start_cpu = time.perf_counter(), time.process_time()
{body}
seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
new = set(sys.modules) - loaded
print(json.dumps(dict(
    beyond=seconds, beyond_cpu=cpu, whole_cpu=time.process_time(), modules=len(new),
    of_torch=sorted(m for m in new if m.startswith("torch.distributed.") and m.count(".") == 2),
)))
"""


def measured(program: str) -> dict[str, Any]:
    """One fresh process: seconds (wall, CPU) beyond ``import torch``, and of the process as a whole."""
    code = _CHILD.format(body=PROGRAMS[program])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """The claim and everything measured; prints the tables."""
    rounds = 3 if quick else 11
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    order = list(PROGRAMS)
    for name in order:
        measured(name)  # the files' first reading is the disk's time
    for _ in range(rounds):
        for name in order:
            found[name].append(measured(name))
        order.reverse()

    def each(name: str, key: str) -> list[float]:
        return [result[key] for result in found[name]]

    rows = [
        [
            name,
            *(f"{1e3 * statistics.median(each(name, k)):,.1f}" for k in _MILLISECONDS),
            found[name][0]["modules"],
        ]
        for name in PROGRAMS
    ]
    head = ["fresh process, median", *_MILLISECONDS.values(), "modules beyond torch"]
    print_table(f"imports, {rounds} processes each in turns; wall and CPU time, ms", head, rows)
    ours = each("import torch, parallel3d", "beyond")
    whole = [
        a - b
        for a, b in zip(
            each("import torch, parallel3d", "whole_cpu"),
            each("import torch", "whole_cpu"),
            strict=True,
        )
    ]
    print(
        f"whole processes, with parallel3d minus without, CPU: {1e3 * statistics.median(whole):.1f} ms "
        f"(middle half {range_of([1e3 * seconds for seconds in whole])}): the noise of starting Python\n"
        f"torch.distributed's own packages in it: "
        f"{found['import torch, parallel3d'][0]['of_torch'] or 'none'}"
    )
    claim = Claim(
        "import parallel3d beyond import torch",
        statistics.median(ours),
        LIMIT,
        "s",
        "fixed limit",
        bar=1.0,
        spread=range_of([seconds / LIMIT for seconds in ours]),
    )
    script = [
        a - b
        for a, b in zip(
            each("a first script", "beyond_cpu"), each("torch's engine", "beyond_cpu"), strict=True
        )
    ]
    first = Claim(
        "import of what a first script uses, beyond torch's engine, CPU",
        statistics.median(script),
        FIRST_SCRIPT,
        "s",
        "fixed limit",
        bar=1.0,
        spread=range_of([seconds / FIRST_SCRIPT for seconds in script]),
    )
    return [claim, first], {"imports": found, "whole_difference_cpu": whole}


_MILLISECONDS = {
    "beyond": "beyond torch",
    "beyond_cpu": "CPU",
    "whole_cpu": "whole process, CPU",
}


if __name__ == "__main__":
    command_line(__doc__, run)
