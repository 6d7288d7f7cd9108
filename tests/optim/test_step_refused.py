"""step_in_backward refuses what it can't do right, and before anything is updated."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from _support.models import Lm, lm_loss, tokens
from _support.side_by_side import side_by_side
from _support.stepped import build, refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d import (
    MeshLayout,
    Parallel3dError,
    build_mesh,
    optim,
)
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world


class Region(Lm):
    """``run`` calls the blocks, in some kind of checkpoint."""

    def __init__(self, run: Callable) -> None:
        super().__init__()
        self.run = run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run(self, self.embed(ids))))


def reentrant(model: Lm, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def reentrant_inside(model: Lm, x: torch.Tensor) -> torch.Tensor:
    """Within the root's forward, the norm's parameters."""
    for layer in model.layers:
        x = checkpoint(model.norm, layer(x), use_reentrant=True)
    return x


def values_only(model: Lm, x: torch.Tensor) -> torch.Tensor:
    """Recomputed when the block has long been updated."""

    def region(x: torch.Tensor) -> torch.Tensor:
        return x * model.layers[0](x).detach()

    return model.layers[0](model.layers[1](checkpoint(region, x, use_reentrant=False)))


class TestUsesAfterTheUpdate:
    """What can't be done right is refused, and nothing of the unit is updated before."""

    def sharded(self, model: nn.Module) -> nn.Module:
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
        return model

    @pytest.mark.parametrize("run", [reentrant, reentrant_inside])
    def test_reentrant_checkpoint(self, run) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(run))
            with refused("use_reentrant=False", model):
                lm_loss(model, tokens(0)).backward()

    def test_the_whole_model_in_reentrant_checkpoint(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(lambda m, x: m.layers[1](m.layers[0](x))))
            model.embed.register_forward_hook(lambda m, a, out: out)
            x = torch.zeros(1, requires_grad=True)
            with refused("use_reentrant=False", model):
                loss = checkpoint(
                    lambda x: lm_loss(model, tokens(0)) + 0 * x.sum(), x, use_reentrant=True
                )
                loss.backward()

    def test_recomputed_for_its_values_alone(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(values_only))
            with refused("recomputes"):
                lm_loss(model, tokens(0)).backward()

    def test_a_loss_with_the_sharded_parameter(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Lm())
            penalty = model.layers[1].up.weight.to_local().square().sum()
            with refused("outside the unit's forward"):
                (lm_loss(model, tokens(0)) + penalty).backward()

    @pytest.mark.parametrize("retain", [True, False], ids=["one graph", "two graphs"])
    def test_a_second_backward_of_old_weights(self, retain) -> None:
        with fake_world(0, 2):
            model = self.sharded(Lm())
            first = lm_loss(model, tokens(0))
            second = first if retain else lm_loss(model, tokens(0))
            first.backward(retain_graph=retain)
            with refused("updated since this forward", model):
                second.backward()
            model.zero_grad()
            lm_loss(model, tokens(0)).backward()  # it still works

    def test_losses_that_are_summed(self) -> None:
        """Two forwards, one backward: as the plain model's."""
        with side_by_side((1, 2, 1)) as sides:
            plain = torch.optim.SGD(sides.plain.parameters(), lr=0.1)
            optim.step_in_backward(sides.model, torch.optim.SGD, lr=0.1)
            with sides.outside():
                (sides.plain_loss(0) + sides.plain_loss(1)).backward()
                plain.step()
            (sides.loss(0) + sides.loss(1)).backward()
            sides.check()

    def test_a_backward_inside_a_forward(self) -> None:
        with fake_world(0, 2):

            def run(m: Lm, x: torch.Tensor) -> torch.Tensor:
                m.layers[0](x.detach().requires_grad_()).sum().backward()
                return m.layers[1](x)

            model = self.sharded(Region(run))
            with refused("inside a forward", model):
                lm_loss(model, tokens(0))


class TestNotTogetherWith:
    def test_accumulation(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            with refused("set_requires_gradient_sync"):
                model.set_requires_gradient_sync(False)
            with refused("set_requires_all_reduce"):
                model.set_requires_all_reduce(False)
            with refused("updated in backward"):
                next(optim.accumulate(model, [tokens(0), tokens(1)]))
            for ids in optim.accumulate(model, [tokens(0)]):  # one is no accumulation
                lm_loss(model, ids).backward()

    def test_switches_that_were_set_behind_its_back(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            get_unit(model.layers[0]).sync = False
            with refused("accumulates"):
                lm_loss(model, tokens(0)).backward()

    def test_clipping(self) -> None:
        with fake_world(0, 2):
            model, optimizer = build()
            with refused("clip_grad_norm_"):
                optim.clip_grad_norm_(model, 1.0)
            optimizer.remove()
            lm_loss(model, tokens(0)).backward()
            optim.clip_grad_norm_(model, 1.0)
            assert all(p.grad is not None for p in model.parameters())

    def test_removed_twice(self) -> None:
        """It does not remove what has come after it."""
        with fake_world(0, 2):
            model, first = build()
            first.remove()
            optimizer = optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
            first.remove()
            lm_loss(model, tokens(0)).backward()
            assert all(p.grad is None for p in model.parameters())
            with refused("updated in backward", model):
                optim.clip_grad_norm_(model, 1.0)
            assert "SGD" in repr(optimizer)

    def test_our_scaler(self) -> None:
        """Before anything is updated."""
        with fake_world(0, 2):
            model, optimizer = build()
            scaler = optim.GradScaler("cpu")
            loss = scaler.scale(lm_loss(model, tokens(0)))
            with refused("GradScaler", model):
                loss.backward()
            with refused("GradScaler"):
                scaler.step(optimizer)
            model.zero_grad()
            disabled = optim.GradScaler("cpu", enabled=False)
            disabled.scale(lm_loss(model, tokens(0))).backward()

    def test_torchs_scaler(self) -> None:
        with fake_world(0, 2):
            model, optimizer = build()
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(lm_loss(model, tokens(0))).backward()
            with refused("GradScaler"):
                scaler.step(optimizer)

    def test_its_own_step(self) -> None:
        with fake_world(0, 2):
            _, optimizer = build()
            with refused("leave the call of step\\(\\) out"):
                optimizer.step()


def test_copies() -> None:
    with fake_world(0, 2):
        model, optimizer = build()
        for copied in (copy.deepcopy, pickle.dumps):
            with refused("can't be copied"):
                copied(optimizer)
        lm_loss(model, tokens(0)).backward()
        assert all(p.grad is None for p in model.parameters())


class TestArguments:
    def test_what_is_refused(self) -> None:
        with fake_world(0, 2):
            with pytest.raises(Parallel3dError, match="not parallel"):
                optim.step_in_backward(Lm(), torch.optim.SGD, lr=0.1)
            with pytest.raises(Parallel3dError, match="needs a module"):
                optim.step_in_backward(torch.optim.SGD, Lm(), lr=0.1)
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            plain = Lm(layers=1)
            model = fully_shard(plain, mesh=mesh, ignored_params={plain.norm.weight})
            with pytest.raises(Parallel3dError, match="belongs to no unit"):
                optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
            with pytest.raises(Parallel3dError, match="LBFGS"):
                optim.step_in_backward(model, torch.optim.LBFGS)
            with pytest.raises(Parallel3dError, match="class of optimizers"):
                optim.step_in_backward(model, torch.optim.SGD(model.parameters()))
            with pytest.raises(Parallel3dError, match="made a list"):
                optim.step_in_backward(model, list)
            params = [p for p in model.parameters() if p is not model.norm.weight]
            lm_loss(model, tokens(0)).backward()
            with refused("has a gradient"):
                optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
            assert model.head.weight.grad is not None  # nothing was half-applied
            model.zero_grad()
            model.set_requires_gradient_sync(False)
            with refused("defers its reductions"):
                optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
            model.set_requires_gradient_sync(True)
            optimizer = optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
            with refused("already"):
                optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
            with pytest.raises(Parallel3dError, match="at the beginning"):
                optimizer.add_param_group({"params": [model.norm.weight]})
            assert "SGD" in repr(optimizer)

    def test_ties_to_a_unit_that_is_updated(self) -> None:
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = Lm(layers=1, tied=True)
            fully_shard(model.embed, mesh=mesh)
            optim.step_in_backward(model.embed, torch.optim.SGD, lr=0.1)
            with refused("updated in backward already"):
                fully_shard(model.head, mesh=mesh)
