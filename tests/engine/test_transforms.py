"""torch.func's transforms over units, forward-mode derivatives, and derivatives of derivatives."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from _support.engine.twins import device_mesh, full
from _support.engines import Engine
from _support.models import Block
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

Case = Callable[[nn.Module, torch.Tensor], Iterator[torch.Tensor]]
DIM = 12


class Net(nn.Module):
    """Two units in a root that has parameters too."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 5)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x)


def wrap(engine: Engine, model: Net, **options) -> Net:
    mesh = device_mesh()
    for layer in model.layers:
        engine.fully_shard(layer, mesh=mesh, **options)
    return engine.fully_shard(model, mesh=mesh, **options)


def square_sum(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().sum()


def compare(case: Case, model: nn.Module, plain: nn.Module) -> None:
    """What the case yields and the gradients it leaves, twice over."""
    x = torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        got, want = (
            [
                *(t.detach() for t in case(each, x.clone())),
                *(full(p.grad) for p in each.parameters() if p.grad is not None),
            ]
            for each in (model, plain)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=case.__name__)


# -- transforms: both engines ------------------------------------------------------------------------


def values(model, x):
    yield from jvp(model, (x,), (x + 1,))
    yield grad(square_sum(model))(x)
    out, pull = vjp(model, x)
    yield out
    yield from pull(torch.ones_like(out))
    yield jacrev(square_sum(model))(x)
    yield jacfwd(square_sum(model))(x)
    yield hessian(square_sum(model))(x)
    yield vmap(model)(x.unsqueeze(1))
    with torch.no_grad():
        yield from jvp(model, (x,), (x + 1,))
    yield torch.autograd.functional.jacobian(square_sum(model), x)


def train_through_jvp(model, x):
    x.requires_grad_()
    out, tangent = jvp(model, (x,), (torch.ones_like(x),))
    (out - tangent.detach()).square().sum().backward()
    yield x.grad


def train_through_the_tangent(model, x):
    pairs = [jvp(model, (x,), (x + i,)) for i in range(2)]
    sum((out**2 + tangent**2).sum() for out, tangent in pairs).backward()
    yield from pairs[1]


def train_through_vmap(model, x):
    vmap(model)(x.unsqueeze(1)).square().sum().backward()
    yield x


def train_beside_a_gradient(model, x):
    g = grad(square_sum(model))(x)
    (model(x) * g.sum().detach()).sum().backward()
    yield g


def transforms(engine: Engine) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(engine, copy.deepcopy(plain))
    for case in (
        values,
        train_through_jvp,
        train_through_the_tangent,
        train_through_vmap,
        train_beside_a_gradient,
    ):
        compare(case, model, plain)


@pytest.mark.parity("behaviour: torch.func's transforms")
def test_transforms(on_ranks) -> None:
    on_ranks(transforms)


# -- what torch's engine fails or dies of ------------------------------------------------------------


def forward_mode(model, x):
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x + 1)))
        out.primal.square().sum().backward()
        yield from out


def gradient_penalty(model, x):
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    model(2 * x.detach()).square().mean().backward()  # another backward before the graph's own
    (g.norm() - 1).square().backward()
    yield x.grad


def penalty_of_a_linear_loss(model, x):
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).sum() + g.square().sum()).backward()
    yield x.grad


def third_derivative(model, x):
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.square().sum().backward()
    yield x.grad


def gradient_of_a_transform(model, x):
    grad(square_sum(model))(x).square().sum().backward()
    inner = grad(square_sum(model))
    yield grad(lambda x: inner(x).square().sum())(x)


def penalty_on_kept_parameters(model, x):
    units = [m for m in model.modules() if hasattr(m, "unshard")]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(x).square().sum(), params, create_graph=True)
    sum(g.square().sum() for g in grads).backward()
    for unit in units:
        unit.reshard()
    yield x


def higher(engine: Engine, checkpointing: bool, frozen: bool, **options) -> None:
    torch.manual_seed(0)
    plain = Net(checkpointing).double()
    if frozen:
        for p in [*plain.layers[1].parameters(), plain.layers[0].up.weight]:
            p.requires_grad_(False)
    model = wrap(engine, copy.deepcopy(plain), **options)
    cases = [gradient_penalty, penalty_of_a_linear_loss, third_derivative]
    if not checkpointing:
        cases += [forward_mode, gradient_of_a_transform]
    if not frozen and not checkpointing:
        cases.append(penalty_on_kept_parameters)
    for case in cases:
        compare(case, model, plain)


@pytest.mark.parity("behaviour: derivatives of derivatives (gradient penalties)")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_higher_derivatives(gloo_pool, checkpointing: bool, frozen: bool) -> None:
    """torch 2.13 dies of a segmentation fault where a backward reads parameters it has freed."""
    gloo_pool.run(higher, Engine("parallel3d"), checkpointing, frozen, world_size=2)
