"""Gradients that each rank of a tp group has whole must be alike in it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from parallel3d.errors import AgreementError

__all__ = ["compare_whole_gradients"]


@torch.no_grad()
def compare_whole_gradients(model: nn.Module) -> None:
    """Compares the gradients that lie whole on each tp rank, with those of the first rank of its group.

    Every rank of the model's mesh calls it, with gradients there.

    Raises:
        AgreementError: on every rank, naming the first parameter whose gradients differ by more than
            rounding.
    """
    mesh = next(
        (
            p.device_mesh
            for p in model.parameters()
            if isinstance(p, DTensor) and _tp(p) is not None
        ),
        None,
    )
    if mesh is None or mesh.size((mesh.mesh_dim_names or ()).index("tp")) == 1:
        return
    group = mesh.get_group("tp")
    names, found = [], []
    for name, mine in _whole(model):
        names.append(name)
        found.append(_difference(mine, group))
    if not found:
        return
    worst = torch.stack(found)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    values = worst.tolist()
    wrong = [(name, value) for name, value in zip(names, values, strict=True) if value]
    if wrong:
        name, value = wrong[0]
        others = f", and those of {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise AgreementError(
            f"the gradient of {name}, which each rank of a tp group has whole, is not alike in it: it "
            f"differs by {value:.1e} of its largest number{others}. They compute it from different data. "
            "A module used on each rank's part of features or of a sequence needs the style "
            "'replicated_with_grad_allreduce' or 'sequence_parallel'; and the ranks must read the same batch "
            "(tp.check_same_batch)"
        )


def _difference(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Of this rank's from the first one's, relative to the largest number; 0 where it may be rounding."""
    if not mine.numel():  # a shard without rows, on every rank of the group
        return torch.zeros((), device=mine.device)
    first = mine.clone()
    dist.broadcast(first, group_src=0, group=group)
    off, largest = _largest(mine - first), _largest(first)
    # nan is like nothing but nan.
    off = torch.where(mine.isnan().any() ^ first.isnan().any(), torch.inf, off)
    return torch.where(off > _tolerance(mine) * largest, off / largest, 0.0)


def _tp(param: DTensor) -> int | None:
    names = param.device_mesh.mesh_dim_names or ()
    return names.index("tp") if "tp" in names else None


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's shard of each gradient that isn't split over tp."""
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            continue
        if isinstance(grad, DTensor):
            axis = _tp(grad)
            if axis is not None and not isinstance(grad.placements[axis], Replicate):
                continue
            grad = grad.to_local()
        yield name, grad.detach().contiguous()


def _largest(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor.float(), 0.0).abs().amax()


def _tolerance(tensor: Tensor) -> float:
    """What another order of additions may make of it."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)
