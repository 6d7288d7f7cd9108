"""The checks of doctor: of a process, its machine, devices and network, and of differences between ranks.

A check's docstring is the text of its finding: it says why what the check has found matters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from itertools import chain
from operator import attrgetter

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.facts import GIB, Facts, Interface, is_loopback
from parallel3d.tools.doctor.finding import (
    ACROSS,
    CHECKS,
    Area,
    Result,
    Seen,
    name_hosts,
    ranks_by_value,
)

# Environment variables: wrong ones, left over from debugging, or meant for another machine.

ENVIRONMENT = Area("environment", CHECKS)

RENAMED = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_USE_COMM_NONBLOCKING": "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
"""Old name -> new name."""

KNOWN_NCCL = frozenset(
    files("parallel3d.tools.doctor").joinpath("nccl_variables.txt").read_text().split()
)
"""The variables of NVIDIA's documentation, and a few more that NCCL's source reads."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name, the old
_TUNING = ("ALGO", "PROTO", "NTHREADS", "BUFFSIZE", "MAX_NCHANNELS", "MIN_NCHANNELS", "MAX_CTAS")


def _setting(facts: Facts, name: str, *values: str) -> str:
    """Returns "NAME=VALUE" if the variable has one of ``values`` (none given: if it is on); else ""."""
    value = facts.environment.get(name, "")
    wrong = value.upper() in values if values else facts.is_set(name)
    return f"{name}={value.upper() if values else value}" if wrong else ""


@ENVIRONMENT.warning("Set the new name, unset the old one.")
def renamed_variable(facts: Facts) -> Result:
    """A variable's old name is read with a warning, or not any more: the setting may have no effect."""
    old = sorted(name for name in RENAMED if facts.environment.get(name))
    do = "; ".join(f'export {RENAMED[n]}="${n}"; unset {n}' for n in old)
    return Seen("; ".join(f"{n} is now {RENAMED[n]}" for n in old), do) if old else None


@ENVIRONMENT.warning("Set the variable with the right name.")
def misspelt_variable(facts: Facts) -> Result:
    """NCCL silently ignores variables that it does not know."""
    found = []
    for name in sorted(facts.environment):
        if name.startswith("NCCL_") and name not in KNOWN_NCCL and name not in RENAMED:
            near = get_close_matches(name, KNOWN_NCCL, n=1, cutoff=0.88)
            found += [f"{name} is no variable of NCCL, {near[0]} is"] if near else []
    return "; ".join(found)


@ENVIRONMENT.warning("unset NCCL_IB_DISABLE")
def nccl_ib_disabled(facts: Facts) -> Result:
    """Without InfiniBand communication between nodes uses TCP sockets, with a tenth of the
    bandwidth or less."""
    text = f"NCCL_IB_DISABLE=1, and there is InfiniBand or RoCE: {', '.join(facts.infiniband)}"
    return text if facts.is_set("NCCL_IB_DISABLE") and facts.infiniband else None


@ENVIRONMENT.warning("unset NCCL_P2P_DISABLE")
def nccl_p2p_disabled(facts: Facts) -> Result:
    """GPUs of a node don't use NVLink or PCIe directly but copy through host memory."""
    return _setting(facts, "NCCL_P2P_DISABLE")


@ENVIRONMENT.warning(
    "unset NCCL_SHM_DISABLE, and give the container a larger /dev/shm if that was the reason"
)
def nccl_shm_disabled(facts: Facts) -> Result:
    """Processes of a node without a direct path use the network instead of shared memory."""
    return _setting(facts, "NCCL_SHM_DISABLE")


@ENVIRONMENT.note("Unset it and measure again; keep it if that is slower.")
def nccl_tuned_by_hand(facts: Facts) -> Result:
    """NCCL chooses by message size and machine; a value tuned on another machine may be slow here."""
    names = (f"NCCL_{name}" for name in _TUNING)
    return ", ".join(f"{n}={facts.environment[n]}" for n in names if n in facts.environment)


@ENVIRONMENT.note("unset NCCL_DEBUG, or NCCL_DEBUG=WARN")
def nccl_debug(facts: Facts) -> Result:
    """Every rank logs what it does, which is useful in a first run and a large log in a long one."""
    return _setting(facts, "NCCL_DEBUG", "INFO", "TRACE", "ABORT")


@ENVIRONMENT.warning(
    "unset TORCH_DISTRIBUTED_DEBUG (guards.debug finds more, and only where you switch it on)"
)
def torch_distributed_debug(facts: Facts) -> Result:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL every collective is compared between its ranks before it runs:
    steps take several times as long."""
    return _setting(facts, "TORCH_DISTRIBUTED_DEBUG", "DETAIL")


@ENVIRONMENT.warning("unset CUDA_LAUNCH_BLOCKING")
def cuda_launch_blocking(facts: Facts) -> Result:
    """The host waits for each kernel: nothing overlaps, and communication least of all."""
    return _setting(facts, "CUDA_LAUNCH_BLOCKING")


@ENVIRONMENT.warning(
    "unset TORCH_NCCL_BLOCKING_WAIT (guards.Timeouts ends a collective that hangs)"
)
def nccl_blocking_wait(facts: Facts) -> Result:
    """Waiting for a collective stops the host thread, which then can't queue the next kernels."""
    return _setting(facts, "TORCH_NCCL_BLOCKING_WAIT")


@ENVIRONMENT.warning("unset TORCH_NCCL_ASYNC_ERROR_HANDLING (torch's own value is 3)")
def errors_not_handled(facts: Facts) -> Result:
    """With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a rank whose peer has failed waits forever, and the
    job with it."""
    return _setting(facts, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


@ENVIRONMENT.note("export TORCH_NCCL_ASYNC_ERROR_HANDLING=3 before torchrun")
def no_flight_record(facts: Facts) -> Result:
    """With TORCH_NCCL_ASYNC_ERROR_HANDLING=1, which torchrun sets by default, communicators are aborted
    before torch's flight recorder is written: there is no record of a hang."""
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE")
    recorder = ", ".join(filter(facts.is_set, names))
    handled = _setting(facts, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return f"{recorder} set, but {handled}" if recorder and handled else None


@ENVIRONMENT.warning("unset CUDA_DEVICE_MAX_CONNECTIONS, or CUDA_DEVICE_MAX_CONNECTIONS=32")
def one_connection(facts: Facts) -> Result:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue: a reduce-scatter waits for the
    matmuls queued before it. (Megatron's own tensor parallelism needs 1; FSDP with tensor parallelism does
    not.)"""
    return _setting(facts, "CUDA_DEVICE_MAX_CONNECTIONS", "1")


@ENVIRONMENT.note("export PYTORCH_ALLOC_CONF=expandable_segments:True")
def allocator_not_expandable(facts: Facts) -> Result:
    """Without expandable segments blocks of varying sizes fragment memory: it runs out although there is
    enough."""
    settings = " ".join(filter(None, map(facts.environment.get, _ALLOCATOR)))
    text = f"expandable_segments is not on ({settings or 'nothing is set'})"
    return text if facts.devices and "expandable_segments:true" not in settings.lower() else None


@ENVIRONMENT.warning("unset PYTORCH_CUDA_ALLOC_CONF")
def allocator_set_twice(facts: Facts) -> Result:
    """torch reads one of the two variables and ignores the other."""
    new, old = map(facts.environment.get, _ALLOCATOR)
    text = f"PYTORCH_ALLOC_CONF={new}, PYTORCH_CUDA_ALLOC_CONF={old}"
    return text if new and old and new != old else None


@ENVIRONMENT.warning(
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes, or let the scheduler restart all nodes"
)
def restart_hangs(facts: Facts) -> Result:
    """torch 2.13's torchrun shares its store with the ranks and does not publish the address again: if one
    node's torchrun is restarted while another's continues, it waits in the rendezvous forever."""
    restarts = facts.environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = facts.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    text = f"--max-restarts {restarts} on {facts.place.nodes} nodes, with the store shared"
    return text if facts.several_nodes and shared and restarts not in ("", "0") else None


# Limits, memory, processors, disk and devices of a node or of its container.

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
    """Every rank, data worker and checkpoint opens files; at the limit they fail with Too many open files."""
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
    """NCCL (between processes of a node) and data workers need /dev/shm."""
    return "there is no /dev/shm" if facts.limits.shm < 0 else None


@MACHINE.warning(
    "Give the job more CPUs (SLURM: --cpus-per-task; docker: --cpus), or start fewer ranks."
)
def few_processors(facts: Facts) -> Result:
    """A rank has a thread that launches kernels and others that communicate: with few CPUs they wait for each
    other, and the GPU for them."""
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
    """torchrun sets OMP_NUM_THREADS=1 by default: optimizers and data preparation on the CPU use one core."""
    cpus = int(facts.limits.usable_cpus) // max(facts.place.local_world_size, 1)
    if facts.environment.get("OMP_NUM_THREADS") != "1" or cpus < 4:
        return None
    text = f"OMP_NUM_THREADS=1, with {cpus} CPUs for each rank"
    return Seen(text, f"export OMP_NUM_THREADS={cpus} before torchrun")


@MACHINE.warning("Free memory, or raise the container's limit (docker: --memory; SLURM: --mem).")
def little_memory(facts: Facts) -> Result:
    """Pinned buffers, checkpoints written in the background and data workers need the host's memory; a
    process that exceeds its limit is killed."""
    limits, ranks = facts.limits, facts.place.local_world_size
    free = min(limits.available, limits.memory_limit or limits.available)
    if free >= 2 * GIB * ranks:
        return None
    limit = f", the container's limit {_gib(limits.memory_limit)}" if limits.memory_limit else ""
    return f"{_gib(free)} for {ranks} ranks ({_gib(limits.available)} available{limit})"


@MACHINE.error("Create the folder, or mount it writable, on every node.")
def checkpoint_not_writable(facts: Facts) -> Result:
    """The first checkpoint can't be saved, after hours of work."""
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
    """On a local disk each node keeps its own part of a checkpoint: if one node is lost, it can't
    be loaded."""
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
    """Without a device the job would run on the CPU, or fail at its first tensor."""
    text = f"{facts.on_machine} on this machine, none that torch can use: {facts.device_error}"
    return text if facts.on_machine and facts.device_error and not facts.devices else None


@DEVICES.warning("unset CUDA_VISIBLE_DEVICES")
def devices_hidden(facts: Facts) -> Result:
    """torch sees no device although the machine has some."""
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
    """NCCL does not join MIG instances of one GPU, and there is no direct path between instances."""
    names = [device.name for device in facts.devices if device.mig]
    return f"{len(names)} of {len(facts.devices)} are MIG instances: {names[0]}" if names else None


@DEVICES.note("nvidia-smi -pm 1, or the service nvidia-persistenced")
def no_persistence(facts: Facts) -> Result:
    """Without persistence mode the driver unloads between jobs: the first call takes seconds, and clocks and
    counters are reset."""
    off = sum(not device.persistence for device in facts.devices)
    return f"persistence mode is off on {off} of {len(facts.devices)} devices" if off else None


@DEVICES.warning("nvidia-smi shows the process; end it if it should have ended")
def device_busy(facts: Facts) -> Result:
    """Another process uses the device's memory and time: an old job that has not ended, or another user's."""
    used = ((i, device.total - device.free) for i, device in enumerate(facts.devices))
    return ", ".join(f"device {i} has {n / GIB:.1f} GiB in use" for i, n in used if n > 2 * GIB)


@DEVICES.error(
    "Take the node out of the job; nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace the device"
)
def device_faulty(facts: Facts) -> Result:
    """The device has uncorrected memory errors: numbers may be wrong, and the next error ends the job."""
    bad = [f"device {i} had {d.errors}" for i, d in enumerate(facts.devices) if d.errors]
    return f"uncorrected memory errors: {', '.join(bad)}" if bad else None


@DEVICES.warning("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check cooling and power supply")
def device_slowed(facts: Facts) -> Result:
    """The device's clocks are throttled: it is the slowest of the job, and all others wait for it."""
    return ", ".join(f"device {i}: {d.slowed}" for i, d in enumerate(facts.devices) if d.slowed)


# Network interfaces and host names.

NETWORK = Area("network", CHECKS)
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def matches(interfaces: Iterable[Interface], value: str) -> list[Interface]:
    """Returns the interfaces that ``value``, in the form of NCCL_SOCKET_IFNAME, selects.

    It is a list of prefixes of names; after ``=`` of whole names; after ``^`` of interfaces to exclude.
    """
    value = value.strip()
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = _names_in(value)

    def matched(name: str) -> bool:
        return any(name == n.partition(":")[0] if exact else name.startswith(n) for n in names)

    return [interface for interface in interfaces if matched(interface.name) != exclude]


def _names_in(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _gloo_names(facts: Facts) -> list[str]:
    return _names_in(facts.environment.get(_GLOO, ""))


def _ready(facts: Facts) -> list[Interface]:
    return [interface for interface in facts.interfaces if interface.up and interface.addresses]


def _instead(facts: Facts, variable: str, text: str) -> Seen:
    """Returns ``text`` plus the interfaces that the environment ``variable`` could name instead."""
    usable = facts.usable
    here = ", ".join(f"{interface.name} ({interface.addresses[0]})" for interface in usable)
    text += f"; here are {here}" if here else "; no other interface has an address"
    return Seen(text, _export(facts, variable))


def _export(facts: Facts, variable: str = _GLOO) -> str:
    return f"export {variable}={facts.usable[0].name if facts.usable else 'eth0'}"


@NETWORK.error("Name one that is up on this node; nodes may need different values.")
def gloo_interface_missing(facts: Facts) -> Result:
    """gloo can't make a process group: the rank fails at once, and the others wait for it."""
    ready = {interface.name for interface in _ready(facts)}
    wrong = ",".join(name for name in _gloo_names(facts) if name not in ready)
    return _instead(facts, _GLOO, f"{_GLOO}={wrong} is not up, or not there") if wrong else None


@NETWORK.error("Name one that is up on this node (a prefix is enough; ^lo,docker excludes).")
def nccl_interface_missing(facts: Facts) -> Result:
    """NCCL finds no interface for its bootstrap and fails, or hangs on nodes where others don't."""
    value = facts.environment.get(_NCCL, "")
    if not value or matches(_ready(facts), value):
        return None
    return _instead(facts, _NCCL, f"{_NCCL}={value} matches no interface that is up")


@NETWORK.error("Name the interface that leads to the other nodes.")
def interface_of_this_machine(facts: Facts) -> Result:
    """Each node has its own interface with this address (as docker0): nodes can't reach each other through
    it."""
    if not facts.several_nodes:
        return None
    nccl = facts.environment.get(_NCCL, "")
    by_name = {interface.name: interface for interface in facts.interfaces}
    named = {
        _GLOO: [by_name[name] for name in _gloo_names(facts) if name in by_name],
        _NCCL: matches(facts.interfaces, nccl) if nccl else [],
    }
    for variable, found in named.items():
        if found and all(each.is_loopback or each.is_of_containers for each in found):
            text = f"{variable}={facts.environment[variable]} is a loopback or container bridge"
            return _instead(facts, variable, text)
    return None


@NETWORK.error(
    "ip -br address; then set up the interface, or start the container in the host's network"
)
def no_interface(facts: Facts) -> Result:
    """Without a network interface other nodes can't be reached."""
    if facts.several_nodes and facts.interfaces and not facts.usable:
        names = ", ".join(f"{i.name} {'up' if i.up else 'down'}" for i in facts.interfaces)
        return f"no interface but loopback and container bridges is up with an address ({names})"
    return None


@NETWORK.note(
    "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that leads to the other nodes."
)
def several_interfaces(facts: Facts) -> Result:
    """gloo uses the interface that this node's name resolves to, NCCL the first: they may differ
    or be slow."""
    unset = [name for name in (_NCCL, _GLOO) if not facts.environment.get(name)]
    if not facts.several_nodes or not unset or len(facts.usable) < 2:
        return None
    found = ", ".join(
        f"{i.name} ({i.addresses[0]}{f', {i.speed} Mb/s' if i.speed else ''})" for i in facts.usable
    )
    return f"{found}; and {' and '.join(unset)} not set"


@NETWORK.error("Add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME.")
def hostname_unresolved(facts: Facts) -> Result:
    """gloo looks up the address of this machine's name; without one it listens on the loopback, which no
    other node reaches."""
    found = Seen(f"{facts.place.host} does not resolve: {facts.host_error}", _export(facts))
    return found if facts.host_error and facts.several_nodes and not _gloo_names(facts) else None


@NETWORK.error("Give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME.")
def hostname_is_loopback(facts: Facts) -> Result:
    """gloo gives other nodes the address that this machine's name resolves to; a loopback address means,
    there, the other node itself. Debian's installer writes such a line to /etc/hosts."""
    here = facts.host_addresses  # the first is the one that gloo uses
    if facts.several_nodes and not _gloo_names(facts) and here and is_loopback(here[0]):
        return Seen(f"{facts.place.host} resolves to {here[0]}", _export(facts))
    return None


@NETWORK.error("Use a name that all nodes resolve (getent hosts NAME), or the address.")
def master_unresolved(facts: Facts) -> Result:
    """With a MASTER_ADDR that doesn't resolve this node can't find the store that all ranks connect to."""
    text = f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')}: {facts.master_error}"
    return text if facts.master_error else None


@NETWORK.error(
    "Set MASTER_ADDR (torchrun: --rdzv-endpoint or --master-addr) to the first node's name or address."
)
def master_is_loopback(facts: Facts) -> Result:
    """With a loopback address as MASTER_ADDR each node looks for the store on itself, so they
    never connect."""
    addresses = facts.master_addresses
    if facts.several_nodes and addresses and is_loopback(addresses[0]):
        return f"MASTER_ADDR={facts.environment.get('MASTER_ADDR', '')} resolves to {addresses[0]}"
    return None


@NETWORK.error(
    "Does rank 0 run, is its port free, and open in the firewall? nc -vz $MASTER_ADDR $MASTER_PORT"
)
def store_unreachable(facts: Facts) -> Result:
    """Ranks wait for the store, through which they find each other, for minutes, and fail."""
    return facts.store_error


@NETWORK.warning("ibstat; check cable, switch port and subnet manager")
def infiniband_down(facts: Facts) -> Result:
    """NCCL does not use the InfiniBand port: this node has less bandwidth than the others, and all wait for
    it."""
    if not facts.devices:
        return None
    ports = facts.infiniband.items()
    return ", ".join(f"{port} is {state}" for port, state in ports if state != "ACTIVE")


# Differences between ranks or nodes, and how ranks are distributed over nodes.

BETWEEN_NODES = Area("between nodes", ACROSS)
_FOUND_ELSEWHERE = Area("between nodes", CHECKS)  # by doctor itself: the check never fires
# A job hangs or computes other numbers where these differ; the driver may differ.
_VERSIONS = ("python", "torch", "cuda", "nccl", "parallel3d")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "OMP_")
_NOT_COMPARED = {
    *_INTERFACES,
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS_OUT", "TORCH_TRACE", "NCCL_HOSTID"),
}
_APART, _TOO_FAR = 1.0, 10.0  # seconds
_versions, _variables = attrgetter("versions"), attrgetter("environment")


def differences(
    facts: Mapping[int, Facts],
    names: Iterable[str],
    values: Callable[[Facts], Mapping[str, str]],
    missing: str = "none",
) -> Seen | None:
    """Returns the ``names`` whose value differs between ranks, each with the values and their ranks.

    The finding concerns all ranks but those with the commonest value. ``missing``: text for a name without a
    value.
    """
    lines, odd = [], []
    for name in names:
        of_rank = {rank: values(own).get(name, missing) for rank, own in facts.items()}
        by_value = ranks_by_value(of_rank)
        if len(by_value) < 2:
            continue
        ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
        odd += [rank for _, ranks in ordered[1:] for rank in ranks]
        shown = (f"{text} on {_places(facts, ranks)}" for text, ranks in ordered)
        lines.append(f"{name}: {'; '.join(shown)}")
    return Seen("\n".join(lines), ranks=tuple(odd)) if lines else None


def _places(facts: Mapping[int, Facts], ranks: list[int]) -> str:
    """Returns "node-1 (ranks 4-7)" if the ranks are all of a node, or of several; else only the ranks."""
    by_host = ranks_by_value({rank: own.place.host for rank, own in facts.items()})
    hosts = [host for host, own_ranks in by_host.items() if set(own_ranks) <= set(ranks)]
    if {rank for host in hosts for rank in by_host[host]} != set(ranks) or len(by_host) == 1:
        return name_ranks(ranks)
    return name_hosts(hosts, ranks)


@_FOUND_ELSEWHERE.error(
    "Look at these ranks' output: did they start, and reach MASTER_ADDR? Are all nodes up?"
)
def ranks_missing(facts: Facts) -> Result:
    """A job would wait for the missing ranks until its timeouts expire."""
    return None


@_FOUND_ELSEWHERE.error("Choose sizes whose product is the number of ranks; one may be -1.")
def mesh_does_not_fit(facts: Facts) -> Result:
    """build_mesh would raise an error for this mesh and number of ranks."""
    return None


@BETWEEN_NODES.error("Use one image or environment on all nodes.")
def versions_differ(facts: Mapping[int, Facts]) -> Result:
    """Ranks would use different protocols: a hang in NCCL's first collective, or other numbers."""
    return differences(facts, _VERSIONS, _versions)


@BETWEEN_NODES.warning("Update the nodes with the older driver.")
def drivers_differ(facts: Mapping[int, Facts]) -> Result:
    """NCCL may choose other transports on some nodes; performance differs."""
    return differences(facts, ["driver"], _versions)


@BETWEEN_NODES.error(
    "Set the variable for the whole job: in the launch file, not in one node's profile."
)
def settings_differ(facts: Mapping[int, Facts]) -> Result:
    """Ranks that communicate with different settings may hang or be slow."""
    names = sorted({name for own in facts.values() for name in own.environment} - _NOT_COMPARED)
    compared = (name for name in names if name.startswith(_COMPARED))
    return differences(facts, compared, _variables, "not set")


@BETWEEN_NODES.warning("Use a prefix that fits all nodes, or one value for all.")
def interfaces_differ(facts: Mapping[int, Facts]) -> Result:
    """Different settings are correct only if the nodes' interfaces have different names; otherwise one node
    uses another network."""
    return differences(facts, _INTERFACES, _variables, "not set")


@BETWEEN_NODES.warning("Use equal nodes, or leave the odd one out.")
def devices_differ(facts: Mapping[int, Facts]) -> Result:
    """All wait for the slowest device, and the smallest memory limits the batch size."""

    def kinds(own: Facts) -> dict[str, str]:
        counted = Counter(f"{d.name}, {d.total / GIB:.0f} GiB" for d in own.devices)
        found = " and ".join(f"{count} x {kind}" for kind, count in counted.items())
        return {"devices": found or "none"}

    return differences(facts, ["devices"], kinds)


@BETWEEN_NODES.error(
    "torch.cuda.set_device(LOCAL_RANK), and CUDA_VISIBLE_DEVICES unset or one device for each rank"
)
def device_shared(facts: Mapping[int, Facts]) -> Result:
    """NCCL refuses two ranks on one device (Duplicate GPU detected)."""
    used: dict[int, tuple[str, str]] = {}
    for rank, own in facts.items():
        index = 0 if len(own.devices) == 1 else own.place.local_rank
        if index < len(own.devices) and own.devices[index].uuid:
            used[rank] = own.place.host, own.devices[index].uuid
    shared = {key: ranks for key, ranks in ranks_by_value(used).items() if len(ranks) > 1}
    text = "; ".join(f"{name_ranks(ranks)} on {host}" for (host, _), ranks in shared.items())
    return Seen(f"one device for {text}", ranks=(*chain(*shared.values()),)) if shared else None


@BETWEEN_NODES.warning("Start the same number of ranks on every node.")
def nodes_differ_in_ranks(facts: Mapping[int, Facts]) -> Result:
    """With unequal numbers of ranks tp groups lie across nodes, which is slow, and fewer meshes
    are possible."""
    name = "ranks of the node"
    return differences(facts, [name], lambda own: {name: str(own.place.local_world_size)})


@BETWEEN_NODES.warning("Give each node a name of its own with hostnamectl set-hostname.")
def same_hostname(facts: Mapping[int, Facts]) -> Result:
    """torchrun and gloo identify machines by name: nodes with the same name are taken for one."""
    nodes = {(own.place.host, own.place.node) for own in facts.values() if own.place.node >= 0}
    counts = Counter(host for host, _ in sorted(nodes))
    return "; ".join(f"{n} nodes are called {host}" for host, n in counts.items() if n > 1)


def _clocks(facts: Mapping[int, Facts], least: float, most: float) -> Result:
    """Returns the ranks whose clocks are ``least`` to less than ``most`` seconds away from rank 0's."""
    off = {
        rank: own.clock
        for rank, own in sorted(facts.items())
        if own.clock is not None and least <= abs(own.clock) - own.clock_error < most
    }
    text = "; ".join(
        f"{facts[r].place.host} is {abs(s):.3g} s {'ahead of' if s > 0 else 'behind'} rank 0's node"
        for r, s in off.items()
    )
    return Seen(text, ranks=tuple(off)) if off else None


@BETWEEN_NODES.warning("chronyc tracking (or timedatectl): let all nodes follow one time server")
def clocks_apart(facts: Mapping[int, Facts]) -> Result:
    """Times in the nodes' logs and traces don't agree; tokens and certificates may be refused."""
    return _clocks(facts, _APART, _TOO_FAR)


@BETWEEN_NODES.error(
    "chronyc makestep (or timedatectl set-ntp true), then let all nodes follow one time server"
)
def clocks_too_far_apart(facts: Mapping[int, Facts]) -> Result:
    """torchrun's c10d rendezvous compares clocks: it takes a node 15 s behind for a dead one."""
    return _clocks(facts, _TOO_FAR, float("inf"))
