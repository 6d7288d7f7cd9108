"""What surrounds expert parallelism, on every rank: optimizers, hooks, copies, evaluation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from _support.ep.models import HIDDEN, Batched, Looped, Mixture, batch, loss
from _support.ep.on_ranks import EIGHT, backward, made, whole
from parallel3d import Checks, MeshLayout, build_mesh, ep, optim, parallelize
from parallel3d.errors import AuditError, Parallel3dError
from parallel3d.fsdp import FSDPModule, full_params, fully_shard
from parallel3d.tp import Colwise, Replicated, VocabParallel


def check(plain: nn.Module, parallel: nn.Module, *, grads: bool = True, tol: float = 1e-12) -> None:
    """Compares each gradient, or each weight, relative to the plain one's largest number."""
    pairs = zip(plain.named_parameters(), parallel.named_parameters(), strict=True)
    for (name, p), (other, q) in pairs:
        assert name == other
        want, got = (p.grad, q.grad) if grads else (p.detach(), q.detach())
        assert want is not None and got is not None, name
        assert (whole(got) - want).abs().max() <= tol * want.abs().max(), name


def units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def ema(layout: MeshLayout) -> None:
    _, plain, parallel = made(layout)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = optim.local(torch.optim.SGD, parallel, lr=0.1)
    mean = copy.deepcopy(plain)
    average = optim.EMA(parallel, decay=0.9)
    for step in range(3):
        backward(layout, plain, parallel, step)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        average.update()
        for p, q in zip(mean.parameters(), plain.parameters(), strict=True):
            p.data.mul_(0.9).add_(q.detach(), alpha=0.1)
    with average.swapped():
        check(mean, parallel, grads=False)
        torch.testing.assert_close(parallel(batch(0)), mean(batch(0)))


def scaled(layout: MeshLayout) -> None:
    """An infinite gradient of one expert on one rank: all ranks leave the step out."""
    _, plain, parallel = made(layout)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = optim.local(torch.optim.SGD, parallel, lr=0.1)
    scaler = optim.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        theirs.zero_grad()
        ours.zero_grad()
        for rank in range(layout.data_size):
            (loss(plain, batch(step * 8 + rank)) / layout.data_size).backward()
        mine = batch(step * 8 + layout.data_rank(dist.get_rank()))
        scaler.scale(loss(parallel, mine)).backward()
        if step == 1:
            if dist.get_rank() == 3:
                parallel.layers[0].experts.up.grad.to_local().view(-1)[0] = float("inf")
        else:
            theirs.step()
        scaler.unscale_(ours)
        optim.clip_grad_norm_(parallel.parameters(), 1e9)
        scaler.step(ours)
        scaler.update()
    assert scaler.get_scale() == 512.0
    check(plain, parallel, grads=False)


def in_backward(layout: MeshLayout) -> None:
    _, plain, parallel = made(layout)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optim.step_in_backward(parallel, torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        backward(layout, plain, parallel, step)
        theirs.step()
        theirs.zero_grad()
    check(plain, parallel, grads=False)


def offloaded(layout: MeshLayout) -> None:
    """Parameters, gradients and the optimizer's state in the CPU's memory."""
    import sys
    from functools import partial
    from unittest.mock import patch

    from parallel3d.fsdp import CPUOffloadPolicy

    module = sys.modules["parallel3d.parallelize"]
    shard = partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with patch.object(module, "fully_shard", shard):
        _, plain, parallel = made(layout)
    backward(layout, plain, parallel)
    check(plain, parallel)


def hooked(layout: MeshLayout) -> None:
    """A hook on what is reduced, and a factor of the user's."""
    _, plain, parallel = made(layout)
    for unit in units(parallel):
        unit.set_all_reduce_hook(lambda grad: grad.mul_(2))
    backward(layout, plain, parallel)
    for p in plain.parameters():
        p.grad.mul_(2)
    check(plain, parallel)
    _, plain, parallel = made(layout)
    for unit in units(parallel):
        unit.set_gradient_divide_factor(3.0)
    backward(layout, plain, parallel)
    for p in plain.parameters():
        p.grad.mul_(layout.data_size / 3)
    check(plain, parallel)


def used(layout: MeshLayout) -> None:
    """Evaluation, a copy, whole parameters, and a backward without reduction."""
    _, plain, parallel = made(layout)
    mine = batch(layout.data_rank(dist.get_rank()))
    parallel.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(parallel(mine), plain(mine))
    parallel.train()
    copied = copy.deepcopy(parallel)
    backward(layout, plain, copied)
    check(plain, copied)
    assert all(p.grad is None for p in parallel.parameters())
    with full_params(parallel):
        for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
            assert torch.equal(p, q)
    plain.zero_grad()
    for step, last in ((0, False), (1, False), (2, True)):
        parallel.set_requires_gradient_sync(last)
        backward(layout, plain, parallel, step)
    check(plain, parallel)


def in_sequence(layout: MeshLayout) -> None:
    """Each rank of tp has its part of the tokens, which are flattened; the audit is on."""
    part = Replicated(tp_grad="partial")
    plan: dict[str, Any] = {
        "embed": VocabParallel(output="sequence"),
        "layers.*.norm": "sequence_parallel",
        "layers.*.{router,shared}": part,
        "layers.*.experts": ep.Experts(input="sequence"),
        "head": Colwise(input="sequence", output="replicate"),
    }
    _, plain, parallel = made(layout, tp_plan=plan, checks=Checks())
    backward(layout, plain, parallel)
    check(plain, parallel)
    ep.set_capacity(parallel, 8.0)
    backward(layout, plain, parallel, 1)
    check(plain, parallel)
    plan["layers.*.experts"] = ep.Experts()
    _, plain, parallel = made(layout, tp_plan=plan, checks=Checks())
    with pytest.raises(AuditError):
        backward(layout, plain, parallel)


def odd_room(layout: MeshLayout) -> None:
    """Messages of one size where tp doesn't divide the tokens."""
    _, plain, parallel = made(layout)
    ep.set_capacity(parallel, 8.0)
    for rank in range(layout.data_size):
        (loss(plain, batch(rank, 1, 7)) / layout.data_size).backward()
    loss(parallel, batch(layout.data_rank(dist.get_rank()), 1, 7)).backward()
    check(plain, parallel)


USES: dict[str, Callable[[MeshLayout], None]] = {
    each.__name__: each for each in (used, hooked, offloaded, scaled, ema, in_backward)
}


def compiled(layout: MeshLayout, recompute: bool | str) -> None:
    _, plain, parallel = made(layout, compile="aot_eager", activation_checkpointing=recompute)
    for step in range(2):
        backward(layout, plain, parallel, step)
    check(plain, parallel)


def muon(layout: MeshLayout, experts: int) -> None:
    """Each expert's matrix as Muon steps on it where it is a parameter of its own: the same bits."""
    _, _, parallel = made(layout, lambda: Mixture(Looped, experts))
    named = parallel.named_parameters()
    params = {
        n: p for n, p in named if p.dim() == 3 or n.endswith(("shared.weight", "router.weight"))
    }
    matrices: dict[str, list[nn.Parameter]] = {}
    for name, param in params.items():
        value = whole(param.detach()).clone()
        matrices[name] = [nn.Parameter(v) for v in (value if value.dim() == 3 else [value])]
    theirs = torch.optim.Muon([m for each in matrices.values() for m in each], lr=0.02)
    ours = optim.local(torch.optim.Muon, list(params.values()), lr=0.02)
    for step in range(3):
        loss(parallel, batch(step * 8 + layout.data_rank(dist.get_rank()))).backward()
        for name, param in params.items():
            grad = whole(param.grad)
            for m, g in zip(matrices[name], grad if grad.dim() == 3 else [grad], strict=True):
                m.grad = g.clone()
        if step == 2:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        theirs.step()
        ours.step()
        parallel.zero_grad()
    for name, param in params.items():
        momentum = ours.state[param]["momentum_buffer"]
        assert momentum.placements == param.placements
        of_theirs = [theirs.state[m]["momentum_buffer"] for m in matrices[name]]
        for got, want in ((param.detach(), matrices[name]), (momentum, of_theirs)):
            value = whole(got)
            assert torch.equal(value if value.dim() == 3 else value[None], torch.stack(list(want)))


class WithParameter(Mixture):
    """The routers' correction biases are parameters."""

    def __init__(self) -> None:
        super().__init__(Looped, 8)
        for layer in self.layers:
            bias = layer._buffers.pop("expert_bias")
            layer.expert_bias = nn.Parameter(bias, requires_grad=False)


def balanced(layout: MeshLayout) -> list[list[float]]:
    """The biases after a step on the same four samples."""
    _, _, parallel = made(layout, WithParameter)
    ep.count(parallel)
    each = 4 // layout.data_size
    for sample in range(each):
        loss(parallel, batch(layout.data_rank(dist.get_rank()) * each + sample)).backward()
    ep.balance(parallel, 0.25)
    return [whole(layer.expert_bias.detach()).tolist() for layer in parallel.layers]


def refused(what: str) -> str:
    layout = MeshLayout(shard=4, ep=2)
    mesh, model = build_mesh(layout, device_type="cpu"), EIGHT()
    try:
        if what == "engine":
            parallelize(model, mesh, engine="torch")
        elif what == "view":
            fully_shard(model.layers[0].experts, mesh=ep.make_expert_view(mesh, 2).data)
        elif what == "comm hook":
            parallelize(model, mesh)
            model.layers[0].experts.register_comm_hook(None, lambda state, grad, out=None: None)
        elif what == "Muon":
            parallelize(model, mesh)
            optim.local(torch.optim.Muon, model)
        elif what == "fsdp":
            parallelize(model, mesh, fsdp=False)
        elif what == "buffer":
            model.layers[1].experts.register_buffer("scale", torch.ones(8, 1))
            parallelize(model, mesh)
        elif what == "root":
            parallelize(model.layers[0].experts, mesh)
    except Parallel3dError as error:
        return str(error)
    return ""


# ---- ranks without tokens, and experts with buffers ----


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
