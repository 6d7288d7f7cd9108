"""SkyPilot, for any cloud or cluster that it supports, and Ray."""

from functools import partial
from pprint import pformat
from textwrap import indent

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.shell import (
    LIMITS,
    SIGNALS,
    commented,
    grace_option,
    setup_lines,
    training_words,
    variables,
    yaml_text,
)

_literal = partial(pformat, width=100, sort_dicts=False)


def skypilot_file(job: LaunchJob) -> str:
    """A task file for ``sky launch`` or ``sky jobs launch``, which needs the GPU's name."""
    environment = commented(job, lambda name, value: f"{name}: {yaml_text(value)}")
    return f"""\
#   sky jobs launch FILE      on spot machines or with restarts;   sky launch FILE      to look at it
name: {job.name}
num_nodes: {job.nodes}
# This folder is copied to each node; the script runs in it.
workdir: .
resources:
{indent(_resources(job), "  ")}
envs:
{indent(environment, "  ")}
run: |
{indent(_run(job), "  ")}
"""


def _resources(job: LaunchJob) -> str:
    if job.device == "cpu":
        lines = [f'cpus: "{job.gpus_per_node}+"']
    elif job.gpu is None:
        raise LaunchError("skypilot needs --gpu, the GPU's name as SkyPilot has it, such as H100")
    else:
        lines = [f"accelerators: {yaml_text(f'{job.gpu}:{job.gpus_per_node}')}"]
        if job.nodes > 1:
            lines.append("# InfiniBand, EFA or whatever the cloud has between nodes")
            lines.append("network_tier: best")
    if job.image:
        lines.append(f"image_id: {yaml_text('docker:' + job.image)}")
    lines += [
        "# restarts by sky jobs after a process has failed; a machine that is taken away doesn't count",
        "job_recovery:",
        f"  max_restarts_on_errors: {job.max_restarts}",
    ]
    return "\n".join(lines)


def _run(job: LaunchJob) -> str:
    rendezvous, head = "--standalone \\", ""
    if job.nodes > 1:
        head = """
# SkyPilot sets each node's number and all addresses, one in each line: the first line is node 0.
read -r MASTER_ADDR <<< "$SKYPILOT_NODE_IPS"
"""
        rendezvous = """\
--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \\
    --master-addr="$MASTER_ADDR" --master-port=29500 \\"""
    return f"""\
{setup_lines(job)}set -euo pipefail
{head}
{LIMITS}

torchrun {rendezvous}
    --nproc-per-node={job.gpus_per_node} --max-restarts=0 {grace_option(job)}--tee=3 \\
    {SIGNALS} \\
    {training_words(job)}"""


def ray_file(job: LaunchJob) -> str:
    """A Python script for a Ray cluster with ``ray[train]``, whose workers each run the training script."""
    environment = {name: value for name, value, _ in variables(job)}
    return f"""\
#   ray job submit --working-dir . -- python FILE
import ctypes
import os
import signal
import socket
import subprocess
import sys

import ray.train
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

COMMAND = {_literal(list(job.command))}
PROCESSES_PER_NODE = {job.gpus_per_node}
ENVIRONMENT = {_literal(environment)}


def train():
    context = ray.train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    # Ray packs workers onto nodes as they fit; tp groups need whole nodes, with consecutive ranks.
    node = rank // PROCESSES_PER_NODE
    if (context.get_node_rank(), local_rank) != (node, rank % PROCESSES_PER_NODE):
        raise RuntimeError(f"Ray's nodes have other than {{PROCESSES_PER_NODE}} workers each")
    # Ray's own process group sends the address of the training's, and is destroyed before that is made.
    address = [free_address()]
    dist.broadcast_object_list(address, src=0)
    dist.destroy_process_group()
    host, port = address[0]
    environment = {{
        **os.environ,
        **ENVIRONMENT,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(PROCESSES_PER_NODE),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }}
    # A separate process: Ray calls this function in a thread, where a script can't handle signals.
    child = subprocess.Popen([sys.executable, *COMMAND], env=environment, preexec_fn=die_with_worker)
    status = child.wait()
    if status:
        raise RuntimeError(f"rank {{rank}} ended with {{status}}")  # Ray restarts all


def free_address():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def die_with_worker():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if Ray kills its worker


if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(
            num_workers={job.world_size},
            use_gpu={job.device == "cuda"},
            placement_strategy="PACK",  # as few nodes as can be
        ),
        torch_config=TorchConfig(backend="gloo"),  # only for the address
        run_config=RunConfig(
            name={job.name!r},
            failure_config=FailureConfig(max_failures={job.max_restarts}),
        ),
    ).fit()
"""
