"""JobSet: an indexed Job whose pods find each other by name, started again as a whole."""

from __future__ import annotations

from parallel3d.launch import containers as c
from parallel3d.launch.error import LaunchError
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import yaml_text

__all__ = ["jobset_file"]


def jobset_file(job: LaunchJob) -> str:
    """A manifest for kubectl.

    Raises:
        LaunchError: no image.
    """
    if job.image is None:
        raise LaunchError(
            "jobset needs --image, a container image with torch, parallel3d and the script, such as "
            "registry/name:tag"
        )
    limit = f"              activeDeadlineSeconds: {job.seconds}\n" if job.seconds else ""
    gpus = c.resources(job, "resources")
    return f"""\
#   kubectl create -f FILE
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  # A headless service: pods find the first one by its name, {job.name}-node-0-0.{job.name}, also before it
  # is ready, which it never is before the others have come.
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  # One process that fails ends all, and all start again: what is left of the old ones can't disturb.
  failurePolicy:
    maxRestarts: {job.max_restarts}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          # Indexed: each pod has its number as JOB_COMPLETION_INDEX.
          completionMode: Indexed
          completions: {job.nodes}
          parallelism: {job.nodes}
          # A pod is never started again by itself: the others would not know.
          backoffLimit: 0
          template:
            spec:
{limit}              restartPolicy: Never
              # From SIGTERM to SIGKILL: time for a last checkpoint.
              terminationGracePeriodSeconds: {max(30, job.grace + 10)}
              containers:
                - name: train
                  image: {yaml_text(job.image)}
{c.nested(c.script(_torchrun(job), job), 18)}
{c.nested(c.arguments(job), 18)}
{c.nested(c.environment(job), 18)}
{c.nested(gpus, 18)}{c.nested(c.mounts(), 18)}
{c.nested(c.volumes(), 14)}
"""


def _torchrun(job: LaunchJob) -> str:
    if job.nodes == 1:
        return "--standalone --max-restarts=0"
    return f"""\
--nnodes={job.nodes} --node-rank="$JOB_COMPLETION_INDEX" --max-restarts=0
--master-addr={job.name}-node-0-0.{job.name} --master-port=29500"""
