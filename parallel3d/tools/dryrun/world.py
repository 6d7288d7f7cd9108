"""One rank of a world that isn't there: environment, process group, and what asks for hardware."""

from __future__ import annotations

import copy
import math
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallel3d._torch import groups
from parallel3d._torch.fake import SCALED_STEP, loader_iterators
from parallel3d.errors import DryRunError
from parallel3d.testing.worlds import fake_world
from parallel3d.tools.dryrun.result import UnknownRead
from parallel3d.tools.dryrun.unknown import NOT_KNOWN, Unknown, asking, caller

# What a program sets for its whole process: a dry run puts it back.


@contextmanager
def settings_kept(check_device: Callable[[Any], None]) -> Iterator[None]:
    """The defaults of dtype and device, the number of threads and the random numbers are afterwards as they
    were; ``check_device`` is called with each device that is made the default."""
    dtype, threads, device = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_default_device(),
    )
    set_device, changed = torch.set_default_device, False

    def set_default_device(device: Any) -> None:
        nonlocal changed
        check_device(device)
        set_device(device)
        changed = True

    try:
        with (
            patch.object(torch, "set_default_device", set_default_device),
            torch.random.fork_rng(devices=()),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if changed:
            set_device(None if device == torch.device("cpu") else device)


# A script as a program that ``record`` can call.


def script(path: str | PathLike[str], arguments: Sequence[str] = ()) -> Callable[[], None]:
    """``python path arguments...`` as a function: its own folder comes first on the path for imports.

    Raises:
        DryRunError: there is no such file; when called, that the script ended with an error of its own.
    """
    file = Path(path)
    if not file.is_file():
        raise DryRunError(f"there is no script {fspath(path)!r}; give the path of a .py file")

    def run() -> None:
        with (
            patch.object(sys, "argv", [fspath(path), *arguments]),
            patch.object(sys, "path", [str(file.resolve().parent), *sys.path]),
        ):
            try:
                runpy.run_path(fspath(path), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise DryRunError(f"{fspath(path)} ended with {end.code}") from end

    return run


# Where the program asks for values or names a device: what a dry run answers, or why it can't.

_DECIDING = {
    Tensor.__bool__: "the program decides by a tensor's value",
    Tensor.__int__: "an int is made of a tensor's value",
    Tensor.__index__: "an index is made of a tensor's value",
    Tensor.numpy: "a numpy array is made of a tensor",
    Tensor.__array__: "a numpy array is made of a tensor",
    torch.is_nonzero: "the program decides by a tensor's value",
    Tensor.is_nonzero: "the program decides by a tensor's value",
    torch.equal: "the program decides by tensors' values",
    Tensor.equal: "the program decides by tensors' values",
    torch.allclose: "the program decides by tensors' values",
    Tensor.allclose: "the program decides by tensors' values",
}
_HELP = (
    "which a dry run does not know. Decide by p3d.dryrun.assume(tensor.item(), value to take for it), or "
    "skip the lines with p3d.dryrun.active()"
)


class ReadMode(TorchFunctionMode):
    """Answers NaN (``Unknown``) where the program reads a tensor's value, and raises where it decides by it.

    Args:
        is_unknown: whether a plain tensor's values are not known.
        device_type: of the tensors of the dry run.

    Attributes:
        reads: (where, what) -> how often.
    """

    def __init__(self, is_unknown: Callable[[Tensor], bool], device_type: str) -> None:
        super().__init__()
        self._is_unknown = is_unknown
        self.device_type = device_type
        self.reads: Counter[tuple[str, str]] = Counter()
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Tensor):
            tensor = args[0]
            if self.unknown(tensor):
                return handler(self, func, tensor, args[1:])
        self._check_device(func, args, kwargs)
        if func in _FROM_DATA and args:
            return self._from_data(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _check_device(self, func: Any, args: Any, kwargs: Any) -> None:
        if "device" in kwargs:
            refuse_device(kwargs["device"], self.device_type)
        elif func in _TO_A_DEVICE:
            for argument in args[1:2]:
                refuse_device(argument, self.device_type)
        elif func in _TO_CUDA:
            refuse_device("cuda", self.device_type)

    def _from_data(self, func: Any, data: Any, rest: Any, kwargs: Any) -> Any:
        """``torch.tensor`` of numbers, some of which may be unknown: then the tensor is."""
        unknown: list[Any] = []
        known = self._known(data, unknown)
        if not unknown:
            return func(data, *rest, **kwargs)
        made = func(known, *rest, **kwargs)
        dtype = made.dtype
        if kwargs.get("dtype") is None:
            for each in unknown:
                dtype = torch.promote_types(dtype, getattr(each, "dtype", dtype))
        return torch.empty(made.shape).to(dtype).requires_grad_(made.requires_grad)

    def _known(self, data: Any, unknown: list[Any]) -> Any:
        """``data`` with something of the same kind in place of what is ``unknown``."""
        if isinstance(data, list | tuple):
            return [self._known(each, unknown) for each in data]
        if isinstance(data, Unknown):
            unknown.append(data)
            return 0.0
        if isinstance(data, Tensor) and not data.ndim and self.unknown(data):
            self._note("item")
            unknown.append(data)
            return False  # of the lowest dtype
        return data

    @property
    def found(self) -> tuple[UnknownRead, ...]:
        """The places, those with most reads first."""
        return tuple(UnknownRead(*key, count) for key, count in self.reads.most_common())

    def unknown(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor``, DTensor or not, are not known."""
        if isinstance(tensor, DTensor):
            return True
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return any(self.unknown(getattr(tensor, name)) for name in flatten()[0])
        return self._is_unknown(tensor)

    def _item(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        if tensor.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar"
            )
        self._note(func.__name__)
        if isinstance(tensor, DTensor):
            tensor.full_tensor()  # what it communicates
        return Unknown()

    def _float(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        self._item(func, tensor, rest)
        return NOT_KNOWN

    def _format(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        if tensor.ndim:
            return object.__format__(tensor, "")
        self._note("format")
        return format(Unknown(), *rest)

    def _list(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        self._note("tolist")
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()

        def nested(shape: tuple[int, ...]) -> Any:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else Unknown()

        return nested(tuple(tensor.shape))

    def _decide(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        raise DryRunError(f"{caller()}: {_DECIDING[func]}, {_HELP}")

    def _note(self, what: str) -> None:
        self.reads[caller(), what] += 1


_HANDLERS: dict[Any, Any] = {
    Tensor.item: ReadMode._item,
    Tensor.__float__: ReadMode._float,
    Tensor.__format__: ReadMode._format,
    Tensor.tolist: ReadMode._list,
    **dict.fromkeys(_DECIDING, ReadMode._decide),
}
_TO_A_DEVICE = {Tensor.to}
_TO_CUDA = {Tensor.cuda}
_FROM_DATA = {torch.tensor, torch.as_tensor}


def refuse_device(device: Any, device_type: str) -> None:
    """Raises DryRunError if ``device`` names another one than the dry run's or meta.

    A number means the current accelerator's.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return  # torch says what is wrong with it
    if isinstance(device, torch.device) and device.type not in (device_type, "meta", "cpu"):
        raise DryRunError(
            f"{caller()}: the device {str(device)!r} is hard-coded; this dry run has {device_type!r}. Take "
            "the mesh's, which is right on every machine: torch.device(mesh.device_type)"
        )


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
        stack.enter_context(patch.object(groups, "pretended_backend", backend))
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
