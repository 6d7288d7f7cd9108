"""check_same_batch: whether the ranks of each tp group, or cp group, got the same batch.

Ranks of a tp group share each layer's computation, those of a cp group each sequence, so they must read the
same samples. If they don't, nothing raises: the loss is that of a mixture of batches, and decreases more
slowly. The check compares inputs before every forward. It uses only collectives on tensors, so that it works
on simulated ranks too. ``parallelize`` checks the first training forward over tp, and ``shard_batch`` the
first batch over cp; both compare a digest first, and the inputs only if it differs.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.autograd import untraced
from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.simulated import inner_tensors, ranks_are_simulated
from parallel3d._util.arguments import as_bool
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.errors import AgreementError, MeshError, Parallel3dError, StateError
from parallel3d.mesh.joined import kept_with
from parallel3d.mesh.store import others

_HANDLE = "_parallel3d_same_batch"
_DIMS = 8  # dims of a tensor that are compared
_NEVER = torch.iinfo(torch.int64).max  # the rank in the record of a group without a difference
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def check_same_batch(model: nn.Module, mesh: DeviceMesh, enabled: bool = True) -> None:
    """Compares the input tensors of ``model`` over each tp group before each forward, for debugging.

    It costs a broadcast of the inputs over tp, a few small collectives and a wait for the device. Values must
    be equal; nan equals nan. DTensors, whose placements say what ranks hold, and sparse and nested tensors
    are not compared.

    Args:
        model: a module that all ranks of ``mesh`` call with the same kinds of arguments.
        mesh: a mesh; without an axis ``tp`` of more than one rank nothing is compared.
        enabled: whether to compare; False removes the check.

    Raises:
        Parallel3dError, MeshError: no module, or no mesh. Later, in the forward, AgreementError on every rank
            of ``mesh``, naming the first rank whose batch differs, and the first input and element that do.
    """
    enabled = as_bool("enabled", enabled)
    if not isinstance(model, nn.Module):
        raise Parallel3dError(
            f"check_same_batch was given {type(model).__name__}; it needs a module"
        )
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {mesh!r}; it must be a DeviceMesh, as parallel3d.build_mesh makes"
        )
    handle: RemovableHandle | None = vars(model).pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
    names = mesh.mesh_dim_names or ()
    if enabled and "tp" in names and mesh.size(names.index("tp")) > 1:
        # Before other hooks: an error must be raised while the sharding engine is at rest.
        hook = _BatchCheck(mesh, names.index("tp"))
        handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        vars(model)[_HANDLE] = handle


def check_first_batch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compares the inputs of ``model`` over each tp group once, before its first forward in training.

    It compares digests: a hash of integer tensors, and the norm and direction of others, so that inputs which
    differ by rounding only (those of pipeline stages) count as equal. This takes one all-gather of eight
    numbers over tp, and of one over each other axis. Nothing happens where there are no other ranks, as in a
    dry run.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names and mesh.size(names.index("tp")) > 1:
        hook = _FirstForward(mesh, names.index("tp"))
        hook.handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def check_first_cut(mesh: DeviceMesh, cp: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Compares a batch, which ``shard_batch`` is about to cut, over the axis named ``cp``, by digests as in
    ``check_first_batch``; once for each mesh."""
    axis = (mesh.mesh_dim_names or ()).index(cp)

    def compare() -> bool:
        _FirstCheck(mesh, axis).compare(_named_inputs(args, kwargs))
        return True

    if others() is not None or ranks_are_simulated():
        kept_with(mesh, ("first batch", cp), compare)


class _BatchCheck:
    """The forward pre-hook of ``check_same_batch``."""

    more = ""  # the end of its error

    def __init__(self, mesh: DeviceMesh, axis: int) -> None:
        self.mesh = mesh
        self.axis = axis
        self.name = (mesh.mesh_dim_names or ())[axis]
        self.device = torch.device(mesh.device_type)

    def __deepcopy__(self, memo: dict) -> _BatchCheck:
        return self  # a mesh can't be copied

    @untraced
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.compare(_named_inputs(args, kwargs))

    @torch.no_grad()
    def compare(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Raises AgreementError on every rank of the mesh if the tensors differ between ranks of one group of
        the axis. ``named``: (name for messages, tensor)."""
        if found := self.first_of_all(self.difference(self.filled(len(named)).view(1))):
            rank, _, *counts = found
            self.fail(rank, "the number of input tensors", *counts)
        if not named:
            return
        kinds = [self.kind(tensor) for _, tensor in named]
        if found := self.first_of_all(self.difference(torch.cat(kinds))):
            rank, place, got, want = found
            index, number = divmod(place, 2 + _DIMS)
            of = f"of {named[index][0]}"
            if number == 0:
                self.fail(rank, f"the dtype {of}", _DTYPES[got], _DTYPES[want])
            what = "the number of dims" if number == 1 else f"the size of dim {number - 2}"
            self.fail(rank, f"{what} {of}", got, want)
        record: torch.Tensor | None = None
        for index, (_, tensor) in enumerate(named):
            here = self.difference(
                _bits(tensor.to(self.device)), self.filled(index).view(1), kinds[index]
            )
            record = here if record is None else torch.where(record[0] == _NEVER, here, record)
        if record is not None and (found := self.first_of_all(record)):
            rank, element, got, want, index, number, dims, *sizes = found
            dtype = _DTYPES[number]
            at: list[int] = []
            element //= 2 if dtype.is_complex else 1  # of two numbers each
            for size in reversed(sizes[:dims]):
                element, place = divmod(element, max(size, 1))
                at.insert(0, place)
            where = f"{named[index][0]}, element {at}" if dims else named[index][0]
            self.fail(rank, where, _value(got, dtype), _value(want, dtype))

    def filled(self, value: int) -> torch.Tensor:
        """Returns an int64 scalar tensor with ``value``, which may differ by simulated rank."""
        return torch.full((), value, dtype=torch.int64, device=self.device)

    def kind(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an int64 tensor: the dtype's number, the number of dims, the sizes."""
        sizes = [*tensor.shape[:_DIMS], *([-1] * (_DIMS - tensor.dim()))]
        numbers = [_DTYPES.index(tensor.dtype), tensor.dim(), *sizes]
        return torch.stack([self.filled(number) for number in numbers])

    def difference(self, mine: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Compares ``mine`` (int64) with that of the group's first rank, and returns an int64 record of the
        first element that differs: global rank, index, both values, then ``more``; all ``_NEVER`` if they are
        equal."""
        mine = torch.cat([mine, mine.new_zeros(1)])  # an input may have no elements
        first = mine.clone()
        dist.broadcast(first, group_src=0, group=self.mesh.get_group(self.axis))
        differs = mine != first
        at = differs.to(torch.int64).argmax().view(1)
        rank = self.mesh.mesh.to(self.device, torch.int64)
        for axis in range(self.mesh.ndim):
            rank = rank.select(0, self.mesh.get_local_rank(axis))
        values = [x.index_select(0, at) for x in (mine, first)]
        record = torch.cat([rank.view(1), at, *values, *more])
        return torch.where(differs.any(), record, torch.full_like(record, _NEVER))

    def rows(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """All-gathers a flat tensor over the mesh axis ``axis``, as (ranks, numel)."""
        size = self.mesh.size(axis)
        rows = tensor.new_empty(size * tensor.numel())
        all_gather_single(rows, tensor.contiguous(), group=self.mesh.get_group(axis))
        return rows.view(size, -1)

    def first_of_all(self, record: torch.Tensor) -> list[int]:
        """Exchanges the ranks' ``record``s, each from ``difference``. Returns on all ranks that of the lowest
        rank that differs; [] if none does."""
        for axis in range(self.mesh.ndim):
            if self.mesh.size(axis) > 1:
                rows = self.rows(record, axis)
                record = rows.index_select(0, rows[:, 0].argmin().view(1))[0]
        numbers = next(inner_tensors(record)).tolist()  # simulated ranks all have it
        return [] if numbers[0] == _NEVER else numbers

    def fail(self, rank: int, what: str, got: object, want: object) -> NoReturn:
        """Raises AgreementError: ``what`` is ``got`` on ``rank``, ``want`` on its group's first rank."""
        grid = next(inner_tensors(self.mesh.mesh))
        group = grid.movedim(self.axis, -1).reshape(-1, grid.shape[self.axis])
        first = int(group[(group == rank).any(dim=1)][0, 0])
        raise AgreementError(
            f"rank {rank} has another batch than rank {first}, the first of its {self.name} group: {what} is "
            f"{got} on rank {rank} and {want} on rank {first}. Ranks of one {self.name} group must read "
            "the same samples: give each rank the part of the data that MeshLayout.data_rank(rank) says"
            f"{self.more}"
        )


class _FirstCheck(_BatchCheck):
    """A check that compares digests first, and values only where the digests differ."""

    more = "; or leave this check out: checks=Checks(same_batch=False)"

    @torch.no_grad()
    def compare(self, named: list[tuple[str, torch.Tensor]]) -> None:
        rows = self.rows(self.digest([tensor for _, tensor in named]), self.axis)
        exact = (rows[:, :_EXACT] != rows[:1, :_EXACT]).any()
        about = rows[:, _EXACT:].view(torch.float64)
        differ = (exact | ((about - about[:1]).abs() > _ABOUT).any()).to(torch.int64).view(1)
        for axis in range(self.mesh.ndim):
            if axis != self.axis and self.mesh.size(axis) > 1:
                differ = self.rows(differ, axis).amax(0)
        if bool(next(inner_tensors(differ)).item()):
            super().compare(named)

    def digest(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns eight int64 numbers: the number of tensors; a hash of their dtypes and shapes; a hash of
        the integer tensors' values; and, as bits of float64 and summed over the other tensors, the logarithm
        of the norm and four products of the normalized tensor with fixed vectors of signs."""
        kinds = torch.cat([self.filled(0).view(1), *(self.kind(tensor) for tensor in tensors)])
        whole, scale = self.filled(0), self.filled(0).to(torch.float64)
        signed = torch.zeros(4, dtype=torch.float64, device=self.device)
        for number, tensor in enumerate(tensors):
            flat = _flat(tensor.to(self.device))
            if not isinstance(flat.numel(), int):
                continue  # simulated ranks have different sizes, which their kinds show
            if flat.dtype == torch.int64:
                whole = whole + _hash(flat, number)
                continue
            norm, products = scale.new_zeros(()), torch.zeros_like(signed)
            for start, piece in enumerate(flat.split(_PIECE)):
                piece = torch.nan_to_num(piece, 0.0, 0.0, 0.0)
                place = torch.arange(piece.numel(), device=self.device) + start * _PIECE + number
                signs = torch.stack([1.0 - 2.0 * ((place * m >> 40) & 1) for m in _MIXERS])
                norm, products = norm + piece.square().sum(), products + signs.double() @ piece
            norm = norm.sqrt().clamp(min=1e-300)
            scale, signed = scale + norm.log(), signed + products / norm
        exact = torch.stack([self.filled(len(tensors)), _hash(kinds, 0), whole])
        return torch.cat([exact, torch.cat([scale.view(1), signed]).view(torch.int64)])


def check_whole(mesh: DeviceMesh, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises StateError on every rank of ``mesh``, the axis cp, if the ranks' inputs differ: then they are no
    whole sequences."""
    if others() is not None or ranks_are_simulated():
        _WholeCheck(mesh, 0).compare(_named_inputs(tuple(args), kwargs))


class _WholeCheck(_FirstCheck):
    def fail(self, rank: int, what: str, got: object, want: object) -> NoReturn:
        raise StateError(
            "an evaluation without p3d.cp.shard_batch is one of whole sequences, and the ranks of cp were "
            f"given others: {what} is {got} on rank {rank} and {want} on the first rank. If they are parts, "
            "give the whole model what shard_batch has returned itself, not a copy of it (.to, .clone)"
        )


class _FirstForward(_FirstCheck):
    """The forward pre-hook of ``check_first_batch``, which removes itself."""

    handle: RemovableHandle | None = None

    @untraced
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.handle is None or not (module.training and torch.is_grad_enabled()):
            return
        self.handle.remove()
        self.handle = None
        if others() is None and not ranks_are_simulated():
            return
        # Some ranks may still have another model's, for which guards would raise.
        issuing.unit = ""
        self.compare(_named_inputs(args, kwargs))


_EXACT = 3  # the first numbers of a digest must be equal
_ABOUT = 0.05  # tolerance of the others: rounding gives 0.01 at most, other samples about 1
_MIXERS = (0x9E3779B97F4A7C1, 0xBF58476D1CE4E5B, 0x94D049BB133111E + 1, 0x2545F4914F6CDD1)
_PIECE = 1 << 20


def _hash(flat: torch.Tensor, salt: int) -> torch.Tensor:
    """Returns a hash of the values of an int64 tensor and their positions, as an int64 scalar tensor.
    ``salt``: a number that changes the hash, here the tensor's place among others."""
    total = flat.new_zeros(())
    for start, piece in enumerate(flat.split(_PIECE)):
        place = torch.arange(piece.numel(), device=flat.device) + start * _PIECE + 31 * salt + 1
        total = total + ((piece + 1) * (place * _MIXERS[0] + _MIXERS[1])).sum()
    return total


def _named_inputs(args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns (name for messages, tensor) of the plain tensors in a forward's arguments."""
    values = [(f"input {place}", value) for place, value in enumerate(args)]
    values += [(f"input {key!r}", kwargs[key]) for key in sorted(kwargs)]
    named = []
    for name, value in values:
        tensors = [
            t
            for t in tensors_in(value)
            if t.layout == torch.strided
            and not (t.is_nested or t.is_meta or isinstance(t, DTensor))
        ]
        for place, tensor in enumerate(tensors):
            several = f", tensor {place}" if not isinstance(value, torch.Tensor) else ""
            named.append((name + several, tensor))
    return named


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a flat tensor of float64 or int64, dtypes that all backends communicate and
    that hold values of the others exactly."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.detach().reshape(-1).to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a flat int64 tensor; for floating-point tensors the bits of their float64
    values. Equal numbers get equal bits (0.0 and -0.0 too), and so do all nans."""
    flat = _flat(tensor)
    if flat.dtype == torch.int64:
        return flat
    return (torch.where(flat != flat, torch.nan, flat) + 0.0).view(torch.int64)


def _value(bits: int, dtype: torch.dtype) -> object:
    """Returns the number that ``_bits`` gave as ``bits`` for an element of ``dtype``."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(bits, dtype=torch.int64).view(torch.float64).item()
    if dtype == torch.uint64:
        return bits % 2**64
    return bool(bits) if dtype == torch.bool else bits
