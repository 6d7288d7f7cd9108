"""torch's own ``fully_shard`` for ``parallelize(engine="torch")``: what it takes, and its mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._torch.fully_shard import TorchMixedPrecisionPolicy, torch_fully_shard
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.placement import data_axes


def torch_sharding(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    policy: TorchMixedPrecisionPolicy,
) -> Callable[..., Any]:
    """Returns torch's ``fully_shard`` with the data axes of ``mesh`` and its own kind of policy.

    Args:
        model: the root; not changed.
        units: the modules of each unit but the root, inner ones before those around them.
        mesh: with axes ``shard`` and perhaps ``replicate`` and ``tp``.

    Raises:
        Parallel3dError, MeshError: something that torch's ``fully_shard`` can't do, or fails on later.
    """
    if ranks_are_simulated():
        raise Parallel3dError(
            "engine=\"torch\": torch's fully_shard can't run on simulated ranks; use real processes"
        )
    axes = data_axes(mesh)
    if axes.shard is None:
        raise MeshError(
            f'engine="torch" needs a mesh with a shard axis, if of one rank; this one has '
            f"{mesh.mesh_dim_names}. build_mesh makes one"
        )
    names: Any = mesh.mesh_dim_names  # data_axes refuses axes without names, unless there is one
    data = mesh
    if names is not None and mesh.ndim > 1:
        replicated = axes.replicate is not None and axes.size(axes.replicate) > 1
        data = (
            mesh[names[axes.replicate], names[axes.shard]]
            if replicated
            else mesh[names[axes.shard]]
        )
    _check_params(model, units)
    return functools.partial(torch_fully_shard, mesh=data, mp_policy=_torch_policy(policy, model))


def _torch_policy(policy: TorchMixedPrecisionPolicy, model: nn.Module) -> TorchMixedPrecisionPolicy:
    """Returns ``policy`` as torch's own class; Parallel3dError if it asks for what torch has not."""
    if not isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    plain = MixedPrecisionPolicy(**{name: getattr(policy, name) for name in names})
    ours = [name for name in vars(plain) if getattr(policy, name) != getattr(plain, name)]
    if ours:
        raise Parallel3dError(
            f'engine="torch": torch\'s MixedPrecisionPolicy has no {", ".join(ours)}; leave it out, or use '
            'engine="parallel3d"'
        )
    for name, module in model.named_modules():
        if policy.param_dtype is not None and isinstance(module, policy.full_precision_modules):
            raise Parallel3dError(
                f'engine="torch": {name!r} ({type(module).__name__}) would compute in '
                f"{policy.param_dtype}, since torch's MixedPrecisionPolicy has no full_precision_modules; "
                'give full_precision_modules=() if that is meant, or use engine="parallel3d"'
            )
    return TorchMixedPrecisionPolicy(**{name: getattr(policy, name) for name in names})


def _check_params(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
    """Raises Parallel3dError for parameters that torch's ``fully_shard`` refuses, some only in forward."""
    names = {param: name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for unit in (*units, [model]):
        dtypes: dict[Any, str] = {}  # of those that are trained -> the first's name
        for param in (p for module in unit for p in module.parameters()):
            if param in taken:
                continue
            taken.add(param)
            name, why = names[param], ""
            if param.dim() == 0:
                why = "is a scalar; make it a tensor of one element"
            elif not param.is_contiguous():
                why = f"is not contiguous (stride {param.stride()}); make it so"
            if param.requires_grad:
                first = dtypes.setdefault(param.dtype, name)
                if len(dtypes) > 1:
                    others = next(n for n in dtypes.values() if n != first)
                    why = f"is {param.dtype} in one unit with {others} of another dtype; give them one"
            if why:
                raise Parallel3dError(
                    f'engine="torch": parameter {name} {why}, or use engine="parallel3d"'
                )
