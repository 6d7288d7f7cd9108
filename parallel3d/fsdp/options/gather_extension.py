"""ExtensionBucket: the parameters of one unit that have their own way of being gathered.

They live outside contiguous buffers: each shard at rest is a tensor of the user's subclass. Their gather
inputs, whatever their dtypes, are packed as bytes and travel in one all-gather; a lone input goes from
and to its own memory, without a copy. Gradients are ordinary: they share one reduce input as in any Bucket.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import preserved_versions
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.simulated import LocalTensor, inner_tensors, ranks_are_simulated
from parallel3d._util.storage import own_copy
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.bucket import Bucket, Versions, allocate, release
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.context import RootOption, RunContext, root_options
from parallel3d.fsdp.gradients import GradientSlots
from parallel3d.fsdp.param import ShardedParam, count_zero_copy, is_small
from parallel3d.fsdp.placement import DataAxes, chunk_length, post_forward_mesh

# Extension: one parameter that has its own way of being gathered, by torch's all-gather extension
# protocol.
#
# Such a parameter is of a tensor subclass with the methods ``fsdp_pre_all_gather``, which says
# what to gather instead of the shard (a quantised copy and its scale, say), and
# ``fsdp_post_all_gather``, which makes the unsharded parameter of what was gathered. The shard at
# rest is of the subclass too.

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has one of the protocol's methods; ``Extension`` raises if it lacks the other."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST)


class Extension:
    """One parameter that torch's all-gather extension protocol gathers. n is the size of the shard axis.

    Attributes:
        param: the parameter's layouts.
        kinds: (shape, dtype) of each gather input; empty before the first gather.
        metadata: what came with the gather inputs.
        rows: for each input, the bytes of its output, (n, bytes): row i is what shard rank i gives.
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
        """``local``: the shard, or what it will be cut from. ``dtype``: what to compute in."""
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
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inner: tuple[torch.Tensor, ...] = ()
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    # -- before the gather -------------------------------------------------------------------------

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """What to gather for the shard ``local``, as flat bytes."""
        if self.arguments == 1:
            given = local.fsdp_pre_all_gather(self.mesh)  # type: ignore[attr-defined]
        else:
            shape = torch.Size(self.param.compute_shape)
            given = local.fsdp_pre_all_gather(  # type: ignore[attr-defined]
                self.mesh, shape, _strides(shape), self.param.module(), self.policy
            )
        inputs, self.metadata = self._split_result(given)
        kinds = [(t.shape, t.dtype) for t in inputs]
        if not self.kinds:
            self.kinds = kinds
        elif kinds != self.kinds:
            raise Parallel3dError(
                f"{self.label}: {_PRE} returned tensors of {_show(kinds)}, and of {_show(self.kinds)} "
                "the first time; it must return the same shapes and dtypes each time"
            )
        return [as_plain(t).reshape(-1).view(torch.uint8) for t in inputs]

    def _split_result(self, given: Any) -> tuple[Sequence[torch.Tensor], Any]:
        if isinstance(given, tuple) and len(given) == 2:
            inputs, metadata = given
            if isinstance(inputs, (tuple, list)) and inputs and _all_tensors(inputs):
                return inputs, metadata
        raise Parallel3dError(
            f"{self.label}: {_PRE} returned {_describe(given)}; it must return (inputs, metadata), where "
            "inputs is a tuple of at least one tensor"
        )

    # -- after the gather --------------------------------------------------------------------------

    def make_outputs(self, n: int, device: torch.device) -> None:
        """Buffers for the gathered inputs, each with storage of its own, kept for the model's life.

        An input with the parameter's number of dims is put together along the sharded dim, any other along
        its first.
        """
        outputs = []
        for shape, dtype in self.kinds:
            shape = shape or torch.Size([1])
            same = len(shape) == len(self.param.compute_shape)
            dim = (self.param.dim or 0) if same else 0
            whole = [size * n if i == dim else size for i, size in enumerate(shape)]
            buffer = torch.empty(whole, dtype=dtype, device=device)
            rows = buffer
            if dim != 0:
                rows = torch.empty([n * shape[0], *shape[1:]], dtype=dtype, device=device)
                by_rank = buffer.unflatten(dim, (n, shape[dim])).movedim(dim, 0)
                self._scattered.append((by_rank, rows.view(n, *shape)))
            self.rows.append(rows.view(-1).view(torch.uint8).view(n, -1))
            self._keep([buffer, rows])
            # .data: a version counter of its own, as the computing parameters of a Bucket have.
            outputs.append(buffer.data)
        self._outputs = tuple(outputs)

    def rebuild(self) -> bool:
        """Makes the unsharded parameter of the gathered ``rows``, or renews it.

        Returns:
            Whether it was made, and not renewed.
        """
        for by_rank, rows in self._scattered:
            by_rank.copy_(rows)
        local, given = self.param.local, (self._outputs, self.metadata, self.dtype)
        if self.compute is None:
            result = local.fsdp_post_all_gather(*given)  # type: ignore[attr-defined]
            self.compute = self._make_compute(result)
            return True
        written = [self.compute, *self._inner]
        if isinstance(self.compute, DTensor):
            written.append(get_local_tensor(self.compute))
        with preserved_versions(written):
            local.fsdp_post_all_gather(*given, out=self.compute)  # type: ignore[attr-defined]
        return False

    def _make_compute(self, result: Any) -> nn.Parameter:
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[0], torch.Tensor)
            and isinstance(result[1], (tuple, list))
            and _all_tensors(result[1])
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
        self._keep(inner)
        whole = self.param.as_compute(self._trimmed(whole))
        return nn.Parameter(whole, requires_grad=self.param.sharded.requires_grad)

    def _trimmed(self, whole: torch.Tensor) -> torch.Tensor:
        """``whole`` without the rows that pad the sharded dim."""
        shape = torch.Size(self.param.compute_shape)
        dim = self.param.dim or 0
        if whole.shape == shape:
            return whole
        if (
            whole.ndim != len(shape)
            or whole.shape[dim] < shape[dim]
            or any(
                a != b for i, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if i != dim
            )
        ):
            raise Parallel3dError(
                f"{self.label}: {_POST} returned a tensor of shape {tuple(whole.shape)}; the unsharded "
                f"parameter has shape {tuple(shape)}, or more along dim {dim} if its inputs were padded"
            )
        if dim == 0:  # as torch does, so that a subclass written for it has what we ask of it
            return torch.as_strided(whole, shape, _strides(shape), 0)
        return whole.narrow(dim, 0, shape[dim])

    # -- memory ------------------------------------------------------------------------------------

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes storages to free at reshard, and their sizes: several tensors may share one."""
        for tensor in tensors:
            for inner in inner_tensors(tensor):
                storage = inner.untyped_storage()
                if all(storage._cdata != known._cdata for known, _ in self._storages):
                    self._storages.append((storage, storage.nbytes()))

    def allocate(self) -> None:
        """Gives outputs and inner tensors storage again, with undefined content."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def release(self) -> None:
        """Frees them."""
        for storage, _ in self._storages:
            storage.resize_(0)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of an instance of a user's subclass as an ordinary tensor; an ordinary one itself."""
    if type(tensor) is torch.Tensor or isinstance(tensor, (DTensor, LocalTensor)):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor)


def _check_methods(label: str, local: torch.Tensor) -> int:
    """Number of arguments ``fsdp_pre_all_gather`` takes: 1 in its first form, 5 now."""
    for name, other in ((_PRE, _POST), (_POST, _PRE)):
        if not hasattr(local, name):
            raise Parallel3dError(
                f"{label} has {other} but not {name}; an all-gather extension needs both methods"
            )
    signature = inspect.signature(local.fsdp_pre_all_gather)  # type: ignore[attr-defined]
    count = len(signature.parameters)
    if count not in (1, 5):
        raise Parallel3dError(
            f"{label}: {_PRE}{signature} takes {count} arguments; it must take (mesh, outer_size, "
            "outer_stride, module, mp_policy), or (mesh) alone"
        )
    return count


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _all_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _show(kinds: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in kinds)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__


class ExtensionBucket(Bucket):
    """See the module's docstring. S is the bytes of all gather inputs of one rank.

    The unsharded parameters are what the user's methods make at the first gather; until then
    ``compute_params`` holds empty ones.

    Attributes:
        flat: the first shard, for its dtype and device.
        gathered: (n * S,) bytes.
        rows: for each gather input its output's bytes, (n, bytes).
    """

    joinable = False  # it gathers bytes of its own making
    packs_all = True
    by_precision = (
        "policy",
        "compute_dtype",
        "reduce_dtype",
        "sum_dtype",
        "grad_dtype",
        "extensions",
        "compute_params",
        "gathered",
        "unsharded",
        "rows",
        "zero_copy",
    )

    # -- storage -----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> None:
        """Takes each parameter's shard, or moves it to ``device`` with undefined content."""
        self._describe(device)
        self._make_extensions()
        self.local_views = [self._place(param) for param in self.params]
        self.flat = self.local_views[0]
        self.versions = Versions(self)
        self.has_own_unsharded = True
        self._make_unsharded()
        self.grads = _PlainGradients(self)
        self.part = None
        self.rank_in_small = 0
        self.gather_group = self.shard_group
        self.custom_gathered = None

    def build_unsharded(self) -> None:
        """As a Bucket does."""
        self._make_extensions()
        self._make_unsharded()

    def _make_unsharded(self) -> None:
        self.compute_params = [
            nn.Parameter(
                torch.empty(0, dtype=self.compute_dtype, device=self.device),
                requires_grad=p.requires_grad and self.compute_dtype.is_floating_point,
            )
            for p in self.params
        ]
        self.gathered = self.unsharded = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.rows: list[torch.Tensor] = []
        self.zero_copy = False

    def _make_extensions(self) -> None:
        mesh = _shard_mesh(self.unit, self.axes)
        self.extensions = []
        for param in self.params:
            local = param.local if param.initial is None else param.initial
            extension = Extension(self.unit, param, local, mesh, self.policy, self.compute_dtype)
            self.extensions.append(extension)
            if param.dim is None and self.axes.size(self.axes.shard) > 1:
                raise Parallel3dError(
                    f"{extension.label} of shape {tuple(param.global_shape)} can't be cut over the shard "
                    "axis; hold it as a plain parameter, or list it in ignored_params"
                )

    def _place(self, param: ShardedParam) -> torch.Tensor:
        initial, param.initial = param.initial, None
        if initial is None:
            local = param.local
            if local.device != self.storage_device:
                local = torch.empty_like(local, device=self.storage_device)
            local = self._pinned(local)
            param.place(local)
            return local
        local = self._shard_of(param, initial)
        if local.device != self.storage_device:
            local = local.to(self.storage_device)
        local = self._pinned(local)
        param.place(local)
        # What the subclass keeps on its instances came along with the user's own attributes.
        for name in vars(initial):
            vars(param.sharded).pop(name, None)
        return local

    def _pinned(self, local: torch.Tensor) -> torch.Tensor:
        return local.pin_memory() if self.pin and not local.is_pinned() else local

    def _shard_of(self, param: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard, by the operations that torch's engine asks of a subclass."""
        if self.num_shards == 1:
            return own_copy(whole)
        assert param.dim is not None
        coordinate = self.axes.coordinate(self.axes.shard)
        if isinstance(coordinate, torch.SymInt):
            rows = param.chunk_shape[param.dim]
            start = torch.sym_min(coordinate * rows, whole.shape[param.dim])
            part = whole.narrow(param.dim, start, param.local_shape[param.dim])
            return part.clone(memory_format=torch.contiguous_format)
        chunks = self._chunks(param, whole)
        if coordinate < len(chunks):
            return own_copy(chunks[coordinate])
        empty = list(whole.shape)
        empty[param.dim] = 0
        return whole.new_zeros(empty)

    def _chunks(self, param: ShardedParam, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """``whole`` cut along the sharded dim; by all ranks alike, so that all find what can't be."""
        assert param.dim is not None
        size = whole.shape[param.dim]
        wanted = [
            n for n in (chunk_length(size, self.num_shards, i) for i in range(self.num_shards)) if n
        ]
        what = (
            f"parameter {param.name} of unit {self.unit}, a {type(whole).__name__} of shape "
            f"{tuple(whole.shape)}, can't be cut into {self.num_shards} shards of dim {param.dim}"
        )
        remedy = (
            f"give it a size that its kind can cut over {self.num_shards} ranks, another dim by "
            "shard_placement_fn, or list it in ignored_params"
        )
        try:
            chunks = torch.chunk(whole, self.num_shards, dim=param.dim)
        except Exception as error:
            raise Parallel3dError(
                f"{what}: its torch.chunk raised {type(error).__name__}: {error}; {remedy}"
            ) from error
        rows = [chunk.shape[param.dim] for chunk in chunks]
        if rows != wanted:
            raise Parallel3dError(
                f"{what}: its torch.chunk made {rows} rows, where shards have {wanted}; {remedy}"
            )
        return chunks

    def _take(self, locals_: list[torch.Tensor]) -> None:
        for param, old, local in zip(self.params, self.local_views, locals_, strict=True):
            if not is_extended(local):  # assigned as an ordinary tensor, say
                param.place(self._extended(param, old, local))
        self.build(locals_[0].device)

    def _extended(
        self, param: ShardedParam, old: torch.Tensor, local: torch.Tensor
    ) -> torch.Tensor:
        """The values of ``local`` in a tensor like ``old``."""
        new = torch.empty_like(old, dtype=local.dtype, device=local.device)
        if not is_extended(new):
            raise Parallel3dError(
                f"a conversion turned parameter {param.name} of unit {self.unit}, a {type(old).__name__}, "
                f"into a {type(new).__name__} without fsdp_pre_all_gather; the subclass must keep its type "
                "in empty_like"
            )
        return new.copy_(local)

    # -- unshard -----------------------------------------------------------------------------------

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns (output, input) of the all-gather, both bytes, as lists of one."""
        with _unrecorded():
            inputs = [self.part] if self.part is not None else self._inputs()
            if self.gather_comm is None or self.shard_group is None:
                allocate(self.gathered)
                return [self.gathered], [inputs[0] if len(inputs) == 1 else torch.cat(inputs)]
            self.custom_gathered = output = self.gather_comm.allocate(
                (self.gathered.numel(),), dtype=torch.uint8, device=self.device
            )
            size = sum(part.numel() for part in inputs)
            rank = self.axes.coordinate(self.axes.shard)
            rank = rank if self.part is None else self.rank_in_small
            part = output.narrow(0, rank * size, size)
            torch.cat(inputs, out=part)
            return [output], [part]

    def _inputs(self) -> list[torch.Tensor]:
        by_param = []
        for extension, local in zip(self.extensions, self.local_views, strict=True):
            if self.reads_host:
                local = local.to(self.device, non_blocking=self.pin)
            by_param.append(extension.inputs(local))
        flat = [tensor for inputs in by_param for tensor in inputs]
        if not self.rows:
            self._check_agreement([sum(t.numel() for t in inputs) for inputs in by_param])
            self._make_buffers(flat)
        return flat

    def _check_agreement(self, sizes: list[int]) -> None:
        """Once, and only where ranks have shards of different sizes: an all-gather of S from each rank.

        torch raises on the rank that is wrong, and the others hang.
        """
        uneven = not all(param.even for param in self.params)
        if not uneven or self.shard_group is None or ranks_are_simulated():
            return
        mine = torch.tensor(sizes, device=self.device)
        everyone = mine.repeat(self.num_shards)
        work = all_gather(everyone, mine, self.shard_group, unit=self.unit)
        if work is not None:
            work.wait()
        by_param = everyone.view(self.num_shards, -1).T.tolist()
        for extension, given in zip(self.extensions, by_param, strict=True):
            if len(set(given)) > 1:
                param = extension.param
                raise Parallel3dError(
                    f"{extension.label} of shape {tuple(param.compute_shape)} is cut unevenly over "
                    f"{self.num_shards} ranks, and fsdp_pre_all_gather returned inputs of "
                    f"{', '.join(map(str, given))} bytes on them; where a rank has fewer rows it must pad "
                    f"its inputs as if its shard had the shape {tuple(param.chunk_shape)}"
                )

    def _make_buffers(self, flat: list[torch.Tensor]) -> None:
        for extension in self.extensions:
            extension.make_outputs(self.num_shards, self.device)
        self.rows = [rows for extension in self.extensions for rows in extension.rows]
        self.zero_copy = len(self.rows) == 1
        if self.zero_copy:
            self.gathered = self.rows[0].view(-1)
        else:
            size = self.num_shards * sum(tensor.numel() for tensor in flat)
            self.gathered = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.unsharded = self.rows[0]

    def copy_out(self) -> None:
        """After the all-gather: bytes into the outputs, and of these the unsharded parameters."""
        gathered, self.custom_gathered = self.custom_gathered, None
        with _unrecorded():
            for extension in self.extensions:
                extension.allocate()
            if gathered is None and not self.zero_copy:
                gathered = self.gathered
            if gathered is not None:
                sizes = [rows.shape[1] for rows in self.rows]
                whole = gathered.view(self.num_shards, -1)
                torch.split_with_sizes_copy(whole, sizes, dim=1, out=self.rows)
            made = [extension.rebuild() for extension in self.extensions]
        if any(made):
            self.compute_params = [e.compute for e in self.extensions if e.compute is not None]
            refresh = None if self.made is None else self.made()
            if refresh is not None:
                refresh()

    def cast_whole(self) -> None:
        """Unshard without a shard axis: as if gathered from this rank alone."""
        (output,), (part,) = self.gather_buffers()
        with _unrecorded():
            output.copy_(part)
        self.copy_out()
        self.free_gathered()

    def free_gathered(self) -> None:
        """After ``copy_out`` has run on the device."""
        if not self.zero_copy:
            release(self.gathered)
        self.drop_part()

    def free_unsharded(self) -> None:
        """Frees what the unsharded parameters live in, unless the user keeps it."""
        if not self.keep_storage:
            for extension in self.extensions:
                extension.release()

    def free_other_precision(self) -> None:
        """As a Bucket does."""
        if self.other_precision is not None:
            for extension in self.other_precision["extensions"]:
                extension.release()

    # -- between forward and backward ----------------------------------------------------------------

    def keep_part(self, ranks: int) -> None:
        """Keeps the gathered bytes of n / ``ranks`` ranks, as a Bucket does its parameters'."""
        if self.shard_group is None or ranks >= self.num_shards:
            return
        mesh = post_forward_mesh(self.axes, ranks)
        self.gather_group, self.rank_in_small = mesh.get_group(1), mesh.get_local_rank(1)
        count = self.num_shards // ranks
        start = self.rank_in_small * count
        kept = [rows.narrow(0, start, count) for rows in self.rows]
        with _unrecorded():
            self.part = torch.cat(kept, dim=1).view(-1)

    def drop_part(self) -> None:
        """Lets the next all-gather be of the shards again."""
        self.part = None
        self.gather_group = self.shard_group


class _PlainGradients(GradientSlots):
    """A gradient may be of a subclass, as the unsharded parameter is."""

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        super().accept(index, as_plain(grad), sync=sync)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """The user's methods run outside autograd; and tensors made in inference mode couldn't be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _shard_mesh(unit: str, axes: DataAxes) -> DeviceMesh:
    """The shard axis as a mesh of one axis, which ``fsdp_pre_all_gather`` is given."""
    mesh = axes.mesh
    if axes.shard is not None and mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    if axes.shard is None or names is None:
        raise MeshError(
            f"unit {unit} has a parameter with fsdp_pre_all_gather, which needs the shard axis as a mesh, "
            f"and {mesh} has no axis of that name; give one, of size 1 if nothing is to be sharded: "
            "parallel3d.build_mesh(MeshLayout(replicate=..., shard=1))"
        )
    return mesh[names[axes.shard]]


# All-gather extensions that the user sets on local tensors of sharded Parameters.
#
# torch asks the local tensor itself, whatever its class. Here it is asked when the model first
# runs.

_SETTINGS = (
    "divide_factor",
    "reduce_unused",
    "on_result",
    "reducer",
    "gather_comm",
    "scatter_group",
    "max_inputs",
    "force_sum",
    "on_reduced",
    "keep_storage",
)


class LateExtensions(RootOption):
    """Before a root runs for the first time: looks for extensions on local tensors."""

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)

    def before_forward(self, units: Sequence[Any]) -> Sequence[Any]:
        """Looks for them."""
        context = self._context()
        assert context is not None
        context.options.remove(self)
        for unit in context.units:
            unit.group.rebuild(with_late_extensions)
        return units


root_options.append(LateExtensions)


def with_late_extensions(buckets: list[Bucket]) -> list[Bucket] | None:
    """``buckets``, whose extended parameters have gone over to buckets of their own; None if there are none.

    Raises:
        Parallel3dError: one of the methods alone, or in a bucket that can't be parted.
    """
    found = [
        bucket
        for bucket in buckets
        if not isinstance(bucket, ExtensionBucket) and any(map(is_extended, bucket.local_views))
    ]
    if not found:
        return None
    result = []
    for bucket in buckets:
        result += _parted(bucket) if bucket in found else [bucket]
    return result


def _parted(bucket: Bucket) -> list[Bucket]:
    if type(bucket) is not Bucket or bucket.grads.is_busy:
        names = [p.name for p in bucket.params if is_extended(p.local)]
        raise Parallel3dError(
            f"the local tensor of parameter {', '.join(names)} of unit {bucket.unit} was given "
            "fsdp_pre_all_gather, which does not go with shard_optimizer_over_replicate, nor with gradients "
            "that wait; give it before the first forward, or before fully_shard"
        )
    extended = [param for param in bucket.params if is_extended(param.local)]
    rest = [param for param in bucket.params if not is_extended(param.local)]
    new = ExtensionBucket(bucket.unit, extended, bucket.axes, bucket.given_policy, bucket.offload)
    for name in _SETTINGS:
        setattr(new, name, getattr(bucket, name))
    if not rest:
        return [new]
    device_type = bucket.axes.mesh.device_type
    locals_ = [param.local for param in rest]
    bucket.params = rest
    if bucket.shard_group is not None:
        bucket.zero_copy = count_zero_copy(rest, device_type)
    bucket.small_grads = [is_small(param, device_type) for param in rest]
    bucket._take(locals_)
    return [bucket, new]
