"""Jobs to write launch files for."""

from typing import Any

from parallel3d.tools.launch import TARGETS, LaunchJob

ODD = [
    "",
    " ",
    "a b",
    "it's",
    "\\'",
    'say "hi"',
    "$HOME ${HOME} $(touch oops) `touch oops`",
    "; touch oops #",
    "&& touch oops || touch oops",
    "two\nlines\n#SBATCH --nodes=99\n",
    "tab\tand\rreturn and \\n and \\",
    "- yaml: [x, {y: z}] # no",
    "yes",
    "null",
    "0x10",
    "$(PET_NNODES) $$(PET_NNODES) $$ $",
    "${local_rank} $local_rank $$local_rank",
    "é ü 漢字 🙂",
    "\u2028 \x7f \x85 \x1b[0m",
    "{braces} %s %(x)s",
    '"""',
    "-x",
    "--rdzv-id=other",
    "*",
    "~",
    "!!",
]


COMMAND = ("train.py", *ODD)


ENV = {f"ODD_{i}": word for i, word in enumerate(ODD)}


def job_for(target: str, **more: Any) -> LaunchJob:
    """A job that ``target`` takes; ``more`` as it is."""
    takes = TARGETS[target].takes
    given = {"image": "registry/name:1.2", "gpu": "H100", "time": "12:00:00"}
    slurm = {"partition": "main", "account": "lab"}
    chosen = {k: v for k, v in (given | slurm).items() if k in takes}
    return LaunchJob(**{"command": COMMAND, "nodes": 4, "env": ENV, **chosen, **more})
