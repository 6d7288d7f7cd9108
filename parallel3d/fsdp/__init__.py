"""The sharding engine: ``fully_shard`` and what comes with it."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
    from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
    from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
    from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
    from torch.distributed.fsdp import StateDictSettings as StateDictSettings
    from torch.distributed.fsdp import StateDictType as StateDictType

    from parallel3d.fsdp.api import BackwardPrefetch as BackwardPrefetch
    from parallel3d.fsdp.api import CPUOffloadPolicy as CPUOffloadPolicy
    from parallel3d.fsdp.api import DataParallelMeshDims as DataParallelMeshDims
    from parallel3d.fsdp.api import MixedPrecisionPolicy as MixedPrecisionPolicy
    from parallel3d.fsdp.api import OffloadPolicy as OffloadPolicy
    from parallel3d.fsdp.api import ShardingStrategy as ShardingStrategy
    from parallel3d.fsdp.api import ShardPlacementResult as ShardPlacementResult
    from parallel3d.fsdp.api import strategy_layout as strategy_layout
    from parallel3d.fsdp.api import strategy_options as strategy_options
    from parallel3d.fsdp.fully_shard import fully_shard as fully_shard
    from parallel3d.fsdp.interop import register_fsdp_forward_method as register_fsdp_forward_method
    from parallel3d.fsdp.interop import share_comm_ctx as share_comm_ctx
    from parallel3d.fsdp.module import FSDPModule as FSDPModule
    from parallel3d.fsdp.module import GradientReductionHandle as GradientReductionHandle
    from parallel3d.fsdp.module import UnshardHandle as UnshardHandle
    from parallel3d.fsdp.options.checks import check_execution_order as check_execution_order
    from parallel3d.fsdp.options.comm_hooks import CommHookState as CommHookState
    from parallel3d.fsdp.options.comm_hooks import allreduce_hook as allreduce_hook
    from parallel3d.fsdp.options.comm_hooks import bf16_compress_hook as bf16_compress_hook
    from parallel3d.fsdp.options.comm_hooks import fp16_compress_hook as fp16_compress_hook
    from parallel3d.fsdp.options.comm_hooks import reduce_scatter_hook as reduce_scatter_hook
    from parallel3d.fsdp.state_dict.full_params import full_params as full_params
    from parallel3d.fsdp.state_dict.state_dicts import get_state_dict_type as get_state_dict_type
    from parallel3d.fsdp.state_dict.state_dicts import (
        load_model_state_dict as load_model_state_dict,
    )
    from parallel3d.fsdp.state_dict.state_dicts import (
        load_optim_state_dict as load_optim_state_dict,
    )
    from parallel3d.fsdp.state_dict.state_dicts import model_state_dict as model_state_dict
    from parallel3d.fsdp.state_dict.state_dicts import optim_state_dict as optim_state_dict
    from parallel3d.fsdp.state_dict.state_dicts import set_state_dict_type as set_state_dict_type
    from parallel3d.fsdp.state_dict.state_dicts import state_dict_type as state_dict_type
    from parallel3d.fsdp.state_dict.transforms import chunk as chunk
    from parallel3d.fsdp.state_dict.transforms import gather as gather
else:
    export_lazily(
        __name__,
        {
            ".api": (
                "BackwardPrefetch CPUOffloadPolicy DataParallelMeshDims MixedPrecisionPolicy "
                "OffloadPolicy ShardingStrategy ShardPlacementResult strategy_layout "
                "strategy_options"
            ),
            ".fully_shard": "fully_shard",
            ".interop": "register_fsdp_forward_method share_comm_ctx",
            ".module": "FSDPModule GradientReductionHandle UnshardHandle",
            ".options.checks": "check_execution_order",
            ".options.comm_hooks": (
                "CommHookState allreduce_hook bf16_compress_hook fp16_compress_hook "
                "reduce_scatter_hook"
            ),
            ".state_dict.full_params": "full_params",
            ".state_dict.state_dicts": (
                "get_state_dict_type load_model_state_dict load_optim_state_dict model_state_dict "
                "optim_state_dict set_state_dict_type state_dict_type"
            ),
            ".state_dict.transforms": "chunk gather",
            "torch.distributed.fsdp": (
                "FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
                "LocalStateDictConfig ShardedOptimStateDictConfig ShardedStateDictConfig "
                "StateDictSettings StateDictType"
            ),
        },
    )
