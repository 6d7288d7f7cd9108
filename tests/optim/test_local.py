"""optim.local: the plain model's steps, on plain local tensors, with DTensors to be seen."""

import copy
import functools

import pytest
from _support.optim.local_sides import Counting, Sides, everything
from torch import nn, optim
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout
from parallel3d.optim import local
from parallel3d.testing import local_world

ELEMENTWISE = [
    (optim.AdamW, {}),
    (optim.Adam, {"amsgrad": True, "foreach": False, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {}),  # no state at all
    (optim.Adagrad, {"initial_accumulator_value": 0.5}),  # has state before its first step
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"lr": 0.0}),
    (optim.AdamW, {"maximize": True, "foreach": True}),
    (optim.ASGD, {"t0": 1, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "fused": True}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Rprop, {"etas": (0.4, 1.3)}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "classes"),
    [((2, 2, 1), ELEMENTWISE), ((1, 2, 2), ELEMENTWISE[:9:4])],
    ids=["hsdp", "tp"],
)
def test_every_elementwise_optimizer_of_torch(sizes, classes) -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes))
        sides.backward()
        for cls, options in classes:
            options = {"lr": 1e-2, **options}
            sides.reset()
            sides.optimizers(
                everything,
                functools.partial(cls, **options),
                functools.partial(local, cls, **options),
            )
            assert isinstance(sides.optimizer, cls)
            for _ in range(2):
                sides.step()
            sides.check(moved=options["lr"] > 0)


class TestTraining:
    """Forwards, backwards and steps, with what surrounds them."""

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
    def test_groups_schedule_and_flat_buffers(self, sizes) -> None:
        def groups(model: nn.Module) -> list[dict]:
            """The blocks whole; of the rest, biases apart: their buckets are split."""
            rest = [p for n, p in model.named_parameters() if "layers" not in n]
            return [
                {"params": list(model.layers.parameters()), "weight_decay": 0.1},
                {"params": [p for p in rest if p.dim() == 2], "lr": 3e-3},
                {"params": [p for p in rest if p.dim() == 1]},
            ]

        with local_world(4) as world:
            sides = Sides(world, MeshLayout(*sizes), layers=2)
            sides.optimizers(
                groups,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, Counting, elementwise=True, lr=1e-2),
            )
            schedules = [
                optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5)
                for each in (sides.plain_optimizer, sides.optimizer)
            ]
            for step in range(3):
                sides.backward(step)
                grads = [p.grad for p in sides.model.layers[0].parameters()]
                sides.step()
                assert [p.grad for p in sides.model.layers[0].parameters()] == grads
                sides.zero_grad()
                for schedule in schedules:
                    schedule.step()
            sides.check()
            optimizer = sides.optimizer
            assert [len(tensors) for tensors in optimizer.given] == [2, 2, 3]
            assert not any(issubclass(kind, DTensor) for kind in optimizer.kinds)
            assert optimizer.param_groups[1]["lr"] == 3e-3 / 8
            assert [p for g in optimizer.param_groups for p in g["params"]] == [
                p for g in groups(sides.model) for p in g["params"]
            ]
            assert all(p.grad is None for group in optimizer.given for p in group)

    def test_frozen_missing_and_accumulated(self) -> None:
        """A gradient that is missing once divides a flat buffer: its step count stays behind."""
        with local_world(4) as world:
            sides = Sides(world, MeshLayout(1, 2, 2), layers=2)
            for model in (sides.plain, sides.model):
                model.layers[1].norm.weight.requires_grad_(False)
            sides.optimizers(
                everything,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, Counting, elementwise=True, lr=1e-2),
            )
            for step in range(4):
                sides.backward(step)
                sides.backward(step + 4)
                if step == 1:
                    for model in (sides.plain, sides.model):
                        model.layers[0].up.bias.grad = None
                if step == 3:  # a gradient of the user's own
                    for model in (sides.plain, sides.model):
                        model.layers[0].up.bias.grad = model.layers[0].up.bias.grad * 2
                sides.step()
                sides.zero_grad()
                if not step:
                    assert len(sides.optimizer.given[0]) < 12  # a flat buffer among them
            sides.check()
            bias = sides.optimizer.state[sides.model.layers[0].up.bias]
            assert bias["step"] == 3 and "step" not in sides.optimizer.state.get(
                sides.model.layers[1].norm.weight, {}
            )

    def test_gradients_that_change_places(self) -> None:
        """They are the bucket's, and the user has put them elsewhere."""

        def change(model: nn.Module, step: int) -> None:
            first, second = model.layers[0].norm.parameters()
            if step == 0:
                first.grad, second.grad = second.grad, first.grad
            else:
                first.grad = second.grad

        with local_world(2) as world:
            sides = Sides(world, MeshLayout(1, 2, 1))
            sgd = functools.partial(optim.SGD, lr=0.1)
            sides.optimizers(everything, sgd, functools.partial(local, optim.SGD, lr=0.1))
            for step in range(2):
                sides.backward(step)
                with world.paused():
                    change(sides.plain, step)
                change(sides.model, step)
                if step == 0:
                    sides.backward(3)  # adds to them
                sides.step()
                sides.zero_grad()
                sides.check(moved=False)

    @pytest.mark.slow
    def test_state_from_a_plain_model_and_a_conversion(self) -> None:
        """Whole tensors are cut, edits of the state are seen, and buckets may be built anew."""
        with local_world(4) as world:
            sides = Sides(world, MeshLayout(1, 2, 2))
            sides.optimizers(
                everything,
                functools.partial(optim.AdamW, lr=1e-2),
                functools.partial(local, optim.AdamW, lr=1e-2),
            )
            sides.backward()
            sides.step()
            with world.paused():
                saved = copy.deepcopy(sides.plain_optimizer.state_dict())
            for entry in saved["state"].values():
                entry["exp_avg"] = entry["exp_avg"] * 3
            for optimizer in (sides.plain_optimizer, sides.optimizer):
                optimizer.load_state_dict(copy.deepcopy(saved))
            sides.step()
            sides.check()
            for model, optimizer in (
                (sides.plain, sides.plain_optimizer),
                (sides.model, sides.optimizer),
            ):
                state = optimizer.state[model.layers[0].up.weight]
                state["exp_avg_sq"] = state["exp_avg_sq"] * 2  # replaced
                optimizer.state[model.layers[0].down.weight]["exp_avg"].mul_(5)  # in place
                optimizer.state[model.layers[0].norm.bias]["step"].add_(3)
                optimizer.state[model.head.weight].clear()
            sides.step()
            sides.check()
            assert sides.optimizer.state[sides.model.layers[0].norm.bias]["step"] == 6
            assert sides.optimizer.state[sides.model.layers[0].norm.weight]["step"] == 3
            with world.paused():
                sides.plain.layers[0].float().double()
            sides.model.layers[0].float().double()
            sides.zero_grad()
            sides.backward(1)
            sides.step()
            sides.check()
