"""Checks of environment variables: wrong ones, left over from debugging, or meant for another machine."""

from difflib import get_close_matches
from importlib.resources import files

from parallel3d.tools.doctor.facts import Facts
from parallel3d.tools.doctor.finding import CHECKS, Area, Result, Seen

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
    files("parallel3d.tools.doctor.checks").joinpath("nccl_variables.txt").read_text().split()
)
"""The variables of NVIDIA's documentation, and a few more that NCCL's source reads."""

_TUNING = ("ALGO", "PROTO", "NTHREADS", "BUFFSIZE", "MAX_NCHANNELS", "MIN_NCHANNELS", "MAX_CTAS")


def _setting(facts: Facts, name: str, *values: str) -> str:
    """Returns ``name=value`` if the variable has one of ``values``, or is on if none are given; else ""."""
    value = facts.environment.get(name, "")
    wrong = value.upper() in values if values else facts.is_set(name)
    return f"{name}={value.upper() if values else value}" if wrong else ""


@ENVIRONMENT.warning("Set the new name, unset the old one.")
def renamed_variable(facts: Facts) -> Result:
    """The old name is read with a warning, or no longer read at all: the setting may have no effect."""
    old = sorted(name for name in RENAMED if facts.environment.get(name))
    do = "; ".join(f'export {RENAMED[n]}="${n}"; unset {n}' for n in old)
    return Seen("; ".join(f"{n} is now {RENAMED[n]}" for n in old), do) if old else None


@ENVIRONMENT.warning("Set the variable with the right name.")
def misspelt_variable(facts: Facts) -> Result:
    """NCCL silently ignores names that it does not know."""
    found = []
    for name in sorted(facts.environment):
        if name.startswith("NCCL_") and name not in KNOWN_NCCL and name not in RENAMED:
            near = get_close_matches(name, KNOWN_NCCL, n=1, cutoff=0.88)
            found += [f"{name} is no variable of NCCL, {near[0]} is"] if near else []
    return "; ".join(found)


@ENVIRONMENT.warning("unset NCCL_IB_DISABLE")
def nccl_ib_disabled(facts: Facts) -> Result:
    """All communication between nodes uses TCP sockets, with a tenth of the bandwidth or less."""
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
    """With DETAIL every collective is compared between its ranks before it runs: steps take several times
    as long.
    """
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
    """A rank whose peer has failed waits forever, and the job with it."""
    return _setting(facts, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


@ENVIRONMENT.note("export TORCH_NCCL_ASYNC_ERROR_HANDLING=3 before torchrun")
def no_flight_record(facts: Facts) -> Result:
    """With 1, which torchrun sets by default, communicators are aborted before torch's flight recorder is
    written, so there is no record of the hang that it is meant for.
    """
    recorder = [
        n for n in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE") if facts.is_set(n)
    ]
    if not recorder or facts.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "1":
        return None
    return f"{', '.join(recorder)} set, but TORCH_NCCL_ASYNC_ERROR_HANDLING=1"


@ENVIRONMENT.warning("unset CUDA_DEVICE_MAX_CONNECTIONS, or CUDA_DEVICE_MAX_CONNECTIONS=32")
def one_connection(facts: Facts) -> Result:
    """All streams share one hardware queue: a reduce-scatter waits for the matmuls queued before it.
    (Megatron's own tensor parallelism needs 1; FSDP with tensor parallelism does not.)
    """
    return _setting(facts, "CUDA_DEVICE_MAX_CONNECTIONS", "1")


@ENVIRONMENT.note("export PYTORCH_ALLOC_CONF=expandable_segments:True")
def allocator_not_expandable(facts: Facts) -> Result:
    """Blocks of varying sizes fragment memory: it runs out although there is enough."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = " ".join(filter(None, (facts.environment.get(name) for name in names)))
    if not facts.devices or "expandable_segments:true" in settings.lower():
        return None
    return f"expandable_segments is not on ({settings or 'nothing is set'})"


@ENVIRONMENT.warning("unset PYTORCH_CUDA_ALLOC_CONF")
def allocator_set_twice(facts: Facts) -> Result:
    """torch reads one of the two and ignores the other."""
    new, old = (facts.environment.get(n) for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    text = f"PYTORCH_ALLOC_CONF={new}, PYTORCH_CUDA_ALLOC_CONF={old}"
    return text if new and old and new != old else None


@ENVIRONMENT.warning(
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes, or let the scheduler restart all nodes"
)
def restart_hangs(facts: Facts) -> Result:
    """torch 2.13's torchrun shares its store with the ranks and does not publish the address again: if one
    node's torchrun is restarted while another's continues, it waits in the rendezvous forever.
    """
    restarts = facts.environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = facts.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    text = f"--max-restarts {restarts} on {facts.place.nodes} nodes, with the store shared"
    return text if facts.several_nodes and shared and restarts not in ("", "0") else None
