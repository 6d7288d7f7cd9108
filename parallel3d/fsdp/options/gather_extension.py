"""ExtensionBucket: parameters with torch's all-gather extension, which say themselves how they are gathered.

Such a parameter is of a tensor subclass with the methods ``fsdp_pre_all_gather``, which returns what to
gather instead of the shard (a quantised copy and its scale, say), and ``fsdp_post_all_gather``, which makes
the unsharded parameter from the gathered values. Its shard at rest is of the subclass too, so it is not part
of a contiguous buffer. The gather inputs of a unit, whatever their dtypes, are packed as bytes and sent in
one all-gather; a single input is sent without a copy. Gradients are reduced as in any Bucket.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.saved import preserved_versions
from parallel3d._torch.simulated import LocalTensor, inner_tensors, ranks_are_simulated
from parallel3d._util.storage import own_copy
from parallel3d._util.trees import map_tensors
from parallel3d.errors import MeshError, Parallel3dError, RefusedError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.bucket import Bucket, Versions
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option
from parallel3d.fsdp.gradients import BucketGradients
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placement import DataAxes, chunk_length, post_forward_mesh
from parallel3d.fsdp.records import Precision
from parallel3d.fsdp.reduction import ON_DEMAND

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` has ``fsdp_pre_all_gather`` or ``fsdp_post_all_gather``."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST)


class Extension:
    """One parameter with an all-gather extension. n is the size of the shard axis.

    Args:
        local: its shard, or the tensor that the shard will be cut from.
        mesh: the shard axis as a mesh, passed to ``fsdp_pre_all_gather``, as is ``policy``.
        dtype: the compute dtype, passed to ``fsdp_post_all_gather``.

    Attributes:
        kinds: (shape, dtype) of each gather input; empty before the first gather.
        metadata: the second result of ``fsdp_pre_all_gather``.
        rows: for each gather input the all-gather's output as bytes, (n, bytes): row i is of shard rank i.
        compute: the unsharded parameter; None before the first gather.
    """

    def __init__(
        self,
        unit: str,
        param: ShardedParam,
        local: torch.Tensor,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
    ) -> None:
        self.label = f"parameter {param.name} of unit {unit} ({type(local).__name__})"
        self.arguments = _check_methods(self.label, local)
        self.param = param
        self.mesh = mesh
        self.policy = policy
        self.dtype = dtype
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.rows: list[torch.Tensor] = []
        self.metadata: Any = None
        self.compute: nn.Parameter | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._transposed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inner: tuple[torch.Tensor, ...] = ()
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of ``local.fsdp_pre_all_gather`` as flat bytes, padded if need be."""
        shape = torch.Size(self.param.geometry.compute_shape)
        arguments = (self.mesh, shape, _strides(shape), self.param.module(), self.policy)
        if local.numel() == 0:
            local = self._zeros_for(local)
        result = local.fsdp_pre_all_gather(*arguments[: self.arguments])  # type: ignore[attr-defined]
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not (is_pair and _are_tensors(result[0]) and result[0]):
            raise Parallel3dError(
                f"{self.label}: {_PRE} returned {_describe(result)}; it must return (inputs, metadata), "
                "where inputs is a tuple of at least one tensor"
            )
        inputs, self.metadata = result
        inputs = [self._padded(as_plain(tensor)) for tensor in inputs]
        kinds = [(t.shape, t.dtype) for t in inputs]
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            raise Parallel3dError(
                f"{self.label}: {_PRE} returned tensors of {_show(kinds)}, and of {_show(self.kinds)} "
                "the first time; it must return the same shapes and dtypes each time"
            )
        return [t.reshape(-1).view(torch.uint8) for t in inputs]

    def _zeros_for(self, local: torch.Tensor) -> torch.Tensor:
        """Returns zeros of the largest shard's shape in place of ``local``, a shard without rows: extensions
        may need a maximum, which an empty tensor does not have."""
        zeros = local.new_zeros(self.param.geometry.chunk_shape)
        if not is_extended(zeros):
            return local
        for name, value in vars(local).items():  # such as a scale computed before
            if vars(zeros).get(name) is None:
                setattr(zeros, name, value)
        return zeros

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a gather input with the rows of the largest shard: padded with zeros, if it is not."""
        geometry, cut = self.param.geometry, self.param.dim or 0
        dim = self._gathered_dim(tensor.shape)
        rows, wanted = geometry.local_shape[cut], geometry.chunk_shape[cut]
        if isinstance(rows, torch.SymInt) or rows == wanted or not tensor.dim():
            return tensor
        if tensor.shape[dim] != rows:
            return tensor
        shape = [wanted if i == dim else size for i, size in enumerate(tensor.shape)]
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, rows).copy_(tensor)
        return padded

    def _gathered_dim(self, shape: torch.Size) -> int:
        """Returns the dim along which the ranks' gather inputs, of ``shape``, are concatenated."""
        same_ndim = len(shape) == len(self.param.geometry.compute_shape)
        return (self.param.dim or 0) if same_ndim else 0

    def make_outputs(self, n: int, device: torch.device) -> None:
        """Allocates the gathered tensors, concatenated from ``n`` ranks, each with storage of its own.

        They last as long as the model; only their storage is freed. Inputs with the parameter's number of
        dims are concatenated along the sharded dim, others along dim 0.
        """
        outputs = []
        for shape, dtype in self.kinds:
            shape = shape or torch.Size([1])
            dim = self._gathered_dim(shape)
            whole = [size * n if i == dim else size for i, size in enumerate(shape)]
            buffer = torch.empty(whole, dtype=dtype, device=device)
            rows = buffer
            if dim != 0:
                rows = torch.empty([n * shape[0], *shape[1:]], dtype=dtype, device=device)
                by_rank = buffer.unflatten(dim, (n, shape[dim])).movedim(dim, 0)
                self._transposed.append((by_rank, rows.view(n, *shape)))
            self.rows.append(rows.view(-1).view(torch.uint8).view(n, -1))
            self._note_storages([buffer, rows])
            # .data: a version counter of its own, as the computing parameters of a Bucket have.
            outputs.append(buffer.data)
        self._outputs = tuple(outputs)

    def rebuild(self) -> bool:
        """Calls ``fsdp_post_all_gather`` on the gathered tensors. The first call makes the unsharded
        parameter and returns True; later ones update it in place and return False."""
        for by_rank, rows in self._transposed:
            by_rank.copy_(rows)
        local, arguments = self.param.local, (self._outputs, self.metadata, self.dtype)
        if self.compute is None:
            result = local.fsdp_post_all_gather(*arguments)  # type: ignore[attr-defined]
            self.compute = self._make_compute(result)
            return True
        written = [self.compute, *self._inner]
        if isinstance(self.compute, DTensor):
            written.append(get_local_tensor(self.compute))
        with preserved_versions(written):
            local.fsdp_post_all_gather(*arguments, out=self.compute)  # type: ignore[attr-defined]
        return False

    def _make_compute(self, result: Any) -> nn.Parameter:
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[0], torch.Tensor)
            and _are_tensors(result[1])
        ):
            raise Parallel3dError(
                f"{self.label}: {_POST} returned {_describe(result)}; without out= it must return "
                "(unsharded tensor, tensors to free), where the latter is a tuple"
            )
        whole, inner = result
        for tensor in inner:
            if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, LocalTensor):
                raise Parallel3dError(
                    f"{self.label}: {_POST} returned a {type(tensor).__name__} among the tensors to free; "
                    "it has no memory of its own: list the tensors inside it"
                )
        self._inner = (*self._outputs, *inner)
        self._note_storages(inner)
        whole = self.param.as_compute(self._without_padding(whole))
        return nn.Parameter(whole, requires_grad=self.param.sharded.requires_grad)

    def _without_padding(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns ``whole`` without padding rows of the sharded dim; raises if another dim is wrong."""
        shape, dim = torch.Size(self.param.geometry.compute_shape), self.param.dim or 0
        if whole.shape == shape:
            return whole
        if whole.ndim != len(shape) or not all(
            size >= wanted if i == dim else size == wanted
            for i, (size, wanted) in enumerate(zip(whole.shape, shape, strict=True))
        ):
            raise Parallel3dError(
                f"{self.label}: {_POST} returned a tensor of shape {tuple(whole.shape)}; the unsharded "
                f"parameter has shape {tuple(shape)}, or more along dim {dim} if its inputs were padded"
            )
        if dim == 0:  # as in torch, so that subclasses need to support nothing else
            rows = torch.as_strided(whole, shape, _strides(shape), 0)
            if rows.shape == shape:  # torchao's int8 weights return themselves
                return rows
        try:
            return whole.narrow(dim, 0, shape[dim])
        except NotImplementedError as error:
            raise Parallel3dError(
                f"{self.label} of shape {tuple(shape)} is cut unevenly over the shard axis, and the padding "
                f"can't be taken from its gathered {type(whole).__name__}: {error}; give the layer a size "
                "that the axis divides, or leave it as it is"
            ) from error

    def _note_storages(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds the storages of ``tensors``, with their sizes, to those that resharding frees."""
        for tensor in tensors:
            for inner in inner_tensors(tensor):
                storage = inner.untyped_storage()
                if all(storage._cdata != known._cdata for known, _ in self._storages):
                    self._storages.append((storage, storage.nbytes()))

    def allocate(self) -> None:
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


class _NoRows:
    """Base class for float8 weights whose shard on this rank has no rows: their infinity norm is 0.

    torch raises for the infinity norm of an empty tensor. So torchao's
    ``precompute_float8_dynamic_scale_for_fsdp`` would raise on this rank only, and other ranks would hang.
    """

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._foreach_norm.Scalar:
            tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
            if order == math.inf:
                full = [tensor for tensor in tensors if tensor.numel()]
                norms = iter(func(full, *args[1:], **kwargs) if full else ())
                dtype = kwargs.get("dtype")
                return [
                    next(norms)
                    if tensor.numel()
                    else torch.zeros((), dtype=dtype or tensor.dtype, device=tensor.device)
                    for tensor in tensors
                ]
        base: Any = super()
        return map_tensors(_without_rows, base.__torch_dispatch__(func, types, args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the shard as a tensor of its original class, as this one can't be imported."""
        base: Any = type(self).__bases__[1]
        twin = base.__torch_dispatch__(torch.ops.aten.detach.default, (base,), (self,))
        vars(twin).update(vars(self))
        return twin.__reduce_ex__(protocol)


@cache
def _no_rows_class(base: type) -> type:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (_NoRows, base), names)


def _without_rows(local: torch.Tensor) -> torch.Tensor:
    """Returns ``local``; torchao's float8 weights without elements get the base class ``_NoRows``."""
    kind = type(local)
    is_float8 = kind.__module__ == "torchao.float8.fsdp_utils" and is_extended(local)
    if is_float8 and not issubclass(kind, _NoRows) and not local.numel():
        local.__class__ = _no_rows_class(kind)
    return local


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor subclass of the user's copied to an ordinary tensor; other tensors as they are."""
    if type(tensor) is torch.Tensor or isinstance(tensor, (DTensor, LocalTensor)):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor)


def _check_methods(label: str, local: torch.Tensor) -> int:
    """Returns the number of arguments that ``fsdp_pre_all_gather`` takes: 5, or 1 in its old form."""
    for name, other in ((_PRE, _POST), (_POST, _PRE)):
        if not hasattr(local, name):
            raise RefusedError(
                f"{label} has {other} but not {name}; an all-gather extension needs both methods"
            )
    signature = inspect.signature(local.fsdp_pre_all_gather)  # type: ignore[attr-defined]
    count = len(signature.parameters)
    if count not in (1, 5):
        raise RefusedError(
            f"{label}: {_PRE}{signature} takes {count} arguments; it must take (mesh, outer_size, "
            "outer_stride, module, mp_policy), or (mesh) alone"
        )
    return count


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _are_tensors(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in values)


def _show(kinds: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in kinds)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__


@dataclass(eq=False)
class ExtensionPrecision(Precision):
    """The dtypes and buffers of an ``ExtensionBucket``; ``extensions``: one ``Extension`` per parameter."""

    extensions: list[Extension] = field(default_factory=list)

    @property
    def rows(self) -> list[torch.Tensor]:
        """``Extension.rows`` of all parameters, one after another."""
        return [rows for extension in self.extensions for rows in extension.rows]


class ExtensionBucket(Bucket):
    """A bucket of parameters with all-gather extensions. S is the number of
    bytes that one rank gives to its all-gather, n the number of ranks.

    The first gather makes the unsharded parameters; until then ``compute_params`` are empty tensors.

    Attributes:
        flat: the first parameter's shard (there is no common buffer), for its dtype and device.
        precision: owns the buffer of the all-gather's result, ``gathered``, of (n * S,) bytes.
    """

    precision: ExtensionPrecision
    other_precision: ExtensionPrecision | None
    gathers_shards = False  # but bytes

    # -- storage -----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> None:
        """Sets each parameter's shard: cut from its initial value, or moved, undefined, to ``device``."""
        self._describe(device)
        self.build_unsharded()
        self.local_views = [self._place(param) for param in self.params]
        self.flat = self.local_views[0]
        self.versions = Versions(self)
        self.grads = _PlainGradients(self)
        self.post_forward_rank = 0

    def set_precision(self, *, own: bool) -> None:
        super().set_precision(own=own)
        self.precision = ExtensionPrecision(**vars(self.precision))

    def build_unsharded(self) -> None:
        mesh, now = _shard_mesh(self.unit, self.axes), self.precision
        now.extensions = []
        for param in self.params:
            local = param.local if param.initial is None else param.initial
            extension = Extension(self.unit, param, local, mesh, now.policy, now.compute_dtype)
            now.extensions.append(extension)
            if param.dim is None and self.axes.size(self.axes.shard) > 1:
                raise Parallel3dError(
                    f"{extension.label} of shape {tuple(param.global_shape)} can't be cut over the shard "
                    "axis; hold it as a plain parameter, or list it in ignored_params"
                )
        floating = now.compute_dtype.is_floating_point
        empty = torch.empty(0, dtype=now.compute_dtype, device=self.device)
        now.compute_params = [
            nn.Parameter(empty.clone(), p.requires_grad and floating) for p in self.params
        ]
        now.gathered = now.unsharded = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _place(self, param: ShardedParam) -> torch.Tensor:
        """Cuts or moves the shard of ``param``, and makes it the sharded Parameter's local tensor."""
        initial, param.initial = param.initial, None
        device = self.storage_device
        local = param.local if initial is None else _without_rows(self._shard_of(param, initial))
        if local.device != device:
            local = torch.empty_like(local, device=device) if initial is None else local.to(device)
        if self.pin and not local.is_pinned():
            local = local.pin_memory()
        param.place(local)
        for name in vars(initial) if initial is not None else ():
            # ``place`` copied the attributes of the user's Parameter, among them the subclass's own.
            vars(param.sharded).pop(name, None)
        return local

    def _shard_of(self, param: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of ``whole``, by operations that torch's engine uses on it too."""
        if self.num_shards == 1:
            return own_copy(whole)
        assert param.dim is not None
        coordinate = self.axes.coordinate(self.axes.shard)
        if isinstance(coordinate, torch.SymInt):
            rows = param.geometry.chunk_shape[param.dim]
            start = torch.sym_min(coordinate * rows, whole.shape[param.dim])
            part = whole.narrow(param.dim, start, param.geometry.local_shape[param.dim])
            return part.clone(memory_format=torch.contiguous_format)
        chunks = self._chunks(param, whole)
        if coordinate < len(chunks):
            return own_copy(chunks[coordinate])
        empty = list(whole.shape)
        empty[param.dim] = 0
        return whole.new_zeros(empty)

    def _chunks(self, param: ShardedParam, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns all ranks' chunks of ``whole``, so that all ranks raise if it can't be chunked."""
        assert param.dim is not None
        n, size = self.num_shards, whole.shape[param.dim]
        wanted = [length for i in range(n) if (length := chunk_length(size, n, i))]
        cause: Exception | None = None
        try:
            chunks = torch.chunk(whole, n, dim=param.dim)
        except Exception as error:
            cause, problem = error, f"raised {type(error).__name__}: {error}"
        else:
            rows = [chunk.shape[param.dim] for chunk in chunks]
            if rows == wanted:
                return chunks
            problem = f"made {rows} rows, where shards have {wanted}"
        raise Parallel3dError(
            f"parameter {param.name} of unit {self.unit}, a {type(whole).__name__} of shape "
            f"{tuple(whole.shape)}, can't be cut into {n} shards of dim {param.dim}: its torch.chunk "
            f"{problem}; give it another size or dim (shard_placement_fn), or list it in ignored_params"
        ) from cause

    def _take(self, locals_: list[torch.Tensor]) -> None:
        for param, old, local in zip(self.params, self.local_views, locals_, strict=True):
            if not is_extended(local):  # assigned as an ordinary tensor, say
                new = torch.empty_like(old, dtype=local.dtype, device=local.device)
                if not is_extended(new):
                    raise Parallel3dError(
                        f"a conversion turned parameter {param.name} of unit {self.unit}, a "
                        f"{type(old).__name__}, into a {type(new).__name__} without fsdp_pre_all_gather; "
                        "empty_like must keep the subclass"
                    )
                param.place(new.copy_(local))
        self.build(locals_[0].device)

    # -- unshard -----------------------------------------------------------------------------------

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns ([output], [input]) of the all-gather, both as bytes."""
        # Not inference mode: what the user's methods make there could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            kept = self.post_forward_shard
            inputs = self._inputs() if kept is None else [kept]
            if self.settings.gather_comm is None or self.shard_group is None:
                ON_DEMAND.allocate(self.precision.gathered)
                part = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
                return [self.precision.gathered], [part]
            self.custom_gathered = output = self.settings.gather_comm.allocate(
                (self.precision.gathered.numel(),), dtype=torch.uint8, device=self.device
            )
            size = sum(tensor.numel() for tensor in inputs)
            rank = self.axes.coordinate(self.axes.shard) if kept is None else self.post_forward_rank
            part = output.narrow(0, rank * size, size)
            torch.cat(inputs, out=part)
            return [output], [part]

    def _inputs(self) -> list[torch.Tensor]:
        by_param = []
        for extension, local in zip(self.precision.extensions, self.local_views, strict=True):
            if self.reads_host:
                local = local.to(self.device, non_blocking=self.pin)
            by_param.append(extension.inputs(local))
        if not self.precision.rows:
            sizes = [sum(t.numel() for t in inputs) for inputs in by_param]
            self._check_agreement(sizes)
            self._make_buffers(sum(sizes))
        return [tensor for inputs in by_param for tensor in inputs]

    def _check_agreement(self, sizes: list[int]) -> None:
        """Raises, on all ranks, if gather inputs (``sizes`` in bytes) differ by rank; a gather would hang."""
        uneven = not all(param.geometry.even for param in self.params)
        if not uneven or self.shard_group is None or ranks_are_simulated():
            return
        own = torch.tensor(sizes, device=self.device)
        gathered = own.repeat(self.num_shards)
        work = all_gather([gathered], [own], self.shard_group, unit=self.unit)
        if work is not None:
            work.wait()
        by_param = gathered.view(self.num_shards, -1).T.tolist()
        for extension, by_rank in zip(self.precision.extensions, by_param, strict=True):
            if len(set(by_rank)) > 1:
                param = extension.param
                raise RefusedError(
                    f"{extension.label} of shape {tuple(param.geometry.compute_shape)} is cut unevenly over "
                    f"{self.num_shards} ranks, and fsdp_pre_all_gather returned inputs of "
                    f"{', '.join(map(str, by_rank))} bytes on them; where a rank has fewer rows it must pad "
                    f"its inputs as if its shard had the shape {tuple(param.geometry.chunk_shape)}"
                )

    def _make_buffers(self, size: int) -> None:
        """Allocates the all-gather's output; ``size``: bytes of this rank's input."""
        for extension in self.precision.extensions:
            extension.make_outputs(self.num_shards, self.device)
        rows = self.precision.rows
        self.precision.unsharded = rows[0]
        if len(rows) == 1:
            self.precision.gathered = rows[0].view(-1)
        else:
            numel = self.num_shards * size
            self.precision.gathered = torch.empty(numel, dtype=torch.uint8, device=self.device)

    def copy_out(self) -> None:
        """Splits the gathered bytes by gather input, and makes or updates the unsharded parameters."""
        gathered, self.custom_gathered = self.custom_gathered, None
        extensions, rows = self.precision.extensions, self.precision.rows
        with torch.inference_mode(False), torch.no_grad():
            for extension in extensions:
                extension.allocate()
            if gathered is None and len(rows) > 1:
                gathered = self.precision.gathered
            if gathered is not None:
                whole = gathered.view(self.num_shards, -1)
                torch.split_with_sizes_copy(whole, [r.shape[1] for r in rows], dim=1, out=rows)
            made = [extension.rebuild() for extension in extensions]
        if any(made):
            self.precision.compute_params = [e.compute for e in extensions if e.compute is not None]
            if self.on_rebuilt is not None and (refresh := self.on_rebuilt()) is not None:
                refresh()

    def unshard_without_gather(self) -> None:
        """Where nothing is sharded: makes the unsharded parameters from this rank's gather inputs."""
        (output,), (part,) = self.gather_buffers()
        with torch.inference_mode(False), torch.no_grad():
            output.copy_(part)
        self.copy_out()
        self.free_gathered()

    def free_gathered(self) -> None:
        if len(self.precision.rows) > 1:  # one alone is gathered to its own memory
            ON_DEMAND.release(self.precision.gathered)
        self.free_post_forward_shard()

    def free_unsharded(self) -> None:
        if not self.settings.keep_storage:
            for extension in self.precision.extensions:
                extension.release()

    def free_other_precision(self) -> None:
        if self.other_precision is not None:
            for extension in self.other_precision.extensions:
                extension.release()

    def to_sharded_post_forward(self, ranks: int) -> None:
        """Keeps the gathered bytes of n / ``ranks`` ranks until backward; see ``PostForwardGroup``."""
        if self.shard_group is None or ranks >= self.num_shards:
            return
        mesh = post_forward_mesh(self.axes, ranks)
        self.gather_group, self.post_forward_rank = mesh.get_group(1), mesh.get_local_rank(1)
        count = self.num_shards // ranks
        first = self.post_forward_rank * count
        kept = [rows.narrow(0, first, count) for rows in self.precision.rows]
        with torch.inference_mode(False), torch.no_grad():
            self.post_forward_shard = torch.cat(kept, dim=1).view(-1)

    def free_post_forward_shard(self) -> None:
        self.post_forward_shard = None
        self.gather_group = self.shard_group


class _PlainGradients(BucketGradients):
    """Converts gradients, which may be of the parameters' subclass, to ordinary tensors."""

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        super().accept(index, as_plain(grad), sync=sync)


def _shard_mesh(unit: str, axes: DataAxes) -> DeviceMesh:
    """Returns the shard axis as a mesh of one axis, for ``fsdp_pre_all_gather``."""
    mesh = axes.mesh
    if axes.shard is not None and mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    if axes.shard is None or names is None:
        raise MeshError(
            f"unit {unit} has a parameter with fsdp_pre_all_gather, which needs the shard axis as a mesh, "
            f"and {mesh} has no axis of that name; give one, of size 1 if nothing is to be sharded"
        )
    return mesh[names[axes.shard]]


# Extensions that the user sets on local tensors of sharded Parameters after ``fully_shard``. torch looks at
# the local tensor in each gather, whatever its class; here it is looked at when the model first runs.


class LateExtensions(Option):
    """Before a root's first forward, moves parameters whose local tensor was given an extension after
    ``fully_shard`` to ExtensionBuckets."""

    @classmethod
    def of_root(cls, context: RunContext) -> LateExtensions:
        return cls()

    def before_root_forward(self, context: RunContext) -> None:
        context.options.remove(self)
        for unit in context.units:
            unit.group.rebuild(_with_late_extensions)


def _with_late_extensions(buckets: list[Bucket]) -> list[Bucket] | None:
    """Returns the buckets after ``LateExtensions`` has moved parameters; None if none is to be moved."""
    result: list[Bucket] = []
    for bucket in buckets:
        late = not isinstance(bucket, ExtensionBucket) and any(map(is_extended, bucket.local_views))
        result += _split_bucket(bucket) if late else [bucket]
    return None if result == buckets else result


def _split_bucket(bucket: Bucket) -> list[Bucket]:
    extended = [param for param in bucket.params if is_extended(param.local)]
    others = [param for param in bucket.params if not is_extended(param.local)]
    if type(bucket) is not Bucket or bucket.grads.input or bucket.grads.to_reduce():
        raise Parallel3dError(
            f"the local tensor of parameter {', '.join(p.name for p in extended)} of unit {bucket.unit} was "
            "given fsdp_pre_all_gather, which does not go with shard_optimizer_over_replicate, nor with "
            "unreduced gradients; give it before fully_shard"
        )
    new = ExtensionBucket(bucket.unit, extended, bucket.axes, bucket.given_policy, bucket.offload)
    new.settings = bucket.settings
    if not others:
        return [new]
    bucket.set_params(others)
    bucket._take([param.local for param in others])
    return [bucket, new]
