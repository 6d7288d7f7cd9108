"""Which classes and options optim.local takes, and what it says of the others."""

import functools

import pytest
import torch
from torch import nn, optim

from parallel3d import MeshLayout, Parallel3dError, build_mesh, parallelize
from parallel3d.optim import local


class Lamb(optim.Optimizer):
    """Not elementwise: scales the step by norms."""

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class Together(optim.SGD):
    """Not elementwise: divides by the norm of all its gradients."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.grad = p.grad / norm
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "options", "match"),
    [
        (optim.LBFGS, {}, "inner products over the whole model"),
        (optim.SparseAdam, {}, "use Adam"),
        (
            Lamb,
            {},
            r"Lamb is not known to be elementwise; known are ASGD.*elementwise=True.*matrix=True",
        ),
        (Together, {"lr": 0.1}, "not known to be elementwise .it is a subclass of SGD"),
        (optim.Muon, {"matrix": False}, "not known to be elementwise;"),
        (optim.Muon, {"elementwise": True}, "Muon is not elementwise.*orthogonal matrices"),
        (optim.Adafactor, {"elementwise": True}, "is not elementwise"),
        (optim.AdamW, {"differentiable": True}, "leave it out"),
        (optim.AdamW, {"matrix": 1}, "must be True, False or None"),
        (optim.AdamW, {"elementwise": 1}, "must be True or False"),
        (optim.AdamW, {"elementwise": True, "matrix": True}, "give one"),
        (functools.partial(optim.AdamW, lr=1e-3), {}, "needs a class.*model, lr="),
        (optim.AdamW([nn.Parameter(torch.zeros(1))]), {}, "needs a class"),
        ("AdamW", {}, "needs a class"),
        (nn.Linear, {}, "needs a class"),
    ],
)
def test_refused(cls, options, match) -> None:
    with pytest.raises(Parallel3dError, match=match):
        local(cls, nn.Linear(3, 2), **options)


class Keeps(optim.SGD):
    """Keeps in each parameter's state what its lr says."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = {0.1: torch.zeros(7), 0.2: [torch.zeros_like(p)], 0.3: Wrapped(p.detach())}
                self.state[p]["kept"] = kept[group["lr"]]
        return super().step(closure)


class Wrapped(torch.Tensor):
    """As a quantized state is."""


@pytest.mark.parametrize(
    ("said", "lr", "match"),
    [
        ("elementwise", 0.1, r"keeps a Tensor .*'kept'.*shape \(7,\) for a part of \(2, 3\)"),
        ("elementwise", 0.2, "keeps a list .*'kept'.*can't be cut by element"),
        ("elementwise", 0.3, "keeps a Wrapped .*can't be cut by element"),
        ("matrix", 0.2, "keeps a list .*'kept'.*can't exchange"),
        ("matrix", 0.3, "keeps a Wrapped .*can't exchange"),
    ],
)
def test_a_state_that_is_not_as_was_said(said, lr, match) -> None:
    model = nn.Linear(3, 2)
    optimizer = local(Keeps, model, lr=lr, **{said: True})
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(Parallel3dError, match=match):
        optimizer.step()


class ByWeights(optim.SGD):
    """Keeps as many numbers as there are positive weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = torch.zeros(int((p > 0).sum()))
        return super().step(closure)


def states_that_differ_by_rank() -> None:
    mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[1].weight)
    parallelize(model, mesh, units=["0", "1"])
    optimizer = local(ByWeights, model, lr=0.1, matrix=True)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(Parallel3dError, match=r"ByWeights has made .*\(4, 4\) differ.*'kept'"):
        optimizer.step()


@pytest.mark.slow
def test_states_that_differ_by_rank(gloo_pool) -> None:
    """Ranks would exchange tensors of different sizes, and wait for each other."""
    gloo_pool.run(states_that_differ_by_rank, world_size=2)


class Grouped(optim.SGD):
    """Asks each group for something that is no option."""

    def add_param_group(self, param_group: dict) -> None:
        param_group["lr"] = {"slow": 1e-3, "fast": 1e-1}[param_group.pop("speed")]
        super().add_param_group(param_group)


def test_groups_with_options_of_their_own() -> None:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "speed": "fast"}, {"params": model.bias, "speed": "slow"}]
    optimizer = local(Grouped, groups, elementwise=True)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-1, 1e-3]
    with pytest.raises(KeyError, match="speed"):
        local(Grouped, model, elementwise=True)


@pytest.mark.parametrize("cls", [optim.SGD, optim.Muon])
def test_groups_of_generators(cls) -> None:
    models = [nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)]
    optimizer = local(cls, [{"params": model.parameters()} for model in models])
    assert [group["params"] for group in optimizer.param_groups] == [
        list(model.parameters()) for model in models
    ]


def test_the_class_itself_refuses_and_random_numbers_stay() -> None:
    model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match="momentum"):
        local(optim.AdamW, model, momentum=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        local(optim.AdamW, model, lr=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        local(optim.AdamW, [])
    local(optim.AdamW, model)
    assert torch.equal(torch.get_rng_state(), before)
