"""clip_grad_norm_: the global norm over any mix of sharded, replicated and plain gradients."""

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from parallel3d._compat_foreach import foreach_mul_, foreach_norm
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.running.finalization import refuse_unfinalized
from parallel3d.fsdp.running.members import parameters_at_rest
from parallel3d.optim.clip_plan import Cut, Found, plan_for
from parallel3d.optim.nonfinite import name_losses
from parallel3d.optim.step_in_backward import refuse_stepped

__all__ = ["clip_grad_norm_"]

# Elements whose squares are summed one after another: of millions float32 would lose some digits, on the CPU.
_ROW = 4096


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    loss: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Scales the gradients in place so that their norm is at most ``max_norm``.

    Each element of the plain model's gradient counts once, wherever it is: a sharded gradient's parts are
    summed over the axes that cut it, a replicated or plain one counts on its own. At most one small
    all-reduce per mesh axis.

    Args:
        parameters: a module, or tensors whose ``.grad`` to clip.
        max_norm: the largest norm to leave.
        norm_type: the p of the norm, above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is nan or infinite (waits for the device).
        loss: this rank's, or the sum of its micro-batches': that error then says on which ranks it was nan or
            infinite. Nothing is communicated for it but where there is that error, which all ranks have.

    Returns:
        The norm before clipping, a scalar tensor; the same on every rank if plain gradients (of ignored
        parameters, say) are.

    Raises:
        Parallel3dError: bad ``max_norm`` or ``norm_type``, or a non-finite norm if asked for.
        StateError: a gradient waits for its reduction, as between micro-batches, or for
            ``finalize_backward()``; or parameters are updated in backward (``step_in_backward``).
    """
    _check_numbers(max_norm, norm_type)
    tensors = _tensors(parameters)
    refuse_stepped(tensors, "clip_grad_norm_")
    refuse_unfinalized(tensors, "clip_grad_norm_")
    found = plan_for(tensors).find(tensors)
    if not found.flats and not found.others:
        return torch.zeros(())
    norm = _total_norm(found, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise Parallel3dError(
            f"the {norm_type}-norm of the gradients is {norm.item()}; it must be finite to clip by"
            f"{name_losses(loss)}"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [*found.wholes, *chain.from_iterable(found.others.values())]
    for (device, dtype), alike in _by_kind(grads).items():
        foreach_mul_(alike, factor.to(device, dtype))
    return norm


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise Parallel3dError(f"max_norm is {max_norm!r}; it must be a number >= 0")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise Parallel3dError(
            f"norm_type is {norm_type!r}; it must be a number > 0, such as 2.0 or float('inf')"
        )


def _tensors(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> Sequence[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return parameters_at_rest(parameters)
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str):
        raise Parallel3dError(
            f"parameters is {parameters!r}; it must be a module, a tensor or an iterable of tensors"
        )
    return list(parameters)


def _total_norm(found: Found, p: float) -> torch.Tensor:
    parts = _power_sums(found, p)
    for name, group in found.groups.items():
        _reduce_over(name, group, parts, p)
    (total,) = parts.values()
    return total if math.isinf(p) else total ** (1.0 / p)


def _power_sums(found: Found, p: float) -> dict[Cut, torch.Tensor]:
    """By cut, the sum of |x|^p over all tensors (largest |x| for p = inf), at least in float32."""
    rows, rest = _rows_and_rest(found, p)
    norms = {cut: [_row_norms(x, p) for x in rows.get(cut, ())] for cut in rest}
    # All of a kind in one call, whichever groups have parts of them.
    kinds: dict[tuple[torch.device, torch.dtype], dict[Cut, list[torch.Tensor]]] = {}
    for cut, tensors in rest.items():
        for kind, alike in _by_kind(tensors).items():
            kinds.setdefault(kind, {})[cut] = alike
    for (_, dtype), by_cut in kinds.items():
        tensors = list(chain.from_iterable(by_cut.values()))
        of_all = torch.stack(list(foreach_norm(tensors, p, _norm_dtype(dtype))))
        for cut, mine in zip(by_cut, of_all.split([len(x) for x in by_cut.values()]), strict=True):
            norms[cut].append(mine)
    return {cut: _power_sum(each, p) for cut, each in norms.items()}


def _rows_and_rest(
    found: Found, p: float
) -> tuple[dict[Cut, list[torch.Tensor]], dict[Cut, list[torch.Tensor]]]:
    """By cut: long flat gradients as rows of ``_ROW`` elements, and what is left beside them."""
    rows: dict[Cut, list[torch.Tensor]] = {}
    rest: dict[Cut, list[torch.Tensor]] = {}
    for cut, flats in found.flats.items():
        left = rest[cut] = []
        for x in flats:
            number = x.numel() // _ROW
            if number > 1:
                whole = number * _ROW
                rows.setdefault(cut, []).append(x[:whole].view(number, _ROW))
                x = x[whole:]
            if x.numel():
                left.append(x)
    for cut, others in found.others.items():
        if math.isinf(p):
            # A rank may hold no row of a tensor, and the maximum of nothing is an error: add a zero.
            others = [torch.cat([x.flatten().abs(), x.new_zeros(1)]) for x in others]
        rest.setdefault(cut, []).extend(others)
    return rows, rest


def _row_norms(rows: torch.Tensor, p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, p, 1, dtype=_norm_dtype(rows.dtype))


def _power_sum(norms: list[torch.Tensor], p: float) -> torch.Tensor:
    """Of the tensors that ``norms``, vectors, are the norms of."""
    all_norms = norms[0]
    if len(norms) > 1:
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
        all_norms = torch.cat([norm.to(all_norms.device, dtype) for norm in norms])
    return all_norms.max() if math.isinf(p) else all_norms.pow(p).sum()


def _by_kind(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _reduce_over(name: str, group: ProcessGroup, parts: dict[Cut, torch.Tensor], p: float) -> None:
    """Sums the parts that ``group`` cuts over it, and merges them with those it doesn't cut."""
    keys = [key for key in parts if name in key]
    summed = torch.stack([parts[key] for key in keys])
    op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    dist.all_reduce(summed, op, group=group)
    for key, value in zip(keys, summed.unbind(), strict=True):
        del parts[key]
        rest = key - {name}
        if rest not in parts:
            parts[rest] = value
        elif math.isinf(p):
            parts[rest] = torch.maximum(parts[rest], value)
        else:
            parts[rest] = parts[rest] + value
