"""ParamGroup: one unit's parameters through SHARDED -> gathering -> UNSHARDED -> SHARDED."""

from collections.abc import Callable
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm

__all__ = ["GroupState", "ParamGroup"]


class GroupState(Enum):
    """Where a group's unsharded parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ParamGroup:
    """The buckets of one unit.

    Attributes:
        state: see ``GroupState``.
        trainable: number of parameters that get a gradient.
        kept: whether the user's ``unshard()`` gathered the group, to stay so until ``reshard()``.
        shown: whether the modules' attributes are the unsharded parameters (they are the sharded ones at
            rest, also while an unsharded copy is kept).
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.state = GroupState.SHARDED
        self.shown = False
        self.trainable = 0
        self.kept = False
        self.computing: set[int] = set()
        self.slots: list[tuple[dict, str, nn.Parameter, nn.Parameter]] = []
        self._on_grad: Callable[[Bucket, int, nn.Parameter], None] | None = None
        self.refresh()

    def refresh(self) -> None:
        """After the buckets were built: the swap list and the gradient hooks."""
        self.slots = [
            (holder, name, param.sharded, compute)
            for bucket in self.buckets
            for param, compute in zip(bucket.params, bucket.compute_params, strict=True)
            for holder, name in param.slots
        ]
        self.computing = {id(compute) for _, _, _, compute in self.slots}
        if self._on_grad is not None:
            self.watch_gradients(self._on_grad)
        self.count_trainable()

    def watch_gradients(self, on_grad: Callable[[Bucket, int, nn.Parameter], None]) -> None:
        """Calls ``on_grad(bucket, index, parameter)`` whenever autograd has a parameter's gradient."""
        self._on_grad = on_grad
        for bucket in self.buckets:
            for index, compute in enumerate(bucket.compute_params):
                if compute.dtype.is_floating_point or compute.dtype.is_complex:
                    was = compute.requires_grad
                    compute.requires_grad_(True)  # the hook can be set on no other parameter
                    compute.register_post_accumulate_grad_hook(_GradHook(on_grad, bucket, index))
                    compute.requires_grad_(was)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of the unsharded parameters."""
        return id(tensor) in self.computing

    def count_trainable(self) -> None:
        """Lets the computing parameters follow ``requires_grad`` of the sharded ones."""
        self.trainable = 0
        for bucket in self.buckets:
            bucket.requires_grad_from_sharded()
            self.trainable += sum(p.requires_grad for p in bucket.compute_params)

    def adopt(self) -> None:
        """Takes back Parameters and values that ordinary calls have replaced or moved."""
        assert not self.shown
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.local_views, strict=True):
                for holder, name in param.slots:
                    current = holder.get(name)
                    if current is param.sharded or current is None:
                        continue
                    with torch.no_grad():
                        if param.sharded.is_meta and not current.is_meta:
                            param.place(param.local_part(current))  # its bucket moves with it
                        elif isinstance(current, DTensor):
                            param.sharded.copy_(current)
                        else:
                            view.copy_(param.shard_of(current, tp_local=False))
                    holder[name] = param.sharded
        moved = [bucket.adopt() for bucket in self.buckets]
        if any(moved):
            self.refresh()

    # -- unshard / reshard ---------------------------------------------------------------------------

    def issue_unshard(self, comm: Comm) -> None:
        """Starts the all-gathers if the group is sharded."""
        if self.state is GroupState.SHARDED:
            for bucket in self.buckets:
                comm.issue_gather(bucket)
            self.state = GroupState.GATHERING

    def unshard(self, comm: Comm) -> None:
        """Makes the unsharded parameters ready for use on the current stream."""
        self.issue_unshard(comm)
        if self.state is GroupState.GATHERING:
            for bucket in self.buckets:
                comm.finish_gather(bucket)
            self.state = GroupState.UNSHARDED

    def reshard(self, comm: Comm) -> None:
        """Frees the unsharded parameters."""
        self.kept = False
        if self.state is GroupState.GATHERING:
            self.unshard(comm)  # the collective is under way on the other ranks too
        if self.state is GroupState.UNSHARDED:
            for bucket in self.buckets:
                bucket.free_unsharded()
            self.state = GroupState.SHARDED

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if not self.shown:
            for params, name, _, compute in self.slots:
                params[name] = compute
            self.shown = True

    def hide(self) -> None:
        """Puts the sharded Parameters back."""
        if self.shown:
            for params, name, sharded, _ in self.slots:
                params[name] = sharded
            self.shown = False


class _GradHook:
    """Hands a gradient over and frees it from the parameter."""

    def __init__(
        self, on_grad: Callable[[Bucket, int, nn.Parameter], None], bucket: Bucket, index: int
    ) -> None:
        self.on_grad = on_grad
        self.bucket = bucket
        self.index = index

    def __call__(self, param: torch.Tensor) -> None:
        self.on_grad(self.bucket, self.index, param)  # type: ignore[arg-type]
