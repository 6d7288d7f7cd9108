"""Private names of DTensor and DeviceMesh."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from operator import attrgetter
from typing import Any

import torch
from torch import distributed as dist
from torch._ops import OpOverload as OpOverload
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # noqa: F401

from parallel3d._torch.simulated import leave_operators
from parallel3d._torch.v2_11 import IS_2_11

root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh
"""The mesh that a mesh was sliced from, or the mesh itself."""


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the axes of ``meshes`` in order, which must be slices of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_axes(mesh: DeviceMesh, names: tuple[str, ...], own_group: bool = False) -> DeviceMesh:
    """Returns the axes ``names`` of ``mesh`` joined to one axis, named as torch does; made once per mesh.

    ``own_group``: whether it gets a process group of its own even if it has all ranks of the world.
    """
    backend = dist.get_backend_config() if own_group else None
    return mesh[names]._flatten("_".join(names), backend_override=backend)


def axis_groups(mesh: DeviceMesh) -> dict[str, ProcessGroup]:
    """Returns {name: process group} of the axes of ``mesh``, and of axes that ``flatten_axes`` has joined.

    If an axis of ``mesh`` is a joined one, the groups of the axes that it joins are included, too.
    """
    names, root = mesh.mesh_dim_names or (), root_mesh(mesh)
    groups = {axis: mesh.get_group(axis) for axis in names}
    joined = root._flatten_mapping
    groups |= {axis: flat.get_group() for axis, flat in joined.items() if axis not in groups}
    for axis in (root.mesh_dim_names or ()) if joined.keys() & set(names) else ():
        groups.setdefault(axis, root.get_group(axis))
    return groups


def root_axes(mesh: DeviceMesh) -> list[tuple[int, ...]] | None:
    """Returns, for each axis of ``mesh``, the positions in its root mesh of the axis or those it joins.

    None if there are no names, or a name is not made of the root's.
    """
    known = root_mesh(mesh).mesh_dim_names or ()
    runs = combinations(range(len(known) + 1), 2)
    by_name = {"_".join(known[a:b]): tuple(range(a, b)) for a, b in runs}
    names = mesh.mesh_dim_names or (None,)
    return [by_name[name] for name in names] if by_name.keys() >= set(names) else None  # type: ignore[index]


def unflatten_mesh(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Returns ``mesh``, one named axis, split into axes of ``sizes``; all ranks of its root make groups."""
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def dtensor_shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the (local shape, global offset) that DTensor gives to the rank at ``coordinate``."""
    return _compute_local_shape_and_global_offset(
        tuple(shape), tuple(mesh_shape), list(coordinate), list(placements)
    )


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Returns the DTensorSpec of a contiguous DTensor of global ``shape``.

    If a placement has a ``spec_class`` (``PackedShard``), it is of that class.
    """
    stride = torch.empty(shape, device="meta").stride()
    kind = next((p.spec_class for p in placements if hasattr(p, "spec_class")), DTensorSpec)
    return kind(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor on ``local``, without ``from_local``'s checks and autograd node (1 us, not 30).

    Its class is ``tensor_class(spec)``. ``__init__`` is not called: it does nothing, in three frames that
    keep the compiler out.
    """
    return new_dtensor(tensor_class(spec), local, spec, requires_grad=False)


new_dtensor: Callable[..., DTensor] = DTensor.__new__
"""``new_dtensor(tensor_class(spec), local, spec, requires_grad=False)`` is ``make_dtensor(local, spec)``."""


def tensor_class(spec: DTensorSpec) -> type[DTensor]:
    """Returns the class of a DTensor with ``spec``: DTensor, or the subclass that a spec of ours names."""
    return DTensor if type(spec) is DTensorSpec else spec.tensor_class  # type: ignore[attr-defined]


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


_OPERATORS = ("add", "sub", "mul", "truediv", "matmul")


def wrap_operators(around: Callable[..., Any]) -> None:
    """Makes +, -, *, / and @ of a DTensor and a plain tensor, in either order, call ``around(operator,
    dtensor, other)``, which must return ``operator(dtensor, other)``."""

    def wrapped(operator: Callable[..., Any]) -> Callable[..., Any]:
        def operate(self: DTensor, other: Any) -> Any:
            if isinstance(other, torch.Tensor) and not isinstance(other, DTensor):
                return around(operator, self, other)
            return operator(self, other)

        return operate

    for name in (f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r", "i")):
        if hasattr(torch.Tensor, name):  # @= is none
            setattr(DTensor, name, wrapped(getattr(torch.Tensor, name)))
    leave_operators((f"__{name}__" for name in _OPERATORS), DTensor)


def watch_writes(refuse: Callable[[Sequence[Any]], None]) -> None:
    """Calls ``refuse(operands)`` where DTensors are used to change a plain tensor in place: torch raises an
    AssertionError without a text there."""
    dispatcher: Any = DTensor._op_dispatcher
    tail = getattr(dispatcher, "_dispatch_fast_path_python_tail", None)
    if tail is None:  # of another version
        return

    def watched(op: Any, args: Any, *rest: Any, **named: Any) -> Any:
        try:
            return tail(op, args, *rest, **named)
        except AssertionError:
            if not isinstance(args[0], DTensor):
                refuse(args)
            raise

    dispatcher._dispatch_fast_path_python_tail = watched


def keep_partial_gradients(param: torch.Tensor) -> None:
    """Makes a partial DTensor gradient of ``param`` stay partial in ``param.grad``, also in torch 2.11."""
    if IS_2_11 and isinstance(param, DTensor):
        # 2.11 copies a gradient of other strides than the parameter's into a new DTensor, and sums it.
        param.register_hook(lambda grad: None if grad is None else grad.contiguous())


def clear_dtensor_caches() -> None:
    """Clears DTensor's caches, which hold meshes of process groups that may be destroyed.

    A new mesh equal to a destroyed one would be taken for it; and its group names, which torch counts from
    zero again, could then mean other groups.
    """
    # What torch.distributed.tensor.debug does, whose import alone takes half a second.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    caches = (
        (_redistribute, "_gen_transform_infos.cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_collective_utils, "MeshTopoInfo.build_from_mesh.cache_clear"),
        (_sharding_prop, "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
    )
    for module, path in caches:
        with suppress(AttributeError):  # of another version
            attrgetter(path)(module)()


def gather_whole(tensor: DTensor) -> torch.Tensor:
    """Returns ``tensor.full_tensor()`` without torch's warning that it takes one collective per axis."""
    logger = logging.getLogger(_redistribute.__name__)
    disabled, logger.disabled = logger.disabled, True
    try:
        return tensor.full_tensor()
    finally:
        logger.disabled = disabled


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor object inside the DTensor ``tensor``; ``to_local`` may return a view of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


# The same of what is known to be a DTensor.
local_tensor_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Sets the tensor inside the DTensor ``tensor`` to ``local``, of the same shape, dtype and device."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local
