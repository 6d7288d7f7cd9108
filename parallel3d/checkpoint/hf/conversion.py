"""How transformers turns the tensors of a checkpoint into a model's parameters, and back, as Layouts.

Its own conversion mapping is run, on tensors without values: what names become, which tensors are joined or
cut, is whatever the installed transformers does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import torch_function_off
from parallel3d.checkpoint.hf.folder import Entry, plain_class
from parallel3d.errors import CheckpointError

# Layout: of which parts of other tensors a tensor is made, where values only change their places.
#
# What Hugging Face does to weights on their way from a file into a model (experts stacked,
# projections merged or split, dims swapped) moves values and computes nothing. A Layout says where
# each comes from, so that a rank reads, or sends, only what is needed of it.


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


# Traced: a tensor without values that remembers where they would come from.
#
# Conversions that Hugging Face writes for real tensors run on these, and their results tell what
# they do.


class Traced(Tensor):
    """A meta tensor with a Layout. What moves values may be done with it; all else raises Untraceable."""

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
        name = getattr(func, "__name__", str(func))
        follow = _FOLLOWED.get(name)
        if follow is not None:
            return follow(*args, **(kwargs or {}))
        if name in _QUESTIONS:
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        raise Untraceable(f"it calls {name}, which may compute values")


_QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "is_contiguous"}


def _like(tensor: Traced, layout: Layout) -> Traced:
    return Traced.of(layout, tensor.dtype)


def _dim(tensor: Traced, dim: int, beyond: int = 0) -> int:
    """``dim`` counted from the front; ``beyond`` 1 where a new one is put in."""
    dims = tensor.dim() + beyond
    if not -dims <= dim < dims:
        raise IndexError(f"dim {dim} of a tensor with {dims} dims")
    return dim % dims


def _same(tensor: Traced, *_: Any, **__: Any) -> Traced:
    return tensor


def _permute(tensor: Traced, *dims: Any) -> Traced:
    order = [_dim(tensor, d) for d in _listed(dims)]
    return _like(tensor, permuted(tensor.origin, order))


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.dim()))
    a, b = _dim(tensor, dim0), _dim(tensor, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(tensor, order)


def _reshape(tensor: Traced, *shape: Any, **named: Any) -> Traced:
    sizes = _listed(shape or tuple(named.values()))
    if not all(isinstance(size, int) for size in sizes):
        raise Untraceable("it views a tensor in another dtype")
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = tensor.numel() // known if known else 0
    return _like(tensor, reshaped(tensor.origin, sizes))


def _flatten(tensor: Traced, start_dim: int = 0, end_dim: int = -1) -> Traced:
    shape = list(tensor.origin.shape)
    start, end = _dim(tensor, start_dim), _dim(tensor, end_dim)
    return _reshape(tensor, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _squeeze(tensor: Traced, dim: int | None = None) -> Traced:
    shape = list(tensor.origin.shape)
    dims = range(len(shape)) if dim is None else [_dim(tensor, dim)]
    return _reshape(tensor, [size for d, size in enumerate(shape) if size != 1 or d not in dims])


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    shape, at = list(tensor.origin.shape), _dim(tensor, dim, beyond=1)
    return _reshape(tensor, [*shape[:at], 1, *shape[at:]])


def _cat(tensors: Sequence[Traced], dim: int = 0, **named: Any) -> Traced:
    tensors = _alike(tensors)
    at = _dim(tensors[0], named.get("axis", dim))
    return _like(tensors[0], concatenated([tensor.origin for tensor in tensors], at))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([_unsqueeze(tensor, dim) for tensor in _alike(tensors)], dim)


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Traced:
    return _like(tensor, narrowed(tensor.origin, _dim(tensor, dim), start, length))


def _split_traced(tensor: Traced, sizes: int | Sequence[int], dim: int = 0, **named: Any) -> tuple:
    whole = tensor.origin.shape[_dim(tensor, dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"dim {dim} of size {whole} can't be split into {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_narrow(tensor, dim, at, size) for at, size in zip(starts, sizes, strict=True))


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple:
    whole = tensor.origin.shape[_dim(tensor, dim)]
    return _split_traced(tensor, max(1, -(-whole // chunks)), dim)


def _unbind(tensor: Traced, dim: int = 0) -> tuple:
    return tuple(_squeeze(part, dim) for part in _split_traced(tensor, 1, dim))


def _listed(values: tuple) -> list:
    one = values[0] if len(values) == 1 else values
    return list(one) if isinstance(one, (tuple, list)) else [one]


def _alike(tensors: Sequence[Any]) -> list[Traced]:
    found = list(tensors)
    if not all(isinstance(tensor, Traced) for tensor in found):
        raise Untraceable("it joins weights with a tensor of its own")
    if len({tensor.dtype for tensor in found}) > 1:
        kinds = sorted({str(tensor.dtype) for tensor in found})
        raise ValueError(f"tensors to be joined are of different dtypes: {', '.join(kinds)}")
    return found


_FOLLOWED: dict[str, Callable] = {
    "cat": _cat,
    "chunk": _chunk,
    "clone": _same,
    "concat": _cat,
    "concatenate": _cat,
    "contiguous": _same,
    "detach": _same,
    "flatten": _flatten,
    "narrow": _narrow,
    "permute": _permute,
    "reshape": _reshape,
    "split": _split_traced,
    "split_with_sizes": _split_traced,
    "squeeze": _squeeze,
    "stack": _stack,
    "swapaxes": _transpose,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
}


Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype."""


def is_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers' (or of a class that extends it)."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


class Converted(NamedTuple):
    """What becomes of a checkpoint's tensors.

    Attributes:
        layouts: of the model's tensors, by their names.
        unexpected: names in the checkpoint that none is made of.
        used: transformers' transforms that it took, which the model remembers for its export; None
            without transformers.
    """

    layouts: dict[str, Layout]
    unexpected: list[str]
    used: list[Any] | None


def from_file(model: Any, entries: list[Entry], tensors: Tensors) -> Converted:
    """Of which of a checkpoint's ``tensors`` the model's are made.

    Raises:
        CheckpointError: a conversion that can't be followed, or doesn't fit.
    """
    core, plain, mapping = _tools(model)
    own = {name: entry.tensor for entry in entries for name in entry.names}
    rename = _Renaming(core, mapping, model.base_model_prefix, own)
    layouts: dict[str, Layout] = {}
    converters: dict[str, Any] = {}
    inputs: dict[str, list[str]] = {}
    unexpected: list[str] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        shape, dtype = tensors[name]
        target, pattern = rename(name)
        if target not in own:
            unexpected.append(name)
        elif pattern is None:
            if target in layouts:
                other = layouts[target].patches
                raise CheckpointError(
                    f"{name!r} and {other[0].source if other else 'another'!r} both become {target!r}"
                )
            layouts[target] = whole_of(name, shape)
        else:
            if target not in converters:
                converters[target] = deepcopy(rename.converters[pattern])
            traced = Traced.of(whole_of(name, shape), dtype)
            converters[target].add_tensor(target, name, pattern, traced)
            inputs.setdefault(target, []).append(name)
    for target, converter in converters.items():
        with _following(f"to make {target!r}", [converter]):
            made = converter.convert(target, model=plain, config=model.config)
        for name, value in made.items():
            layouts[name] = _traced(value, name).origin
            if name not in own:
                unexpected += inputs[target]
    layouts = {name: layout for name, layout in layouts.items() if name in own}
    return Converted(layouts, unexpected, [each for each in mapping if each.was_used()])


def to_file(model: Any, tensors: Tensors) -> dict[str, tuple[Layout, torch.dtype]]:
    """The inverse: of which of the model's ``tensors`` those of a checkpoint are made.

    Returns:
        Layout and dtype by the checkpoint's name.

    Raises:
        CheckpointError: a conversion that can't be followed, or doesn't fit.
    """
    core, plain, mapping = _tools(model)
    state = {
        name: Traced.of(whole_of(name, shape), dtype) for name, (shape, dtype) in tensors.items()
    }
    with _following("back", mapping):
        made = core.revert_weight_conversion(plain, state)
    traced = {name: _traced(value, name) for name, value in made.items()}
    return {name: (value.origin, value.dtype) for name, value in traced.items()}


def ignored(model: Any, kind: str) -> Callable[[str], bool]:
    """Whether transformers passes over a name that is ``kind``: "missing" or "unexpected"."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected":  # buffers that checkpoints used to hold
        buffers = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            patterns.add(r"(^|\.)position_ids$")
    found = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or r"(?!)")
    return lambda name: found.search(name) is not None


def tied_away(model: Any) -> set[str]:
    """Names that a checkpoint leaves out, as transformers ties them to another one's weights."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


class _Renaming:
    """What a checkpoint's names become; the order of the calls matters to some mappings."""

    def __init__(
        self, core: Any, mapping: list[Any], base_prefix: str, own: Mapping[str, Any]
    ) -> None:
        self._core, self._base, self._own = core, base_prefix, own
        self._renamings = [each for each in mapping if not isinstance(each, core.WeightConverter)]
        self._converters = [each for each in mapping if isinstance(each, core.WeightConverter)]
        self.converters = {key: each for each in self._converters for key in each.source_patterns}

    def __call__(self, name: str) -> tuple[str, str | None]:
        """The model's name, and the converter's pattern that it matched if one did."""
        target, pattern = self._renamed(name, self._renamings, self._converters)
        if target not in self._own and name in self._own:
            return self._renamed(name, [], [])
        return target, pattern

    def _renamed(self, name: str, renamings: list, converters: list) -> tuple[str, str | None]:
        return self._core.rename_source_key(name, renamings, converters, self._base, self._own)


def _tools(model: Any) -> tuple[Any, Any, list[Any]]:
    """transformers' loading code, the model as it sees it, and the model's conversion mapping."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantized by transformers, which is not supported")
    try:
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:
        raise CheckpointError(
            "the installed transformers has no conversion mapping; install transformers>=5"
        ) from error
    plain = _as_plain(model)
    return core, plain, get_model_conversion_mapping(plain)


def _as_plain(model: Any) -> Any:
    """``model`` as it was before its class, and those of models inside it, were extended.

    transformers looks its conversions up by the classes' names and modules.
    """

    def plain_of(module: nn.Module) -> nn.Module:
        cls = plain_class(module)
        other = object.__new__(cls)
        other.__dict__.update(module.__dict__)
        return other

    plain: Any = plain_of(model)
    modules = [
        (name, plain_of(module) if name and is_transformers(module) else module)
        for name, module in model.named_modules()
    ]
    modules[0] = ("", plain)
    plain.__dict__["named_modules"] = lambda *_, **__: iter(modules)
    return plain


def _traced(value: Any, name: str) -> Traced:
    if isinstance(value, list):
        value = value[0]
    if not isinstance(value, Traced):
        raise CheckpointError(f"transformers' conversion of {name!r} can't be followed")
    return value


@contextmanager
def _following(what: str, transforms: list[Any]) -> Iterator[None]:
    """Makes a conversion's failure an error that names its operations."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        names = {type(op).__name__ for each in transforms for op in getattr(each, "operations", ())}
        operations = ", ".join(sorted(names)) or "a renaming"
        if isinstance(error, Untraceable):
            problem = f"can't be followed: {error}"
        else:
            problem = f"failed: {type(error).__name__}: {error}"
        raise CheckpointError(
            f"transformers' conversion {what} ({operations}) {problem}"
        ) from error
