"""Helpers of the tensor-parallel tests: simulated tp ranks against the plain module, no engine."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from parallel3d._layout.packed import packing_of
from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import get_param_layout
from parallel3d.testing.worlds import LocalWorld, local_world
from parallel3d.tp import resolve_plan

TOLERANCE = 1e-10


class RealWorld:
    """This process's rank, and what ``LocalWorld`` gives of all ranks."""

    def map(self, fn: Callable[[int], Tensor]) -> Tensor:
        return fn(dist.get_rank())

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def per_rank(self, tensor: Tensor) -> list[Tensor]:
        parts: list[Tensor] = [tensor] * dist.get_world_size()
        dist.all_gather_object(parts, tensor.detach())
        return parts


@contextmanager
def real_world(tp: int) -> Iterator[RealWorld]:
    assert dist.get_world_size() == tp
    yield RealWorld()


def tp_mesh(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1, tp), mesh_dim_names=("replicate", "shard", "tp"))


def same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape, (got.shape, want.shape)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@dataclass
class Local:
    """A parameter as the engine would show it to forward, and how to read its gradient."""

    param: nn.Parameter
    dim: int | None
    partial: bool
    packing: Packing | None = None

    def full_grad(self, world: LocalWorld) -> Tensor:
        grads = world.per_rank(self.param.grad)
        if self.packing is not None:
            return _unpack(grads, self.packing)
        if self.dim is not None:
            return torch.cat(grads, self.dim)
        if self.partial:
            return torch.stack(grads).sum(0)
        for grad in grads[1:]:
            same(grad, grads[0])
        return grads[0]


def on_rank(model: nn.Module, plan: Any, tp: int = 2) -> nn.Module:
    """``model`` under ``plan`` as the rank of a ``fake_world`` computes it: with local tensors."""
    resolve_plan(model, plan, tp).apply(model, tp_mesh(tp))
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                local = p.to_local() if isinstance(p, DTensor) else p
                module._parameters[name] = nn.Parameter(local.detach().clone(), p.requires_grad)
    return model


def on_ranks(model: nn.Module, plan: Any, world: LocalWorld, tp: int = 2) -> dict[str, Local]:
    """Applies ``plan`` and does by hand what the engine does before a forward."""
    resolve_plan(model, plan, tp).apply(model, tp_mesh(tp))
    return use_local_tensors(model, world)


def use_local_tensors(model: nn.Module, world: LocalWorld) -> dict[str, Local]:
    """Does by hand what the engine does before a forward."""
    made: dict[int, Local] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or any(param is m.param for m in made.values()):
                continue
            if id(param) not in made:
                layout = get_param_layout(param)
                if isinstance(param, DTensor):
                    assert layout.compute == "local"
                    (placement,) = param.placements
                    dim = None if isinstance(placement, Replicate) else placement.dim
                    local = param.to_local().detach()
                else:
                    dim, plain = None, param.detach()
                    local = world.map(lambda rank, plain=plain: plain.clone())
                made[id(param)] = Local(
                    nn.Parameter(local, requires_grad=param.requires_grad),
                    dim,
                    layout.tp_grad == "partial",
                    packing_of(param),
                )
            module._parameters[name] = made[id(param)].param
    by_param = {id(m.param): m for m in made.values()}
    return {name: by_param[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def check_parity(
    plain: nn.Module,
    plan: dict,
    tp: int,
    *inputs: Tensor,
    sequence_in: bool = False,
    sequence_out: bool = False,
    call: Callable[..., Tensor] = lambda model, *args: model(*args),
    on: Callable[[int], AbstractContextManager[Any]] = local_world,
) -> None:
    """Forward, input gradients and parameter gradients of ``plain`` under ``plan`` on ``tp``
    simulated ranks equal those of ``plain``.

    ``sequence_in`` / ``sequence_out``: floating inputs / the output are parts along dim 1.
    ``on``: what ranks there are; ``real_world`` where this process is one of ``tp``.
    """
    plain = plain.double()
    wanted_in = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = call(plain, *wanted_in)
    weight = torch.randn(wanted.shape, dtype=wanted.dtype, generator=_generator(1))
    plain.zero_grad()
    (wanted * weight).sum().backward()
    grads = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}

    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    with on(tp) as world:
        resolved = resolve_plan(model, plan, tp)
        assert resolved.apply(model, tp_mesh(tp)) is model
        assert list(model.state_dict()) == keys
        params = use_local_tensors(model, world)
        got_in = [world.map(lambda r, x=x: _part(x, r, tp, sequence_in)) for x in inputs]
        for x in got_in:
            x.requires_grad_(x.is_floating_point())
        got = call(model, *got_in)
        (got * world.map(lambda r: _part(weight, r, tp, sequence_out))).sum().backward()

        _same_whole(world.per_rank(got), wanted, sequence_out)
        for mine, theirs in zip(got_in, wanted_in, strict=True):
            if theirs.requires_grad:
                _same_whole(world.per_rank(mine.grad), theirs.grad, sequence_in)
        assert params.keys() == grads.keys()
        for name, local in params.items():
            if grads[name] is None:
                assert local.param.grad is None, name
            else:
                same(local.full_grad(world), grads[name])


def _unpack(parts: list[Tensor], packing: Packing) -> Tensor:
    """What each rank holds of a packed dim, put in the places of the whole."""
    size = list(parts[0].shape)
    size[packing.dim] = packing.size
    whole = parts[0].new_full(size, float("nan"))
    for part, held in zip(parts, packing.rows, strict=True):
        at = 0
        for first, number in held:
            rows = part.narrow(packing.dim, at, number)
            whole.narrow(packing.dim, first, number).copy_(rows)
            at += number
    return whole


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _part(x: Tensor, rank: int, tp: int, sequence: bool) -> Tensor:
    return chunks(x, 1, tp)[rank] if sequence and x.is_floating_point() else x.clone()


def _same_whole(per_rank: list[Tensor], wanted: Tensor, sequence: bool) -> None:
    if sequence:
        same(torch.cat(per_rank, 1), wanted)
    else:
        for got in per_rank:
            same(got, wanted)


def chunks(x: Tensor, dim: int, tp: int) -> list[Tensor]:
    """``torch.chunk``, with empty chunks for the ranks it leaves out."""
    found = [c.contiguous() for c in x.chunk(tp, dim)]
    empty = x.narrow(dim, 0, 0).contiguous()
    return found + [empty] * (tp - len(found))
