"""The sharding engine: ``fully_shard`` and what comes with it."""

from parallel3d.fsdp.api import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from parallel3d.fsdp.comm_hooks import (
    CommHookState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from parallel3d.fsdp.fully_shard import fully_shard
from parallel3d.fsdp.functions import register_fsdp_forward_method, share_comm_ctx
from parallel3d.fsdp.module import FSDPModule, UnshardHandle
from parallel3d.fsdp.order_check import check_execution_order
from parallel3d.fsdp.strategy import ShardingStrategy, strategy_layout, strategy_options

__all__ = [
    "CPUOffloadPolicy",
    "CommHookState",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "ShardingStrategy",
    "UnshardHandle",
    "allreduce_hook",
    "bf16_compress_hook",
    "check_execution_order",
    "fp16_compress_hook",
    "fully_shard",
    "reduce_scatter_hook",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "strategy_layout",
    "strategy_options",
]
