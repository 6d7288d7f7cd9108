"""Kubeflow and JobSet: manifests for kubectl, of a container that runs torchrun."""

from textwrap import indent

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.shell import (
    commented,
    for_kubernetes,
    for_torchrun,
    grace_option,
    yaml_text,
)

_MOUNTS = """\
volumeMounts:
  - name: shm
    mountPath: /dev/shm"""

_VOLUMES = """\
# Data loaders and NCCL exchange tensors in /dev/shm; a container's own has only 64 MiB.
volumes:
  - name: shm
    emptyDir:
      medium: Memory"""


def _nested(text: str, depth: int) -> str:
    return indent(text, " " * depth)


def _container(torchrun: str, job: LaunchJob, before: str = "") -> str:
    """``command``, ``args`` and ``env`` of the container that runs torchrun with the options ``torchrun``.

    ``command`` is bash with our own lines, to which Kubernetes appends ``args`` as ``"$@"``. It has no text
    of the user's, so nothing is escaped. ``before`` is what the options need.
    """
    common = f"--nproc-per-node={job.gpus_per_node} {grace_option(job)}--tee=3"
    options = " \\\n      ".join([*torchrun.split("\n"), common])
    words = (f"  - {yaml_text(for_kubernetes(for_torchrun(word)))}\n" for word in job.command)
    environment = commented(
        job, lambda name, value: f"- name: {name}\n  value: {yaml_text(for_kubernetes(value))}"
    )
    return f"""\
command:
  - bash
  - -c
  # exec: bash as process 1 would not pass SIGTERM on, and torchrun could not save a last checkpoint.
  - |
    set -eu
{_nested(before, 4)}    ulimit -S -n hard
    ulimit -S -l hard
    exec torchrun {options} "$@"
  - {yaml_text(job.name)}
args:
{"".join(words)}env:
{_nested(environment, 2)}"""


def _gpus(job: LaunchJob, key: str) -> str:
    """The GPUs of a container; nothing for a job on CPUs."""
    if job.device == "cpu":
        return ""
    return f"""\
# For RDMA add its resource here, as your cluster names it, and IPC_LOCK to the container's capabilities.
{key}:
  limits:
    nvidia.com/gpu: {job.gpus_per_node}
"""


def jobset_file(job: LaunchJob) -> str:
    """JobSet: an indexed Job whose pods find each other by name and are restarted together."""
    if job.image is None:
        raise LaunchError(
            "jobset needs --image, a container image with torch, parallel3d and the script, such as "
            "registry/name:tag"
        )
    limit = f"              activeDeadlineSeconds: {job.seconds}\n" if job.seconds else ""
    torchrun = "--standalone --max-restarts=0"
    if job.nodes > 1:
        torchrun = f"""\
--nnodes={job.nodes} --node-rank="$JOB_COMPLETION_INDEX" --max-restarts=0
--master-addr={job.name}-node-0-0.{job.name} --master-port=29500"""
    return f"""\
#   kubectl create -f FILE
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  # A headless service: pods find the first one by its name, {job.name}-node-0-0.{job.name}, even before
  # it is ready, which it only is when all have started.
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  # If one process fails, all are ended and restarted, so that none of the old ones can interfere.
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
          # A single pod is never restarted: the others would not notice.
          backoffLimit: 0
          template:
            spec:
{limit}              restartPolicy: Never
              # Seconds from SIGTERM to SIGKILL: time for a last checkpoint.
              terminationGracePeriodSeconds: {max(30, job.grace + 10)}
              containers:
                - name: train
                  image: {yaml_text(job.image)}
{_nested(_container(torchrun, job), 18)}
{_nested(_gpus(job, "resources"), 18)}{_nested(_MOUNTS, 18)}
{_nested(_VOLUMES, 14)}
"""


_HEAD = """\
is_head=false
[ "$PET_NODE_RANK" != 0 ] || is_head=true
"""


def kubeflow_file(job: LaunchJob) -> str:
    """Kubeflow Trainer 2: a TrainJob on the runtime torch-distributed (PyTorchJob is its predecessor's)."""
    image = f"    image: {yaml_text(job.image)}\n" if job.image else ""
    limit = f"  activeDeadlineSeconds: {job.seconds}\n" if job.seconds else ""
    before = _HEAD if job.nodes > 1 and job.max_restarts else ""
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
{_nested(_gpus(job, "resourcesPerNode"), 4)}{_nested(_container(_for_kubeflow(job), job, before), 4)}
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
                        # Seconds from SIGTERM to SIGKILL: time for a last checkpoint.
                        terminationGracePeriodSeconds: {max(30, job.grace + 10)}
                        containers:
                          - name: node
{_nested(_MOUNTS, 28)}
{_nested(_VOLUMES, 24)}
"""


def _for_kubeflow(job: LaunchJob) -> str:
    """torchrun's options. Kubeflow sets the nodes and the first one's address as PET_*, which it reads.

    That is a static rendezvous, which can't be repeated: with restarts it is c10d, on the node that Kubeflow
    numbers 0.
    """
    if job.nodes == 1:
        return f"--standalone --max-restarts={job.max_restarts}"
    if not job.max_restarts:
        return "--max-restarts=0"
    return f"""\
--max-restarts={job.max_restarts} --rdzv-backend=c10d --rdzv-id={job.name}
--rdzv-endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT"
--rdzv-conf="read_timeout=600,is_host=$is_head\""""
