"""Private names of torch's own ``fully_shard``, which other libraries read."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy  # noqa: F401
from torch.distributed.fsdp._fully_shard import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState

if TYPE_CHECKING or hasattr(torch_fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        ShardPlacementResult as ShardPlacementResult,
    )
else:  # 2.11 has neither
    from parallel3d._torch.v2_11 import DataParallelMeshDims as DataParallelMeshDims
    from parallel3d._torch.v2_11 import ShardPlacementResult as ShardPlacementResult

# Attributes of modules: the names and states of what was applied to them.
FULLY_SHARD_KEYS = (STATE_KEY, REGISTRY_KEY)


def set_fully_shard_state(module: nn.Module, state: Any) -> None:
    """Makes ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``, and registers with torch
    that fully_shard was applied to ``module``."""
    attributes = vars(module)  # new dicts: a rollback restores the old ones
    # From torch's own module: ``torch.distributed.fsdp.fully_shard`` may have been replaced by ours.
    function = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
    attributes[STATE_KEY] = {**attributes.get(STATE_KEY, {}), function: state}
    attributes[REGISTRY_KEY] = {**attributes.get(REGISTRY_KEY, {}), "fully_shard": RegistryItem()}


def enter_module_state(module: nn.Module, state: Any) -> None:
    """Makes torch's ``_get_module_fsdp_state(module)`` return ``state``, an instance of ``FSDPState``.

    The caller keeps it alive.
    """
    _module_state_mapping[module] = weakref.ref(state)


def fully_shard_state(module: nn.Module) -> Any:
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


def unsharded_by_torch(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the all-gather buffers of ``module`` if it is a unit of torch's ``fully_shard``."""
    if not isinstance(module, torch_fsdp.FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11 has one, or none
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    for group in groups:
        for param in group.fsdp_params:
            yield from getattr(param, "all_gather_outputs", ())  # none before its first gather


def is_torch_hook_state(state: object) -> bool:
    """Whether ``state`` is a ``DefaultState`` of torch's FSDP1 communication hooks."""
    # By name, so that the module is not imported.
    origin = "torch.distributed.algorithms._comm_hooks.default_hooks"
    return any((c.__module__, c.__name__) == (origin, "DefaultState") for c in type(state).__mro__)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """Returns ``name`` without what ``torch.compile``, ``checkpoint_wrapper`` and FSDP1 insert."""
    if not any(part in name for part in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
