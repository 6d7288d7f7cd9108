"""The variables that every launch file sets, each with its reason."""

from __future__ import annotations

from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import shell_word

__all__ = ["Variable", "exports", "variables"]

Variable = tuple[str, str, str]
"""Name, value, why."""


def variables(job: LaunchJob) -> list[Variable]:
    """What the training processes get: our settings, then ``job.env``, which wins."""
    threads = "8" if job.device == "cuda" else "1"
    found = [
        ("PYTHONUNBUFFERED", "1", "a killed process's last lines are in the log too"),
        ("PYTHONFAULTHANDLER", "1", "a crash in C code prints Python's stack"),
        (
            "OMP_NUM_THREADS",
            threads,
            "torchrun would say 1, and all cores are too many for each process",
        ),
    ]
    if job.device == "cuda":
        found += [
            (
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "32",
                "1, a habit from Megatron, would keep FSDP's collectives from overlapping with tp",
            ),
            (
                "PYTORCH_ALLOC_CONF",
                "expandable_segments:True",
                "gathered parameters of many sizes leave less memory in holes",
            ),
            ("NCCL_DEBUG", "WARN", "NCCL says why a connection failed; INFO for a first run"),
            (
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "1",
                "a collective that hangs leaves a record of what each rank waited for",
            ),
            ("TORCH_FR_BUFFER_SIZE", "2000", "of so many collectives"),
        ]
    if job.nodes > 1 and job.max_restarts > 0:
        found.append(
            (
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                "1",
                "a torchrun that is started again while another survives would wait for ever (torch 2.13)",
            )
        )
    own = [(name, value, "") for name, value in job.env.items()]
    return [each for each in found if each[0] not in job.env] + own


def exports(job: LaunchJob, indent: str = "") -> str:
    """Lines of bash that export them; what the node's shell has set already is overwritten.

    NCCL's interface is the exception: a cluster's own setting stays, as only its administrator knows it.
    """
    lines = []
    for name, value, why in variables(job):
        if why:
            lines.append(f"{indent}# {why}")
        lines.append(f"{indent}export {name}={shell_word(value)}")
    if job.device == "cuda" and job.nodes > 1 and "NCCL_SOCKET_IFNAME" not in job.env:
        lines += [
            f"{indent}# not over interfaces that lead nowhere; a name here would differ between nodes",
            f'{indent}export NCCL_SOCKET_IFNAME="${{NCCL_SOCKET_IFNAME:-^lo,docker,veth,virbr}}"',
        ]
    return "\n".join(lines)
