"""Policies of the sharding engine. torch's own objects are taken as well, and torch takes these."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from parallel3d._torch.autograd import BatchNorm, grads_may_differ_in_dtype
from parallel3d._torch.fully_shard import (
    DataParallelMeshDims,
    ShardPlacementResult,
    TorchMixedPrecisionPolicy,
)
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placement import checked_mesh, data_axes
from parallel3d.mesh.layout import MeshLayout

__all__ = [
    "BackwardPrefetch",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "ShardingStrategy",
    "check_offload",
    "check_policy",
    "in_own_dtype",
    "input_dtype",
    "keeps_its_dtype",
    "own_policy",
    "strategy_layout",
    "strategy_options",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """Which dtypes a unit computes and communicates in. Sharded parameters keep their own dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters, of the all-gather, and of the floating-point
            inputs of ``forward``. None: the parameters' own.
        reduce_dtype: dtype of the gradient reduction. None: as torch's engine has it. Before torch 2.15 that
            is the dtype of the unsharded parameters. Since then it is the ``grad_dtype`` that a parameter was
            given before ``fully_shard``, or else the parameter's own; a parameter with a ``grad_dtype`` has
            its ``.grad`` in it. With ``keep_low_precision_grads`` it is that of the unsharded parameters.
        output_dtype: dtype that floating-point outputs of ``forward`` are cast to. None: as they are.
        cast_forward_inputs: whether inputs are cast to ``param_dtype``.
        cast_root_forward_inputs: the same for the outermost unit. None: as ``cast_forward_inputs``.
        buffer_dtype: dtype that forward and backward see floating-point buffers in. None: their own. At rest,
            and so in ``state_dict``, a module has its buffer as it was; what forward writes reaches it. The
            cast one is kept until the buffer changes (not through ``.data``: that is not seen).
        keep_low_precision_grads: whether ``.grad`` stays in the dtype it was reduced in. Otherwise it has the
            sharded parameter's. Accumulation over micro-batches then adds in that dtype too, but for sums
            that wait for their reduction. Not every optimizer takes such gradients: ``SGD`` does, ``AdamW``
            wants ``p.grad = p.grad.to(p.dtype)`` before, which ``optim.step_in_backward`` leaves no room for.
        full_precision_in_eval: whether a unit whose modules are in ``eval()`` gathers, computes and reduces
            in the parameters' own dtype, with buffers in theirs. Its inputs are not cast, but for those in
            ``param_dtype``, as a unit in training hands them over; its outputs are, if at all, by
            ``output_dtype``: give one where a unit in ``eval()`` hands over to one in training.
        full_precision_modules: classes of modules that keep parameters and buffers in their own dtype, and
            compute and reduce in it. Where ``param_dtype`` is given, their inputs are cast to it and their
            outputs back. Modules of these classes without parameters and buffers compute in float32 at
            least. Torch's own policies name none.
        param_dtype_override_fn: called once with each parameter of a unit; where it returns the parameter's
            own dtype, that parameter is gathered, computed with and reduced in it. None or ``param_dtype``:
            as the others. Inputs are cast to ``param_dtype`` all the same. torch has it since 2.15.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    full_precision_modules: tuple[type[nn.Module], ...] = (BatchNorm,)
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        check_policy(self)


def check_policy(policy: TorchMixedPrecisionPolicy) -> None:
    """Raises if ``policy``, of ours or torch's, is none or holds what can't be.

    Raises:
        Parallel3dError: see above.
    """
    if not isinstance(policy, TorchMixedPrecisionPolicy):
        raise Parallel3dError(f"mp_policy is {policy!r}; it must be a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
        dtype = getattr(policy, name, None)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise Parallel3dError(
                f"MixedPrecisionPolicy.{name} is {dtype!r}; it must be a floating-point "
                "torch.dtype such as torch.bfloat16, or None"
            )
    for name in ("cast_forward_inputs", "keep_low_precision_grads", "full_precision_in_eval"):
        value = getattr(policy, name, False)
        if not isinstance(value, bool):
            raise Parallel3dError(
                f"MixedPrecisionPolicy.{name} is {value!r}; it must be True or False"
            )
    if isinstance(policy, MixedPrecisionPolicy):
        _check_ours(policy)


def _check_ours(policy: MixedPrecisionPolicy) -> None:
    cast = policy.cast_root_forward_inputs
    if cast is not None and not isinstance(cast, bool):
        raise Parallel3dError(
            f"MixedPrecisionPolicy.cast_root_forward_inputs is {cast!r}; it must be True, False, or None: as "
            "cast_forward_inputs"
        )
    override = policy.param_dtype_override_fn
    if override is not None and not callable(override):
        raise Parallel3dError(
            f"MixedPrecisionPolicy.param_dtype_override_fn is {override!r}; it must be a function of a "
            "parameter that returns a torch.dtype or None"
        )
    classes = policy.full_precision_modules
    if not isinstance(classes, tuple) or not all(
        isinstance(each, type) and issubclass(each, nn.Module) for each in classes
    ):
        raise Parallel3dError(
            f"MixedPrecisionPolicy.full_precision_modules is {classes!r}; it must be a tuple of module "
            "classes, such as (nn.LayerNorm,), or () for none"
        )
    if policy.keep_low_precision_grads and not grads_may_differ_in_dtype:
        raise Parallel3dError(
            f"MixedPrecisionPolicy.keep_low_precision_grads is True, but torch {torch.__version__} lets no "
            "gradient have another dtype than its parameter; use torch 2.13, or leave it False"
        )


def check_offload(policy: OffloadPolicy) -> None:
    """Raises if ``policy`` is no offload policy.

    Raises:
        Parallel3dError: see above.
    """
    if not isinstance(policy, OffloadPolicy):
        raise Parallel3dError(
            f"offload_policy is {policy!r}; it must be an OffloadPolicy() (everything stays on the mesh's "
            "device) or a CPUOffloadPolicy(pin_memory=...)"
        )
    if isinstance(policy, CPUOffloadPolicy) and not isinstance(policy.pin_memory, bool):
        raise Parallel3dError(
            f"CPUOffloadPolicy.pin_memory is {policy.pin_memory!r}; it must be True or False"
        )


def own_policy(policy: TorchMixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy``, which may be torch's, as one of ours that does what torch does; checked."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    check_policy(policy)
    return MixedPrecisionPolicy(
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
        full_precision_modules=(),
        param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),
    )


def keeps_its_dtype(policy: MixedPrecisionPolicy, name: str, param: nn.Parameter) -> bool:
    """Whether ``param_dtype_override_fn`` wants ``param`` in its own dtype.

    Raises:
        Parallel3dError: it wants anything else than that, ``param_dtype`` or None.
    """
    if policy.param_dtype_override_fn is None:
        return False
    wanted = policy.param_dtype_override_fn(param)
    if wanted is None or wanted is policy.param_dtype:
        return False
    if wanted is not param.dtype:
        raise Parallel3dError(
            f"param_dtype_override_fn of the MixedPrecisionPolicy returned {wanted!r} for {name!r}; it must "
            f"return None, param_dtype ({policy.param_dtype}) or the parameter's own dtype ({param.dtype})"
        )
    return True


def input_dtype(policy: MixedPrecisionPolicy, *, is_root: bool) -> torch.dtype | None:
    """What a unit casts its inputs to; None: nothing."""
    cast = policy.cast_forward_inputs
    if is_root and policy.cast_root_forward_inputs is not None:
        cast = policy.cast_root_forward_inputs
    return policy.param_dtype if cast else None


def in_own_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """``policy`` for parameters that compute in ``dtype``, their own, and are reduced in no lower one."""
    if not dtype.is_floating_point:
        return policy
    wanted = torch.promote_types(dtype, policy.reduce_dtype or policy.param_dtype or dtype)
    return replace(policy, param_dtype=None, reduce_dtype=None if wanted == dtype else wanted)


_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_FREES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
_RANKS_PER_NODE = "LOCAL_WORLD_SIZE"  # as torchrun sets it


def strategy_layout(
    strategy: ShardingStrategy, world_size: int, *, tp: int = 1, shard: int | None = None
) -> MeshLayout:
    """The mesh on which ``strategy`` shards over ``world_size`` ranks.

    Args:
        strategy: FULL_SHARD and SHARD_GRAD_OP shard over all data ranks, NO_SHARD replicates over them,
            HYBRID_SHARD and _HYBRID_SHARD_ZERO2 shard within a node and replicate over nodes.
        world_size: number of ranks of the job.
        tp: ranks of a tensor-parallel group, which a node holds whole.
        shard: of the hybrid ones, ranks that share a copy of the model; by default the ranks of a node
            (``LOCAL_WORLD_SIZE``, which torchrun sets) divided by ``tp``.

    Returns:
        A resolved layout.

    Raises:
        Parallel3dError: no ``ShardingStrategy``, or ``shard`` with one that is not hybrid.
        MeshError: sizes that do not divide, or a hybrid with one copy, or with copies that are not sharded.
    """
    _check_strategy(strategy)
    if strategy not in _HYBRID:
        if shard is not None:
            raise Parallel3dError(
                f"shard is {shard!r}, but {strategy.name} says itself over how many ranks it shards; leave "
                "it out, or use HYBRID_SHARD"
            )
        whole = strategy is ShardingStrategy.NO_SHARD
        sizes = {"replicate": -1, "shard": 1} if whole else {"replicate": 1, "shard": -1}
        return MeshLayout(**sizes, tp=tp).resolve(world_size)
    layout = MeshLayout(
        replicate=-1, shard=_of_a_node(tp) if shard is None else shard, tp=tp
    ).resolve(world_size)
    _check_hybrid(strategy, layout.replicate, layout.shard, str(layout))
    return layout


def strategy_options(strategy: ShardingStrategy, mesh: DeviceMesh) -> dict[str, Any]:
    """What ``fully_shard`` (or ``parallelize``) is given to do as ``strategy`` does on ``mesh``.

    FSDP1 does not free its outermost unit after forward: leave ``reshard_after_forward`` out there.

    Args:
        mesh: with axes replicate and shard (one that is missing has size 1), and maybe tp.

    Returns:
        ``{"mesh": mesh, "reshard_after_forward": bool}``.

    Raises:
        Parallel3dError: no ``ShardingStrategy``.
        MeshError: the mesh does what another strategy says.
    """
    _check_strategy(strategy)
    axes = data_axes(checked_mesh(mesh))
    replicate, shard = axes.size(axes.replicate), axes.size(axes.shard)
    shown = f"replicate {replicate} x shard {shard}"
    if strategy in _HYBRID:
        _check_hybrid(strategy, replicate, shard, shown)
    elif strategy is ShardingStrategy.NO_SHARD and shard > 1:
        raise MeshError(
            f"NO_SHARD on a mesh of {shown}: its ranks would hold whole copies, so shard must be 1; use "
            f"FULL_SHARD, or MeshLayout(replicate={replicate * shard})"
        )
    elif strategy is not ShardingStrategy.NO_SHARD and replicate > 1:
        hybrid = _HYBRID[strategy is ShardingStrategy.SHARD_GRAD_OP]
        raise MeshError(
            f"{strategy.name} on a mesh of {shown}: it shards over all data ranks, so replicate must be 1; "
            f"use {hybrid.name}, or MeshLayout(shard={replicate * shard})"
        )
    return {"mesh": mesh, "reshard_after_forward": strategy in _FREES}


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, ShardingStrategy):
        names = ", ".join(s.name for s in ShardingStrategy)
        raise Parallel3dError(
            f"strategy is {strategy!r}; it must be a ShardingStrategy: one of {names}"
        )


def _check_hybrid(strategy: ShardingStrategy, replicate: int, shard: int, shown: str) -> None:
    if replicate > 1 and shard > 1:
        return
    zero2 = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
    instead = "NO_SHARD"
    if replicate == 1:
        instead = "SHARD_GRAD_OP" if zero2 else "FULL_SHARD"
    raise MeshError(
        f"{strategy.name} on {shown}: it shards within a copy and replicates copies, so both sizes must be "
        f"above 1; use {instead}, or another size of shard"
    )


def _of_a_node(tp: int) -> int:
    """Data ranks of a node."""
    given = os.environ.get(_RANKS_PER_NODE, "")
    if not given.isdecimal() or not int(given):
        raise Parallel3dError(
            f"shard is None, and {_RANKS_PER_NODE} is {given!r}: it would tell the ranks of a node, as under "
            "torchrun; give shard="
        )
    if type(tp) is not int or tp < 1 or int(given) % tp:
        raise MeshError(
            f"tp is {tp!r} and a node has {given} ranks ({_RANKS_PER_NODE}): a node must hold whole tp "
            "groups; give shard=, or a tp that divides it"
        )
    return int(given) // tp
