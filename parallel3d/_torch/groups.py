"""Private names of process groups, stores, collectives, and of memory for them."""

import atexit
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

default_store: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store
"""The key-value store of the default process group."""

pretended_backend: str | None = None
"""What ``backend_name`` says whatever the group is: a dry run's."""

_GLOO_DROPS_WITHIN = 0.2
"""Seconds without the interpreter's lock that gloo's threads get at exit; they need microseconds."""


def backend_name(group: ProcessGroup, device_type: str) -> str:
    """Returns the name of the backend for ``device_type`` in ``group``: ``gloo``, ``nccl``, ``fake``.

    A third party's subclass of ``ProcessGroup`` has no backends inside, and is asked itself.
    """
    if pretended_backend is not None:
        return pretended_backend
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return group.name()


@cache
def let_gloo_finish_at_exit() -> None:
    """Makes the interpreter wait at exit until gloo's threads have dropped their last tensors.

    A work holds the Python objects of its tensors, and is dropped by the thread that ran it, which then waits
    for the interpreter's lock. While the interpreter finalizes, Python ends that thread, and so C++ the
    process: exit code 134, after everything was right (pytorch/pytorch#179291).
    """
    atexit.register(time.sleep, _GLOO_DROPS_WITHIN)


# 2.13 deprecated the names 2.11 has
if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor


def process_group_of(argument: ProcessGroup | str | torch.ScriptObject) -> ProcessGroup:
    """Returns the process group for the argument of a c10d op: a group, its boxed form or its name."""
    if isinstance(argument, ProcessGroup):
        return argument
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(
            dist.distributed_c10d.GroupName(argument)
        )
    return ProcessGroup.unbox(argument)


def clone_store(store: dist.Store) -> dist.Store:
    """Returns a second connection to ``store``, as a wait blocks all other uses of its connection."""
    return store.clone()  # type: ignore[attr-defined]


def set_keys(store: dist.Store, keys: Sequence[str], text: str) -> None:
    """Sets all ``keys`` to ``text``, in one round trip if the store supports that."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        store.multi_set(list(keys), [text] * len(keys))  # type: ignore[attr-defined]
        return
    for key in keys:
        store.set(key, text)


def all_groups() -> list[ProcessGroup]:
    """Returns all process groups that this process is in, in the order in which they were made."""
    return [group for group in dist.distributed_c10d._world.pg_map if group is not None]


def group_timeout(group: ProcessGroup | None = None) -> timedelta:
    """Returns the timeout of collectives of ``group`` (default: the default group), of all backends'."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    options = [getattr(backend, "options", None) for backend in _backends(group)]
    timeouts = [getattr(each, "_timeout", None) for each in options]
    known = [timeout for timeout in timeouts if timeout is not None]
    return max(known, default=dist.distributed_c10d.default_pg_timeout)


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of the collectives of ``group`` that begin from now on, on gloo too."""
    for backend in _backends(group):
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)
        elif hasattr(dist, "set_timeout"):  # 2.14
            dist.set_timeout(timeout, group)


def wake_waiting(group: ProcessGroup) -> None:
    """Makes every wait for a gloo collective of ``group`` fail, in this process and its peers.

    This is for a job that can't go on. gloo closes a group's connections when a message does not arrive in
    time, which ends waits in other threads: so this waits briefly for a message that nobody sends. NCCL's
    collectives are kernels, for which see ``communicators``.
    """
    for backend in _backends(group):
        if backend.name() != "gloo":
            continue
        for peer in range(group.size()):
            if peer == group.rank():
                continue
            with suppress(RuntimeError):  # what it is for
                backend.recv([torch.empty(1)], peer, _UNSENT).wait(timedelta(milliseconds=1))


def communicators(group: ProcessGroup) -> list[Any]:
    """Returns the NCCL backends of ``group``, whose collectives only ``abort_communicator`` ends.

    The backend inside one that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps around it is returned.
    """
    return [
        getattr(backend, "wrapped_pg", backend)
        for backend in _backends(group)
        if backend.name() == "nccl"
    ]


def abort_communicator(backend: Any) -> None:
    """Ends the kernels of an NCCL backend without an error; their outputs are then undefined.

    It may wait for the device; after the backend's timeout it raises a DistBackendError. The backend's own
    watchdog then no longer looks for errors, so it does not end the process for them.
    """
    backend.abort()


_UNSENT = 0x70336421  # a tag that no message has


def _backends(group: ProcessGroup) -> list[Any]:
    found = {}
    for device in group._device_types:
        with suppress(RuntimeError):  # none for it
            backend = group._get_backend(device)
            found[id(backend)] = backend
    return list(found.values())


def max_over(tensor: torch.Tensor, group: ProcessGroup) -> dist.Work:
    """Issues an all-reduce of ``tensor``, in place, to the maximum. Returns the work to wait for.

    It calls the backend directly, so no recorder or guard sees it.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    try:
        backend: Any = group._get_backend(tensor.device)
    except RuntimeError:  # a third party's group has none inside
        backend = group
    return backend.allreduce([tensor], options)


def all_gather_members(
    outputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    async_op: bool,
) -> dist.Work | None:
    """Issues all-gathers of each of ``parts``, (S,), into its output, (n * S,), as one call."""
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    work = group.allgather_into_tensor_coalesced(list(outputs), list(parts), options)
    return _ended(work, async_op)


def reduce_scatter_members(
    outputs: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    op: Any,
    async_op: bool,
) -> dist.Work | None:
    """Issues reduce-scatters of each of ``wholes``, (n * S,), into its output, (S,), as one call."""
    options = dist.distributed_c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    work = group.reduce_scatter_tensor_coalesced(list(outputs), list(wholes), options)
    return _ended(work, async_op)


def _ended(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """Waits for ``work`` unless ``async_op``: some backends return one for synchronous calls, too. Returns
    the work of an asynchronous call, else None."""
    if async_op or work is None:
        return work
    work.wait()
    return None


scaled_sum: Callable[[float], Any] = dist._make_nccl_premul_sum
"""``scaled_sum(factor)`` is NCCL's reduction that multiplies each summand by ``factor``."""


COLLECTIVES = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "barrier", "_end_coalescing"),
)
"""By torch's names of 2.11 and of 2.13; those that a group lacks are passed over."""


def has_group_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` has an allocator for ``device`` (NCCL has)."""
    return group._get_backend(device).supports_tensor_alloc(device)


def group_memory(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a tensor from the allocator of ``group``'s backend."""
    return group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str) -> None:
    _symmetric_memory().set_backend(backend)


def symmetric_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor from the pool of symmetric memory, which reuses what was freed."""
    with torch.cuda.use_mem_pool(_symmetric_memory().get_mem_pool(device)):
        return torch.empty(numel, dtype=dtype, device=device)


def make_symmetric(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Registers ``tensor``, from ``symmetric_memory``, on all ranks of ``group``, which all call it."""
    _symmetric_memory().rendezvous(tensor, group=group.group_name)


def _symmetric_memory() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")  # a slow import


def record_history(entries: int) -> None:
    """Makes torch record the last ``entries`` CUDA allocations and frees, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_snapshot(path: str) -> None:
    """Writes the CUDA allocations, and the recorded history, to ``path`` for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
