"""Limits, memory, processors and disk of a node, and of the container it may be."""

from __future__ import annotations

from parallel3d.doctor.facts import GIB, Facts
from parallel3d.doctor.finding import Result, Seen, Severity, check

__all__: list[str] = []

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
