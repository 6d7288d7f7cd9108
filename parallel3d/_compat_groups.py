"""Private torch names about process groups and stores that the guards use."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

__all__ = [
    "all_groups",
    "clone_store",
    "group_timeout",
    "set_group_timeout",
    "set_keys",
    "wake_waiting",
]


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
    which ends the waits of other threads: hence one that nobody sends. Other backends are left alone: an
    aborted NCCL kernel ends without an error, and what it has left half-way would pass for a result.
    """
    for backend in _backends(group):
        if backend.name() != "gloo":
            continue
        for peer in range(group.size()):
            if peer == group.rank():
                continue
            with suppress(RuntimeError):  # what it is for
                backend.recv([torch.empty(1)], peer, _UNSENT).wait(timedelta(milliseconds=1))


_UNSENT = 0x70336421  # a tag that no message has


def _backends(group: ProcessGroup) -> list[Any]:
    found = {}
    for device in group._device_types:
        with suppress(RuntimeError):  # none for it
            backend = group._get_backend(device)
            found[id(backend)] = backend
    return list(found.values())
