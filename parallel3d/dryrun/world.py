"""One rank of a world that isn't there: environment, process group, and what asks for hardware."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed import checkpoint as dcp

from parallel3d import _compat
from parallel3d._compat_dry import SCALED_STEP, loader_iterators
from parallel3d.dryrun.reads import refuse_device
from parallel3d.dryrun.settings import settings_kept
from parallel3d.dryrun.unknown import asking, caller
from parallel3d.errors import DryRunError
from parallel3d.testing.worlds import fake_world

__all__ = ["DEVICE_TYPE", "played_rank"]

DEVICE_TYPE = "cpu"
"""Of all tensors of a dry run, whatever the machine has."""

_CUDA_CALLS: dict[str, Any] = {
    "is_available": False,
    "set_device": None,
    "current_device": 0,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "manual_seed": None,
    "manual_seed_all": None,
    "memory_stats": {},
}
"""What programs call on a GPU that they take for granted: here it does nothing, with a GPU or without."""


@contextmanager
def played_rank(
    rank: int,
    world_size: int,
    gpus_per_node: int,
    backend: str,
    *,
    on_mesh: Callable[[DeviceMesh], None],
    on_resize: Callable[[torch.UntypedStorage], None],
    for_real: Callable[[], Any],
) -> Iterator[None]:
    """This process is ``rank``, as far as a program can see.

    ``init_process_group`` finds the group made already, meshes on any device are on the CPU, objects that are
    exchanged are this rank's own, and a DataLoader reads ``for_real``.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, _environment(rank, world_size, gpus_per_node)))
        stack.enter_context(fake_world(rank, world_size))
        stack.enter_context(patch.object(_compat, "pretended_backend", backend))
        for owner, name, replacement in (
            (dist, "init_process_group", _already_there(world_size)),
            (dist, "destroy_process_group", lambda group=None: None),
            (DeviceMesh, "__init__", _mesh_init(on_mesh)),
            (torch, "compile", _uncompiled()),
            (torch.autocast, "__init__", _autocast_init()),
            (torch.UntypedStorage, "resize_", _noted_resize(on_resize)),
            (torch.amp.GradScaler, SCALED_STEP, _stepped),
            *((dist, name, fn) for name, fn in _OBJECT_COLLECTIVES.items()),
            *((kind, m, _read(kind, m, for_real)) for kind, m in _loader_methods()),
            (torch, "load", _read(torch, "load", for_real)),
            (torch, "save", lambda *args, **kwargs: None),
            *((dcp, name, lambda *args, **kwargs: None) for name in ("save", "load", "async_save")),
            (nn.parallel.DistributedDataParallel, "__init__", _no_ddp),
            *_without_cuda(),
            *((math, name, asking(name)) for name in ("isnan", "isinf", "isfinite")),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(settings_kept(lambda device: refuse_device(device, DEVICE_TYPE)))
        yield


def _environment(rank: int, world_size: int, gpus_per_node: int) -> dict[str, str]:
    local = min(gpus_per_node, world_size)
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    return {name: str(value) for name, value in values.items()}


def _already_there(world_size: int) -> Callable[..., None]:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        if asked not in (-1, None, world_size):
            raise DryRunError(
                f"init_process_group(world_size={asked}) in a dry run of {world_size} ranks: leave it out, "
                "torchrun and this dry run set WORLD_SIZE"
            )

    return init_process_group


def _mesh_init(on_mesh: Callable[[DeviceMesh], None]) -> Callable[..., None]:
    original = DeviceMesh.__init__

    def __init__(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, DEVICE_TYPE, *args, **kwargs)
        on_mesh(self)

    return __init__


def _uncompiled() -> Callable[..., Any]:
    """Calls what it is given; without the import of a compiler, which takes seconds."""
    original = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        return original(model, backend="eager")

    return compile


def _autocast_init() -> Callable[..., None]:
    original = torch.autocast.__init__

    def __init__(
        self: torch.autocast, device_type: str, dtype: Any = None, *a: Any, **k: Any
    ) -> None:
        if device_type != DEVICE_TYPE and dtype is None:
            dtype = torch.get_autocast_dtype(device_type)
        original(self, DEVICE_TYPE, dtype, *a, **k)

    return __init__


def _noted_resize(on_resize: Callable[[torch.UntypedStorage], None]) -> Callable[..., Any]:
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        on_resize(self)
        return result

    return resize_


def _stepped(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """No gradient is infinite."""
    return optimizer.step(*args, **kwargs)


def _loader_methods() -> list[tuple[type, str]]:
    return [(kind, name) for kind in loader_iterators() for name in ("__init__", "_next_data")]


def _read(kind: Any, method: str, for_real: Callable[[], Any]) -> Callable[..., Any]:
    original = getattr(kind, method)

    def reading(*args: Any, **kwargs: Any) -> Any:
        with for_real():
            return original(*args, **kwargs)

    return reading


def _no_ddp(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise DryRunError(
        f"{caller()}: DistributedDataParallel issues its collectives from C++, where a dry run does not see "
        "them; parallel3d.parallelize(model, mesh) on a mesh of replicas does the same"
    )


def _without_cuda() -> Iterator[tuple[Any, str, Any]]:
    for name, value in _CUDA_CALLS.items():
        yield torch.cuda, name, lambda *args, value=value, **kwargs: value
    yield torch.accelerator, "is_available", lambda: False
    yield torch.accelerator, "current_accelerator", lambda check_available=False: None


# Every rank brings what this one brings.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [copy.deepcopy(obj) for _ in object_gather_list]


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """Another rank's objects are what this one has in their place."""


def _scatter_object_list(output: list[Any], given: Any = None, *args: Any, **kwargs: Any) -> None:
    if given:
        output[0] = given[dist.get_rank() % len(given)]


_OBJECT_COLLECTIVES: dict[str, Any] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}
