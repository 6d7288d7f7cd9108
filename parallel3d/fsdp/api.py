"""Policies of the sharding engine. torch's own objects are taken as well, and torch takes these."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, OffloadPolicy

from parallel3d._torch.autograd import BatchNorm, grads_may_differ_in_dtype
from parallel3d._torch.fully_shard import (
    DataParallelMeshDims,
    ShardPlacementResult,
    TorchMixedPrecisionPolicy,
)
from parallel3d.errors import Parallel3dError

__all__ = [
    "BackwardPrefetch",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "check_offload",
    "check_policy",
    "in_own_dtype",
    "input_dtype",
    "keeps_its_dtype",
    "own_policy",
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
