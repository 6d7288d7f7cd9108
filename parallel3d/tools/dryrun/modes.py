"""DryMode: records each operation, and runs it without values, memory or communication."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from parallel3d._torch.fake import (
    FakeTensor,
    boxed,
    forget_conversions,
    functions_unseen,
    in_fake_mode,
    make_fake_mode,
)
from parallel3d._torch.groups import process_group_of
from parallel3d._trace.kinds import arguments_of, bytes_of, kind_of, product_of, written_by
from parallel3d._util.dry_run import HOST_DEVICE
from parallel3d._util.recorder import Recorder, RecordingMode, Signature
from parallel3d._util.trace import issuing
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.mesh.axes import moves_activations
from parallel3d.planner.constants import constant
from parallel3d.tools.dryrun.captures import CaptureChecker
from parallel3d.tools.dryrun.memory import Held, Ledger, local_of
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.races import RaceDetector
from parallel3d.tools.dryrun.result import Operation
from parallel3d.tools.dryrun.streams import PlayedStreams
from parallel3d.tools.dryrun.unknown import Undecided


def dtype_name(tensor: Tensor) -> str:
    """Returns the name of the tensor's dtype, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


# Collectives that send nothing.


class DryWork(dist.Work):
    """The work of a collective that has already ended; ``wait`` calls ``on_wait`` with its ``index``.

    Whoever makes one must keep a reference to it: c10d gives the program only the C++ object, whose own
    ``wait`` would wait forever. It refers weakly to the outputs, so as not to keep them alive.
    """

    def __init__(self, on_wait: Callable[[int], None], outputs: list[Tensor]) -> None:
        super().__init__()
        self.on_wait = on_wait
        self.outputs = [weakref.ref(tensor) for tensor in outputs]
        self.index = -1

    def wait(self, timeout: Any = None) -> bool:
        self.on_wait(self.index)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        """Returns a completed future with the outputs."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([tensor for ref in self.outputs if (tensor := ref()) is not None])
        return future


_POINT_TO_POINT = ("send", "recv")
_WRITTEN = ("output_tensor", "output_tensors", "output", "outputs", "tensors")
_READ = ("input_tensor", "input_tensors", "input", "inputs", "tensors", "tensor")


# The work of an operation: kind, FLOPs and bytes.

# They don't read what they write to.
_OVERWRITES = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
_FILLS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""They read nothing: of a tensor they take the shape or the dtype."""


def _work(
    func: Any, args: Any, kwargs: Any, read: list[Tensor], written: list[Tensor]
) -> dict[str, Any] | None:
    """Returns the fields of an ``Operation``: its kind, FLOPs and bytes; None if the device has nothing to
    do, as for a view or an allocation."""
    name = func.overloadpacket.__name__
    kind = kind_of(name)
    if not written or kind == "free":
        return None
    if not func._schema.is_mutable and name != "all_gather_copy_in":  # returns what it writes to
        known = {id(t.untyped_storage()) for t in read}
        if all(id(t.untyped_storage()) in known for t in written):
            return None
    outs = {
        id(t) for a in func._schema.arguments if a.is_out for t in tensors_in(kwargs.get(a.name))
    }
    read = [] if name in _FILLS else [t for t in read if id(t) not in outs]
    read = read[len(written) :] if name in _OVERWRITES else read
    moved = sum(map(bytes_of, written)) + sum(map(bytes_of, read))
    if kind == "copy" and len({t.device == HOST_DEVICE for t in (*read, *written)}) == 2:
        return {"kind": "host_copy", "moved": sum(map(bytes_of, written))}
    if kind == "product" and len(read) >= 2:
        rows, n, k = sizes = product_of(name, read)[2]
        return {"kind": "matmul", "flops": 2.0 * rows * n * k, "moved": moved, "sizes": sizes}
    if kind == "convolution":
        backward = name.endswith("backward")  # of the output's gradient, the input and the weight
        out, weight = (read[0], read[2]) if backward else (written[0], read[1])
        flops = (4.0 if backward else 2.0) * out.numel() * prod(weight.shape[1:])
        return {"kind": "matmul", "flops": flops, "moved": moved}
    if kind == "attention" and "dot_product" in name:
        return {"kind": "attention", "moved": moved, **_attention(func, args, read)}
    if kind == "lookup":
        moved = 2 * sum(map(bytes_of, written)) + sum(map(bytes_of, read[1:]))
    if (
        name == "embedding_dense_backward"
    ):  # zeros; gradients read, rows of the sum read and written
        moved += 2 * bytes_of(read[0])
    if name == "logsumexp":  # amax; the difference; exp in place; sum
        moved = 6 * bytes_of(read[0])
    if name == "scatter_add_":  # what is added, and where
        moved = 3 * bytes_of(read[2]) + bytes_of(read[1])
    if name == "nll_loss_forward":  # one element a row
        moved = 2 * bytes_of(read[1])
    if name == "nll_loss_backward":  # zeros, and one element a row
        moved = sum(map(bytes_of, written)) + bytes_of(read[2])
    return {"kind": "elementwise", "moved": moved}


def _attention(func: Any, args: Any, read: list[Tensor]) -> dict[str, Any]:
    """Returns the FLOPs and sizes of an attention: two matmuls forward, more backward; half of that if
    causal, which any mask is taken for."""
    backward = "backward" in func.overloadpacket.__name__
    given = arguments_of(func, args, {})
    masked = given.get("attn_mask") is not None or given.get("attn_bias") is not None
    causal = masked or given.get("is_causal")
    query, key = (read[1], read[2]) if backward else (read[0], read[1])
    *heads, rows, width = query.shape
    flops = 4.0 * prod(heads) * rows * key.shape[-2] * width / (2 if causal else 1)
    flops *= constant("attention_backward").value if backward else 1
    return {"flops": flops, "sizes": (prod(heads), rows, width)}


_INTEGERS = ("arange", "randint", "randperm", "tril_indices", "triu_indices")
"""Factory functions whose default dtype is int64."""


class DryMode(RecordingMode):
    """Makes the program's floating-point tensors, and what is computed from them, fake: without memory.

    Integers (token ids, positions, the order of samples) are real, and so are tensors from before the dry
    run, until they are combined with a fake tensor or come from another rank.

    Attributes:
        recorder, operations: the recorded collectives, and all recorded operations.
        ledger: the ledger of the fake tensors' memory.
        streams: stands for ``torch.cuda``'s streams.
        races: the race detector of these streams, or None.
        captures: the capture checker, which needs the race detector too.
        meshes: the meshes that the program has made.
    """

    def __init__(
        self, place: Place, check_streams: bool = False, check_capture: bool = False
    ) -> None:
        self.recorder, self.meshes = Recorder(), list[DeviceMesh]()
        super().__init__(self.recorder, {}, meshes=self.meshes)
        self.place = place
        self.operations: list[Operation] = []
        self.ledger = Ledger()
        place.on_backward = self.ledger.begin_backward
        self.streams = PlayedStreams(self._wait)
        self.ledger.stream = lambda: self.streams.current_stream().number
        self.captures = CaptureChecker(self.streams, place, follows=check_capture)
        self.races: RaceDetector | None = None
        if check_streams:
            self.races = RaceDetector(self.streams, place, self.ledger, self.captures)
            self.streams.watcher = self.captures
        self._fake_mode = make_fake_mode()
        self._stand_ins: Any = WeakTensorKeyDictionary()  # real tensor -> fake
        self._overwritten: dict[int, Any] = {}  # id -> storage of a real tensor, kept alive
        self.reads: Counter[int] = Counter()  # by step
        self.host_waits: Counter[int] = Counter()
        self.streams.on_host_wait = lambda: self.host_waits.update([place.steps])
        self._works: list[DryWork] = []  # kept alive: see there
        self._waited_for: set[int] = set()  # the collectives that the computation has waited for
        self._results: dict[Held, int] = {}  # output of a functional collective -> its index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fake mode that is on is another's: this mode is off while its own is on.
        if self.place.paused or in_fake_mode():
            return func(*args, **(kwargs or {}))
        with functions_unseen():
            if DTensor in types and _is_elementwise_list(func, args):
                args, kwargs = map_tensors(local_of, (args, kwargs))
                types = ()
            return super().__torch_dispatch__(func, types, args, kwargs)

    def on_read(self, tensor: Tensor, what: str) -> None:
        """Called when the program reads the value of ``tensor``, so that the host waits; counts it."""
        self.reads[self.place.steps] += 1
        self.captures.reads(what)
        if self.races is not None:
            self.races.host_reads(tensor)

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` (no DTensor) are not computed in the dry run."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._overwritten) and id(tensor.untyped_storage()) in self._overwritten
        )

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that is not a collective."""
        tensors = list(tensors_in((args, kwargs)))
        self.captures.random(func, args, kwargs)
        if self._is_real(func, tensors, kwargs):
            out = func(*args, **kwargs)
            self.captures.real(func, args, kwargs, tensors, out)
            return out
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(tensors[0])
        if func.namespace == "_c10d_functional":
            return self._wait_for(func, args, kwargs)
        out = self._run(func, args, kwargs)
        self._note(func, args, kwargs, tensors, out)
        return out

    def _is_real(self, func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
        device = kwargs.get("device")
        to_meta = device is not None and torch.device(device).type == "meta"
        if any(map(self.is_unknown, tensors)):
            return False
        if tensors and all(t.is_meta for t in tensors):
            return device is None or to_meta
        if tensors:
            return not any(t.is_meta for t in tensors)
        name = func.overloadpacket.__name__
        default = torch.int64 if name in _INTEGERS else torch.get_default_dtype()
        return to_meta or not (kwargs.get("dtype") or default).is_floating_point

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs ``func`` on fake tensors in place of real ones; real ones written to become unknown."""
        if func._schema.is_mutable:
            self._forget(written_by(func, args, kwargs))
        args, kwargs = map_tensors(self._stand_in, (tuple(args), kwargs))
        with self._fake_mode:
            out = func(*args, **kwargs)
        forget_conversions(self._fake_mode)
        return out

    def _forget(self, tensors: Any) -> None:
        """Marks the values of those of the tensors that are real as unknown from now on."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._overwritten[id(storage)] = storage

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._stand_ins.get(tensor)
        if fake is None or fake.shape != tensor.shape or fake.dtype != tensor.dtype:
            with self._fake_mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            if not tensor.is_meta:
                self.captures.on_device(tensor)
                self._stand_ins[tensor] = fake
                self._held(fake, "input", "inputs")
        return fake

    def _held(self, tensor: Tensor, made_by: str, kind: str = "") -> None:
        """Adds the storage of ``tensor`` to the ledger, if it is new."""
        if self.ledger.find(tensor) is None:
            place, shape, dtype = self.place, tuple(tensor.shape), dtype_name(tensor)
            held = Held(shape, dtype, place.module, place.phase, made_by)
            held.kind, held.recomputed = kind, place.recomputing
            held.on_host = tensor.device == HOST_DEVICE
            self.ledger.add(tensor, held)

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        # A fused optimizer may write to gradients, but does so under a gradient scaler only.
        mutated = written_by(func, args, kwargs, but="grads")
        written = [t for t in tensors_in(out) if isinstance(t, FakeTensor) or not t.is_meta]
        if not written and func._schema.is_mutable:  # _foreach_add_ and the like return nothing
            written = mutated or tensors[:1]
        name = func.overloadpacket.__name__
        if (work := _work(func, args, kwargs, tensors, written)) is not None:
            self._add(name=name, dtype=dtype_name(written[0]), **work)
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                self._held(tensor, name)
        if work is not None and any(t.device == HOST_DEVICE for t in tensors):
            for tensor in written:  # what was copied back from the CPU's memory
                if (held := self.ledger.find(tensor)) is not None:
                    held.recomputed = True
        if work is not None and self.races is not None:
            writes = [*tensors_in(out), *mutated]
            self.races.operation(name, tensors, writes)
            blocks = not arguments_of(func, args, kwargs).get("non_blocking")
            if blocks and any(t.device == HOST_DEVICE for t in (*tensors, *written)):
                self.races.host_reads()
                if work["kind"] == "host_copy":
                    self.captures.copies(name)
        if tensors and name.startswith(("resize_", "set_")):
            self.ledger.resized(tensors[0].untyped_storage())

    def _add(self, kind: str, name: str, **more: Any) -> None:
        place = self.place
        position = self.ledger.operation = len(self.operations)
        if kind != "wait":
            more["stream"], more["after"] = self.streams.place(position)
        operation = Operation(kind, name, place.module, place.phase, place.steps, **more)
        self.operations.append(operation)

    def _wait(self, index: int | None, after: tuple[int, ...] = ()) -> None:
        name = "copies" if index is None else self.recorder.calls[index].op
        self._add("wait", name, collective=index, after=after)

    def _scalar(self, tensor: Tensor) -> float:
        """Returns NaN for a float tensor whose value torch itself reads; raises Undecided for others."""
        if tensor.dtype.is_floating_point:
            self.on_read(tensor, "item")
            return float("nan")
        raise Undecided(
            f"an operation needs the value of a tensor ({tuple(tensor.shape)}, {tensor.dtype}) that a dry "
            "run does not know",
            "use a Python number, or skip the lines with p3d.dryrun.active()",
        )

    def collective(
        self, func: Any, signature: Signature, values: dict[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """Records a collective, and returns what it would return: its outputs without values."""
        unit, count = issuing.unit, len(self.recorder.calls)
        group = process_group_of(values[signature.group])
        read, written = (
            [t for name in names for t in tensors_in(values.get(name))]
            for names in (_READ, _WRITTEN)
        )
        work: DryWork | None = None
        made: list[Tensor] = []
        if func.namespace == "c10d":
            work = DryWork(self._waited, written)
            self._works.append(work)
            outputs = next((values[n] for n in _WRITTEN if values.get(n) is not None), None)
            types = [str(each.type) for each in func._schema.returns]
            returned = tuple(boxed(work) if "Work" in kind else outputs for kind in types)
            result = returned if len(returned) > 1 else next(iter(returned), None)
            self._forget(written)
        else:
            result = self._run(func, args, kwargs)
            made = list(tensors_in(result))
            for tensor in made:
                self._held(tensor, signature.op)
        self.record(signature, unit, values, result)
        index = len(self.recorder.calls) - 1
        call = self.recorder.calls[index]
        if index >= count:
            dtype = dtype_name(read[0]) if read else ""
            self._add("collective", signature.op, collective=index, dtype=dtype)
        # Its caller waits, if at all.
        blocks = not call.asynchronous and call.op not in _POINT_TO_POINT
        stream = self.streams.issue(index, group.group_name, call.axis or "", blocks=blocks)
        if self.races is not None:
            is_root = values.get("root_rank", -1) == group.rank()
            one_way = {"broadcast": not is_root, "reduce": is_root, "send": False}
            writes = [*(written if one_way.get(call.op, True) else []), *made]
            self.races.collective(index, stream, call.op, read, writes, holds=not blocks)
        if work is not None:
            work.index = index
        for tensor in made:
            if (held := self.ledger.find(tensor)) is not None:
                self._results[held] = index
        if not moves_activations(call.axis):
            for tensor in (*read, *written):
                if isinstance(tensor, FakeTensor) and (held := self.ledger.find(tensor)):
                    held.communicated = True
        return result

    def _waited(self, index: int) -> None:
        on_compute = self.streams.arrived(index)
        if self.races is not None:
            self.races.arrived(index)
        if on_compute and index not in self._waited_for:
            self._waited_for.add(index)
            self._wait(index)

    def _wait_for(self, func: Any, args: Any, kwargs: Any) -> Any:
        held = self.ledger.find(args[0]) if args else None
        index = None if held is None else self._results.pop(held, None)
        out = self._run(func, args, kwargs)
        if index is not None:
            self._waited(index)
        for tensor in tensors_in(out):
            self._held(tensor, "wait")
        return out


def _is_elementwise_list(func: Any, args: Any) -> bool:
    """Whether ``func`` is an optimizer's in-place operation on lists of DTensors (``_foreach_add_``,
    ``_fused_adamw_``) that each rank can run on its local shards: the DTensors at the same index of all lists
    have equal placements without ``Partial``.

    DTensor's own dispatch would take half a minute for the parameters of a 70B model.
    """
    name = func.overloadpacket.__name__
    if func._schema.returns or not name.startswith(("_foreach_", "_fused_")):
        return False
    lists = [value for value in args if isinstance(value, list | tuple) and value]
    for row in zip(*lists, strict=False):
        placed = [t.placements for t in row if isinstance(t, DTensor)]
        if any(p != placed[0] or any(each.is_partial() for each in p) for p in placed):
            return False
    return True
