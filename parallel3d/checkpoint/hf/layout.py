"""Layout: of which parts of other tensors a tensor consists, when values are moved but not computed.

Hugging Face stacks experts, merges or splits projections and swaps dims between a file and a model. A Layout
says where each value comes from, so that a rank reads, or sends, only what it needs. ``Traced`` tensors find
the Layout of a conversion by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d._torch.autograd import torch_function_off

_MAX_PATCHES = 4096  # that one axis may become


class Untraceable(Exception):
    """Raised for a conversion that a Layout cannot express."""


class Run(NamedTuple):
    """Indices along one dim, evenly spaced: ``start``, ``start + step``, ..., ``size`` of them."""

    start: int
    step: int
    size: int

    def inside(self, low: int, high: int) -> tuple[int, int]:
        """Returns (position in the run of its first index in ``[low, high)``, how many are in there)."""
        first = max(0, -((self.start - low) // self.step))
        end = min(self.size, -((self.start - high) // self.step))
        return first, max(0, end - first)


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a tensor whose values come from one other tensor, its source."""

    runs: tuple[Run, ...]  # its indices in the tensor, by dim
    source: str  # name of the source
    offset: int  # place of its first element in the contiguous source, in elements
    strides: tuple[int, ...]  # by dim of the tensor, the distance in the source of its neighbours

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(run.size for run in self.runs)

    def part(self, dim: int, first: int, count: int) -> Patch:
        """Returns the patch cut to ``count`` of its indices along ``dim``, from the ``first``-th on."""
        start, step, _ = self.runs[dim]
        run = Run(start + first * step, step, count)
        offset = self.offset + first * self.strides[dim]
        return replace(self, runs=_replaced(self.runs, dim, run), offset=offset)

    def shifted(self, dim: int, by: int) -> Patch:
        """Returns the patch with its indices along ``dim`` of the tensor increased by ``by``."""
        start, step, size = self.runs[dim]
        return replace(self, runs=_replaced(self.runs, dim, Run(start + by, step, size)))

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Patch | None:
        """Returns the part of the patch in the tensor's box (``offsets``, ``sizes``); None if empty."""
        patch = self
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            first, count = patch.runs[dim].inside(offset, offset + size)
            if not count:
                return None
            patch = patch.part(dim, first, count)
        return patch

    def bounded(self, limit: int) -> Iterator[Patch]:
        """Divides the patch into parts of at most ``limit`` elements."""
        if prod(self.counts) <= limit:
            yield self
            return
        dim = next(d for d, size in enumerate(self.counts) if size > 1)
        size = self.counts[dim]
        at_once = max(1, limit // (prod(self.counts) // size))
        for first in range(0, size, at_once):
            yield from self.part(dim, first, min(at_once, size - first)).bounded(limit)

    def slices(self, offsets: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Returns the slices that index the patch in the tensor, or in its box that begins at ``offsets``."""
        starts = [0] * len(self.runs) if offsets is None else offsets
        return tuple(
            slice(run.start - o, run.start - o + (run.size - 1) * run.step + 1, run.step)
            for run, o in zip(self.runs, starts, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """A tensor of ``shape``, which consists of ``patches`` without overlap."""

    shape: tuple[int, ...]
    patches: tuple[Patch, ...]


def _replaced(values: tuple, dim: int, *new: Any, count: int = 1) -> tuple:
    """Returns ``values`` with ``count`` of them, from ``dim`` on, replaced by ``new``."""
    return (*values[:dim], *new, *values[dim + count :])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def whole_of(source: str, shape: Sequence[int]) -> Layout:
    """Returns the layout of a tensor that is the tensor named ``source``, unchanged."""
    shape = tuple(shape)
    runs = tuple(Run(0, 1, size) for size in shape)
    patch = Patch(runs, source, 0, contiguous_strides(shape))
    return Layout(shape, (patch,) if prod(shape) else ())


def permuted(layout: Layout, dims: Sequence[int]) -> Layout:
    def reorder(values: Sequence[Any]) -> tuple:
        return tuple(values[d] for d in dims)

    patches = [
        replace(patch, runs=reorder(patch.runs), strides=reorder(patch.strides))
        for patch in layout.patches
    ]
    return Layout(reorder(layout.shape), tuple(patches))


def narrowed(layout: Layout, dim: int, start: int, length: int) -> Layout:
    patches = []
    for patch in layout.patches:
        first, count = patch.runs[dim].inside(start, start + length)
        if count:
            patches.append(patch.part(dim, first, count).shifted(dim, -start))
    return Layout(_replaced(layout.shape, dim, length), tuple(patches))


def concatenated(layouts: Sequence[Layout], dim: int) -> Layout:
    patches: list[Patch] = []
    length = 0
    for layout in layouts:
        patches += [patch.shifted(dim, length) for patch in layout.patches]
        length += layout.shape[dim]
    return Layout(_replaced(layouts[0].shape, dim, length), tuple(patches))


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """Returns the layout in another shape; raises Untraceable if a patch is not evenly spaced in it."""
    shape = tuple(shape)
    if not prod(shape):
        return Layout(shape, ())
    patches: list[Patch] = []
    for patch in layout.patches:
        units = contiguous_strides(layout.shape)
        axes = [
            _Axis(run.size, run.step * unit, stride)
            for run, unit, stride in zip(patch.runs, units, patch.strides, strict=True)
            if run.size > 1
        ]
        start = sum(run.start * unit for run, unit in zip(patch.runs, units, strict=True))
        patches += _with_runs(patch.source, start, patch.offset, _coalesced(axes), shape)
    return Layout(shape, tuple(patches))


class _Axis(NamedTuple):
    """``size`` elements, ``step`` apart in the flattened tensor, ``stride`` apart in the flattened source."""

    size: int
    step: int
    stride: int


def _coalesced(axes: list[_Axis]) -> list[_Axis]:
    """Merges axes that together are one evenly spaced axis; sorts them, outermost first."""
    result: list[_Axis] = []
    for size, step, stride in sorted(axes, key=lambda axis: -axis.step):
        outer = result[-1] if result else None
        if outer and (outer.step, outer.stride) == (size * step, size * stride):
            result[-1] = _Axis(outer.size * size, step, stride)
        else:
            result.append(_Axis(size, step, stride))
    return result


def _with_runs(
    source: str, start: int, offset: int, axes: list[_Axis], shape: tuple[int, ...]
) -> Iterator[Patch]:
    """Yields the patches, in a tensor of ``shape``, of the elements that ``axes`` describe. The first one is
    at ``start`` in the flattened tensor and at ``offset`` in the flattened source."""
    units = contiguous_strides(shape)
    runs = [Run(start // unit % size, 1, 1) for unit, size in zip(units, shape, strict=True)]
    strides = [0] * len(shape)

    def divided(number: int, *sizes: int) -> Iterator[Patch]:
        """Yields the patches after dividing the axis ``number`` into parts of ``sizes``."""
        _, step, stride = axes[number]
        begin = 0
        for size in sizes:
            axis = [_Axis(size, step, stride)] if size > 1 else []
            rest = [*axes[:number], *axis, *axes[number + 1 :]]
            at, place = start + begin * step, offset + begin * stride
            yield from _with_runs(source, at, place, rest, shape)
            begin += size

    taken: dict[int, int] = {}  # dim -> the axis along it
    for number, (size, step, stride) in enumerate(axes):
        dim = next(d for d, unit in enumerate(units) if unit <= step and shape[d] > 1)
        along, rest = divmod(step, units[dim])
        if rest and size > _MAX_PATCHES:
            raise Untraceable(f"every {step}th element, divided into rows of {units[dim]}")
        if rest or dim in taken:  # a patch for each element, of the shorter axis along the dim
            shorter = min((number, taken.get(dim, number)), key=lambda n: axes[n].size)
            number = number if rest else shorter
            yield from divided(number, *[1] * axes[number].size)
            return
        fit = -((runs[dim].start - shape[dim]) // along)  # elements before the dim's end
        if fit < size:
            per_row, rest = divmod(shape[dim], along)
            if rest:
                raise Untraceable(f"every {along}th index, divided into rows of {shape[dim]}")
            if fit < per_row:  # a part of a row at the beginning
                yield from divided(number, fit, size - fit)
            elif size % per_row:  # or at the end
                yield from divided(number, size - size % per_row, size % per_row)
            else:
                rows = _Axis(size // per_row, per_row * step, per_row * stride)
                row = _Axis(per_row, step, stride)
                new = [*axes[:number], rows, row, *axes[number + 1 :]]
                yield from _with_runs(source, start, offset, new, shape)
            return
        taken[dim] = number
        runs[dim], strides[dim] = Run(runs[dim].start, along, size), stride
    yield Patch(tuple(runs), source, offset, tuple(strides))


class Along(NamedTuple):
    """Indices of a patch along one dim of its source: every ``step``-th from ``start`` on, which correspond
    to its indices along ``dim`` of the tensor; or the one index ``start`` if ``dim`` is None."""

    start: int
    step: int
    dim: int | None


def in_source(patch: Patch, shape: Sequence[int]) -> Iterator[tuple[Patch, tuple[Along, ...]]]:
    """Yields ``patch`` in parts that are slices of its source, of ``shape``; Alongs by dim are the slice."""
    alongs, rest = [], patch.offset
    for stride in contiguous_strides(shape):
        start, rest = divmod(rest, stride)
        alongs.append(Along(start, 1, None))
    for dim in sorted(range(len(patch.runs)), key=lambda d: -patch.strides[d]):
        count, stride = patch.runs[dim].size, patch.strides[dim]
        if count == 1:
            continue
        at, step = next(  # the source's dim along which it steps, and by how many indices
            (
                (d, stride // unit)
                for d, unit in enumerate(contiguous_strides(shape))
                if shape[d] > 1 and stride % unit == 0 and stride // unit < shape[d]
            ),
            (0, 0),
        )
        if step == 0 or alongs[at].dim is not None:  # along no dim, or the same as another
            for index in range(count):
                yield from in_source(patch.part(dim, index, 1), shape)
            return
        fit = -((alongs[at].start - shape[at]) // step)  # indices within the source's dim
        if fit < count:
            yield from in_source(patch.part(dim, 0, fit), shape)
            yield from in_source(patch.part(dim, fit, count - fit), shape)
            return
        alongs[at] = Along(alongs[at].start, step, dim)
    yield patch, tuple(alongs)


def within_source(
    patch: Patch, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[Patch]:
    """Yields the parts of ``patch`` that come from a box of its source, which has the shape ``shape``."""
    for whole, alongs in in_source(patch, shape):
        part = whole
        for (start, step, dim), offset, size in zip(alongs, offsets, sizes, strict=True):
            run = Run(start, step, 1 if dim is None else whole.runs[dim].size)
            first, count = run.inside(offset, offset + size)
            if not count:
                break
            if dim is not None:
                part = part.part(dim, first, count)
        else:
            yield part


# -- tracing -------------------------------------------------------------------------------------------------


class Traced(Tensor):
    """A meta tensor with a Layout, its ``origin``. Functions that move, join or divide it return Traced
    tensors; all others raise Untraceable, as they may compute values."""

    origin: Layout

    @staticmethod
    def of(layout: Layout, dtype: torch.dtype) -> Traced:
        empty = torch.empty(layout.shape, dtype=dtype, device="meta")
        traced = torch.Tensor._make_subclass(Traced, empty)
        traced.origin = layout
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        for names, trace in _TRACED.items():
            if name in names.split():
                return trace(func, *args, **kwargs)
        if name in _QUESTIONS:
            with torch_function_off():
                return func(*args, **kwargs)
        raise Untraceable(f"it calls {name}, which may compute values")


_QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "is_contiguous"}


def _unchanged(func: Callable, tensor: Traced, *args: Any, **kwargs: Any) -> Traced:
    return tensor


def _reshaping(func: Callable, tensor: Traced, *args: Any, **kwargs: Any) -> Traced:
    result = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)
    if result.dtype != tensor.dtype:
        raise Untraceable("it views a tensor in another dtype")
    return Traced.of(reshaped(tensor.origin, result.shape), tensor.dtype)


def _viewing(func: Callable, tensor: Traced, *args: Any, **kwargs: Any) -> Any:
    """Traces a call that returns views: it is called with a meta tensor whose strides are all different, so
    that the views' strides tell which of its dims they have."""
    shape = tuple(tensor.shape)
    strides = contiguous_strides([size + 2 for size in shape])
    result = func(torch.empty_strided(shape, strides, device="meta"), *args, **kwargs)

    def traced(view: Tensor) -> Traced:
        order = [strides.index(stride) for stride in view.stride()]
        sizes = dict(zip(order, view.shape, strict=True))
        layout, rest = tensor.origin, int(view.storage_offset())
        for dim, stride in enumerate(strides):
            start, rest = divmod(rest, stride)
            layout = narrowed(layout, dim, start, sizes.get(dim, 1))
        dropped = [dim for dim in range(len(shape)) if dim not in sizes]
        layout = permuted(layout, [*dropped, *order])
        return Traced.of(reshaped(layout, view.shape) if dropped else layout, tensor.dtype)

    return traced(result) if isinstance(result, Tensor) else tuple(map(traced, result))


def _joining(func: Callable, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Traced:
    tensors = list(tensors)
    if not all(isinstance(tensor, Traced) for tensor in tensors):
        raise Untraceable("it joins weights with a tensor of its own")
    if len({tensor.dtype for tensor in tensors}) > 1:
        kinds = sorted({str(tensor.dtype) for tensor in tensors})
        raise ValueError(f"tensors to be joined are of different dtypes: {', '.join(kinds)}")
    dim = kwargs.get("axis", dim)
    plain = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    result = func(plain, dim)  # which checks dim and shapes
    dim %= result.dim()
    layouts = [tensor.origin for tensor in tensors]
    if result.dim() > tensors[0].dim():  # stacked
        layouts = [reshaped(each, _replaced(each.shape, dim, 1, count=0)) for each in layouts]
    return Traced.of(concatenated(layouts, dim), tensors[0].dtype)


_TRACED: dict[str, Callable] = {
    "clone contiguous detach": _unchanged,
    "flatten reshape squeeze unsqueeze view": _reshaping,
    "chunk narrow permute split split_with_sizes swapaxes transpose unbind": _viewing,
    "cat concat concatenate stack": _joining,
}
