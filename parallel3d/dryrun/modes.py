"""DryMode: each operation is recorded, and done without values, memory or communication."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from parallel3d._compat import get_local_tensor, process_group_of
from parallel3d._compat_dry import FakeTensor, functions_unseen, in_fake_mode
from parallel3d._recorder import Recorder, RecordingMode, Signature
from parallel3d._trace import issuing
from parallel3d._tree import map_tensors, tensors_in
from parallel3d.dryrun.fakes import FakeRunner
from parallel3d.dryrun.ledger import Held, Ledger
from parallel3d.dryrun.operations import work_of
from parallel3d.dryrun.place import Place
from parallel3d.dryrun.result import Operation
from parallel3d.dryrun.streams import Streams
from parallel3d.dryrun.unknown import caller
from parallel3d.dryrun.works import DryWork, answer, inputs_and_outputs
from parallel3d.errors import DryRunError

__all__ = ["DryMode"]


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
