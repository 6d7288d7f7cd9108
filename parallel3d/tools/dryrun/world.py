"""Makes this process look like one rank of a larger world: environment, process group, calls that need
hardware."""

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
from torch.nn import functional as F

from parallel3d._torch import groups
from parallel3d._torch.fake import SCALED_STEP, loader_iterators
from parallel3d._torch.optimizers import CAPTURABLE, optimizer_modules
from parallel3d._trace.record import Functions
from parallel3d._util.dry_run import HOST_DEVICE
from parallel3d._util.streams import FakeEvent, FakeStream, StandIn
from parallel3d._util.users_code import caller
from parallel3d.errors import DryRunError
from parallel3d.testing.worlds import fake_world
from parallel3d.tools.dryrun.modes import DryMode
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.races import RaceDetector
from parallel3d.tools.dryrun.result import UnknownRead
from parallel3d.tools.dryrun.streams import PlayedStreams
from parallel3d.tools.dryrun.unknown import NOT_KNOWN, Undecided, Unknown, asking


def script(path: str | PathLike[str], arguments: Sequence[str] = ()) -> Callable[[], None]:
    """Returns ``python path *arguments`` as a function; the script's folder is first on the import path.

    Args:
        path: the script.
        arguments: its command line, without its name.

    Raises:
        DryRunError: there is no such file; when called, the script exited with an error.
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


# Calls that read values or name a device.

_BY_ONE = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero)
_BY_SEVERAL = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
_DECIDING: dict[Any, str] = {
    **dict.fromkeys(_BY_ONE, "the program decides by a tensor's value"),
    **dict.fromkeys(_BY_SEVERAL, "the program decides by tensors' values"),
    Tensor.__int__: "an int is made of a tensor's value",
    Tensor.__index__: "an index is made of a tensor's value",
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), "a numpy array is made of a tensor"),
}
_HELP = (
    ", which a dry run does not know. Decide by p3d.dryrun.assume(tensor.item(), value to use instead), or "
    "skip the lines with p3d.dryrun.active()"
)


class ReadMode(Functions):
    """Returns NaN (``Unknown``) where the program reads a value, and raises where it branches on one.

    It asks ``mode`` whether a tensor's values are unknown, and tells it which of them are read.
    """

    def __init__(self, mode: DryMode) -> None:
        super().__init__(self.function)
        self._mode, self._place = mode, mode.place
        self._reads: Counter[tuple[str, str]] = Counter()  # (where, what) -> how often
        self._in_steps: Counter[tuple[tuple[str, str], int]] = Counter()  # (that, step) -> the same

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, unless it reads a value that isn't known."""
        if self._place.paused:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Tensor) and self.unknown(args[0]):
            if func not in _DECIDING:
                self._mode.on_read(args[0], func.__name__.strip("_"))
            return handler(self, func, *args)
        captures = self._mode.captures
        if func in _DECIDING and captures.deciding(args[0]):
            captures.branches(_DECIDING[func])
            with self._place.unrecorded():
                return func(*args, **kwargs)
        captures.function(func, args, kwargs)
        numbered = func is F.one_hot and (*args[1:], *kwargs.values(), -1)[0] != -1
        if numbered and captures.deciding(args[0]):  # which a GPU does not compare with the number
            with self._place.unrecorded():
                made = func(*args, **kwargs)
            captures.on_device(made)
            return made
        if "device" in kwargs:
            _check_device(kwargs["device"])
        elif func is Tensor.to and len(args) > 1:
            _check_device(args[1])
        elif func is Tensor.cuda:
            _check_device("cuda")
        if func in (torch.tensor, torch.as_tensor) and args:
            return self._from_data(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _from_data(self, func: Any, data: Any, rest: Any, kwargs: Any) -> Any:
        """Runs ``torch.tensor`` on numbers, some of which may be unknown: the result is then unknown too."""
        unknown: list[Any] = []
        known = self._known(data, unknown)
        if not unknown:
            return func(data, *rest, **kwargs)
        made = func(known, *rest, **kwargs)
        dtype = made.dtype
        if kwargs.get("dtype") is None:
            for value in unknown:
                dtype = torch.promote_types(dtype, getattr(value, "dtype", dtype))
        return torch.empty(made.shape).to(dtype).requires_grad_(made.requires_grad)

    def _known(self, data: Any, unknown: list[Any]) -> Any:
        """Returns ``data`` with known numbers in place of unknown ones, which are appended to ``unknown``."""
        if isinstance(data, list | tuple):
            return [self._known(item, unknown) for item in data]
        if isinstance(data, Unknown):
            unknown.append(data)
            return 0.0
        if isinstance(data, Tensor) and not data.ndim and self.unknown(data):
            self._note("item")
            unknown.append(data)
            return False  # which has the lowest dtype
        return data

    @property
    def found(self) -> tuple[UnknownRead, ...]:
        """The places in the program that read unknown values, those with most reads first."""
        return tuple(
            UnknownRead(*key, count, self._in_steps[key, self._place.steps - 1])
            for key, count in self._reads.most_common()
        )

    def unknown(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are not known; it may be a DTensor."""
        if isinstance(tensor, DTensor):
            return True
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return any(self.unknown(getattr(tensor, name)) for name in flatten()[0])
        return self._mode.is_unknown(tensor)

    def _item(self, func: Any, tensor: Tensor) -> Any:
        if tensor.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar"
            )
        self._note(func.__name__)
        if isinstance(tensor, DTensor):
            tensor.full_tensor()  # for its collectives
        return Unknown()

    def _float(self, func: Any, tensor: Tensor) -> Any:
        self._item(func, tensor)
        return NOT_KNOWN

    def _format(self, func: Any, tensor: Tensor, *spec: Any) -> Any:
        if tensor.ndim:
            return object.__format__(tensor, "")
        self._note("format")
        return format(Unknown(), *spec)

    def _repr(self, func: Any, tensor: Tensor, **options: Any) -> Any:
        self._note("repr")
        return func(tensor, **options)

    def _list(self, func: Any, tensor: Tensor) -> Any:
        self._note("tolist")
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()

        def nested(shape: tuple[int, ...]) -> Any:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else Unknown()

        return nested(tuple(tensor.shape))

    def _decide(self, func: Any, tensor: Tensor, *rest: Any) -> Any:
        raise Undecided(_DECIDING[func], _HELP)

    def _note(self, what: str) -> None:
        key = caller(), what
        self._reads[key] += 1
        if self._place.roots:  # a forward has run
            self._in_steps[key, self._place.steps] += 1


_HANDLERS: dict[Any, Any] = {
    Tensor.item: ReadMode._item,
    Tensor.__float__: ReadMode._float,
    Tensor.__format__: ReadMode._format,
    Tensor.tolist: ReadMode._list,
    Tensor.__repr__: ReadMode._repr,
    **dict.fromkeys(_DECIDING, ReadMode._decide),
}


DEVICE_TYPE = "cpu"
"""Device type of all tensors of a dry run, on any machine."""


def _check_device(device: Any) -> None:
    """Raises DryRunError for a device other than cpu and meta; a number stands for the current device."""
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return  # torch raises its own error
    if isinstance(device, torch.device) and device.type not in (DEVICE_TYPE, "meta"):
        raise DryRunError(
            f"{caller()}: the device {str(device)!r} is hard-coded; this dry run has {DEVICE_TYPE!r}. Use "
            "the mesh's, which is right on every machine: torch.device(mesh.device_type)"
        )


_CUDA_CALLS: dict[str, Any] = {
    "is_available": False,
    "memory_stats": {},
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    **dict.fromkeys(("manual_seed", "manual_seed_all")),
    **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated"), 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), 0),
}
"""Function of ``torch.cuda`` that does nothing in a dry run -> what it returns."""


@contextmanager
def as_rank(
    rank: int, world_size: int, gpus_per_node: int, backend: str, mode: DryMode
) -> Iterator[None]:
    """Within this context the process looks like rank ``rank`` to a program that ``mode`` records.

    The process group exists already, so ``init_process_group`` does nothing. Meshes of any device are on the
    CPU; object collectives return this rank's own objects; a DataLoader reads for real. With nccl, streams
    are replaced by the mode's; if it looks for races, so are those that torch's ``fully_shard`` makes on
    CPUs.
    """

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        if asked not in (-1, None, world_size):
            raise DryRunError(
                f"init_process_group(world_size={asked}) in a dry run of {world_size} ranks: leave it out, "
                "torchrun and this dry run set WORLD_SIZE"
            )

    mesh_init = DeviceMesh.__init__

    def init_mesh(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_init(self, DEVICE_TYPE, *args, **kwargs)
        mode.meshes.append(self)

    compile_model = torch.compile  # eager, as importing a compiler takes seconds
    autocast_init = torch.autocast.__init__

    def init_autocast(
        self: torch.autocast, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type != DEVICE_TYPE and dtype is None:
            dtype = torch.get_autocast_dtype(device_type)
        autocast_init(self, DEVICE_TYPE, dtype, *args, **kwargs)

    scaler_init = torch.amp.GradScaler.__init__

    def init_scaler(self: Any, device: str = DEVICE_TYPE, *args: Any, **kwargs: Any) -> None:
        scaler_init(self, DEVICE_TYPE, *args, **kwargs)  # torch disables one of a GPU where none is

    def scaled_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps without checking for infinite gradients. A fused optimizer checks on the GPU."""
        mode.captures.branches(
            "GradScaler.step asks whether a gradient is infinite; with fused=True "
            "the optimizer does that on the GPU"
        )
        return optimizer.step(*args, **kwargs)

    resize_storage = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = resize_storage(self, size)
        mode.ledger.resized(self)
        return result

    def really(owner: Any, name: str) -> tuple[Any, str, Any]:
        original = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            with mode.place.unrecorded():
                return original(*args, **kwargs)

        return owner, name, function

    methods = ("__init__", "_next_data")
    local = min(gpus_per_node, world_size)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(fake_world(rank, world_size))
        stack.enter_context(patch.object(groups, "pretended_backend", backend))
        for owner, name, replacement in (
            (dist, "init_process_group", init_process_group),
            (dist, "destroy_process_group", lambda group=None: None),
            (DeviceMesh, "__init__", init_mesh),
            (torch, "compile", lambda model=None, **_: compile_model(model, backend="eager")),
            (torch.autocast, "__init__", init_autocast),
            (torch.UntypedStorage, "resize_", resize),
            (torch.amp.GradScaler, "__init__", init_scaler),
            (torch.amp.GradScaler, SCALED_STEP, scaled_step),
            *((dist, name, fn) for name, fn in _OBJECT_COLLECTIVES.items()),
            *(really(kind, method) for kind in loader_iterators() for method in methods),
            really(torch, "load"),
            (torch, "save", _nothing),
            *((dcp, name, _nothing) for name in ("save", "load", "async_save")),
            (nn.parallel.DistributedDataParallel, "__init__", _no_ddp),
            *((torch.cuda, name, _returning(value)) for name, value in _CUDA_CALLS.items()),
            (torch.accelerator, "is_available", _returning(False)),
            (torch.accelerator, "current_accelerator", _nothing),
            *(_stream_calls(mode.streams, mode.races is not None) if backend == "nccl" else ()),
            *((math, name, asking(name)) for name in ("isnan", "isinf", "isfinite")),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_settings_kept())
        yield


_STREAM_CALLS = ("Stream", "Event", "current_stream", "default_stream", "set_stream", "stream")


def _stream_calls(streams: PlayedStreams, torchs: bool) -> list[tuple[Any, str, Any]]:
    """Returns (owner, name, replacement) for torch's calls that make streams and events or wait for them;
    with ``torchs`` those of ``torch.cpu`` too."""
    calls = (*_STREAM_CALLS, "synchronize")
    replaced: list[tuple[Any, str]] = [(torch.cuda, name) for name in calls]
    if torchs:
        replaced += [(torch.cpu, name) for name in calls if hasattr(torch.cpu, name)]
    accelerator = ("current_stream", "set_stream", "synchronize")
    replaced += [(torch.accelerator, name) for name in accelerator]
    replaced += [(torch, "Stream"), (torch, "Event")]
    found: list[tuple[Any, str, Any]] = [(Tensor, "record_stream", _nothing)]
    for owner, name in replaced:
        call = getattr(streams, name)
        if name in ("Stream", "Event"):
            kind = FakeStream if name == "Stream" else FakeEvent
            call = StandIn(getattr(owner, name), call, kind)
        found.append((owner, name, call))
    return found


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restores the process's default dtype and device, number of threads and random state after the body."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    device, set_device, changed = torch.get_default_device(), torch.set_default_device, False

    def set_default_device(device: Any) -> None:
        nonlocal changed
        _check_device(device)
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


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_nothing = _returning(None)


def _no_ddp(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise DryRunError(
        f"{caller()}: DistributedDataParallel issues its collectives from C++, where a dry run does not see "
        "them; parallel3d.parallelize(model, mesh) on a mesh of replicas does the same"
    )


# Collectives of objects: every rank has the same objects as this one.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(output: list[Any], given: Any = None, *args: Any, **kwargs: Any) -> None:
    if given:
        output[0] = given[dist.get_rank() % len(given)]


_OBJECT_COLLECTIVES: dict[str, Any] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _nothing,
    "scatter_object_list": _scatter_object_list,
}


# Kernels that a GPU runs as one where a CPU runs several operations, and keeps more: RMS norms.


@contextmanager
def as_on_gpu(place: Place) -> Iterator[None]:
    """Within this context RMS norms of plain tensors run as the one kernel that they are on a GPU, and
    optimizers accept ``capturable=True``."""
    plain = torch.rms_norm

    def norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if place.paused or isinstance(input, DTensor):
            return plain(input, normalized_shape, weight, eps)
        rows = input.shape[: input.ndim - len(normalized_shape)]
        return _RmsNorm.apply(input, weight, rows)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "rms_norm", norm))
        stack.enter_context(patch.object(F, "rms_norm", norm))
        for module in optimizer_modules():
            stack.enter_context(patch.object(module, CAPTURABLE, lambda *_, **__: ["cpu", "cuda"]))
        yield


class _RmsNorm(torch.autograd.Function):
    """``F.rms_norm`` without values: one kernel forward and one backward, as on a GPU.

    It keeps the input and an fp32 number for each row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        scale = torch.empty(*rows, 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        grad = None if weight is None else torch.zeros_like(weight)
        return grads[0] + x, grad, None  # reads two, writes one


# Moves between the GPU's memory and the CPU's, where a dry run's devices do not tell them apart.

_CPU = torch.device("cpu")
_cpu, _to, _is_pinned = Tensor.cpu, Tensor.to, Tensor.is_pinned


@contextmanager
def moves_played(races: RaceDetector) -> Iterator[None]:
    """Within this context the race detector sees copies to the CPU's memory, and ``record_stream``.

    In a dry run "cpu" stands for the GPU's memory, and ``HOST_DEVICE`` for the CPU's, to which offloads of
    torch's ``fully_shard`` go. Methods are replaced, because a TorchFunctionMode doesn't see those called in
    backward.
    """

    def record_stream(tensor: Tensor, stream: FakeStream) -> None:
        races.record_stream(tensor, stream)

    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _to(tensor, HOST_DEVICE) if _in_torchs() else _cpu(tensor, *args, **kwargs)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == _CPU and tensor.device == _CPU and _in_torchs():
            return _to(tensor, HOST_DEVICE, *args[1:], **kwargs)
        return _to(tensor, *args, **kwargs)

    def pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _to(tensor, HOST_DEVICE)

    def is_pinned(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
        return tensor.device == HOST_DEVICE if _in_torchs() else _is_pinned(tensor, *args, **kwargs)

    with ExitStack() as stack:
        for function in (record_stream, cpu, to, pin_memory, is_pinned):
            stack.enter_context(patch.object(Tensor, function.__name__, function))
        yield


def _in_torchs() -> bool:
    """Whether the caller was called by torch's ``fully_shard``."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.fsdp")
