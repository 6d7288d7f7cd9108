"""What ``docs/parity.md`` must show: every argument, method, behaviour and fault of torch's fully_shard.

An item is what a test's ``@pytest.mark.parity("<item>")`` says. A test may name an item that is not
required here; it is listed too.
"""

from torch.distributed.fsdp import FSDPModule

# The kinds of items, in the order of the table: prefix -> heading.
KINDS = {
    "argument": "Arguments of `fully_shard`",
    "method": "Methods of `FSDPModule`",
    "function": "Functions and classes of the module",
    "behaviour": "Behaviours",
    "fault": "Faults of torch 2.13 that are none here",
    "reliability": "Reliability",
    "show": "Beside torch",
}

_ARGUMENTS = [
    "module",
    "list of modules",
    "list of modules run in parts",
    "mesh=None",
    "mesh 1-D",
    "mesh 2-D",
    "mesh of more axes, by name",
    "reshard_after_forward=None",
    "reshard_after_forward=True",
    "reshard_after_forward=False",
    "reshard_after_forward=int",
    "shard_placement_fn: dim",
    "shard_placement_fn: mesh per parameter",
    "mp_policy: param_dtype",
    "mp_policy: reduce_dtype",
    "mp_policy: output_dtype",
    "mp_policy: cast_forward_inputs",
    "offload_policy=OffloadPolicy()",
    "offload_policy=CPUOffloadPolicy()",
    "offload_policy=CPUOffloadPolicy(pin_memory=False)",
    "ignored_params",
    "dp_mesh_dims: shard",
    "dp_mesh_dims: shard and replicate",
    "dp_mesh_dims: tuple of axes",
    "torch's own policy objects",
]

_FUNCTIONS = [
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "UnshardHandle",
    "all-gather extension: fsdp_pre_all_gather, fsdp_post_all_gather",
    "isinstance of torch's FSDPModule",
    "every name of torch's FSDPModule is overridden",
]

_BEHAVIOURS = [
    "several forwards before a backward",
    "backward of one of two outputs",
    "frozen, unfrozen, refrozen parameters",
    "frozen buckets hold no gradient or reduce buffers (LoRA)",
    "shared parameters",
    "non-float parameters",
    "empty shards",
    "activation checkpointing",
    "torch.compile per unit, aot_eager",
    "torch.compile per unit, inductor",
    "nested units",
    "sibling units",
    "root-only unit",
    "inference mode and no_grad",
    "Hugging Face generate()",
    "torch's pipeline schedules",
    "CPU offload without a device",
    "CPU offload with pinned memory",
    "uneven sharding",
    "gradient divide on gloo",
    "gradient accumulation",
    "own HSDP by set_all_reduce_hook",
    "uneven Shard(1)",
    "stable parameter identity",
]

_FAULTS = [
    "a: reshard to a smaller world with Shard(1)",
    "b: stale partial sum",
    "c: clipping over mixed meshes",
    "d: clipping with ignored parameters",
    "e: TP reductions in the reduce dtype",
    "f: fresh parameters in accumulation",
    "g: unfreezing with mixed precision",
    "h: mixed dtypes in one unit",
    "i: mesh order by name",
    "n: scalar parameters",
    "n: non-contiguous parameters",
    "n: copy.deepcopy",
    "n: uneven Shard(1)",
    "n: tied parameters across units",
    "o: submodule first",
]

_RELIABILITY = [
    "exception in forward, reset_iter_state",
    "exception in backward, reset_iter_state",
    "exceptions at every hook",
    "random configurations",
    "no memory growth over 200 steps",
    "everything freed at once",
]

_SHOW = ["the recorder's list of collectives equals torch's"]


def required_items() -> list[str]:
    """All of them, kind by kind. Methods are what the installed torch's class has."""
    methods = sorted(name for name in dir(FSDPModule) if not name.startswith("_"))
    by_kind = {
        "argument": _ARGUMENTS,
        "method": methods,
        "function": _FUNCTIONS,
        "behaviour": _BEHAVIOURS,
        "fault": _FAULTS,
        "reliability": _RELIABILITY,
        "show": _SHOW,
    }
    return [
        f"{kind} {i}" if kind == "fault" else f"{kind}: {i}"
        for kind in KINDS
        for i in by_kind[kind]
    ]


# What a test that torch fails may cite, and what that says of torch 2.13.0.
CITED = {
    "fault a": "reshard_after_forward=int with Shard(1): sizes of dim 0, IndexError or RuntimeError",
    "fault b": "HSDP: a stale partial sum survives zero_grad()",
    "fault c": "clip_grad_norm_ over parameters on different meshes: RuntimeError",
    "fault d": "clip_grad_norm_ with ignored_params: RuntimeError",
    "fault e": "gradients are summed over TP in the compute dtype, not the reduce dtype",
    "fault f": "accumulation without reduction, a parameter first used last: AssertionError (#196996)",
    "fault g": "unit frozen in the first forward, unfrozen later, mixed precision: RuntimeError (#186998)",
    "fault h": "two dtypes in one unit: AssertionError at the first forward",
    "fault i": 'mesh named ("shard", "replicate") used as (replicate, shard)',
    "fault n": "scalar, non-contiguous and tied parameters, deepcopy, uneven Shard(1) refused",
    "fault o": "running a submodule before the root: RuntimeError",
    "no gloo": "gloo: PREMUL_SUM for set_gradient_divide_factor fails; pin_memory fails without a device",
    "refused": "refused by torch: 3-D meshes by name; reshard to an int with DTensors (hangs)",
    "silent": "set_allocate_memory_from_process_group_for_comm does nothing, without a word, on gloo",
    "found: conversion": "a conversion to another dtype after the first forward: RuntimeError",
    "found: reset": "reset_iter_state keeps unreduced gradients, which the next backward adds to its own",
    "found: no elements": "a parameter without elements: RuntimeError in backward",
    "#144289": "types of parameters differ after a forward of a root that is not resharded",
}
