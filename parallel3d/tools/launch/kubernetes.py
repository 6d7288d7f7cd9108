"""What Kubeflow and JobSet share: a container that runs torchrun, as lines of YAML."""

from __future__ import annotations

from textwrap import indent

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.shell import (
    for_kubernetes,
    for_torchrun,
    grace_option,
    variables,
    yaml_text,
)


def script(torchrun: str, job: LaunchJob, before: str = "") -> str:
    """``command``: bash with our lines of shell, to which Kubernetes appends ``args`` as ``"$@"``.

    ``torchrun`` are its options, a line each; ``before`` lines of shell that they
    need. No user's text is in here, so nothing is to be escaped.
    """
    common = f"--nproc-per-node={job.gpus_per_node} {grace_option(job)}--tee=3"
    options = " \\\n      ".join([*torchrun.split("\n"), common])
    return f"""\
command:
  - bash
  - -c
  # exec: as process 1 bash would not pass SIGTERM on, and torchrun could not save a last checkpoint.
  - |
    set -eu
{nested(before, 4)}    ulimit -S -n hard
    ulimit -S -l hard
    exec torchrun {options} "$@"
  - {yaml_text(job.name)}"""


def arguments(job: LaunchJob) -> str:
    """``args``: the training command's words, each just what it is; Kubernetes would expand ``$(...)``."""
    lines = [f"  - {yaml_text(for_kubernetes(for_torchrun(word)))}" for word in job.command]
    return "\n".join(["args:", *lines])


def environment(job: LaunchJob) -> str:
    """``env`` with a comment before each variable that is ours."""
    lines = ["env:"]
    for name, value, why in variables(job):
        if why:
            lines.append(f"  # {why}")
        lines += [f"  - name: {name}", f"    value: {yaml_text(for_kubernetes(value))}"]
    return "\n".join(lines)


def resources(job: LaunchJob, key: str) -> str:
    """The GPUs; nothing for a job on CPUs."""
    if job.device == "cpu":
        return ""
    return f"""\
# For RDMA add its resource here, as your cluster names it, and IPC_LOCK to the container's capabilities.
{key}:
  limits:
    nvidia.com/gpu: {job.gpus_per_node}
"""


def mounts() -> str:
    """Of the container."""
    return """\
volumeMounts:
  - name: shm
    mountPath: /dev/shm"""


def volumes() -> str:
    """Of the pod."""
    return """\
# Data loaders and NCCL hand tensors over in /dev/shm; a container's own has 64 MiB.
volumes:
  - name: shm
    emptyDir:
      medium: Memory"""


def nested(text: str, depth: int) -> str:
    """``text`` ``depth`` spaces to the right."""
    return indent(text, " " * depth)


# JobSet: an indexed Job whose pods find each other by name, started again as a whole.


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
    gpus = resources(job, "resources")
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
{nested(script(_torchrun(job), job), 18)}
{nested(arguments(job), 18)}
{nested(environment(job), 18)}
{nested(gpus, 18)}{nested(mounts(), 18)}
{nested(volumes(), 14)}
"""


def _torchrun(job: LaunchJob) -> str:
    if job.nodes == 1:
        return "--standalone --max-restarts=0"
    return f"""\
--nnodes={job.nodes} --node-rank="$JOB_COMPLETION_INDEX" --max-restarts=0
--master-addr={job.name}-node-0-0.{job.name} --master-port=29500"""


# Kubeflow Trainer 2: a TrainJob on the runtime torch-distributed (PyTorchJob is its predecessor's).

_HEAD = """\
is_head=false
[ "$PET_NODE_RANK" != 0 ] || is_head=true
"""


def kubeflow_file(job: LaunchJob) -> str:
    """A manifest for kubectl."""
    image = f"    image: {yaml_text(job.image)}\n" if job.image else ""
    limit = f"  activeDeadlineSeconds: {job.seconds}\n" if job.seconds else ""
    before = _HEAD if job.nodes > 1 and job.max_restarts else ""
    gpus = resources(job, "resourcesPerNode")
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
{nested(gpus, 4)}{nested(script(_torchrun_arguments(job), job, before), 4)}
{nested(arguments(job), 4)}
{nested(environment(job), 4)}
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
{nested(mounts(), 28)}
{nested(volumes(), 24)}
"""


def _torchrun_arguments(job: LaunchJob) -> str:
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
