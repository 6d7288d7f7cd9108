"""The sharding engine: ``fully_shard`` and what comes with it."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.fsdp.api import (
        BackwardPrefetch,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
        ShardPlacementResult,
        strategy_layout,
        strategy_options,
    )
    from parallel3d.fsdp.fully_shard import fully_shard
    from parallel3d.fsdp.interop import register_fsdp_forward_method, share_comm_ctx
    from parallel3d.fsdp.module import FSDPModule, GradientReductionHandle, UnshardHandle
    from parallel3d.fsdp.options.checks import check_execution_order
    from parallel3d.fsdp.options.comm_hooks import (
        CommHookState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        reduce_scatter_hook,
    )
    from parallel3d.fsdp.state_dict.full_params import full_params
    from parallel3d.fsdp.state_dict.model_state_dict import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictSettings,
        StateDictType,
        get_state_dict_type,
        load_model_state_dict,
        model_state_dict,
        set_state_dict_type,
        state_dict_type,
    )
    from parallel3d.fsdp.state_dict.optim_state_dict import load_optim_state_dict, optim_state_dict
    from parallel3d.fsdp.state_dict.transforms import chunk, gather

__all__ = [
    "BackwardPrefetch",
    "CPUOffloadPolicy",
    "CommHookState",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "allreduce_hook",
    "bf16_compress_hook",
    "check_execution_order",
    "chunk",
    "fp16_compress_hook",
    "full_params",
    "fully_shard",
    "gather",
    "get_state_dict_type",
    "load_model_state_dict",
    "load_optim_state_dict",
    "model_state_dict",
    "optim_state_dict",
    "reduce_scatter_hook",
    "register_fsdp_forward_method",
    "set_state_dict_type",
    "share_comm_ctx",
    "state_dict_type",
    "strategy_layout",
    "strategy_options",
]

export_lazily(
    __name__,
    {
        "fsdp.api": "BackwardPrefetch CPUOffloadPolicy DataParallelMeshDims MixedPrecisionPolicy "
        "OffloadPolicy ShardPlacementResult ShardingStrategy strategy_layout strategy_options",
        "fsdp.fully_shard": "fully_shard",
        "fsdp.interop": "register_fsdp_forward_method share_comm_ctx",
        "fsdp.module": "FSDPModule GradientReductionHandle UnshardHandle",
        "fsdp.options.checks": "check_execution_order",
        "fsdp.options.comm_hooks": "CommHookState allreduce_hook bf16_compress_hook "
        "fp16_compress_hook reduce_scatter_hook",
        "fsdp.state_dict.full_params": "full_params",
        "fsdp.state_dict.model_state_dict": "FullOptimStateDictConfig FullStateDictConfig "
        "LocalOptimStateDictConfig LocalStateDictConfig ShardedOptimStateDictConfig "
        "ShardedStateDictConfig StateDictSettings StateDictType get_state_dict_type "
        "load_model_state_dict model_state_dict set_state_dict_type state_dict_type",
        "fsdp.state_dict.optim_state_dict": "load_optim_state_dict optim_state_dict",
        "fsdp.state_dict.transforms": "chunk gather",
    },
)
