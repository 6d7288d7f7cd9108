"""DryMode: each operation is recorded, and done without values, memory or communication."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.fake import (
    FakeTensor,
    as_fake,
    boxed,
    forget_conversions,
    functions_unseen,
    in_fake_mode,
    make_fake_mode,
)
from parallel3d._torch.groups import process_group_of
from parallel3d._util.recorder import Recorder, RecordingMode, Signature
from parallel3d._util.trace import issuing
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun.memory import Held, Ledger
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.result import Operation
from parallel3d.tools.dryrun.streams import Streams
from parallel3d.tools.dryrun.unknown import caller

# FakeRunner: operations on fake tensors, each kind of call worked out once.
#
# A model's blocks are alike, so nearly all calls repeat an earlier one with the same shapes. Torch's
# fake mode takes about half a millisecond a call, also where it has a result in its cache; a repeated
# one takes a tenth.

_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class _Output:
    """How to make one output again; ``source`` is the argument whose memory it lies in, -1 for its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    source: int
    is_argument: bool


class FakeRunner:
    """Runs operations whose tensors are fake, or on meta.

    Attributes:
        mode: torch's, which works out what is new.
    """

    def __init__(self) -> None:
        self.mode = make_fake_mode()
        self._known: dict[Any, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``."""
        key = _key_of(func, args, kwargs)
        if key is not None:
            found = self._known.get(key)
            if found is not None:
                return self._again(found, args)
        with self.mode:
            out = func(*args, **kwargs)
        forget_conversions(self.mode)
        if key is not None:
            how = _how(func, args, out)
            if how is not None and not _reshapes(func, args, kwargs, key):
                self._known[key] = how
        return out

    def _again(self, how: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(how, _Output):
            return self._make(how, args)
        kind, parts = how
        return None if kind is None else kind(self._again(part, args) for part in parts)

    def _make(self, how: _Output, args: tuple[Any, ...]) -> Tensor:
        if how.is_argument:
            return args[how.source]
        if how.source < 0:
            meta = torch.empty_strided(how.shape, how.stride, dtype=how.dtype, device="meta")
        else:
            storage = args[how.source].untyped_storage()
            meta = torch.empty(0, dtype=how.dtype, device="meta")
            meta.set_(storage, how.offset, how.shape, how.stride)
        return as_fake(self.mode, meta, _DEVICE)


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the shapes of the result depend on; None if that can't be told."""
    parts: list[Any] = [func]
    if not _add(parts, args) or not _add(parts, tuple(kwargs.items())):
        return None
    return tuple(parts)


def _add(parts: list[Any], values: Any) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            if value.is_conj() or value.is_neg():
                return False
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif isinstance(value, list | tuple):
            parts += (type(value), len(value))
            if not _add(parts, value):
                return False
        elif isinstance(value, _PLAIN):
            parts += (type(value), value)  # as 1, 1.0 and True are equal
        else:
            return False
    return True


def _how(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """How to make ``out`` without ``func``; None if that isn't known."""
    if out is None:
        return (None, ())
    if isinstance(out, list | tuple):
        parts = [_how(func, args, each) for each in out]
        return None if None in parts else (type(out), tuple(parts))
    if not isinstance(out, FakeTensor) or out.device != _DEVICE or out.is_conj() or out.is_neg():
        return None
    storage, source = out.untyped_storage(), -1
    for position, value in enumerate(args):
        if isinstance(value, FakeTensor) and value.untyped_storage() is storage:
            source = position
            break
    else:
        if func._schema.is_mutable:
            return None  # it may be one of a list's, or given by name
        if storage.nbytes() != _span(out):
            return None  # a part of something else
    is_argument = source >= 0 and out is args[source]
    return _Output(
        tuple(out.shape), out.stride(), int(out.storage_offset()), out.dtype, source, is_argument
    )


def _reshapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Any) -> bool:
    """Whether it has changed the shape or the storage of an argument."""
    if not func._schema.is_mutable:
        return False
    name = func.overloadpacket.__name__
    return name.startswith(("set_", "resize_")) or _key_of(func, args, kwargs) != before


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# Collectives that send nothing: what torch's operations return, and a handle that notes who waits.


class DryWork(dist.Work):
    """A collective that is over at once; the first ``wait`` calls ``on_wait`` with its ``index``.

    Whoever makes it must keep it: what c10d gives the program refers to the C++ part alone, whose own
    ``wait`` would wait for ever. So it does not keep the outputs alive.
    """

    def __init__(self, on_wait: Callable[[int], None], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.on_wait: Callable[[int], None] | None = on_wait
        self.outputs = [weakref.ref(tensor) for tensor in outputs]
        self.index = -1

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        on_wait, self.on_wait = self.on_wait, None
        if on_wait is not None:
            on_wait(self.index)
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """Nothing fails here."""
        return True

    def get_future(self) -> Any:
        """Complete, with the outputs."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([t for each in self.outputs if (t := each()) is not None])
        return future


_WRITTEN = ("output_tensor", "output_tensors", "output", "outputs", "tensors")
_READ = ("input_tensor", "input_tensors", "input", "inputs", "tensors", "tensor")


def inputs_and_outputs(values: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a collective's arguments by name: the tensors it reads, and those it writes."""
    read = [t for name in _READ for t in _flat(values.get(name))]
    written = [t for name in _WRITTEN for t in _flat(values.get(name))]
    return read, written


def answer(func: Any, values: dict[str, Any], work: dist.Work) -> Any:
    """What ``func``, an operation of c10d, returns: its outputs as far as it does, and ``work``."""
    given = next((values[name] for name in _WRITTEN if values.get(name) is not None), None)
    returned: list[Any] = []
    for each in func._schema.returns:
        returned.append(boxed(work) if "Work" in str(each.type) else given)
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


# What kind of work an operation is: matmul, attention or elementwise, its FLOPs and its bytes.

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_FREE = (
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"),
    *("detach", "alias", "lift_fresh", "is_same_size", "_local_scalar_dense"),
)
_LOOKUPS = ("embedding", "index", "index_select", "gather")


class Work:
    """kind, flops, bytes; (m, n, k) of a matmul, (heads of all sequences, rows, head dim) of an attention."""

    __slots__ = ("flops", "kind", "moved", "sizes")

    def __init__(
        self, kind: str, flops: float, moved: int, sizes: tuple[int, int, int] | None = None
    ) -> None:
        self.kind, self.flops, self.moved, self.sizes = kind, flops, moved, sizes


def work_of(
    func: Any, args: Any, read: list[torch.Tensor], written: list[torch.Tensor]
) -> Work | None:
    """Of one operation with the arguments ``args``, on these tensors.

    None if it does nothing on a device: a view, an allocation.
    """
    name = func.overloadpacket.__name__
    if not written or name in _FREE:
        return None
    mutable = func._schema.is_mutable
    if not mutable:
        known = {id(t.untyped_storage()) for t in read}
        if all(id(t.untyped_storage()) in known for t in written):
            return None
    moved = sum(map(_bytes, written)) + sum(map(_bytes, read))
    if name in _PRODUCTS and len(read) >= 2:
        a, b = [t for t in read if t.ndim >= 2][-2:] if name.endswith("addmm") else read[:2]
        m, n, k = prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
        return Work("matmul", 2.0 * m * n * k, moved, (m, n, k))
    if name in ("convolution", "convolution_backward"):
        return Work("matmul", _convolution(name, read, written), moved)
    if "dot_product" in name and "attention" in name:
        return _attention(name, _is_causal(func, args), read, moved)
    if name in _LOOKUPS:
        moved = 2 * sum(map(_bytes, written)) + sum(map(_bytes, read[1:]))
    return Work("elementwise", 0.0, moved)


def _attention(name: str, causal: bool, read: list[torch.Tensor], moved: int) -> Work:
    """Both products of scores x values, half of it where it is causal; 2.5 times that backward (flash)."""
    backward = "backward" in name
    query, key = (read[1], read[2]) if backward else (read[0], read[1])
    *heads, rows, width = query.shape
    flops = 4.0 * prod(heads) * rows * key.shape[-2] * width / (2 if causal else 1)
    sizes = (prod(heads), rows, width)
    return Work("attention", flops * 2.5 if backward else flops, moved, sizes)


def _is_causal(func: Any, args: Any) -> bool:
    """What the call says; a mask is taken to hide the future."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal" and value:
            return True
        if argument.name in ("attn_mask", "attn_bias") and value is not None:
            return True
    return False


def _convolution(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> float:
    if name == "convolution":
        return 2.0 * written[0].numel() * prod(read[1].shape[1:])
    grad, weight = read[0], read[2]
    return 4.0 * grad.numel() * prod(weight.shape[1:])


def _bytes(tensor: torch.Tensor) -> int:
    """Of the elements that are different: an expanded dim is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in sizes if step != 0) * tensor.element_size()


class DryMode(RecordingMode):
    """Floating-point tensors that the program makes are fake: they have a shape and no memory, and so has all
    that is computed with them. Integers (token ids, positions, the order of samples) stay real until they
    meet a fake one, or come from another rank; so do tensors that were there before.

    Args:
        place: where the program is. meshes: those that it has made, with names; may grow.

    Attributes:
        operations: what was done. recorder: its collectives. ledger: the memory of the fake tensors.
        streams: those of a GPU, if the engine is to use them.
        paused: what is done meanwhile is done for real and is not recorded.
    """

    def __init__(self, place: Place, meshes: list[DeviceMesh]) -> None:
        self.recorder = Recorder()
        self.axes: dict[str, str] = {}
        super().__init__(self.recorder, self.axes)
        self.place, self._meshes = place, meshes
        place.on_backward = self._begin_backward
        self.operations: list[Operation] = []
        self.ledger = Ledger()
        self.streams = Streams(self._wait)
        self.paused = False
        self._fakes = FakeRunner()
        self._stand_ins: Any = WeakTensorKeyDictionary()  # real tensor -> fake
        self._overwritten: set[int] = set()  # storages of real tensors, kept alive below
        self._kept: list[Any] = []
        self._works: list[DryWork] = []  # kept alive: see there
        # Of functional collectives: id of the output -> collective.
        self._results: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused or in_fake_mode():  # not ours, which is on only when this mode is off
            return func(*args, **(kwargs or {}))
        with functions_unseen():
            if DTensor in types and _is_elementwise_list(func, args):
                args, kwargs = map_tensors(_local, (args, kwargs))
                types = ()
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _begin_backward(self) -> None:
        self.ledger.begin_backward()

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether nobody has computed the values of ``tensor``, which is plain."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._overwritten) and id(tensor.untyped_storage()) in self._overwritten
        )

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that is no collective."""
        given = list(tensors_in((args, kwargs)))
        if self._is_real(func, given, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(given[0])
        if func.namespace == "_c10d_functional":
            return self._wait_for(func, args, kwargs)
        if not _all_fake(given) or func._schema.is_mutable:
            out = self._run(func, args, kwargs)
        else:
            out = self._fakes.run(func, tuple(args), kwargs)
        self._note(func, args, given, out)
        return out

    def _is_real(self, func: Any, given: list[Tensor], kwargs: Any) -> bool:
        device = kwargs.get("device")
        to_meta = device is not None and torch.device(device).type == "meta"
        if any(map(self.is_unknown, given)):
            return False
        if given:
            if all(t.is_meta for t in given):
                return device is None or to_meta
            return not any(t.is_meta for t in given)
        dtype = kwargs.get("dtype") or _factory_dtype(func)
        return to_meta or not dtype.is_floating_point

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On fake tensors, in place of real ones stand-ins; what it writes to real ones is not known."""
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        args, kwargs = map_tensors(self._stand_in, (tuple(args), kwargs))
        return self._fakes.run(func, args, kwargs)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.forget(tensors_in(value))
        self.forget(tensors_in(kwargs.get("out")))

    def forget(self, tensors: Any) -> None:
        """The values of these tensors, as far as they are real, are not known from now on."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._overwritten.add(id(storage))
                self._kept.append(storage)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._stand_ins.get(tensor)
        if fake is None or fake.shape != tensor.shape or fake.dtype != tensor.dtype:
            with self._fakes.mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            if not tensor.is_meta:
                self._stand_ins[tensor] = fake
                self._held(fake, "input", "inputs")
        return fake

    def _held(self, tensor: Tensor, made_by: str, kind: str = "") -> Held:
        found = self.ledger.find(tensor)
        if found is not None:
            return found
        place = self.place
        held = Held(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            place.module,
            place.phase,
            place.steps,
            made_by,
            kind=kind,
            recomputed=place.recomputing,
        )
        return self.ledger.add(tensor, held)

    def _note(self, func: Any, args: Any, given: list[Tensor], out: Any) -> None:
        written = [t for t in tensors_in(out) if isinstance(t, FakeTensor) or not t.is_meta]
        if not written and func._schema.is_mutable:  # _foreach_add_ and the like return nothing
            written = given[:1]
        name = func.overloadpacket.__name__
        work = work_of(func, args, given, written)
        if work is not None:
            self._add(
                work.kind,
                name,
                flops=work.flops,
                moved=work.moved,
                sizes=work.sizes,
                dtype=str(written[0].dtype).removeprefix("torch."),
            )
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                self._held(tensor, name)
        if name.startswith(("resize_", "set_")):
            for tensor in given[:1]:
                self.ledger.resized(tensor.untyped_storage())

    def _add(self, kind: str, name: str, **more: Any) -> None:
        place = self.place
        position = self.ledger.operation = len(self.operations)
        if kind != "wait":
            more["stream"], more["after"] = self.streams.place(position)
        self.operations.append(
            Operation(kind, name, place.module, place.phase, place.steps, **more)
        )

    def _wait(self, index: int, after: tuple[int, ...] = ()) -> None:
        self._add("wait", self.recorder.calls[index].op, collective=index, after=after)

    def _scalar(self, tensor: Tensor) -> float:
        """torch itself needs the value; for a floating-point one NaN will do."""
        if tensor.dtype.is_floating_point:
            return float("nan")
        raise DryRunError(
            f"{caller()}: an operation needs the value of a tensor ({tuple(tensor.shape)}, {tensor.dtype}) "
            "that a dry run does not know; take a Python number, or skip the lines with p3d.dryrun.active()"
        )

    # Collectives

    def collective(
        self, func: Any, signature: Signature, values: dict[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """Records it and returns what it would."""
        unit, count = issuing.unit, len(self.recorder.calls)
        self._learn_axis(process_group_of(values[signature.group]).group_name)
        read, written = inputs_and_outputs(values)
        work: DryWork | None = None
        if func.namespace == "c10d":
            work = DryWork(self._waited, written)
            result = answer(func, values, work)
            self.forget(written)
        else:
            result = self._run(func, args, kwargs)
            for tensor in tensors_in(result):
                self._held(tensor, signature.op)
        self.record(signature, unit, values, result)
        index = len(self.recorder.calls) - 1
        if len(self.recorder.calls) > count:
            dtype = next((str(t.dtype).removeprefix("torch.") for t in read), "")
            self._add("collective", signature.op, collective=index, dtype=dtype)
        if not self.recorder.calls[index].asynchronous:
            self.streams.arrived(index)
        if work is not None:
            work.index = index
            self._works.append(work)
        else:
            self._results.update({id(t): index for t in tensors_in(result)})
        self._give_roles(signature.op, read, written)
        return result

    def _give_roles(self, op: str, read: list[Tensor], written: list[Tensor]) -> None:
        axis = self.recorder.calls[-1].axis
        for role, tensors in (("sent", read), ("received", written)):
            for tensor in tensors:
                held = self.ledger.find(tensor) if isinstance(tensor, FakeTensor) else None
                if held is not None and axis != "tp":  # whose are activations
                    held.roles.add(f"{role} {op}")

    def _waited(self, index: int) -> None:
        if self.streams.arrived(index):
            self._wait(index)

    def _wait_for(self, func: Any, args: Any, kwargs: Any) -> Any:
        index = self._results.pop(id(args[0]), None) if args else None
        out = self._run(func, args, kwargs)
        if index is not None:
            self._waited(index)
        for tensor in tensors_in(out):
            self._held(tensor, "wait")
        return out

    def _learn_axis(self, group_name: str) -> None:
        """Which mesh's axis this group is; a mesh gets its groups after it was made."""
        if group_name in self.axes:
            return
        for mesh in self._meshes:
            for axis in mesh.mesh_dim_names or ():
                with suppress(RuntimeError):
                    self.axes.setdefault(mesh.get_group(axis).group_name, axis)


def _is_elementwise_list(func: Any, args: Any) -> bool:
    """An optimizer's operation on lists of DTensors (``_foreach_add_``, ``_fused_adamw_``), of which those at
    one place lie alike: each rank does it on its own parts. DTensor would take half a minute to find out, for
    the parameters of a 70B model."""
    name = func.overloadpacket.__name__
    if func._schema.returns or not name.startswith(("_foreach_", "_fused_")):
        return False
    lists = [value for value in args if isinstance(value, list | tuple) and value]
    for row in zip(*lists, strict=False):
        placed = [t.placements for t in row if isinstance(t, DTensor)]
        if any(p != placed[0] or any(each.is_partial() for each in p) for p in placed):
            return False
    return True


def _all_fake(tensors: list[Tensor]) -> bool:
    return all(type(tensor) is FakeTensor for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _factory_dtype(func: Any) -> torch.dtype:
    """Of a factory call without a dtype."""
    name = func.overloadpacket.__name__
    if name in ("arange", "randint", "randperm", "tril_indices", "triu_indices"):
        return torch.int64
    return torch.get_default_dtype()
