"""Hooks and attributes that see a rank's part of what is split are refused, or keep their layers whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.errors import PlanError, StateError
from parallel3d.testing import assert_parity, fake_world
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel, auto_plan, resolve_plan


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(self.norm(x)))
        return x + self.keep(x, h, self.down(h))

    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return y


class Model(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = Mlp, ids: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8) if ids else nn.Identity()
        self.layers = nn.ModuleList([mlp(), mlp()])
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(16).view(2, 8)
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
SEQUENCE = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": Colwise(input="sequence"),
    "layers.*.down": Rowwise(output="sequence"),
    "head": Colwise(input="sequence", output="replicate"),
}


def split(model: nn.Module, plan: Any = PLAN) -> nn.Module:
    mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
    return parallelize(model, mesh, plan, check_same_batch=False)


# ---- attributes ----


class Penalty(Mlp):
    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        self.penalty = h.square().mean()
        return y


class InList(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        self.losses.append(h.abs().sum())
        return y


class InDict(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.losses = {"entropy": None}

    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        self.losses["entropy"] = -(h.softmax(-1) * h.log_softmax(-1)).sum(-1).mean()
        return y


class Reads(Penalty):
    """Computes with what its last forward has left."""

    last = torch.zeros(())

    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        y = y * (1 + 0 * self.last.detach())
        self.last = h.mean()
        return super().keep(x, h, y)


class Whole(Mlp):
    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        self.penalty = (x + y).square().mean()
        return y


class Detached(Mlp):
    def keep(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        self.seen = h.detach()
        return y


LEFT: dict[type[nn.Module], Callable[[Any], Any]] = {
    Penalty: lambda layer: layer.penalty,
    InList: lambda layer: layer.losses[-1],
    InDict: lambda layer: layer.losses["entropy"],
    Reads: lambda layer: layer.penalty,
}


@pytest.mark.parametrize("mlp", LEFT)
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["plan", "sequence"])
def test_a_part_in_an_attribute_raises_where_it_is_used(mlp: Any, plan: Any) -> None:
    with fake_world(0, 2):
        model = split(Model(mlp), plan)
        for _ in range(3):
            out = model(IDS)
            left = LEFT[mlp](model.layers[1])
            assert left.shape == () and left.requires_grad and repr(left)
            with pytest.raises(
                StateError, match=r"layers\.1\.(penalty|losses) is made of this rank's"
            ):
                out.mean() + left
            out.mean().backward()


def test_a_part_of_an_input_without_gradient() -> None:
    with fake_world(0, 2):
        model = split(
            Model(lambda: nn.Sequential(nn.Linear(8, 8), Penalty()), ids=False),
            {"layers.*.1.up": "colwise", "layers.*.1.down": "rowwise"},
        )
        for p in model.parameters():
            p.requires_grad_(False)
        model.layers[0][1].up.weight.requires_grad_()
        model(torch.ones(2, 3, 8))
        with pytest.raises(StateError, match="penalty"):
            model.layers[0][1].penalty.item()


@pytest.mark.parametrize("mlp", [Whole, Detached, Mlp])
def test_what_is_no_part_is_left_alone(mlp: Any) -> None:
    with fake_world(0, 2):
        model = split(Model(mlp))
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
        model.eval()(IDS)
        with torch.no_grad():
            model.train()(IDS)
        assert hooks == (len(model._forward_hooks), len(model._forward_pre_hooks))
        out = model(IDS)
        # Nothing looks at later forwards.
        assert hooks == (len(model._forward_hooks) + 1, len(model._forward_pre_hooks) + 1)
        assert not any(m._forward_hooks for m in model.layers[0].children())
        for layer in model.layers:
            for name in ("penalty", "seen"):
                out = out.mean() + getattr(layer, name, torch.zeros(1)).sum()


def test_a_penalty_of_the_whole_trains_as_the_plain_model() -> None:
    def loss(model: Any, ids: Tensor) -> Tensor:
        return model(ids).square().mean() + sum(layer.penalty for layer in model.layers)

    for mlp, plan in ((Whole, PLAN), (Penalty, "auto")):
        assert_parity(
            lambda mlp=mlp: Model(mlp),
            IDS,
            MeshLayout(1, 1, 2),
            tp_plan=plan,
            loss=loss,
            fp32=False,
        )


@pytest.mark.parametrize("mlp", LEFT)
def test_auto_leaves_layers_whole_that_leave_a_part(mlp: Any) -> None:
    plan = resolve_plan(Model(mlp), "auto", 2)
    assert not any(m.name.startswith("layers") for m in plan.modules)
    assert any(m.name.startswith("layers") for m in resolve_plan(Model(Whole), "auto", 2).modules)


def test_a_model_that_has_run_before() -> None:
    model = Model(Penalty)
    model(IDS)
    assert "layers.*.up" not in auto_plan(model, 2)
    assert resolve_plan(model, PLAN, 2).modules


def test_a_pruned_layer_is_named() -> None:
    model = Model()
    prune.l1_unstructured(model.layers[0].up, "weight", 0.5)
    assert all(
        name.startswith("layers.1") or name in ("embed", "head") for name in auto_plan(model, 2)
    )
    with pytest.raises(PlanError, match=r"layers\.0\.up.*weight_orig.*parametrized"):
        resolve_plan(model, PLAN, 2)


# ---- hooks ----


def seen(*args: Any) -> None:
    pass


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output of up": lambda layer: layer.up.register_forward_hook(seen),
    "input of down": lambda layer: layer.down.register_forward_pre_hook(seen),
    "output of down": lambda layer: layer.down.register_forward_hook(seen),  # has its input
    "gradient of up": lambda layer: layer.up.register_full_backward_hook(seen),
    "between": lambda layer: layer.act.register_forward_hook(seen),
    "before between": lambda layer: layer.act.register_forward_pre_hook(seen),
}


@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_that_sees_a_part_is_refused(where: str) -> None:
    message = "the hook seen of .* would see this rank's part"
    with fake_world(0, 2):
        before = Model()
        HOOKS[where](before.layers[1])
        if "between" in where:  # a hook that the plan alone doesn't show
            with pytest.raises(StateError, match=message):
                split(before)(IDS)
        else:
            with pytest.raises(PlanError, match=message):
                split(before)
        after = split(Model())
        HOOKS[where](after.layers[1])
        with pytest.raises(StateError, match=message):
            after(IDS)
    model = Model()
    HOOKS[where](model.layers[1])
    rules = auto_plan(model, 2)
    assert "layers.0.up" in rules and "layers.1.up" not in rules


def test_a_hook_of_a_part_of_the_sequence_is_refused() -> None:
    with fake_world(0, 2):
        model = split(Model(), SEQUENCE)
        model.layers[0].register_forward_hook(seen)
        with pytest.raises(StateError, match=r"'layers\.0' would see this rank's part"):
            model(IDS)


def test_a_late_hook_is_refused_in_evaluation_too() -> None:
    with fake_world(0, 2):
        model = split(Model())
        model(IDS)
        handle = model.layers[0].up.register_forward_hook(seen)
        with torch.no_grad(), pytest.raises(StateError, match="the hook seen"):
            model(IDS)
        handle.remove()
        model(IDS)


def test_hooks_that_see_the_whole() -> None:
    with fake_world(0, 2):
        model = split(Model())
        for module in (model, model.embed, model.layers[0], model.layers[0].norm, model.head):
            module.register_forward_hook(seen)
        model.layers[0].up.register_forward_pre_hook(seen)
        model(IDS).mean().backward()
        copied = copy.deepcopy(model)
        assert copied(IDS).shape == (2, 8, 16)


# ---- what a plan is derived of ----


class Table(nn.Embedding):
    """Has a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight) * 2


def test_integers_are_tried_for_a_table_with_its_own_forward() -> None:
    model = Model()
    model.embed = Table(16, 8)
    assert "layers.*.up" in auto_plan(model, 2)
    with pytest.raises(PlanError, match=r"torch\.nn\.Embedding .*, not test_parts\.Table"):
        resolve_plan(model, {**PLAN, "embed": VocabParallel()}, 2)
