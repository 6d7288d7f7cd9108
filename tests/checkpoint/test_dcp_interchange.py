"""Checkpoints of torch's FSDP2 + TP programs load here, and ours there, on real processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import (
    adamw,
    check_equal,
    everything,
    loss_of,
    ours,
    plain,
    step,
    theirs,
)
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from parallel3d import MeshLayout
from parallel3d.checkpoint import load_dcp, save_dcp
from parallel3d.optim import local, step_in_backward

LAYOUTS = [MeshLayout(shard=2, tp=2), MeshLayout(replicate=2, shard=2), MeshLayout(shard=4)]


class AppState(Stateful):
    """torch's tutorial's."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.both)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = self.both
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def as_written(form: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """What programs give to dcp.save and dcp.load."""
    weights = get_model_state_dict(model)
    if form == "tutorial":
        return {"app": AppState(model, optimizer)}
    if form == "raw":
        return {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    if form == "titan":
        flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
        return {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(3)}}
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}


FORMS = ("usual", "tutorial", "titan", "raw")
FULL = pytest.mark.full


def trained(model: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw(model, betas=(0.8, 0.97), **options)
    for seed in (1, 2):
        step(model, optimizer, seed)
    return model, optimizer


def from_torch(path: str, form: str, layout: MeshLayout) -> None:
    model, optimizer = trained(theirs(1))
    expected = everything(model, optimizer)
    dcp.save(as_written(form, model, optimizer), checkpoint_id=path)
    assert not list(Path(path).glob("*.tmp"))

    found = ours(layout)
    fresh = adamw(found, lr=1.0)  # has no state, and other options
    load_dcp(path, found, fresh)
    check_equal(everything(found, fresh), expected)
    for state in fresh.state.values():
        assert state["exp_avg"].placements == state["exp_avg_sq"].placements

    found, stepped = ours(layout), None
    stepped = adamw(found, lr=1.0)
    step(found, stepped, 7)  # has state, of other values
    kept = stepped.state[found.head.weight]["exp_avg"]
    load_dcp(path, found, stepped)
    check_equal(everything(found, stepped), expected)
    assert stepped.state[found.head.weight]["exp_avg"] is kept  # loaded in place
    goes_on(model, optimizer, found, stepped)


def goes_on(model: Any, optimizer: Any, found: Any, loaded: Any) -> None:
    """The next step is the same, but for the order of sums."""
    for each, its in ((model, optimizer), (found, loaded)):
        step(each, its, 9)
    torch.testing.assert_close(everything(found), everything(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        pytest.param("usual", LAYOUTS[0], marks=pytest.mark.slow),
        pytest.param("titan", LAYOUTS[1], marks=FULL),
        pytest.param("tutorial", LAYOUTS[2], marks=FULL),
        pytest.param("raw", LAYOUTS[0], marks=FULL),
    ],
)
def test_from_torch(gloo_pool, tmp_path: Path, form: str, layout: MeshLayout) -> None:
    gloo_pool.run(from_torch, str(tmp_path), form, layout, world_size=4)


def save_ours(path: str, layout: MeshLayout, options: dict[str, Any]) -> None:
    model, optimizer = trained(ours(layout, 1))
    before = everything(model, optimizer)
    save_dcp(path, model, optimizer, **options)
    check_equal(everything(model, optimizer), before)
    if dist.get_rank() == 0:
        torch.save(before, f"{path}.expected")


def into_torch(path: str, form: str, tp: int) -> None:
    expected = torch.load(f"{path}.expected")
    model = theirs(2, tp)
    optimizer = adamw(model, lr=1.0)
    state = as_written(form, model, optimizer)
    if form == "titan":
        del state["train_state"]
    dcp.load(state, checkpoint_id=path)
    if form == "usual":
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    elif form == "titan":
        weights = {k: v for k, v in state.items() if k != "optimizer"}
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state["optimizer"],
            options=FLAT,
        )
    check_equal(everything(model, optimizer), expected)
    loss_of(model, 3).backward()


INTO = {
    "usual": {},
    "tutorial": {"model_prefix": "app.model", "optimizer_prefix": "app.optim."},
    "titan": {"model_prefix": "", "flatten_optimizer": True},
}


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        pytest.param("usual", LAYOUTS[0], marks=pytest.mark.slow),
        pytest.param("titan", LAYOUTS[2], marks=FULL),
        pytest.param("tutorial", LAYOUTS[1], marks=FULL),
    ],
)
def test_into_torch(gloo_pool, tmp_path: Path, form: str, layout: MeshLayout) -> None:
    path = str(tmp_path / "saved")
    gloo_pool.run(save_ours, path, layout, INTO[form], world_size=4)
    gloo_pool.run(into_torch, path, form, 2 if form == "usual" else 1, world_size=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_forms_alone(tmp_path: Path, form: str) -> None:
    """Both ways, without any mesh."""
    model, optimizer = trained(plain(1))
    expected = everything(model, optimizer)
    dcp.save(as_written(form, model, optimizer), checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = plain(2)
    fresh = adamw(found, lr=1.0)
    load_dcp(tmp_path / "theirs", found, fresh)
    check_equal(everything(found, fresh), expected)
    if form == "raw":
        return
    save_dcp(tmp_path / "ours", found, fresh, **INTO[form])
    back = plain(3)
    its = adamw(back, lr=1.0)
    state = as_written(form, back, its)
    state.pop("train_state", None)
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    if form != "tutorial":  # which sets it by itself
        moments = state.pop("optimizer")
        weights = state["model"] if form == "usual" else state
        options = FLAT if form == "titan" else None
        set_state_dict(
            back, its, model_state_dict=weights, optim_state_dict=moments, options=options
        )
    check_equal(everything(back, its), expected)


# -- other optimizers of ours, on other numbers of processes -------------------------------------------------


def make_local(model: Any) -> torch.optim.Optimizer:
    return local(torch.optim.AdamW, model, lr=1.0)


def make_in_backward(model: Any) -> Any:
    return step_in_backward(model, torch.optim.AdamW, lr=1.0)


def make_local_in_backward(model: Any) -> Any:
    return step_in_backward(model, partial(local, torch.optim.AdamW), lr=1.0)


def load_on(path: str, layout: MeshLayout, make: Any) -> None:
    expected = torch.load(f"{path}.expected")
    model = ours(layout)
    optimizer = make(model)
    with torch.random.fork_rng(devices=[]):
        load_dcp(path, model, optimizer)
    check_equal(everything(model, optimizer), expected)
    again, plain_optimizer = ours(layout), None
    plain_optimizer = adamw(again)
    load_dcp(path, again, plain_optimizer)
    for each, its in ((model, optimizer), (again, plain_optimizer)):
        loss_of(each, 4).backward()
        if each is again or make is make_local:
            its.step()
    got = everything(model, optimizer)
    for name, want in everything(again, plain_optimizer).items():
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got[name], want, rtol=1e-6, atol=1e-7, msg=name)
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}


def save_local_again(path: str, layout: MeshLayout) -> None:
    """What a local optimizer saves is what it has."""
    model = ours(layout)
    optimizer = make_local(model)
    load_dcp(path, model, optimizer)
    step(model, optimizer, 5)
    expected = everything(model, optimizer)
    save_dcp(f"{path}.again", model, optimizer)
    other = ours(MeshLayout(shard=2))
    fresh = make_local(other)
    step(other, fresh, 6)
    load_dcp(f"{path}.again", other, fresh)
    check_equal(everything(other, fresh), expected)


@pytest.mark.slow
def test_optimizers_of_ours(gloo_pool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    gloo_pool.run(save_ours, path, LAYOUTS[0], {}, world_size=4)
    gloo_pool.run(load_on, path, MeshLayout(shard=3), make_local_in_backward, world_size=3)
    gloo_pool.run(save_local_again, path, MeshLayout(tp=2), world_size=2)


@pytest.mark.full
@pytest.mark.parametrize("make", [make_local, make_in_backward])
def test_more_optimizers_of_ours(gloo_pool, tmp_path: Path, make: Any) -> None:
    path = str(tmp_path / "saved")
    gloo_pool.run(save_ours, path, LAYOUTS[1], {}, world_size=4)
    for layout in (MeshLayout(shard=3), MeshLayout(tp=2), MeshLayout()):
        gloo_pool.run(load_on, path, layout, make, world_size=layout.world_size)
