"""Limits, memory, processors and disk of a node, and of the container it may be."""

from __future__ import annotations

from parallel3d.tools.doctor.facts import GIB, Facts
from parallel3d.tools.doctor.finding import Result, Seen, Severity, check

AREA = "machine"
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs")
_MIB = 2**20


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g} GiB"


@check(
    "few-open-files",
    AREA,
    Severity.warning,
    why="Every rank, data worker and checkpoint file takes some; at the limit: Too many open files.",
    do="ulimit -n 65536 before the launcher; for good: nofile in /etc/security/limits.conf",
)
def open_files(facts: Facts) -> Result:
    limits = facts.limits
    if limits.nofile >= 8192:
        return None
    text = f"{limits.nofile} files may be open (hard limit {limits.nofile_hard})"
    return (
        Seen(text, f"ulimit -n {limits.nofile_hard}")
        if limits.nofile_hard > limits.nofile
        else text
    )


@check(
    "locked-memory",
    AREA,
    Severity.warning,
    why="RDMA registers its buffers as locked memory: NCCL fails with ibv_reg_mr, or goes over TCP.",
    do="ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: capability IPC_LOCK",
)
def locked_memory(facts: Facts) -> Result:
    if facts.infiniband and 0 <= facts.limits.memlock < GIB:
        return (
            f"{facts.limits.memlock / _MIB:.3g} MiB may be locked, and there is InfiniBand or RoCE"
        )
    return None


@check(
    "small-shared-memory",
    AREA,
    Severity.warning,
    why="NCCL and data workers pass data through /dev/shm; when it is full they end with Bus error.",
    do="docker: --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
)
def shared_memory(facts: Facts) -> Result:
    limits = facts.limits
    if 0 <= limits.shm_free < GIB:
        return f"/dev/shm has {limits.shm_free / _MIB:,.0f} MiB free of {limits.shm / _MIB:,.0f}"
    return None


@check(
    "no-shared-memory",
    AREA,
    Severity.error,
    why="NCCL between processes of a node, and data workers, need it.",
    do="Mount a tmpfs at /dev/shm.",
)
def no_shared_memory(facts: Facts) -> Result:
    return "there is no /dev/shm" if facts.limits.shm < 0 else None


@check(
    "few-processors",
    AREA,
    Severity.warning,
    why="A rank has a thread that launches kernels, and others that communicate: they wait for each other, "
    "and the GPU for them.",
    do="Give the job more CPUs (SLURM: --cpus-per-task; docker: --cpus), or start fewer ranks.",
)
def processors(facts: Facts) -> Result:
    limits, ranks = facts.limits, facts.place.local_world_size
    usable = min(limits.cpus, limits.quota or limits.cpus)
    if usable >= ranks:
        return None
    limit = f", of the container's {limits.quota:g}" if limits.quota else ""
    return f"{ranks} ranks share {usable:g} CPUs ({limits.cpus} visible{limit})"


@check(
    "too-many-threads",
    AREA,
    Severity.warning,
    why="OpenMP threads of the ranks take each other's processors: CPU work gets slower, not faster.",
    do="export OMP_NUM_THREADS=N, with N x ranks of a node no more than its CPUs",
)
def threads(facts: Facts) -> Result:
    limits, place = facts.limits, facts.place
    value = facts.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    count = int(value) if value.isdigit() else limits.cpus
    usable = max(int(min(limits.cpus, limits.quota or limits.cpus)), 1)
    if place.local_world_size == 1 or count == 1 or count * place.local_world_size <= usable:
        return None
    text = (
        f"OMP_NUM_THREADS is {value or 'not set'}: {place.local_world_size} ranks x {count} threads"
    )
    best = max(usable // place.local_world_size, 1)
    return Seen(f"{text} on {usable} CPUs", f"export OMP_NUM_THREADS={best}")


@check(
    "one-thread",
    AREA,
    Severity.note,
    why="torchrun sets 1 where nothing is set: optimizers and data preparation on the CPU use one core.",
    do="export OMP_NUM_THREADS=N before torchrun",
)
def one_thread(facts: Facts) -> Result:
    usable = int(min(facts.limits.cpus, facts.limits.quota or facts.limits.cpus))
    each = usable // max(facts.place.local_world_size, 1)
    if facts.environment.get("OMP_NUM_THREADS") != "1" or each < 4:
        return None
    text = f"OMP_NUM_THREADS=1, with {each} CPUs for each rank"
    return Seen(text, f"export OMP_NUM_THREADS={each} before torchrun")


@check(
    "little-memory",
    AREA,
    Severity.warning,
    why="Pinned buffers, checkpoints in the background and data workers need it; what runs out is killed.",
    do="Free memory, or raise the container's limit (docker: --memory; SLURM: --mem).",
)
def memory(facts: Facts) -> Result:
    limits, ranks = facts.limits, facts.place.local_world_size
    free = min(limits.available, limits.memory_limit or limits.available)
    if free >= 2 * GIB * ranks:
        return None
    limit = f", the container's limit {_gib(limits.memory_limit)}" if limits.memory_limit else ""
    return f"{_gib(free)} for {ranks} ranks ({_gib(limits.available)} available{limit})"


@check(
    "checkpoint-not-writable",
    AREA,
    Severity.error,
    why="The first save fails, after hours of work.",
    do="Create the folder, or mount it writable, on every node.",
)
def not_writable(facts: Facts) -> Result:
    return facts.disk.error or None if facts.disk else None


@check(
    "checkpoint-disk-full",
    AREA,
    Severity.warning,
    why="A checkpoint with AdamW's state has 12 to 16 bytes per parameter, and several are kept.",
    do="Free space, keep fewer checkpoints, or choose another folder.",
)
def disk_full(facts: Facts) -> Result:
    disk = facts.disk
    if disk is None or disk.error or disk.free >= max(10 * GIB, 0.02 * disk.total):
        return None
    return f"{disk.path}: {_gib(disk.free)} free of {_gib(disk.total)}"


@check(
    "checkpoint-on-one-node",
    AREA,
    Severity.warning,
    why="Each node would keep its own part: nothing can be loaded when one is gone.",
    do="Choose a folder that all nodes share: NFS, Lustre, an object store's mount.",
)
def one_node(facts: Facts) -> Result:
    disk = facts.disk
    if disk is None or disk.error or not facts.several_nodes:
        return None
    if disk.shared is False:
        return f"{disk.path}: what rank 0 writes is not seen here (file system {disk.kind})"
    if disk.shared is None and disk.kind in _LOCAL:
        return f"{disk.path} is on {disk.kind}, a file system of this node alone"
    return None


# Accelerators: whether torch sees those there are, enough of them, and in good health.

DEVICES = "devices"


@check(
    "no-device",
    DEVICES,
    Severity.error,
    why="The job would run on the CPU, or fail at its first tensor.",
    do="nvidia-smi; then a driver as new as torch's CUDA wants, or torch's wheel for this driver",
)
def no_device(facts: Facts) -> Result:
    if facts.devices or not facts.on_machine or not facts.device_error:
        return None
    return f"{facts.on_machine} on this machine, none that torch can use: {facts.device_error}"


@check(
    "devices-hidden",
    DEVICES,
    Severity.warning,
    why="torch sees no device although there are some.",
    do="unset CUDA_VISIBLE_DEVICES",
)
def hidden(facts: Facts) -> Result:
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.devices or not facts.on_machine or value is None or facts.device_error:
        return None
    return f"CUDA_VISIBLE_DEVICES={value!r} hides all {facts.on_machine}"


@check(
    "fewer-devices-than-ranks",
    DEVICES,
    Severity.error,
    why="Ranks beyond the last device fail with an invalid device ordinal.",
    do="torchrun --nproc-per-node N with as many as there are, or show more in CUDA_VISIBLE_DEVICES",
)
def too_few(facts: Facts) -> Result:
    count, place = len(facts.devices), facts.place
    if count in (0, 1) and place.local_world_size > 1 and count:
        return None  # each may be shown its own: see device-shared
    if not count or count >= place.local_world_size:
        return None
    text = f"{count} devices for {place.local_world_size} ranks of this node"
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    text += f" (CUDA_VISIBLE_DEVICES={value})" if value is not None else ""
    return Seen(text, f"torchrun --nproc-per-node {count}")


@check(
    "devices-unused",
    DEVICES,
    Severity.note,
    why="They are paid for and idle.",
    do="torchrun --nproc-per-node N with as many as there are",
)
def unused(facts: Facts) -> Result:
    count, place = len(facts.devices), facts.place
    if place.world_size == 1 or count <= place.local_world_size or count == 1:
        return None
    text = f"{place.local_world_size} ranks on {count} devices"
    return Seen(text, f"torchrun --nproc-per-node {count}")


@check(
    "mig",
    DEVICES,
    Severity.warning,
    why="NCCL does not join instances of one GPU, and there is no direct path between instances.",
    do="nvidia-smi -mig 0 on GPUs meant for training on several",
)
def mig(facts: Facts) -> Result:
    found = [each.name for each in facts.devices if each.mig]
    return f"{len(found)} of {len(facts.devices)} are MIG instances: {found[0]}" if found else None


@check(
    "no-persistence",
    DEVICES,
    Severity.note,
    why="The driver unloads between jobs: the first call takes seconds, and clocks and counters are reset.",
    do="nvidia-smi -pm 1, or the service nvidia-persistenced",
)
def persistence(facts: Facts) -> Result:
    off = [i for i, each in enumerate(facts.devices) if not each.persistence]
    return f"persistence mode is off on {len(off)} of {len(facts.devices)} devices" if off else None


@check(
    "device-busy",
    DEVICES,
    Severity.warning,
    why="Another process has memory there: an old job that has not ended, or a neighbour. It takes time too.",
    do="nvidia-smi shows whose it is; end what should have ended",
)
def busy(facts: Facts) -> Result:
    used = {i: d.total - d.free for i, d in enumerate(facts.devices) if d.total - d.free > 2 * GIB}
    if not used:
        return None
    return ", ".join(f"device {i} has {n / GIB:.1f} GiB in use" for i, n in used.items())


@check(
    "device-faulty",
    DEVICES,
    Severity.error,
    why="Uncorrected memory errors: numbers may be wrong, and the next one ends the job.",
    do="Take the node out of the job; nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace the device",
)
def faulty(facts: Facts) -> Result:
    bad = [f"device {i} had {d.errors}" for i, d in enumerate(facts.devices) if d.errors]
    return f"uncorrected memory errors: {', '.join(bad)}" if bad else None


@check(
    "device-slowed",
    DEVICES,
    Severity.warning,
    why="Its clocks are held down: it is the slowest of the job, and all wait for it.",
    do="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling and power supply",
)
def slowed(facts: Facts) -> Result:
    found = [f"device {i}: {d.slowed}" for i, d in enumerate(facts.devices) if d.slowed]
    return ", ".join(found) or None
