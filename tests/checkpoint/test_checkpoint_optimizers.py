"""Optimizers of all kinds, in one process: saved, and loaded into others."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.bad_input import one_rank
from _support.checkpoint.hostile_checkpoints import signed
from _support.checkpoint.small_models import net, same, train, values
from torch import nn

import parallel3d as p3d
from parallel3d.checkpoint import load, save
from parallel3d.errors import CheckpointError
from parallel3d.fsdp import fully_shard


def split(model: nn.Module, make: Callable[..., Any], **options: Any) -> list:
    """Matrices to one, the rest to AdamW."""
    big = [p for p in model.parameters() if p.dim() == 2]
    small = [p for p in model.parameters() if p.dim() != 2]
    return [make(big, **options), torch.optim.AdamW(small, lr=0.02)]


def of(make: Callable[..., Any], **options: Any) -> Callable[[nn.Module], list]:
    return lambda model: [make(model.parameters(), **options)]


O = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], list]] = {
    "SGD": of(O.SGD, lr=0.1),
    "SGD momentum": of(O.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": of(O.AdamW, lr=0.1),
    "AdamW amsgrad": of(O.AdamW, lr=0.1, amsgrad=True),
    "AdamW fused": of(O.AdamW, lr=0.1, fused=True),
    "AdamW foreach": of(O.AdamW, lr=0.1, foreach=True),
    "AdamW tensor lr": of(O.AdamW, lr=torch.tensor(0.1), foreach=False),
    "AdamW lr of one element": of(O.AdamW, lr=torch.tensor([0.1]), foreach=False),
    "NAdam": of(O.NAdam, lr=0.1),
    "Adadelta": of(O.Adadelta, lr=0.1),
    "Adagrad": of(O.Adagrad, lr=0.1),
    "RMSprop": of(O.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "Rprop": of(O.Rprop, lr=0.1),
    "ASGD": of(O.ASGD, lr=0.1),
    "Adamax": of(O.Adamax, lr=0.1),
    "RAdam": of(O.RAdam, lr=0.1),
    "Adafactor": of(O.Adafactor, lr=0.1),
    "Muon and AdamW": partial(split, make=O.Muon, lr=0.1),
    "local AdamW": lambda model: [p3d.optim.local(O.AdamW, model, lr=0.1)],
    "local Adafactor": lambda model: [p3d.optim.local(O.Adafactor, model, lr=0.1)],
    "local Muon": partial(split, make=partial(p3d.optim.local, O.Muon), lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
def test_optimizers(tmp_path: Path, kind: str, fresh: bool) -> None:
    """Into one without state and into one with: the same values, and the same training from there."""
    model = net(1)
    optimizers = OPTIMIZERS[kind](model)
    train(model, *optimizers)
    save(tmp_path, model, iter(optimizers), step=2)
    want = values(model, *optimizers)
    other = net(2)
    others = OPTIMIZERS[kind](other)
    if not fresh:
        train(other, *others, steps=3)
    load(tmp_path, other, iter(others))
    same(values(other, *others), want)
    for each, its in ((model, optimizers), (other, others)):
        train(each, *its)
    same(values(other, *others), values(model, *optimizers))


def test_several_optimizers_with_tensor_rates(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, list]:
        model = net(seed)
        rates = [torch.tensor([0.1 * seed]), torch.tensor([0.2 * seed])]
        parts = zip((model.a, model.b), rates, strict=True)
        return model, [O.AdamW(m.parameters(), lr=lr, foreach=False) for m, lr in parts]

    model, optimizers = made(1)
    train(model, *optimizers)
    save(tmp_path, model, optimizers, step=1)
    other, others = made(2)
    load(tmp_path, other, others)
    assert [o.param_groups[0]["lr"].item() for o in others] == pytest.approx([0.1, 0.2])
    same(values(other, *others), values(model, *optimizers))


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Options belong to parameters, not to places."""

    def made(seed: int, order: Iterable[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed)
        groups = [
            {"params": [model.a.weight], "lr": 0.1 * seed, "name": "first"},
            {"params": [*model.norm.parameters()], "lr": 0.2 * seed, "weight_decay": 0.0},
            {"params": [model.b.bias, model.a.bias, model.b.weight], "lr": 0.3 * seed},
        ]
        return model, O.AdamW([groups[i] for i in order])

    model, optimizer = made(1, (0, 1, 2))
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    other, another = made(2, (2, 0, 1))
    load(tmp_path, other, another)
    assert [g["lr"] for g in another.param_groups] == pytest.approx([0.3, 0.1, 0.2])
    assert [g["weight_decay"] for g in another.param_groups] == [0.01, 0.01, 0.0]
    same(values(other, another)[:2], values(model, optimizer)[:2])
    # One group with what had different options can't be.
    third = net(3)
    with pytest.raises(CheckpointError, match="saved in groups with different options"):
        load(tmp_path, third, O.AdamW(third.parameters()))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda m: O.SGD(m.parameters(), lr=0.1), "another optimizer than SGD: it was AdamW's"),
        (lambda m: O.AdamW(m.a.parameters()), "parameters that the optimizer doesn't have"),
        (lambda m: O.AdamW([nn.Parameter(torch.ones(1))]), "isn't one of the model's"),
        (lambda m: [O.AdamW(m.parameters()), O.AdamW(m.a.parameters())], None),
        (lambda m: 3, "optimizer is 3"),
        (lambda m: [3], "optimizer is 3"),
    ],
)
def test_other_optimizers(tmp_path: Path, make: Callable[..., Any], named: str | None) -> None:
    model = net(1)
    optimizer = O.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    other = net(2)
    before = values(other)
    if named is not None:
        with pytest.raises(CheckpointError, match=named):
            load(tmp_path, other, make(other))
        same(values(other), before)
    else:
        with pytest.raises(CheckpointError, match="in two of the optimizers"):
            save(tmp_path, other, make(other), step=2)


class MyAdamW(O.AdamW):
    """A user's."""


def in_backward(model: nn.Module) -> p3d.optim.StepInBackward:
    mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu")
    return p3d.optim.step_in_backward(fully_shard(model, mesh=mesh), O.AdamW, lr=0.1)


ADAMS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": lambda m: O.Adam(m.parameters(), lr=0.1),
    "AdamW": lambda m: O.AdamW(m.parameters(), lr=0.1),
    "a subclass": lambda m: MyAdamW(m.parameters(), lr=0.1),
    "local": lambda m: p3d.optim.local(O.AdamW, m, lr=0.1),
    "in backward": in_backward,
}
ELSE = ["Adamax", "RAdam", "NAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"]


def adam_saved(tmp_path: Path, make: Callable[[nn.Module], Any] = ADAMS["AdamW"]) -> Path:
    model = net(1)
    optimizer = make(model)
    if not isinstance(optimizer, p3d.optim.StepInBackward):
        train(model, optimizer)
    return save(tmp_path, model, optimizer, step=1)


@pytest.mark.parametrize("kind", ELSE)
def test_another_kind_of_optimizer(tmp_path: Path, kind: str) -> None:
    """Options and state may have the same names, and mean something else."""
    adam_saved(tmp_path / "adam")
    other = net(2)
    optimizer = getattr(O, kind)(other.parameters(), lr=0.2)
    before = values(other, optimizer)
    with pytest.raises(CheckpointError, match=f"than {kind}: it was AdamW's"):
        load(tmp_path / "adam", other, optimizer)
    same(values(other, optimizer), before)
    save(tmp_path / "else", other, optimizer, step=1)
    with pytest.raises(CheckpointError, match=f"than Adam: it was {kind}'s"):
        load(tmp_path / "else", other, O.Adam(other.parameters()))


@pytest.mark.parametrize("saved", ADAMS)
@pytest.mark.parametrize("loaded", ADAMS)
def test_the_same_kind(tmp_path: Path, saved: str, loaded: str) -> None:
    with one_rank():
        adam_saved(tmp_path, ADAMS[saved])
        other = net(2)
        optimizer = ADAMS[loaded](other)
        load(tmp_path, other, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoints_without_the_kind(tmp_path: Path) -> None:
    """Earlier versions wrote none: options and state alone say whether they fit."""
    path = adam_saved(tmp_path)
    signed(info=lambda info: info["optimizer"]["groups"][0].pop("kind"))(path)
    model = net(2)
    load(path, model, O.Adam(model.parameters()))
    load(path, model, O.RAdam(model.parameters()))
    with pytest.raises(CheckpointError, match="is of another optimizer than SGD"):
        load(path, model, O.SGD(model.parameters(), lr=0.1))


def test_without_optimizer(tmp_path: Path) -> None:
    model = net(1)
    optimizer = O.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    other = net(2)
    load(tmp_path, other)
    same(values(other), values(model))
    save(tmp_path, model, step=2)
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        load(tmp_path, other, O.AdamW(other.parameters()))


def test_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    model = net(1)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    optimizer.state["shared"] = {"count": 1}
    with pytest.raises(CheckpointError, match="state for 'shared'"):
        save(tmp_path, model, optimizer, step=1)
