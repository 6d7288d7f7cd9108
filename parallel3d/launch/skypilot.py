"""SkyPilot: a task for any cloud or cluster that it knows."""

from __future__ import annotations

from textwrap import indent

from parallel3d.launch.environment import variables
from parallel3d.launch.error import LaunchError
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import yaml_text
from parallel3d.launch.torchrun import LIMITS, SIGNALS, grace_option, training_words

__all__ = ["skypilot_file"]


def skypilot_file(job: LaunchJob) -> str:
    """A task file for ``sky launch`` or ``sky jobs launch``.

    Raises:
        LaunchError: which GPU isn't said.
    """
    return f"""\
#   sky jobs launch FILE      on spot machines or with restarts;   sky launch FILE      to look at it
name: {job.name}
num_nodes: {job.nodes}
# This folder is copied to each node; the script runs in it.
workdir: .
resources:
{indent(_resources(job), "  ")}
envs:
{indent(_envs(job), "  ")}
run: |
{indent(_run(job), "  ")}
"""


def _resources(job: LaunchJob) -> str:
    lines = []
    if job.device == "cuda":
        if job.gpu is None:
            raise LaunchError(
                "skypilot needs --gpu, the GPU's name as SkyPilot has it, such as H100"
            )
        lines.append(f"accelerators: {yaml_text(f'{job.gpu}:{job.gpus_per_node}')}")
        if job.nodes > 1:
            lines += [
                "# InfiniBand, EFA or what else the cloud has between nodes",
                "network_tier: best",
            ]
    else:
        lines.append(f'cpus: "{job.gpus_per_node}+"')
    if job.image:
        lines.append(f"image_id: {yaml_text('docker:' + job.image)}")
    lines += [
        "# by sky jobs: a machine that is taken away doesn't count, a process that fails does",
        "job_recovery:",
        f"  max_restarts_on_errors: {job.max_restarts}",
    ]
    return "\n".join(lines)


def _envs(job: LaunchJob) -> str:
    lines = []
    for name, value, why in variables(job):
        lines += [f"# {why}"] if why else []
        lines.append(f"{name}: {yaml_text(value)}")
    return "\n".join(lines)


def _run(job: LaunchJob) -> str:
    rendezvous = "--standalone \\"
    head = ""
    if job.nodes > 1:
        head = """
# SkyPilot says each node's number and all addresses, one a line: the first line is node 0.
read -r MASTER_ADDR <<< "$SKYPILOT_NODE_IPS"
"""
        rendezvous = """\
--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \\
    --master-addr="$MASTER_ADDR" --master-port=29500 \\"""
    return f"""\
set -euo pipefail
{head}
{LIMITS}

torchrun {rendezvous}
    --nproc-per-node={job.gpus_per_node} --max-restarts=0 {grace_option(job)}--tee=3 \\
    {SIGNALS} \\
    {training_words(job)}"""
