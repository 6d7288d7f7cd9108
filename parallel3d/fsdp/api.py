"""Policies of the engine, and FSDP1's strategies. torch's own objects are accepted, and the reverse."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (  # noqa: F401 (public here too)
    BackwardPrefetch,
    CPUOffloadPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from parallel3d._torch.autograd import BatchNorm, grads_may_differ_in_dtype
from parallel3d._torch.fully_shard import (  # noqa: F401
    DataParallelMeshDims,
    ShardPlacementResult,
    TorchMixedPrecisionPolicy,
)
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placement import checked_mesh, data_axes
from parallel3d.mesh.layout import MeshLayout


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """The dtypes in which a unit computes and communicates. Sharded parameters keep their own dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters, of the all-gather, and of the floating-point
            inputs of ``forward``. None: the parameters' own.
        reduce_dtype: dtype of the gradient reduction. None: as in torch. Before torch 2.15 that is the dtype
            of the unsharded parameters. Since then it is the ``grad_dtype`` that a parameter was given before
            ``fully_shard``, or else the parameter's own; a parameter with a ``grad_dtype`` has its ``.grad``
            in it. With ``keep_low_precision_grads`` it is that of the unsharded parameters.
        output_dtype: dtype that floating-point outputs of ``forward`` are cast to. None: they are not cast.
        cast_forward_inputs: whether inputs are cast to ``param_dtype``.
        cast_root_forward_inputs: the same for the outermost unit. None: as ``cast_forward_inputs``.
        buffer_dtype: dtype in which forward and backward see floating-point buffers. None: their own. At
            rest, and so in ``state_dict``, a module has its own buffer, with what forward has written. The
            cast copy is reused until the buffer changes; changes through ``.data`` are not noticed.
        keep_low_precision_grads: whether ``.grad`` keeps the dtype it was reduced in. Otherwise it has the
            sharded parameter's. Gradients of several micro-batches are then added in that dtype too, except
            for unreduced sums. Not every optimizer takes such gradients: ``SGD`` does, ``AdamW`` needs
            ``p.grad = p.grad.to(p.dtype)`` before, which is not possible with ``optim.step_in_backward``.
        full_precision_in_eval: whether a unit whose modules are in ``eval()`` gathers, computes and reduces
            in the parameters' own dtype, with buffers in theirs. Its inputs are not cast, except for those
            in ``param_dtype``, which a unit in training may pass to it; its outputs are cast to
            ``output_dtype`` only: set that where a unit in ``eval()`` passes outputs to one in training.
        full_precision_modules: classes of modules whose parameters and buffers keep their own dtype, and
            which compute and reduce in it. With ``param_dtype``, their inputs are cast to their dtype and
            their outputs back. Modules of these classes without parameters and buffers compute in float32 at
            least. Torch's own policies have none.
        param_dtype_override_fn: called once with each parameter of a unit. If it returns the parameter's
            own dtype, that parameter is gathered, computed and reduced in it. None or ``param_dtype``:
            as the others. Inputs are cast to ``param_dtype`` anyway. In torch since 2.15.
        wire_dtype: dtype in which gradients are sent: ``torch.bfloat16``, or ``torch.float32``. A reduction
            is then an all-to-all in it, and each rank sums what it has received in ``reduce_dtype``, in rank
            order: with ``reduce_dtype=torch.float32``, half the bytes of fp32 and its sums. An all-reduce is
            that, and an all-gather of the sums in it. Sums over micro-batches and over ``tp`` stay in
            ``reduce_dtype``. Parameters that compute in their own dtype by one of the options above are sent
            in ``reduce_dtype``. None: the backend reduces, in ``reduce_dtype``.
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
    wire_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_policy(self)


def check_policy(policy: TorchMixedPrecisionPolicy) -> None:
    def check(name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise Parallel3dError(
                f"MixedPrecisionPolicy.{name} is {getattr(policy, name)!r}; it must be {expected}"
            )

    if not isinstance(policy, TorchMixedPrecisionPolicy):
        raise Parallel3dError(f"mp_policy is {policy!r}; it must be a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
        dtype = getattr(policy, name, None)
        valid = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        check(name, valid, "a floating-point torch.dtype such as torch.bfloat16, or None")
    for name in ("cast_forward_inputs", "keep_low_precision_grads", "full_precision_in_eval"):
        check(name, isinstance(getattr(policy, name, False), bool), "True or False")
    if not isinstance(policy, MixedPrecisionPolicy):
        return
    valid = isinstance(policy.cast_root_forward_inputs, (bool, type(None)))
    check("cast_root_forward_inputs", valid, "True, False, or None for that of cast_forward_inputs")
    override = policy.param_dtype_override_fn
    valid = override is None or callable(override)
    expected = "a function of a parameter that returns a torch.dtype or None"
    check("param_dtype_override_fn", valid, expected)
    classes = policy.full_precision_modules
    valid = isinstance(classes, tuple) and all(
        isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes
    )
    expected = "a tuple of module classes, such as (nn.LayerNorm,), or () for none"
    check("full_precision_modules", valid, expected)
    valid = not policy.keep_low_precision_grads or grads_may_differ_in_dtype
    expected = f"False on torch {torch.__version__}, where a gradient has its parameter's dtype"
    check("keep_low_precision_grads", valid, f"{expected}; torch 2.13 has no such limit")
    wire, reduced = policy.wire_dtype, policy.reduce_dtype
    if wire is None:
        return
    expected = "torch.bfloat16 or torch.float32, or None: what is sent isn't scaled"
    check("wire_dtype", wire in (torch.bfloat16, torch.float32), expected)
    valid = reduced is not None and torch.promote_types(wire, reduced) is reduced
    expected = f"no wider than reduce_dtype, which is {reduced}; give reduce_dtype=torch.float32"
    check("wire_dtype", valid, expected)


def as_instance(policy: Any) -> Any:
    """Returns ``policy``, or if it is a policy's class, as torch accepts too, an instance of it."""
    is_class = isinstance(policy, type) and issubclass(
        policy, (OffloadPolicy, TorchMixedPrecisionPolicy)
    )
    return policy() if is_class else policy


def check_offload(policy: OffloadPolicy) -> None:
    if not isinstance(policy, OffloadPolicy):
        raise Parallel3dError(
            f"offload_policy is {policy!r}; it must be an OffloadPolicy() (everything stays on the mesh's "
            "device) or a CPUOffloadPolicy(pin_memory=...)"
        )
    if isinstance(policy, CPUOffloadPolicy) and not isinstance(policy.pin_memory, bool):
        raise Parallel3dError(
            f"CPUOffloadPolicy.pin_memory is {policy.pin_memory!r}; it must be True or False"
        )


def check_block(block: object) -> None:
    if block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int) or block not in _BLOCKS:
        near = ""
        if isinstance(block, (int, float)) and block == block:
            near = f"; the nearest is {min(_BLOCKS, key=lambda size: abs(size - block))}"
        raise Parallel3dError(
            f"block is {block!r}; it must be a number of elements, a power of two from 2 to 4096, such as "
            f"256 for 8-bit states and 128 for 4-bit ones, or None{near}"
        )


_BLOCKS = tuple(2**bits for bits in range(1, 13))


def own_policy(policy: TorchMixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Returns ``policy`` as our ``MixedPrecisionPolicy``. One of torch's is checked and converted, with the
    options that torch doesn't have off."""
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
    """Returns whether ``policy.param_dtype_override_fn`` returns the parameter's own dtype for ``param``.
    Raises Parallel3dError if it returns another dtype than that or ``param_dtype``."""
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
    """Returns the dtype that a unit casts the inputs of forward to; None if they are not cast."""
    cast = policy.cast_forward_inputs
    if is_root and policy.cast_root_forward_inputs is not None:
        cast = policy.cast_root_forward_inputs
    return policy.param_dtype if cast else None


def in_own_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Returns ``policy`` changed for parameters that compute in their own dtype, ``dtype``: no
    ``param_dtype`` or ``wire_dtype``, and a reduce dtype that is at least as wide as ``dtype``."""
    if not dtype.is_floating_point:
        return policy
    wanted = torch.promote_types(dtype, policy.reduce_dtype or policy.param_dtype or dtype)
    reduced = None if wanted == dtype else wanted
    return replace(policy, param_dtype=None, reduce_dtype=reduced, wire_dtype=None)


_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_FREES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
_RANKS_PER_NODE = "LOCAL_WORLD_SIZE"  # as torchrun sets it


def strategy_layout(
    strategy: ShardingStrategy, world_size: int, *, tp: int = 1, shard: int | None = None
) -> MeshLayout:
    """Returns the mesh layout on which FSDP1's ``strategy`` shards over ``world_size`` ranks.

    Args:
        strategy: FULL_SHARD and SHARD_GRAD_OP shard over all data ranks, NO_SHARD replicates over them,
            HYBRID_SHARD and _HYBRID_SHARD_ZERO2 shard within a node and replicate over nodes.
        world_size: number of ranks of the job.
        tp: number of ranks of a tensor-parallel group, which must lie within a node.
        shard: for hybrid strategies: number of ranks that share a replica of the model. Default: the ranks
            of a node (``LOCAL_WORLD_SIZE``, which torchrun sets) divided by ``tp``.

    Returns:
        A resolved layout.

    Raises:
        Parallel3dError: ``strategy`` is no ``ShardingStrategy``, or ``shard`` was given with one that is not
            hybrid.
        MeshError: sizes do not divide, or a hybrid strategy has one replica, or replicas that are not
            sharded.
    """
    _check_strategy(strategy)
    if strategy not in _HYBRID:
        if shard is not None:
            raise Parallel3dError(
                f"shard is {shard!r}, but {strategy.name} shards over a fixed number of ranks; leave it out, "
                "or use HYBRID_SHARD"
            )
        replicate, shard = (-1, 1) if strategy is ShardingStrategy.NO_SHARD else (1, -1)
        return MeshLayout(replicate=replicate, shard=shard, tp=tp).resolve(world_size)
    shard = _data_ranks_of_a_node(tp) if shard is None else shard
    layout = MeshLayout(replicate=-1, shard=shard, tp=tp).resolve(world_size)
    _check_hybrid(strategy, layout.replicate, layout.shard, str(layout))
    return layout


def strategy_options(strategy: ShardingStrategy, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the arguments of ``fully_shard`` (or ``parallelize``) for FSDP1's ``strategy`` on ``mesh``.

    FSDP1 does not reshard its outermost unit after forward: leave ``reshard_after_forward`` out for it.

    Args:
        mesh: has axes replicate and shard (a missing one has size 1), and optionally tp.

    Returns:
        ``{"mesh": mesh, "reshard_after_forward": bool}``.

    Raises:
        Parallel3dError: ``strategy`` is no ``ShardingStrategy``.
        MeshError: the mesh is one for another strategy.
    """
    _check_strategy(strategy)
    axes = data_axes(checked_mesh(mesh))
    replicate, shard = axes.size(axes.replicate), axes.size(axes.shard)
    shown = f"replicate {replicate} x shard {shard}"
    if strategy in _HYBRID:
        _check_hybrid(strategy, replicate, shard, shown)
    elif strategy is ShardingStrategy.NO_SHARD and shard > 1:
        raise MeshError(
            f"NO_SHARD was given a mesh of {shown}: its ranks would hold full replicas, so shard "
            f"must be 1; use FULL_SHARD, or MeshLayout(replicate={replicate * shard})"
        )
    elif strategy is not ShardingStrategy.NO_SHARD and replicate > 1:
        hybrid = _HYBRID[strategy is ShardingStrategy.SHARD_GRAD_OP]
        raise MeshError(
            f"{strategy.name} was given a mesh of {shown}: it shards over all data ranks, so "
            f"replicate must be 1; use {hybrid.name}, or MeshLayout(shard={replicate * shard})"
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
        f"{strategy.name} was given {shown}: it shards each of several replicas, so both sizes must be above "
        f"1; use {instead}, or another size of shard"
    )


def _data_ranks_of_a_node(tp: int) -> int:
    given = os.environ.get(_RANKS_PER_NODE, "")
    if not given.isdecimal() or not int(given):
        raise Parallel3dError(
            f"shard is None, and {_RANKS_PER_NODE} is {given!r}: under torchrun it is the number of ranks of "
            "a node; give shard="
        )
    if type(tp) is not int or tp < 1 or int(given) % tp:
        raise MeshError(
            f"tp is {tp!r} and a node has {given} ranks ({_RANKS_PER_NODE}): a node must hold whole tp "
            "groups; give shard=, or a tp that divides it"
        )
    return int(given) // tp
