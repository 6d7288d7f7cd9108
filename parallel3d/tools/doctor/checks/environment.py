"""Variables that are wrong, left over from a search for a fault, or meant for another machine."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files

from parallel3d.tools.doctor.facts import Facts
from parallel3d.tools.doctor.finding import Result, Seen, Severity, check

AREA = "environment"

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
    files("parallel3d.tools.doctor.checks").joinpath("nccl_variables.txt").read_text().split()
)
"""What NVIDIA's list of environment variables has, and a few that its source reads besides."""


@check(
    "renamed-variable",
    AREA,
    Severity.warning,
    why="The old name is read with a warning, or no longer at all: the setting may do nothing.",
    do="Set the new name, unset the old one.",
)
def renamed(facts: Facts) -> Result:
    old = sorted(name for name in RENAMED if facts.environment.get(name))
    changes = [f"{name} is now {RENAMED[name]}" for name in old]
    if not changes:
        return None
    do = "; ".join(f'export {RENAMED[n]}="${n}"; unset {n}' for n in old)
    return Seen("; ".join(changes), do)


@check(
    "misspelt-variable",
    AREA,
    Severity.warning,
    why="NCCL ignores names that it does not know, without a word.",
    do="Set the variable of the right name.",
)
def misspelt(facts: Facts) -> Result:
    found = []
    for name in sorted(facts.environment):
        if name.startswith("NCCL_") and name not in KNOWN_NCCL and name not in RENAMED:
            near = get_close_matches(name, KNOWN_NCCL, n=1, cutoff=0.88)
            found += [f"{name} is no variable of NCCL, {near[0]} is"] if near else []
    return "; ".join(found) or None


@check(
    "nccl-ib-disabled",
    AREA,
    Severity.warning,
    why="Between nodes everything goes over TCP sockets: a tenth of the bandwidth, or less.",
    do="unset NCCL_IB_DISABLE",
)
def ib_disabled(facts: Facts) -> Result:
    if facts.is_set("NCCL_IB_DISABLE") and facts.infiniband:
        return f"NCCL_IB_DISABLE=1, and there is InfiniBand or RoCE: {', '.join(facts.infiniband)}"
    return None


@check(
    "nccl-p2p-disabled",
    AREA,
    Severity.warning,
    why="GPUs of a node don't use NVLink or PCIe directly but copy through host memory.",
    do="unset NCCL_P2P_DISABLE",
)
def p2p_disabled(facts: Facts) -> Result:
    return "NCCL_P2P_DISABLE=1" if facts.is_set("NCCL_P2P_DISABLE") else None


@check(
    "nccl-shm-disabled",
    AREA,
    Severity.warning,
    why="Processes of a node that have no direct path talk through the network instead of shared memory.",
    do="unset NCCL_SHM_DISABLE, and give the container a larger /dev/shm if that was the reason",
)
def shm_disabled(facts: Facts) -> Result:
    return "NCCL_SHM_DISABLE=1" if facts.is_set("NCCL_SHM_DISABLE") else None


@check(
    "nccl-tuned-by-hand",
    AREA,
    Severity.note,
    why="NCCL chooses by message size and machine; a value that was right on another one costs speed here.",
    do="Unset it and measure again; keep it if that is slower.",
)
def tuned(facts: Facts) -> Result:
    names = ("ALGO", "PROTO", "NTHREADS", "BUFFSIZE", "MAX_NCHANNELS", "MIN_NCHANNELS", "MAX_CTAS")
    found = [
        f"NCCL_{n}={facts.environment[f'NCCL_{n}']}"
        for n in names
        if f"NCCL_{n}" in facts.environment
    ]
    return ", ".join(found) or None


@check(
    "nccl-debug",
    AREA,
    Severity.note,
    why="Every rank writes what it does; good for a first run, and a large log in a long one.",
    do="unset NCCL_DEBUG, or NCCL_DEBUG=WARN",
)
def nccl_debug(facts: Facts) -> Result:
    value = facts.environment.get("NCCL_DEBUG", "").upper()
    return f"NCCL_DEBUG={value}" if value in ("INFO", "TRACE", "ABORT") else None


@check(
    "torch-distributed-debug",
    AREA,
    Severity.warning,
    why="With DETAIL every collective is compared between its ranks before it runs: steps take several times "
    "as long.",
    do="unset TORCH_DISTRIBUTED_DEBUG (guards.debug finds more, and only where you switch it on)",
)
def distributed_debug(facts: Facts) -> Result:
    value = facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    return f"TORCH_DISTRIBUTED_DEBUG={value}" if value == "DETAIL" else None


@check(
    "cuda-launch-blocking",
    AREA,
    Severity.warning,
    why="Each kernel is waited for: nothing overlaps, communication least of all.",
    do="unset CUDA_LAUNCH_BLOCKING",
)
def launch_blocking(facts: Facts) -> Result:
    return "CUDA_LAUNCH_BLOCKING=1" if facts.is_set("CUDA_LAUNCH_BLOCKING") else None


@check(
    "nccl-blocking-wait",
    AREA,
    Severity.warning,
    why="Waiting for a collective stops the host thread: the next kernels are not queued meanwhile.",
    do="unset TORCH_NCCL_BLOCKING_WAIT (guards.Timeouts ends a collective that hangs)",
)
def blocking_wait(facts: Facts) -> Result:
    return "TORCH_NCCL_BLOCKING_WAIT=1" if facts.is_set("TORCH_NCCL_BLOCKING_WAIT") else None


@check(
    "errors-not-handled",
    AREA,
    Severity.warning,
    why="A rank whose peer has failed waits for ever, and the job with it.",
    do="unset TORCH_NCCL_ASYNC_ERROR_HANDLING (torch's own value is 3)",
)
def not_handled(facts: Facts) -> Result:
    value = facts.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    return "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" if value == "0" else None


@check(
    "no-flight-record",
    AREA,
    Severity.note,
    why="With 1, which torchrun sets where nothing is set, communicators are aborted before torch's flight "
    "recorder is written: the hang that it is meant for leaves no trace.",
    do="export TORCH_NCCL_ASYNC_ERROR_HANDLING=3 before torchrun",
)
def no_record(facts: Facts) -> Result:
    wanted = [n for n in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE") if facts.is_set(n)]
    if not wanted or facts.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "1":
        return None
    return f"{', '.join(wanted)} set, but TORCH_NCCL_ASYNC_ERROR_HANDLING=1"


@check(
    "one-connection",
    AREA,
    Severity.warning,
    why="All streams share one hardware queue: a reduce-scatter waits for the matmuls queued before it. "
    "(Megatron's own tensor parallelism wants 1; FSDP with tensor parallelism does not.)",
    do="unset CUDA_DEVICE_MAX_CONNECTIONS, or CUDA_DEVICE_MAX_CONNECTIONS=32",
)
def one_connection(facts: Facts) -> Result:
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "CUDA_DEVICE_MAX_CONNECTIONS=1" if value == "1" else None


@check(
    "allocator-not-expandable",
    AREA,
    Severity.note,
    why="Sizes that vary leave gaps between blocks: memory runs out although there is enough.",
    do="export PYTORCH_ALLOC_CONF=expandable_segments:True",
)
def allocator(facts: Facts) -> Result:
    given = [
        facts.environment.get(n, "") for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ]
    if not facts.devices or any("expandable_segments:true" in each.lower() for each in given):
        return None
    return f"expandable_segments is not on ({' '.join(filter(None, given)) or 'nothing is set'})"


@check(
    "allocator-set-twice",
    AREA,
    Severity.warning,
    why="torch reads one of the two and ignores the other.",
    do="unset PYTORCH_CUDA_ALLOC_CONF",
)
def allocator_twice(facts: Facts) -> Result:
    new, old = (facts.environment.get(n) for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if new and old and new != old:
        return f"PYTORCH_ALLOC_CONF={new}, PYTORCH_CUDA_ALLOC_CONF={old}"
    return None


@check(
    "restart-hangs",
    AREA,
    Severity.warning,
    why="torch 2.13's torchrun shares its store with the ranks and does not publish the address again: a "
    "node's torchrun that is started anew, while another's goes on, waits in the rendezvous for ever.",
    do="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes, or let the scheduler start all anew",
)
def restart_hangs(facts: Facts) -> Result:
    restarts = facts.environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = facts.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if facts.several_nodes and shared and restarts not in ("", "0"):
        return f"--max-restarts {restarts} on {facts.place.nodes} nodes, with the store shared"
    return None
