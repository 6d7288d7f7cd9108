"""Operations on packed DTensors.

To DTensor's own operations their rows are those of ``torch.chunk``. So only what treats rows alike, wherever
they are, goes through to them; anything else would be silently wrong, and raises.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallel3d._compat import get_local_tensor, make_dtensor, make_spec, spec_of
from parallel3d._packed_layout import PackedSpec, cut_packed, ordinary, packed_among
from parallel3d.errors import Parallel3dError

__all__ = ["run"]


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, with packed DTensors among the operands.

    Raises:
        Parallel3dError: it would mix their rows, or they don't lie alike.
    """
    return _Call(func, args, kwargs).run()


# Beside those that torch marks as elementwise.
_SAME_ROWS = {
    "_amp_foreach_non_finite_check_and_unscale_",
    "_fused_adagrad_",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_sgd_",
    "_pin_memory",
    "_to_copy",
    "alias",
    "bernoulli_",
    "clone",
    "copy_",
    "detach",
    "detach_",
    "empty_like",
    "equal",
    "fill_",
    "full_like",
    "is_pinned",
    "is_same_size",
    "normal_",
    "ones_like",
    "rand_like",
    "randn_like",
    "record_stream",
    "uniform_",
    "zero_",
    "zeros_like",
}
# All rows to one number.
_TO_NUMBER = {
    "all",
    "amax",
    "amin",
    "any",
    "linalg_vector_norm",
    "max",
    "min",
    "norm",
    "sum",
}


# New tensors of any shape; of the same one they lie as the packed one does.
_NEW = {"new_empty", "new_full", "new_ones", "new_zeros"}
# Of the same shape, as autograd's nodes are found by, they leave all rows.
_VIEWS = {"expand", "view"}


_LARGEST = {"amax", "max", "_foreach_max"}
_LEAST = {"amin", "min"}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}


@lru_cache(maxsize=1024)
def _fixed_neutral(func: Any) -> float:
    """Of that reduction; 0: it is none; not a number: a norm, whose order says it."""
    name = func._schema.name.removeprefix("aten::")
    if name in _NORMS:
        return math.nan
    return -math.inf if name in _LARGEST else math.inf if name in _LEAST else 0.0


def _neutral(func: Any, args: Any, kwargs: Any) -> float | None:
    """A value that doesn't change a reduction to one number, if that of no values at all is an error."""
    fixed = _fixed_neutral(func)
    if not math.isnan(fixed):
        return None if fixed == 0 else fixed
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if not isinstance(order, (int, float)) or 0 <= order < math.inf:
        return None
    return 0.0 if order > 0 else math.inf


def _with_one_more(local: Tensor, value: float) -> Tensor:
    """All values of ``local`` and one more, in as many dims."""
    if local.dtype.is_floating_point:
        more = local.new_full((1,), value)
    elif local.dtype is torch.bool:
        more = local.new_full((1,), value > 0)
    else:
        info = torch.iinfo(local.dtype)
        more = local.new_full((1,), info.max if value > 0 else info.min)
    flat = torch.cat([local.flatten(), more])
    return flat.view(*(1,) * (local.dim() - 1), -1)


@lru_cache(maxsize=1024)
def _kind(func: Any) -> str:
    """``"rows"``: each result has the rows of its operands. ``"number"``: it is a number of all.
    ``"new"``: it has none of their values. ``"view"``: rows if it keeps the shape. ``""``: anything else."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_") or name in _SAME_ROWS or torch.Tag.pointwise in func.tags:
        return "rows"
    if name in _NEW:
        return "new"
    if name in _VIEWS:
        return "view"
    return "number" if name in _TO_NUMBER else ""


class _Call:
    """One operation with packed DTensors among its operands.

    An operation on lists is one on each position; ``like[i]`` tells how what is packed at position i lies.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind, self.neutral = _kind(func), _neutral(func, args, kwargs)
        self.like: dict[int, PackedSpec] = {}
        self.plain: dict[int, DTensor] = {}  # by id of an operand: what DTensor sees of it
        self.originals: dict[int, DTensor] = {}  # the other way
        self.on_lists = bool(args) and isinstance(args[0], (list, tuple))

    def run(self) -> Any:
        if self.kind == "view" and tuple(self.args[1]) == tuple(self.args[0].shape):
            local = get_local_tensor(self.args[0])
            return make_dtensor(self.func(local, list(local.shape)), spec_of(self.args[0]))
        if self.kind in ("", "view"):
            self._refuse("mixes, picks or moves rows,")
        if self.func is torch.ops.aten.copy_.default and _lie_apart(*self.args[:2]):
            return _copied(*self.args[:2])
        if self.kind == "new":
            return _new(self.func, *self.args, **self.kwargs)
        if self.func in _LOGICAL:
            return _all_or_any(self.func, self.args[0])
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, (list, tuple)):
                for position, item in enumerate(value):
                    self._take(position, item)
            else:
                self._take(0, value)
        args = [self._plain(value) for value in self.args]
        kwargs = {key: self._plain(value) for key, value in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            marked = [self._marked(i * self.on_lists, value) for i, value in enumerate(result)]
            return type(result)(marked)
        return self._marked(0, result)

    def _take(self, position: int, value: Any) -> None:
        """Notes how ``value`` lies, if it is packed."""
        spec = _packed_spec(value)
        if spec is None:
            return
        known = self.like.setdefault(position, spec)
        if known is not spec and not _alike(known, spec):
            self._refuse(f"has operands with other rows, {known.placements} and {spec.placements},")
        if (
            id(value) in self.plain
        ):  # given twice; what DTensor saw of it must live on for its id's sake
            return
        local = get_local_tensor(value)
        if self.neutral is not None and spec.leaves_ranks_empty:
            # Those would raise while the others wait for them.
            local = _with_one_more(local, self.neutral)
        plain = make_dtensor(local, spec.ordinary)
        self.plain[id(value)] = plain
        self.originals[id(plain)] = value

    def _plain(self, value: Any) -> Any:
        """``value`` as DTensor gets it."""
        if isinstance(value, (list, tuple)):
            return [self._plain_at(i, item) for i, item in enumerate(value)]
        return self._plain_at(0, value)

    def _plain_at(self, position: int, value: Any) -> Any:
        known = self.plain.get(id(value))
        if known is not None:
            return known
        like = self.like.get(position)
        if like is None or not isinstance(value, Tensor) or not value.dim() or value.numel() == 1:
            return value
        at = like.packed[1].dim + value.dim() - like.ndim
        if at < 0 or value.shape[at] == 1:
            return value
        if value.stride(at) == 0:  # one row, expanded, as backward expands numbers
            return value.narrow(at, 0, 1)
        what = f"{tuple(value.placements)}" if isinstance(value, DTensor) else "no DTensor"
        return self._refuse(f"has an operand of {tuple(value.shape)} with other rows, {what},")

    def _marked(self, position: int, result: Any) -> Any:
        """The result at ``position`` of the result, packed as the operands there are."""
        original = self.originals.get(id(result))
        if original is not None:
            return original
        like = self.like.get(position)
        if like is None or not isinstance(result, DTensor):
            return result
        if self.kind == "number" or not result.dim():
            if result.dim():
                self._refuse("leaves some of the rows,")
            return result
        if result.shape != like.shape:
            self._refuse(f"makes a tensor of {tuple(result.shape)},")
        spec, same = spec_of(result), like.ordinary
        if spec.tensor_meta == same.tensor_meta and spec.placements == same.placements:
            return make_dtensor(get_local_tensor(result), like)
        axis, shard = like.packed
        placements = list(spec.placements)
        assert placements[axis] == ordinary([shard])[0], f"{self.func} gave {placements}"
        placements[axis] = shard
        made = PackedSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return make_dtensor(get_local_tensor(result), made)

    def _refuse(self, why: str) -> Any:
        raise Parallel3dError(
            f"{self.func} on a packed parameter (gate and up in one, q, k and v in one, uneven heads) {why} "
            "and which rows a rank has DTensor doesn't know; use full_tensor(), which every rank must call, "
            "or to_local(). (State of an optimizer that torch's set_optimizer_state_dict has loaded whole "
            "lies otherwise than its parameter: load it with parallel3d.fsdp.load_optim_state_dict)"
        )


def _new(func: Any, like: DTensor, size: Any, *args: Any, **kwargs: Any) -> DTensor:
    """``like.new_empty(size)`` and its kind."""
    spec, local = _packed_spec(like), get_local_tensor(like)
    assert spec is not None
    if tuple(size) != tuple(like.shape):
        return func(make_dtensor(local, spec.ordinary), size, *args, **kwargs)
    made = func(local, list(local.shape), *args, **kwargs)
    return make_dtensor(made, make_spec(spec.mesh, spec.placements, like.shape, made.dtype))


_LOGICAL = {torch.ops.aten.all.default, torch.ops.aten.any.default}


def _all_or_any(func: Any, value: DTensor) -> Tensor:
    """``value.all()`` or ``value.any()``, by a count on each rank.

    DTensor of torch 2.15 would gather the rows first, as many of each rank as ``torch.chunk`` gives it.
    """
    spec, local = _packed_spec(value), get_local_tensor(value)
    assert spec is not None
    is_all = func is torch.ops.aten.all.default
    count = (local.logical_not() if is_all else local).count_nonzero()
    parts = [Partial() if p.is_shard() else p for p in ordinary(spec.placements)]
    summed = DTensor.from_local(count, spec.mesh, parts, run_check=False)
    summed = summed.redistribute(placements=[Replicate()] * len(parts))
    return summed == 0 if is_all else summed != 0


def _lie_apart(target: Any, source: Any) -> bool:
    """Whether these are DTensors of one shape, one of them packed in a way that the other isn't."""
    if not (isinstance(target, DTensor) and isinstance(source, DTensor)):
        return False
    to, of = _packed_spec(target), _packed_spec(source)
    alike = to is not None and of is not None and _alike(to, of)
    return target.shape == source.shape and not alike


def _copied(target: DTensor, source: DTensor) -> DTensor:
    """``target.copy_(source)`` by way of the whole tensor: what torch loads is placed without a packing."""
    whole = source.full_tensor()
    mesh, placements = target.device_mesh, target.placements
    if _packed_spec(target) is not None:
        whole = cut_packed(whole, mesh, placements)
        get_local_tensor(target).copy_(whole)
        return target
    target.copy_(DTensor.from_local(whole, mesh, run_check=False))
    return target


def _packed_spec(value: Any) -> PackedSpec | None:
    """How ``value`` lies, if packed; also a plain DTensor that was made with a packed one's placements."""
    if not isinstance(value, DTensor):
        return None
    spec = spec_of(value)
    if type(spec) is PackedSpec:
        return spec
    if packed_among(spec.placements) is None:
        return None
    return PackedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)


def _alike(one: PackedSpec, other: PackedSpec) -> bool:
    """Whether the rows of the same shape lie on the ranks alike."""
    (axis, shard), (its_axis, its_shard) = one.packed, other.packed
    same = shard is its_shard or shard == its_shard
    same_mesh = one.mesh is other.mesh or one.mesh == other.mesh
    return same and axis == its_axis and same_mesh and one.shape == other.shape
