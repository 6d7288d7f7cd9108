"""Private names of process groups, stores and collectives."""

import atexit
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
    """The backend that carries ``device_type``'s tensors in ``group``: ``gloo``, ``nccl``, ``fake``.

    A group that is a ``ProcessGroup`` of its own, as a third party's may be, is asked itself: it has no
    backends inside.
    """
    if pretended_backend is not None:
        return pretended_backend
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return group.name()


@cache
def let_gloo_finish_at_exit() -> None:
    """Lets gloo's threads drop the tensors of their last collectives before the interpreter goes.

    A work holds the Python objects of its tensors, and is dropped by the thread that ran it, which
    then waits for the interpreter's lock. Where the interpreter is already going, Python ends that
    thread, and C++ the process: exit code 134, after everything was right (pytorch/pytorch#179291).
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
    """The group behind what a c10d op is called with: a group, its boxed form or its name."""
    if isinstance(argument, ProcessGroup):
        return argument
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(
            dist.distributed_c10d.GroupName(argument)
        )
    return ProcessGroup.unbox(argument)


def clone_store(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own: one that waits blocks the other users of its connection."""
    return store.clone()  # type: ignore[attr-defined]


def set_keys(store: dist.Store, keys: Sequence[str], text: str) -> None:
    """Sets all ``keys`` to ``text``, in one round trip where the store can."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        store.multi_set(list(keys), [text] * len(keys))  # type: ignore[attr-defined]
        return
    for key in keys:
        store.set(key, text)


def all_groups() -> list[ProcessGroup]:
    """The process groups of this process that it is a member of, in the order they were made."""
    return [group for group in dist.distributed_c10d._world.pg_map if group is not None]


def group_timeout(group: ProcessGroup | None = None) -> timedelta:
    """How long a collective of ``group``, by default the default one, may take: its backends' longest."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    options = [getattr(backend, "options", None) for backend in _backends(group)]
    timeouts = [getattr(each, "_timeout", None) for each in options]
    known = [timeout for timeout in timeouts if timeout is not None]
    return max(known, default=dist.distributed_c10d.default_pg_timeout)


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Another one for the collectives that begin from now on: on gloo too."""
    for backend in _backends(group):
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)
        elif hasattr(dist, "set_timeout"):  # 2.14
            dist.set_timeout(timeout, group)


def wake_waiting(group: ProcessGroup) -> None:
    """Lets every wait for a collective of ``group`` fail, in this process and on gloo its peers' too.

    For a job that can't go on. gloo closes a group's connections when a message does not arrive in time,
    which ends the waits of other threads: hence one that nobody sends. NCCL's collectives are kernels, which
    fail no wait: see ``communicators``.
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
    """The NCCL backends of ``group``: their collectives are kernels, which only an abort ends.

    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps a backend into another that checks arguments; the inner one is
    returned.
    """
    return [
        getattr(backend, "wrapped_pg", backend)
        for backend in _backends(group)
        if backend.name() == "nccl"
    ]


def abort_communicator(backend: Any) -> None:
    """Ends the kernels of a NCCL backend, without an error: what they have left is no result.

    It may wait for the device; after the backend's timeout it raises a DistBackendError. The backend's own
    watchdog looks for no errors from then on, so it does not end the process for them.
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
    """Issues the all-reduce of ``tensor``, in place, to the largest values. Returns the work to wait for.

    It is a call of the backend itself, which no recorder or guard sees.
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
    """Waits for the work of a synchronous call, which some backends return; returns an asynchronous one's."""
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
