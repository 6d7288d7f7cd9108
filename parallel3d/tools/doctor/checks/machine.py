"""Checks of limits, memory, processors, disk and devices of a node or of its container."""

from parallel3d.tools.doctor.facts import GIB, Facts
from parallel3d.tools.doctor.finding import CHECKS, Area, Result, Seen

MACHINE = Area("machine", CHECKS)
DEVICES = Area("devices", CHECKS)
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs")
_MIB = 2**20


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g} GiB"


@MACHINE.warning(
    "ulimit -n 65536 before the launcher; permanently: nofile in /etc/security/limits.conf"
)
def few_open_files(facts: Facts) -> Result:
    """Every rank, data worker and checkpoint file uses some; at the limit: Too many open files."""
    soft, hard = facts.limits.nofile, facts.limits.nofile_hard
    if soft >= 8192:
        return None
    text = f"{soft} files may be open (hard limit {hard})"
    return Seen(text, f"ulimit -n {hard}") if hard > soft else text


@MACHINE.warning(
    "ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: capability IPC_LOCK"
)
def locked_memory(facts: Facts) -> Result:
    """RDMA registers its buffers as locked memory: NCCL fails with ibv_reg_mr, or falls back to TCP."""
    limit = facts.limits.memlock
    text = f"{limit / _MIB:.3g} MiB may be locked, and there is InfiniBand or RoCE"
    return text if facts.infiniband and 0 <= limit < GIB else None


@MACHINE.warning(
    "docker: --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
)
def small_shared_memory(facts: Facts) -> Result:
    """NCCL and data workers exchange data in /dev/shm; when it is full they end with Bus error."""
    limits = facts.limits
    text = f"/dev/shm has {limits.shm_free / _MIB:,.0f} MiB free of {limits.shm / _MIB:,.0f}"
    return text if 0 <= limits.shm_free < GIB else None


@MACHINE.error("Mount a tmpfs at /dev/shm.")
def no_shared_memory(facts: Facts) -> Result:
    """NCCL between processes of a node, and data workers, need it."""
    return "there is no /dev/shm" if facts.limits.shm < 0 else None


@MACHINE.warning(
    "Give the job more CPUs (SLURM: --cpus-per-task; docker: --cpus), or start fewer ranks."
)
def few_processors(facts: Facts) -> Result:
    """A rank has a thread that launches kernels and others that communicate: they wait for each other, and
    the GPU for them.
    """
    limits, ranks = facts.limits, facts.place.local_world_size
    if limits.usable_cpus >= ranks:
        return None
    limit = f", of the container's {limits.quota:g}" if limits.quota else ""
    return f"{ranks} ranks share {limits.usable_cpus:g} CPUs ({limits.cpus} visible{limit})"


@MACHINE.warning("export OMP_NUM_THREADS=N, with N x ranks of a node no more than its CPUs")
def too_many_threads(facts: Facts) -> Result:
    """The ranks' OpenMP threads compete for the same CPUs, which makes CPU work slower."""
    ranks = facts.place.local_world_size
    value = facts.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    count = int(value) if value.isdigit() else facts.limits.cpus
    usable = max(int(facts.limits.usable_cpus), 1)
    if ranks == 1 or count == 1 or count * ranks <= usable:
        return None
    text = f"OMP_NUM_THREADS is {value or 'not set'}: {ranks} ranks x {count} threads"
    return Seen(f"{text} on {usable} CPUs", f"export OMP_NUM_THREADS={max(usable // ranks, 1)}")


@MACHINE.note("export OMP_NUM_THREADS=N before torchrun")
def one_thread(facts: Facts) -> Result:
    """torchrun sets 1 by default: optimizers and data preparation on the CPU use one core."""
    cpus = int(facts.limits.usable_cpus) // max(facts.place.local_world_size, 1)
    if facts.environment.get("OMP_NUM_THREADS") != "1" or cpus < 4:
        return None
    text = f"OMP_NUM_THREADS=1, with {cpus} CPUs for each rank"
    return Seen(text, f"export OMP_NUM_THREADS={cpus} before torchrun")


@MACHINE.warning("Free memory, or raise the container's limit (docker: --memory; SLURM: --mem).")
def little_memory(facts: Facts) -> Result:
    """Pinned buffers, checkpoints written in the background and data workers need it; a process that
    exceeds it is killed.
    """
    limits, ranks = facts.limits, facts.place.local_world_size
    free = min(limits.available, limits.memory_limit or limits.available)
    if free >= 2 * GIB * ranks:
        return None
    limit = f", the container's limit {_gib(limits.memory_limit)}" if limits.memory_limit else ""
    return f"{_gib(free)} for {ranks} ranks ({_gib(limits.available)} available{limit})"


@MACHINE.error("Create the folder, or mount it writable, on every node.")
def checkpoint_not_writable(facts: Facts) -> Result:
    """The first save fails, after hours of work."""
    return facts.disk.error if facts.disk else None


@MACHINE.warning("Free space, keep fewer checkpoints, or choose another folder.")
def checkpoint_disk_full(facts: Facts) -> Result:
    """A checkpoint with AdamW's state has 12 to 16 bytes per parameter, and several are kept."""
    disk = facts.writable_disk
    if disk is None or disk.free >= max(10 * GIB, 0.02 * disk.total):
        return None
    return f"{disk.path}: {_gib(disk.free)} free of {_gib(disk.total)}"


@MACHINE.warning("Choose a folder that all nodes share: NFS, Lustre, an object store's mount.")
def checkpoint_on_one_node(facts: Facts) -> Result:
    """Each node would keep its own part: if one node is lost, the checkpoint can't be loaded."""
    disk = facts.writable_disk
    if disk is None or not facts.several_nodes:
        return None
    if disk.shared is False:
        return f"{disk.path}: what rank 0 writes is not seen here (file system {disk.kind})"
    if disk.shared is None and disk.kind in _LOCAL:
        return f"{disk.path} is on {disk.kind}, a file system of this node alone"
    return None


# Accelerators: whether torch sees the machine's devices, whether there are enough, and their health.


@DEVICES.error(
    "nvidia-smi; then install a driver that torch's CUDA supports, or torch's wheel for this driver"
)
def no_device(facts: Facts) -> Result:
    """The job would run on the CPU, or fail at its first tensor."""
    if facts.devices or not facts.on_machine or not facts.device_error:
        return None
    return f"{facts.on_machine} on this machine, none that torch can use: {facts.device_error}"


@DEVICES.warning("unset CUDA_VISIBLE_DEVICES")
def devices_hidden(facts: Facts) -> Result:
    """torch sees no device although there are some."""
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.devices or not facts.on_machine or value is None or facts.device_error:
        return None
    return f"CUDA_VISIBLE_DEVICES={value!r} hides all {facts.on_machine}"


@DEVICES.error(
    "torchrun --nproc-per-node N, N the number of devices, or show more in CUDA_VISIBLE_DEVICES"
)
def fewer_devices_than_ranks(facts: Facts) -> Result:
    """Ranks beyond the last device fail with an invalid device ordinal."""
    count, ranks = len(facts.devices), facts.place.local_world_size
    if count <= 1 or count >= ranks:  # one: each rank may see its own, which device-shared checks
        return None
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    shown = f" (CUDA_VISIBLE_DEVICES={value})" if value is not None else ""
    text = f"{count} devices for {ranks} ranks of this node{shown}"
    return Seen(text, f"torchrun --nproc-per-node {count}")


@DEVICES.note("torchrun --nproc-per-node N, N the number of devices")
def devices_unused(facts: Facts) -> Result:
    """Devices that are paid for stay idle."""
    count, place = len(facts.devices), facts.place
    if place.world_size == 1 or count <= place.local_world_size or count == 1:
        return None
    text = f"{place.local_world_size} ranks on {count} devices"
    return Seen(text, f"torchrun --nproc-per-node {count}")


@DEVICES.warning("nvidia-smi -mig 0 on GPUs meant for training on several")
def mig(facts: Facts) -> Result:
    """NCCL does not join instances of one GPU, and there is no direct path between instances."""
    names = [device.name for device in facts.devices if device.mig]
    return f"{len(names)} of {len(facts.devices)} are MIG instances: {names[0]}" if names else None


@DEVICES.note("nvidia-smi -pm 1, or the service nvidia-persistenced")
def no_persistence(facts: Facts) -> Result:
    """The driver unloads between jobs: the first call takes seconds, and clocks and counters are reset."""
    off = sum(not device.persistence for device in facts.devices)
    return f"persistence mode is off on {off} of {len(facts.devices)} devices" if off else None


@DEVICES.warning("nvidia-smi shows the process; end it if it should have ended")
def device_busy(facts: Facts) -> Result:
    """Another process uses its memory, and its time: an old job that has not ended, or another user's."""
    used = ((i, device.total - device.free) for i, device in enumerate(facts.devices))
    return ", ".join(f"device {i} has {n / GIB:.1f} GiB in use" for i, n in used if n > 2 * GIB)


@DEVICES.error(
    "Take the node out of the job; nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace the device"
)
def device_faulty(facts: Facts) -> Result:
    """Uncorrected memory errors: numbers may be wrong, and the next one ends the job."""
    bad = [f"device {i} had {d.errors}" for i, d in enumerate(facts.devices) if d.errors]
    return f"uncorrected memory errors: {', '.join(bad)}" if bad else None


@DEVICES.warning("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check cooling and power supply")
def device_slowed(facts: Facts) -> Result:
    """Its clocks are throttled: it is the slowest device of the job, and all others wait for it."""
    return ", ".join(f"device {i}: {d.slowed}" for i, d in enumerate(facts.devices) if d.slowed)
