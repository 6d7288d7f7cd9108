"""parallelize: one call from a plain model to a parallel one. The order of the steps is the contract."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

from parallel3d._forward import as_if, without_cache, wrap_forward
from parallel3d._preflight import Plan, preflight
from parallel3d._rollback import unchanged_on_error
from parallel3d.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from parallel3d.tp.logits.head import chunk_whole_head
from parallel3d.tp.same_batch import check_first_batch

__all__ = ["parallelize"]

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    mesh: DeviceMesh,
    tp_plan: Plan | None = None,
    fsdp: bool | ShardingStrategy = True,
    *,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    shard_optimizer_over_replicate: bool = False,
    activation_checkpointing: bool = False,
    compile: bool | str = False,
    loss_parallel: bool | str = False,
    strict: bool = True,
    axes: Mapping[str, str] | None = None,
    example: Any = None,
    check_same_batch: bool = True,
) -> ModelT:
    """Makes ``model`` train with tensor parallelism, FSDP and HSDP on ``mesh``.

    validate -> tensor parallel -> activation checkpointing -> compile per unit -> shard the units
    bottom-up -> root. A model on the meta device stays there; give it values with ``materialize``.

    Args:
        model: a plain module; changed in place.
        mesh: from ``build_mesh``: axes ``replicate``, ``shard``, ``tp`` (``dp_replicate`` and ``dp_shard``
            are known too).
        tp_plan: pattern -> style, see ``parallel3d.tp.resolve_plan``, or ``"auto"``: the plan the model
            brings (Hugging Face's do) or one derived from it, see ``parallel3d.tp.auto_plan``. Needed
            where tp > 1.
        fsdp: False says that the mesh has no data axes: replicate = shard = 1. A ``ShardingStrategy`` of
            FSDP1 is compared with the mesh, and says whether blocks are freed after forward.
        units: names (with wildcards) of the blocks to shard one by one; by default the members of the
            model's outermost ``nn.ModuleList`` s, and of an ``nn.ModuleDict`` of one class, and blocks in
            numbered attributes.
        mp_policy: dtypes of computing and reducing.
        reshard_after_forward: whether blocks are freed after forward; by default they are, unless a
            ShardingStrategy says otherwise. The final norm and head never are.
        shard_optimizer_over_replicate: HFSDP, see ``fully_shard``.
        activation_checkpointing: recompute each block's activations in backward.
        compile: True, or the name of a ``torch.compile`` backend: compile each block.
        loss_parallel: True: the output head leaves its logits split over tp, as ``tp.VocabLogits``, which
            ``F.cross_entropy`` takes as they are; everything else gets them gathered. So the model's code
            stays as it is, and the loss is whole. ``"chunked"``: in training the logits are not even made,
            but some tokens' at a time in the loss and again in the backward; also without tp.
        strict: whether a plan's rule that matches nothing is an error.
        axes: for a mesh whose axes are called otherwise: ``{"data_parallel": "shard",
            "tensor_parallel": "tp"}``.
        example: ``(args, kwargs)`` of a small batch for the model's forward, with which a plan is derived or
            checked, where no input can be guessed.
        check_same_batch: look, at the first training forward, whether the ranks of each tp group were given
            the same batch; ``tp.check_same_batch`` looks at every forward.

    Returns:
        ``model`` itself.

    Raises:
        Parallel3dError, PlanError, MeshError: what was given can't be; the model is unchanged.
        AgreementError: the ranks were given different models (sizes, or values unless on meta), plans
            or options.
    """
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    mesh, plan, found, reshard = preflight(
        model,
        mesh,
        tp_plan,
        units,
        policy,
        fsdp=fsdp,
        strict=strict,
        compile=compile,
        loss_parallel=loss_parallel,
        reshard_after_forward=reshard_after_forward,
        shard_optimizer_over_replicate=shard_optimizer_over_replicate,
        activation_checkpointing=activation_checkpointing,
        axes=axes,
        example=example,
        check_same_batch=check_same_batch,
    )
    blocks = [block for _, block in found.blocks]
    with unchanged_on_error(model):
        # Tensor parallelism first: what it leaves on each rank is what the engine shards.
        if plan is not None:
            plan.apply(model, mesh)
        if loss_parallel == "chunked" and (plan is None or plan.tp_size == 1):
            chunk_whole_head(model, plan)
        # Recompute inside the compiled region, so that the compiler sees both.
        if activation_checkpointing:
            for block in blocks:
                wrap_forward(block, _checkpointed, "checkpoint")
        # Compile inside the hooks: a unit's gathers and frees stay outside the graph.
        if compile:
            backend = compile if isinstance(compile, str) else "inductor"
            compiled = functools.partial(torch.compile, backend=backend)
            for block in blocks:
                wrap_forward(block, compiled, ("compile", backend))
        # Units bottom-up, so that each takes what no unit inside it has; the root takes the rest.
        shard = functools.partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            shard_optimizer_over_replicate=shard_optimizer_over_replicate,
        )
        for block in blocks:
            shard(block, reshard_after_forward=reshard)
        for _, embedding in found.embeddings:
            shard(embedding, reshard_after_forward=True)
            # Its backward doesn't read the table.
            embedding.set_unshard_in_backward(False)  # type: ignore[operator]
        if found.tail:
            # Its backward comes right after its forward: freeing it would only gather it again.
            shard([module for _, module in found.tail], reshard_after_forward=False)
        shard(model, reshard_after_forward=False)
        if check_same_batch:
            check_first_batch(model, mesh)
    return model


def _checkpointed(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            kwargs = without_cache(kwargs)
        return checkpoint(functools.partial(inner, self), *args, use_reentrant=False, **kwargs)

    return as_if(forward, inner)
