"""Kubeflow Trainer 2: a TrainJob on the runtime torch-distributed (PyTorchJob is its predecessor's)."""

from __future__ import annotations

from parallel3d.launch import containers as c
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import yaml_text

__all__ = ["kubeflow_file"]


_HEAD = """\
is_head=false
[ "$PET_NODE_RANK" != 0 ] || is_head=true
"""


def kubeflow_file(job: LaunchJob) -> str:
    """A manifest for kubectl."""
    image = f"    image: {yaml_text(job.image)}\n" if job.image else ""
    limit = f"  activeDeadlineSeconds: {job.seconds}\n" if job.seconds else ""
    before = _HEAD if job.nodes > 1 and job.max_restarts else ""
    gpus = c.resources(job, "resourcesPerNode")
    return f"""\
#   kubectl create -f FILE
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
{limit}  runtimeRef:
    name: torch-distributed
  trainer:
{image}    numNodes: {job.nodes}
    numProcPerNode: {job.gpus_per_node}
{c.nested(gpus, 4)}{c.nested(c.script(_torchrun(job), job, before), 4)}
{c.nested(c.arguments(job), 4)}
{c.nested(c.environment(job), 4)}
  runtimePatches:
    - manager: parallel3d.io/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        # From SIGTERM to SIGKILL: time for a last checkpoint.
                        terminationGracePeriodSeconds: {max(30, job.grace + 10)}
                        containers:
                          - name: node
{c.nested(c.mounts(), 28)}
{c.nested(c.volumes(), 24)}
"""


def _torchrun(job: LaunchJob) -> str:
    """Kubeflow gives nodes, their numbers and the first one's address as PET_*, which torchrun reads.

    That is a static rendezvous, which can't be held a second time: for restarts it is c10d, on the node that
    Kubeflow numbers 0.
    """
    if job.nodes == 1:
        return f"--standalone --max-restarts={job.max_restarts}"
    if not job.max_restarts:
        return "--max-restarts=0"
    return f"""\
--max-restarts={job.max_restarts} --rdzv-backend=c10d --rdzv-id={job.name}
--rdzv-endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT"
--rdzv-conf="read_timeout=600,is_host=$is_head\""""
