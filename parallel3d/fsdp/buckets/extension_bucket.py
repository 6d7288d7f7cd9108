"""ExtensionBucket: the parameters of one unit that have their own way of being gathered.

They live outside contiguous buffers: each shard at rest is a tensor of the user's subclass. Their gather
inputs, whatever their dtypes, are packed as bytes and travel in one all-gather; a lone input goes from
and to its own memory, without a copy. Gradients are ordinary: they share one reduce input as in any Bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._compat_simulated import ranks_are_simulated
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension import Extension, as_plain, is_extended
from parallel3d.fsdp.buckets.grads import GradientSlots
from parallel3d.fsdp.buckets.small_world import small_mesh
from parallel3d.fsdp.buckets.versions import Versions
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placing.axes import DataAxes
from parallel3d.fsdp.placing.placement import chunk_length
from parallel3d.fsdp.storage import allocate, own_copy, release

__all__ = ["ExtensionBucket"]


class ExtensionBucket(Bucket):
    """See the module's docstring. S is the bytes of all gather inputs of one rank.

    The unsharded parameters are what the user's methods make at the first gather; until then
    ``compute_params`` holds empty ones.

    Attributes:
        flat: the first shard, for its dtype and device.
        gathered: (n * S,) bytes.
        rows: for each gather input its output's bytes, (n, bytes).
        made: returns what to call when the unsharded parameters have been made.
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
        "in_place",
    )
    made: Callable[[], Callable[[], None] | None] | None = None

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
        self.in_place = False

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
            if local.device != self.home:
                local = torch.empty_like(local, device=self.home)
            local = self._pinned(local)
            param.place(local)
            return local
        local = self._shard_of(param, initial)
        if local.device != self.home:
            local = local.to(self.home)
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
        if self.parts == 1:
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
        wanted = [n for n in (chunk_length(size, self.parts, i) for i in range(self.parts)) if n]
        what = (
            f"parameter {param.name} of unit {self.unit}, a {type(whole).__name__} of shape "
            f"{tuple(whole.shape)}, can't be cut into {self.parts} shards of dim {param.dim}"
        )
        remedy = (
            f"give it a size that its kind can cut over {self.parts} ranks, another dim by "
            "shard_placement_fn, or list it in ignored_params"
        )
        try:
            chunks = torch.chunk(whole, self.parts, dim=param.dim)
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
            if self.offloaded:
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
        everyone = mine.repeat(self.parts)
        work = all_gather(everyone, mine, self.shard_group, unit=self.unit)
        if work is not None:
            work.wait()
        by_param = everyone.view(self.parts, -1).T.tolist()
        for extension, given in zip(self.extensions, by_param, strict=True):
            if len(set(given)) > 1:
                param = extension.param
                raise Parallel3dError(
                    f"{extension.label} of shape {tuple(param.compute_shape)} is cut unevenly over "
                    f"{self.parts} ranks, and fsdp_pre_all_gather returned inputs of "
                    f"{', '.join(map(str, given))} bytes on them; where a rank has fewer rows it must pad "
                    f"its inputs as if its shard had the shape {tuple(param.chunk_shape)}"
                )

    def _make_buffers(self, flat: list[torch.Tensor]) -> None:
        for extension in self.extensions:
            extension.make_outputs(self.parts, self.device)
        self.rows = [rows for extension in self.extensions for rows in extension.rows]
        self.in_place = len(self.rows) == 1
        if self.in_place:
            self.gathered = self.rows[0].view(-1)
        else:
            size = self.parts * sum(tensor.numel() for tensor in flat)
            self.gathered = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.unsharded = self.rows[0]

    def copy_out(self) -> None:
        """After the all-gather: bytes into the outputs, and of these the unsharded parameters."""
        gathered, self.custom_gathered = self.custom_gathered, None
        with _unrecorded():
            for extension in self.extensions:
                extension.allocate()
            if gathered is None and not self.in_place:
                gathered = self.gathered
            if gathered is not None:
                sizes = [rows.shape[1] for rows in self.rows]
                whole = gathered.view(self.parts, -1)
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
        if not self.in_place:
            release(self.gathered)

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
        if self.shard_group is None or ranks >= self.parts:
            return
        mesh = small_mesh(self.axes, ranks)
        self.gather_group, self.rank_in_small = mesh.get_group(1), mesh.get_local_rank(1)
        count = self.parts // ranks
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
