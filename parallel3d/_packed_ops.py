"""Operations on packed DTensors.

To DTensor's own operations their rows are those of ``torch.chunk``. So only what treats rows alike, wherever
they are, goes through to them; anything else would be silently wrong, and raises.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor, make_spec, spec_of
from parallel3d._packed_layout import PackedShard, PackedSpec, cut_packed, ordinary
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

    An operation on lists is one on each position; ``like[i]`` is what is packed at position i.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind = _kind(func)
        self.like: dict[int, DTensor] = {}
        self.originals: dict[int, DTensor] = {}  # by id of what DTensor sees of it
        self.seen: list[DTensor] = []  # keeps these ids theirs
        self.on_lists = any(isinstance(value, (list, tuple)) for value in args[:1])

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
        values = [*self.args, *self.kwargs.values()]
        for value in values:
            for position, tensor in _positions(value):
                if isinstance(tensor, DTensor) and _is_packed(tensor):
                    self._take(position, tensor)
        args = [self._plain(value) for value in self.args]
        kwargs = {key: self._plain(value) for key, value in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            marked = (self._marked(i * self.on_lists, value) for i, value in enumerate(result))
            return type(result)(marked)
        return self._marked(0, result)

    def _take(self, position: int, tensor: Any) -> None:
        known = self.like.setdefault(position, tensor)
        same = _packed_of(known) == _packed_of(tensor)
        if not same or known.device_mesh != tensor.device_mesh or known.shape != tensor.shape:
            self._refuse(
                f"has operands with other rows, {known.placements} and {tensor.placements},"
            )

    def _plain(self, value: Any) -> Any:
        """``value`` as DTensor gets it."""
        if isinstance(value, (list, tuple)):
            return [self._plain_at(i, item) for i, item in enumerate(value)]
        return self._plain_at(0, value)

    def _plain_at(self, position: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and _is_packed(value):
            spec = spec_of(value)
            plain = make_dtensor(get_local_tensor(value), _ordinary(spec))
            self.originals[id(plain)] = value
            self.seen.append(plain)
            return plain
        like = self.like.get(position)
        if like is None or not value.dim() or value.numel() == 1:
            return value
        at = _packed_of(like)[1].dim + value.dim() - like.dim()
        if at < 0 or value.shape[at] == 1:
            return value
        if value.stride(at) == 0:  # one row, expanded, as backward expands numbers
            return value.narrow(at, 0, 1)
        what = f"{tuple(value.placements)}" if isinstance(value, DTensor) else "no DTensor"
        return self._refuse(f"has an operand of {tuple(value.shape)} with other rows, {what},")

    def _marked(self, position: int, result: Any) -> Any:
        """The result at ``position`` of the result, packed as the operands there are."""
        if not isinstance(result, Tensor):
            return result
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
        spec, packed = spec_of(result), spec_of(like)
        axis, shard = _packed_of(like)
        if (
            spec.placements == _ordinary(packed).placements
            and spec.tensor_meta == packed.tensor_meta
        ):
            return make_dtensor(get_local_tensor(result), packed)
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
    spec, local = spec_of(like), get_local_tensor(like)
    if tuple(size) != tuple(like.shape):
        return func(make_dtensor(local, _ordinary(spec)), size, *args, **kwargs)
    made = func(local, list(local.shape), *args, **kwargs)
    return make_dtensor(made, make_spec(spec.mesh, spec.placements, like.shape, made.dtype))


def _lie_apart(target: Any, source: Any) -> bool:
    """Whether these are DTensors of one shape, one of them packed in a way that the other isn't."""
    if not (isinstance(target, DTensor) and isinstance(source, DTensor)):
        return False
    packed = [_packed_of(t) if _is_packed(t) else None for t in (target, source)]
    alike = packed[0] == packed[1] and target.device_mesh == source.device_mesh
    return target.shape == source.shape and not alike


def _copied(target: DTensor, source: DTensor) -> DTensor:
    """``target.copy_(source)`` by way of the whole tensor: what torch loads is placed without a packing."""
    whole = source.full_tensor()
    mesh, placements = target.device_mesh, target.placements
    if _is_packed(target):
        whole = cut_packed(whole, mesh, placements)
        get_local_tensor(target).copy_(whole)
        return target
    target.copy_(DTensor.from_local(whole, mesh, run_check=False))
    return target


def _is_packed(tensor: DTensor) -> bool:
    """Also of a plain DTensor that torch has made with the placements of a packed one."""
    return any(isinstance(p, PackedShard) for p in spec_of(tensor).placements)


def _packed_of(tensor: DTensor) -> tuple[int, PackedShard]:
    return next(
        (i, p) for i, p in enumerate(spec_of(tensor).placements) if isinstance(p, PackedShard)
    )


def _ordinary(spec: Any) -> Any:
    if isinstance(spec, PackedSpec):
        return spec.ordinary
    return PackedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta).ordinary


def _positions(value: Any) -> list[tuple[int, Any]]:
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else [(0, value)]
