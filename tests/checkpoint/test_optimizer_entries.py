"""Entries of a saved optimizer that can't be: an error that names them, and nothing has changed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.bounded import refused
from _support.checkpoint.handmade_dcp import Folder, flat, make, small
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallel3d.checkpoint import load_dcp, load_torch
from parallel3d.checkpoint.torch_formats.optimizer import SavedGroup, SavedOptimizer
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool

NAN, INF = float("nan"), float("inf")
GONE = object()


def entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Of the weight's state, where the optimizer's dict is in plain form."""

    def change(optimizer: dict[str, Any]) -> None:
        state = optimizer["state"][0]
        if value is GONE:
            del state[key]
        else:
            state[key] = value

    return change


def option(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(optimizer: dict[str, Any]) -> None:
        if value is GONE:
            del optimizer["param_groups"][0][key]
        else:
            optimizer["param_groups"][0][key] = value

    return change


def others(optimizer: dict[str, Any], params: Any) -> None:
    optimizer["param_groups"][0]["params"] = params


def two_groups(optimizer: dict[str, Any], second: Any) -> None:
    group = optimizer["param_groups"][0]
    optimizer["param_groups"].append({**group, "params": second})


# name -> (what is done to the optimizer's dict, what the error names)
ENTRIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "step a text": (entry("step", "x"), "step of lin.weight is 'x'"),
    "step bytes": (entry("step", b"1"), "step of lin.weight"),
    "step None": (entry("step", None), "step of lin.weight is None"),
    "step a bool": (entry("step", True), "step of lin.weight is True"),
    "step a list": (entry("step", [1]), "step of lin.weight is a list"),
    "step a dict": (entry("step", {"a": 1}), "step of lin.weight is a dict"),
    "step NaN": (entry("step", torch.tensor(NAN)), "step of lin.weight is nan"),
    "step a NaN": (entry("step", NAN), "step of lin.weight is nan"),
    "step infinite": (entry("step", torch.tensor(INF)), "step of lin.weight is inf"),
    "step negative": (entry("step", torch.tensor(-1.0)), "step of lin.weight is -1.0"),
    "step huge": (entry("step", 1 << 200), "step of lin.weight is 16069"),
    "step of three": (entry("step", torch.ones(3)), "step of lin.weight is torch.float32 of shape"),
    "step of one": (entry("step", torch.ones(1)), "step of lin.weight is torch.float32 of shape"),
    "step complex": (entry("step", torch.tensor(1j)), "step of lin.weight is torch.complex64"),
    "step a flag": (entry("step", torch.tensor(True)), "step of lin.weight is torch.bool"),
    "no step": (entry("step", GONE), "no step of lin.weight"),
    "no exp_avg": (entry("exp_avg", GONE), "no exp_avg of lin.weight"),
    "no exp_avg_sq": (entry("exp_avg_sq", GONE), "no exp_avg_sq of lin.weight"),
    "another shape": (entry("exp_avg", torch.zeros(7)), "exp_avg of lin.weight"),
    "transposed": (entry("exp_avg", torch.zeros(3, 5)), "exp_avg of lin.weight"),
    "a dim more": (entry("exp_avg", torch.zeros(5, 3, 1)), "exp_avg of lin.weight"),
    "flat": (entry("exp_avg_sq", torch.zeros(15)), "exp_avg_sq of lin.weight"),
    "no elements": (entry("exp_avg", torch.zeros(0, 3)), "exp_avg of lin.weight"),
    "integers": (entry("exp_avg", torch.zeros(5, 3, dtype=torch.int64)), "exp_avg of lin.weight"),
    "flags": (entry("exp_avg", torch.zeros(5, 3, dtype=torch.bool)), "exp_avg of lin.weight"),
    "complex": (entry("exp_avg", torch.zeros(5, 3, dtype=torch.complex64)), "exp_avg of lin"),
    "a text": (entry("exp_avg", "moments"), "exp_avg of lin.weight is 'moments'"),
    "a number": (entry("exp_avg", 0.0), "exp_avg of lin.weight is 0.0"),
    "None": (entry("exp_avg", None), "exp_avg of lin.weight is None"),
    "a list": (entry("exp_avg", [0.0] * 15), "exp_avg of lin.weight is a list"),
    "a text more": (entry("more", "x"), "more of lin.weight is 'x'"),
    "a NaN more": (entry("more", NAN), "more of lin.weight is nan"),
    "an expanded one more": (entry("more", torch.zeros(1).expand(2**28)), "more of lin.weight"),
    "betas a text": (option("betas", "0.9, 0.99"), "betas='0.9, 0.99'"),
    "betas of three": (option("betas", (0.9, 0.9, 0.9)), "betas"),
    "betas a number": (option("betas", 0.9), "betas=0.9"),
    "betas of texts": (option("betas", ("0.9", "0.99")), "betas"),
    "betas beyond one": (option("betas", (1.5, 0.9)), "beta"),
    "betas NaN": (option("betas", (NAN, 0.9)), "beta"),
    "lr a text": (option("lr", "0.1"), "lr='0.1'"),
    "lr NaN": (option("lr", NAN), "lr=nan"),
    "lr negative": (option("lr", -0.1), "learning rate"),
    "lr a list": (option("lr", [0.1]), "lr="),
    "lr of three": (option("lr", torch.ones(3)), "lr="),
    "lr expanded": (option("lr", torch.zeros(1).expand(2**28)), "bytes"),
    "weight_decay huge": (option("weight_decay", 1 << 200), "weight_decay=16069"),
    "eps a text": (option("eps", "small"), "eps='small'"),
    "amsgrad a text": (option("amsgrad", "yes"), "amsgrad='yes'"),
    "amsgrad without its state": (option("amsgrad", True), "max_exp_avg_sq of lin.weight"),
    "foreach a text": (option("foreach", "yes"), "foreach='yes'"),
    "no params": (option("params", GONE), "params"),
    "params a number": (partial(others, params=2), "params"),
    "params of lists": (partial(others, params=[[0], [1]]), "params"),
    "a parameter less": (partial(others, params=[0]), "1 parameter, by number"),
    "a parameter more": (partial(others, params=[0, 1, 2]), "3 parameters, by number"),
    "a parameter twice": (partial(others, params=[0, 0]), "parameter 0 is in two groups"),
    "other numbers": (partial(others, params=[0, 7]), "0 to 1"),
    "negative numbers": (partial(others, params=[-1, 0]), "0 to 1"),
    "a huge number": (partial(others, params=[0, 1 << 61]), "0 to 1"),
    "numbers and names": (partial(others, params=[0, "lin.bias"]), "0 to 1"),
    "other names": (partial(others, params=["a", "b"]), "lin.weight"),
    "a group more": (partial(two_groups, second=[2]), "3 parameters, by number"),
    "the group twice": (partial(two_groups, second=[0, 1]), "parameter 0 is in two groups"),
    "an empty group more, of a text": (
        lambda o: o["param_groups"].append("x"),
        "param_groups are not dicts",
    ),
    "no groups": (lambda o: o["param_groups"].clear(), "no 'lin.bias', 'lin.weight'"),
    "groups a dict": (lambda o: o.update(param_groups={}), "no state of an optimizer"),
    "state a list": (lambda o: o.update(state=[]), "state"),
    "a state a list": (lambda o: o["state"].update({0: []}), "state"),
    "state of nobody": (lambda o: o["state"].update({9: o["state"][0]}), "has '9'"),
    "state of a name": (lambda o: o["state"].update({"w": o["state"][0]}), "has 'w'"),
    "state by a number": (lambda o: o["state"][0].update({3: 4}), "the key 3"),
}


def saved(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    model, optimizer = small(1)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    change(both["optimizer"])
    torch.save(both, path)


@pytest.mark.parametrize("name", ENTRIES)
def test_load_torch(tmp_path: Path, name: str) -> None:
    change, named = ENTRIES[name]
    saved(tmp_path / "it.pt", change)
    for fresh in (False, True):
        model, optimizer = small(2)
        if fresh:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
        load = partial(load_torch, tmp_path / "it.pt", model, optimizer)
        assert named in str(refused(load, model, optimizer))
        assert named in str(refused(partial(load, trusted=True, cast=True), model, optimizer)) or (
            "expanded" in name
        )


IN_A_FOLDER = [name for name, (change, _) in ENTRIES.items() if "option" in repr(change)] + [
    name
    for name, (change, _) in ENTRIES.items()
    if "entry" in repr(change) and name != "step bytes"  # which are a record as they are there
]


@pytest.mark.parametrize("name", IN_A_FOLDER)
def test_load_dcp(tmp_path: Path, name: str) -> None:
    """The same in a folder; there ``params`` are names."""
    change, named = ENTRIES[name]
    found = flat(*small(1))
    both: dict[str, Any] = {"state": {0: {}}, "param_groups": [{}]}
    at = ("optimizer", "state", "lin.weight"), ("optimizer", "param_groups", 0)
    for path, holder in zip(at, (both["state"][0], both["param_groups"][0]), strict=True):
        for key in [key for key in found if key[: len(path)] == path]:
            holder[key[-1]] = found.pop(key)
    change(both)
    for path, holder in zip(at, (both["state"][0], both["param_groups"][0]), strict=True):
        found |= {(*path, key): value for key, value in holder.items()}
    folder = make({k: v for k, v in found.items() if not _expanded(v)})
    for key in [key for key, value in found.items() if _expanded(value)]:
        put_expanded(found[key], ".".join(map(str, key)), folder)
    folder.write(tmp_path / "it")
    model, optimizer = small(2)
    error = refused(partial(load_dcp, tmp_path / "it", model, optimizer), model, optimizer)
    assert named in str(error)


def _expanded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1 << 20


def put_expanded(value: torch.Tensor, name: str, folder: Folder) -> None:
    """``value`` as one chunk."""
    folder.metadata.planner_data[name] = tuple(name.split("."))
    folder.describe(name, value.dtype, value.shape, [([0], value.shape)])
    folder.metadata.storage_data[MetadataIndex(name, [0])] = folder.append(value)


# -- what is as it was saved ---------------------------------------------------------------------------------

CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


def stepped(kind: str, seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), **{"lr": 0.1, **options})
    model(torch.ones(2, 2, 2, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", CLASSES)
def test_all_that_torch_keeps_is_known(tmp_path: Path, kind: str) -> None:
    """Each class of torch's: it loads whole, and an entry less or of another shape is an error."""
    model, optimizer = stepped(kind, 1, **CLASSES[kind])
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, tmp_path / "it.pt")
    other, its = stepped(kind, 2, **CLASSES[kind])
    for each in (its, getattr(torch.optim, kind)(other.parameters(), **CLASSES[kind])):
        load_torch(tmp_path / "it.pt", other, each)
        for a, b in zip(optimizer.state.values(), each.state.values(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], torch.as_tensor(b[key])) for key in a)
    for key in whole["optimizer"]["state"][0]:
        state = whole["optimizer"]["state"][0]
        for bad in (GONE, torch.zeros(2, 9)) if len(state) > 1 else (torch.zeros(2, 9),):
            changed = {k: v for k, v in {**state, key: bad}.items() if v is not GONE}
            optimizers = {**whole["optimizer"], "state": {0: changed}}
            torch.save({**whole, "optimizer": optimizers}, tmp_path / "it.pt")
            fresh = getattr(torch.optim, kind)(other.parameters(), **CLASSES[kind])
            error = refused(partial(load_torch, tmp_path / "it.pt", other, fresh), other, fresh)
            assert f"{key} of 0.weight" in str(error)


def test_numbers_that_were_no_tensors_once(tmp_path: Path) -> None:
    """torch before 1.12 had steps as integers."""
    saved(tmp_path / "it.pt", entry("step", 1))
    model, optimizer = small(2)
    load_torch(tmp_path / "it.pt", model, optimizer)
    assert optimizer.state[model.lin.weight]["step"] == 1.0


def test_parameters_without_state(tmp_path: Path) -> None:
    """One that had no gradient."""
    saved(tmp_path / "it.pt", lambda o: o["state"].pop(0))
    model, optimizer = small(2)
    load_torch(tmp_path / "it.pt", model, optimizer)
    assert list(optimizer.state) == [model.lin.bias]


class Odd(torch.optim.Optimizer):
    """Of nobody that is known: with a text, a list and a factor in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(rows=p.detach().sum(0), name="x", seen=[1, 2.0], count=3)


def test_a_class_of_its_own(tmp_path: Path) -> None:
    model, _ = small(1)
    optimizer = Odd(model.parameters())
    optimizer.step()
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "it.pt")
    other, _ = small(2)
    its = Odd(other.parameters())
    error = refused(partial(load_torch, tmp_path / "it.pt", other, its), other, its)
    assert "name of lin.weight is 'x'" in str(error)
    its.step()
    load_torch(tmp_path / "it.pt", other, its)
    state = its.state[other.lin.weight]
    assert torch.equal(state["rows"], optimizer.state[model.lin.weight]["rows"])
    assert (state["name"], state["seen"], state["count"]) == ("x", [1, 2.0], 3)
    for key, value in (("rows", torch.ones(5)), ("count", "3"), ("rows", 3), ("name", 3)):
        state = both["optimizer"]["state"][0]
        changed = {"state": {0: {**state, key: value}, 1: both["optimizer"]["state"][1]}}
        torch.save({**both, "optimizer": {**both["optimizer"], **changed}}, tmp_path / "it.pt")
        error = refused(partial(load_torch, tmp_path / "it.pt", other, its), other, its)
        assert f"{key} of lin.weight" in str(error)


# -- code that raises while it is given what was loaded ------------------------------------------------------


class Refusing(nn.Module):
    """With a state that it may not take."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin, self.number, self.refuses = nn.Linear(3, 5), number, False

    def get_extra_state(self) -> Any:
        return {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]
        if self.refuses:
            raise RuntimeError("not this one")


def refusing(seed: int) -> tuple[Refusing, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Refusing(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model.lin(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_extra_state_that_is_refused(tmp_path: Path) -> None:
    model, optimizer = refusing(1)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "it.pt")
    other, its = refusing(2)
    other.refuses = True
    load = partial(load_torch, tmp_path / "it.pt", other, its)
    with pytest.raises(RuntimeError):  # and again where it is undone: it refuses everything
        load()
    other, its = refusing(2)
    load = partial(load_torch, tmp_path / "it.pt", other, its)
    both["model"]["_extra_state"] = {"n": 7}
    torch.save(both, tmp_path / "it.pt")
    assert "number" in str(refused(load, other, its))
    both["model"]["_extra_state"] = {"number": 7}
    torch.save(both, tmp_path / "it.pt")
    load()
    assert other.number == 7 and torch.equal(other.lin.weight, model.lin.weight)


def test_a_hook_that_raises(tmp_path: Path) -> None:
    saved(tmp_path / "it.pt", lambda o: None)
    model, optimizer = small(2)

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook's")

    for register in (
        optimizer.register_load_state_dict_pre_hook,
        optimizer.register_load_state_dict_post_hook,
    ):
        handle = register(fail)
        load = partial(load_torch, tmp_path / "it.pt", model, optimizer)
        groups = optimizer.param_groups
        assert "a hook's" in str(refused(load, model, optimizer))
        assert optimizer.param_groups is groups
        handle.remove()
    load_torch(tmp_path / "it.pt", model, optimizer)
    assert torch.equal(model.lin.weight, small(1)[0].lin.weight)


def on_ranks(path: str) -> list[str]:
    """The errors, of a file, a folder, and of one rank's hook."""
    from _support.checkpoint.dcp_models import adamw, check_equal, ours, step
    from _support.checkpoint.dcp_models import everything as tensors
    from torch import distributed as dist

    from parallel3d import MeshLayout

    model = ours(MeshLayout(shard=2))
    optimizer = adamw(model)
    step(model, optimizer)
    before, random = tensors(model, optimizer), torch.get_rng_state()
    texts = []
    for name in ("text", "shape", "expanded"):
        for load in (partial(load_torch, f"{path}/{name}.pt"), partial(load_dcp, f"{path}/{name}")):
            with pytest.raises(CheckpointError) as caught:
                load(model, optimizer)
            texts.append(f"{name}: {caught.value}".replace(path, ""))
    if dist.get_rank() == 1:

        def fail(*_: Any) -> None:
            raise RuntimeError("a hook's")

        optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(CheckpointError, match="on rank 1: RuntimeError: a hook's"):
        load_torch(f"{path}/good.pt", model, optimizer)
    check_equal(tensors(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)
    step(model, optimizer)
    return texts


def test_on_ranks(gloo_pool: GlooPool, tmp_path: Path) -> None:
    from _support.checkpoint.dcp_models import adamw, plain, step

    model = plain(1)
    optimizer = adamw(model)
    step(model, optimizer)
    bad = {"text": "x", "shape": torch.zeros(7), "expanded": torch.zeros(1).expand(2**28)}
    names = [name for name, _ in model.named_parameters()]
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "good.pt"
    )
    for name, value in bad.items():
        raw = optimizer.state_dict()
        key = "step" if name == "text" else "exp_avg"
        raw["state"][1] = {**raw["state"][1], key: value}
        torch.save({"model": model.state_dict(), "optimizer": raw}, tmp_path / f"{name}.pt")
        found, path = flat(model, optimizer), ("optimizer", "state", names[1], key)
        found[path] = value
        folder = make({k: v for k, v in found.items() if not _expanded(v)})
        if name == "expanded":
            put_expanded(value, ".".join(path), folder)
            folder.metadata.planner_data[".".join(path)] = path
        folder.write(tmp_path / name)
    first, second = gloo_pool.run(on_ranks, str(tmp_path), world_size=2)
    assert first == second
    assert all(names[1] in text for text in first), first


def test_tensors_as_options(tmp_path: Path) -> None:
    """A learning rate on the device, as capturable optimizers have it."""
    model, optimizer = small(1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    make(flat(model, optimizer)).write(tmp_path / "it")
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "it.pt")
    for load, path in ((load_dcp, "it"), (load_torch, "it.pt")):
        other, its = small(2)
        load(tmp_path / path, other, its)
        assert torch.equal(its.param_groups[0]["lr"], torch.tensor(0.25))


class Unhashed(int):
    """Stands for numbers that were chosen to have one hash: as keys of a dict they take quadratic time."""

    def __hash__(self) -> int:
        raise AssertionError


def test_numbers_are_checked_before_they_are_keys() -> None:
    saved = SavedOptimizer({}, (SavedGroup({}, (Unhashed(0), Unhashed(2**61))),))
    with pytest.raises(CheckpointError, match="of other numbers than 0 to 1"):
        saved.for_names(["a", "b"])
