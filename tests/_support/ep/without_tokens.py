"""What the tests of ranks without tokens, and of experts with buffers, run on every rank."""

import functools

import torch
from torch import distributed as dist
from torch import nn

from _support.ep.models import HIDDEN, Batched, Looped, Mixture, batch, loss
from _support.ep.on_ranks import made, whole
from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.errors import PlanError


def other_dtype(layout: MeshLayout) -> None:
    """Experts that return another dtype than that of the hidden states, all tokens on one rank."""
    _, plain, parallel = made(layout, functools.partial(Mixture, Batched, 8))
    plain, parallel = plain.bfloat16(), parallel.bfloat16()
    hidden = torch.randn(6, HIDDEN).bfloat16()
    index = torch.tensor([[0, 1]]).expand(6, 2)
    outputs = []
    for model in (plain, parallel):
        x, weights = hidden.clone().requires_grad_(), torch.full((6, 2), 0.3, requires_grad=True)
        y = model.layers[0].experts(x, index, weights)
        y.float().sum().backward()
        outputs.append([each.float() for each in (y, x.grad, weights.grad)])
    for want, got in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def second_derivative(layout: MeshLayout) -> None:
    """A penalty of a gradient, all tokens on one rank."""
    _, plain, parallel = made(layout, functools.partial(Mixture, Looped, 8, hot=True))

    def penalty(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = model.embed.register_forward_hook(lambda module, args, out: seen.append(out))
        value = loss(model, ids)
        hook.remove()
        (grad,) = torch.autograd.grad(value, seen, create_graph=True)
        return grad.square().sum()

    for rank in range(layout.data_size):
        (penalty(plain, batch(rank)) / layout.data_size).backward()
    penalty(parallel, batch(layout.data_rank(dist.get_rank()))).backward()
    for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        want = torch.zeros_like(p) if p.grad is None else p.grad
        got = torch.zeros_like(p) if q.grad is None else whole(q.grad)
        torch.testing.assert_close(got, want, msg=name)


def refusal(what: str) -> str:
    """What parallelize says."""
    model: nn.Module = Mixture(Looped, 8)
    if what == "buffer":
        model.layers[1].experts.register_buffer("scale", torch.ones(8, 1))
    else:
        model = model.layers[0].experts
    try:
        parallelize(model, build_mesh(MeshLayout(shard=4, ep=2), device_type="cpu"))
    except PlanError as error:
        return str(error)
    return ""
