"""Layout: of which parts of other tensors a tensor is made, where values only change their places.

What Hugging Face does to weights on their way from a file into a model (experts stacked, projections merged
or split, dims swapped) moves values and computes nothing. A Layout says where each comes from, so that a
rank reads, or sends, only what is needed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

__all__ = [
    "Along",
    "Layout",
    "Patch",
    "Run",
    "Untraceable",
    "concatenated",
    "contiguous_strides",
    "in_source",
    "narrowed",
    "permuted",
    "reshaped",
    "whole_of",
    "within_source",
]


class Untraceable(Exception):
    """Values that change their places in a way that a Layout can't say."""


class Run(NamedTuple):
    """Indices along one dim: ``start``, ``start + step``, ..., ``size`` of them."""

    start: int
    step: int
    size: int

    def inside(self, low: int, high: int) -> tuple[int, int]:
        """The first of those in ``[low, high)``, by its position in the run, and how many there are."""
        first = max(0, -((self.start - low) // self.step))
        end = min(self.size, -((self.start - high) // self.step))
        return first, max(0, end - first)


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a tensor that comes from one source.

    Attributes:
        runs: where it is in the tensor, by dim.
        source: a name.
        offset: where its first element is in the source, in elements of the contiguous source.
        strides: by dim of the tensor, how far apart in the source neighbours in the patch are.
    """

    runs: tuple[Run, ...]
    source: str
    offset: int
    strides: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(run.size for run in self.runs)

    def part(self, dim: int, first: int, count: int) -> Patch:
        """``count`` of its indices along ``dim`` from position ``first`` on."""
        start, step, _ = self.runs[dim]
        run = Run(start + first * step, step, count)
        runs = (*self.runs[:dim], run, *self.runs[dim + 1 :])
        return replace(self, runs=runs, offset=self.offset + first * self.strides[dim])

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Patch | None:
        """What of it lies in that box of the tensor."""
        patch = self
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            first, count = patch.runs[dim].inside(offset, offset + size)
            if not count:
                return None
            patch = patch.part(dim, first, count)
        return patch

    def slices(self, offsets: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Of the tensor, or of a box of it that begins at ``offsets``."""
        starts = [0] * len(self.runs) if offsets is None else offsets
        return tuple(
            slice(run.start - o, run.start - o + (run.size - 1) * run.step + 1, run.step)
            for run, o in zip(self.runs, starts, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """A tensor of ``shape``, made of ``patches`` that don't overlap and together are all of it."""

    shape: tuple[int, ...]
    patches: tuple[Patch, ...]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def whole_of(source: str, shape: Sequence[int]) -> Layout:
    """``source`` itself, of ``shape``."""
    shape = tuple(shape)
    if not prod(shape):
        return Layout(shape, ())
    runs = tuple(Run(0, 1, size) for size in shape)
    return Layout(shape, (Patch(runs, source, 0, contiguous_strides(shape)),))


def permuted(layout: Layout, dims: Sequence[int]) -> Layout:
    """Dims reordered as ``torch.permute`` does."""

    def move(patch: Patch) -> Iterator[Patch]:
        runs = tuple(patch.runs[d] for d in dims)
        strides = tuple(patch.strides[d] for d in dims)
        yield replace(patch, runs=runs, strides=strides)

    return _each(layout, tuple(layout.shape[d] for d in dims), move)


def narrowed(layout: Layout, dim: int, start: int, length: int) -> Layout:
    """``length`` indices of ``dim`` from ``start`` on."""

    def cut(patch: Patch) -> Iterator[Patch]:
        first, count = patch.runs[dim].inside(start, start + length)
        if count:
            yield _shifted(patch.part(dim, first, count), dim, -start)

    return _each(layout, (*layout.shape[:dim], length, *layout.shape[dim + 1 :]), cut)


def concatenated(layouts: Sequence[Layout], dim: int) -> Layout:
    """Joined along ``dim``.

    Raises:
        ValueError: their other dims differ.
    """
    first = layouts[0].shape
    patches: list[Patch] = []
    length = 0
    for layout in layouts:
        shape = layout.shape
        if (*shape[:dim], *shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]):
            raise ValueError(
                f"tensors of shapes {first} and {shape} can't be joined along dim {dim}"
            )
        patches += [_shifted(patch, dim, length) for patch in layout.patches]
        length += shape[dim]
    return Layout((*first[:dim], length, *first[dim + 1 :]), tuple(patches))


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """Of another shape, the elements in the same order.

    Raises:
        ValueError: another number of elements.
        Untraceable: a patch that is no Run in the new dims.
    """
    shape = tuple(shape)
    if prod(shape) != prod(layout.shape):
        raise ValueError(f"a tensor of shape {layout.shape} can't become {shape}")
    if not prod(shape):
        return Layout(shape, ())
    result = _without_ones(layout)
    wanted = [size for size in shape if size != 1]
    for dim, size in enumerate(wanted):
        while result.shape[dim] % size:  # the next dims begin inside this one's
            result = _merged(result, dim)
        if result.shape[dim] != size:
            result = _split(result, dim, size)
    return _with_ones(result, shape)


# -- one dim into two, two into one --------------------------------------------------------------------


def _merged(layout: Layout, dim: int) -> Layout:
    """Dims ``dim`` and ``dim + 1`` as one."""
    inner = layout.shape[dim + 1]

    def merge(patch: Patch) -> Iterator[Patch]:
        (a, b), (ta, tb) = patch.runs[dim : dim + 2], patch.strides[dim : dim + 2]

        def one(run: Run, stride: int, ahead: int = 0) -> Patch:
            runs = (*patch.runs[:dim], run, *patch.runs[dim + 2 :])
            strides = (*patch.strides[:dim], stride, *patch.strides[dim + 2 :])
            return replace(patch, runs=runs, strides=strides, offset=patch.offset + ahead)

        start = a.start * inner + b.start
        if b == (0, 1, inner) and a.step == 1 and (ta == tb * inner or a.size == 1):
            yield one(Run(start, 1, a.size * inner), tb)
        elif a.size <= b.size:
            for i in range(a.size):
                yield one(Run(start + i * a.step * inner, b.step, b.size), tb, i * ta)
        else:
            for j in range(b.size):
                yield one(Run(start + j * b.step, a.step * inner, a.size), ta, j * tb)

    shape = (*layout.shape[:dim], layout.shape[dim] * inner, *layout.shape[dim + 2 :])
    return _each(layout, shape, merge)


def _split(layout: Layout, dim: int, outer: int) -> Layout:
    """Dim ``dim`` as two, the first of size ``outer``."""
    inner = layout.shape[dim] // outer

    def split(patch: Patch) -> Iterator[Patch]:
        for part in _in_rows(patch, dim, inner):
            run, stride = part.runs[dim], part.strides[dim]
            a, b, ta = _two_runs(run, stride, inner)
            runs = (*part.runs[:dim], a, b, *part.runs[dim + 1 :])
            strides = (*part.strides[:dim], ta, stride, *part.strides[dim + 1 :])
            yield replace(part, runs=runs, strides=strides)

    return _each(layout, (*layout.shape[:dim], outer, inner, *layout.shape[dim + 1 :]), split)


def _in_rows(patch: Patch, dim: int, inner: int) -> Iterator[Patch]:
    """``patch`` in up to three parts, each within a row of ``inner`` indices or made of whole rows."""
    run = patch.runs[dim]
    if run.step != 1 or run.size == 1:
        yield patch
        return
    head = min(run.size, -run.start % inner)
    tail = (run.size - head) % inner
    middle = run.size - head - tail
    for first, count in ((0, head), (head, middle), (head + middle, tail)):
        if count:
            yield patch.part(dim, first, count)


def _two_runs(run: Run, stride: int, inner: int) -> tuple[Run, Run, int]:
    """A run as one over rows of ``inner`` and one inside them; and the first one's stride."""
    start, step, count = run
    row, column = divmod(start, inner)
    if column + (count - 1) * step < inner:
        return Run(row, 1, 1), Run(column, step, count), stride
    if step % inner == 0:
        return Run(row, step // inner, count), Run(column, 1, 1), stride
    per_row = inner // step
    if inner % step == 0 and column < step and count % per_row == 0:
        return Run(row, 1, count // per_row), Run(column, step, per_row), stride * per_row
    raise Untraceable(f"every {step}th index, split into rows of {inner}")


# -- dims of size 1 ------------------------------------------------------------------------------------


def _without_ones(layout: Layout) -> Layout:
    dims = [dim for dim, size in enumerate(layout.shape) if size != 1]
    return permuted(layout, dims)


def _with_ones(layout: Layout, shape: tuple[int, ...]) -> Layout:
    def insert(patch: Patch) -> Iterator[Patch]:
        runs, strides = iter(patch.runs), iter(patch.strides)
        yield replace(
            patch,
            runs=tuple(Run(0, 1, 1) if size == 1 else next(runs) for size in shape),
            strides=tuple(0 if size == 1 else next(strides) for size in shape),
        )

    return _each(layout, shape, insert)


def _shifted(patch: Patch, dim: int, by: int) -> Patch:
    start, step, count = patch.runs[dim]
    run = Run(start + by, step, count)
    return replace(patch, runs=(*patch.runs[:dim], run, *patch.runs[dim + 1 :]))


def _each(
    layout: Layout, shape: tuple[int, ...], change: Callable[[Patch], Iterator[Patch]]
) -> Layout:
    return Layout(shape, tuple(new for patch in layout.patches for new in change(patch)))


# -- in the source's dims ------------------------------------------------------------------------------


class Along(NamedTuple):
    """What a patch takes along one dim of its source: from ``start`` on every ``step``th index, for ``dim``
    of the tensor; or, if ``dim`` is None, one index."""

    start: int
    step: int
    dim: int | None


def in_source(patch: Patch, shape: Sequence[int]) -> Iterator[tuple[Patch, tuple[Along, ...]]]:
    """``patch`` in parts that are each a slice of its source, of ``shape``; with what slice, by dim."""
    alongs, rest = [], patch.offset
    for stride in contiguous_strides(shape):
        start, rest = divmod(rest, stride)
        alongs.append(Along(start, 1, None))
    for dim in sorted(range(len(patch.runs)), key=lambda d: -patch.strides[d]):
        count, stride = patch.runs[dim].size, patch.strides[dim]
        if count == 1:
            continue
        at, step = _source_dim(shape, stride)
        if step == 0 or alongs[at].dim is not None:  # along no dim, or one that another runs along
            for index in range(count):
                yield from in_source(patch.part(dim, index, 1), shape)
            return
        fits = -((alongs[at].start - shape[at]) // step)  # indices within the source's dim
        if fits < count:
            yield from in_source(patch.part(dim, 0, fits), shape)
            yield from in_source(patch.part(dim, fits, count - fits), shape)
            return
        alongs[at] = Along(alongs[at].start, step, dim)
    yield patch, tuple(alongs)


def _source_dim(shape: Sequence[int], stride: int) -> tuple[int, int]:
    """The dim of a source along which ``stride`` steps, and by how many indices; 0 if there is none."""
    for dim, unit in enumerate(contiguous_strides(shape)):
        if shape[dim] > 1 and stride % unit == 0 and stride // unit < shape[dim]:
            return dim, stride // unit
    return 0, 0


def within_source(
    patch: Patch, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[Patch]:
    """What of ``patch`` comes from that box of its source."""
    for part, alongs in in_source(patch, shape):
        cut: Patch | None = part
        for (start, step, dim), offset, size in zip(alongs, offsets, sizes, strict=True):
            run = Run(start, step, 1 if dim is None else part.runs[dim].size)
            first, count = run.inside(offset, offset + size)
            if not count:
                cut = None
                break
            if dim is not None:
                assert cut is not None
                cut = cut.part(dim, first, count)
        if cut is not None:
            yield cut
