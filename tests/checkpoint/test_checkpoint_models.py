"""Models of all kinds, in one process: saved, and loaded into others."""

from pathlib import Path

import pytest
import torch
from _support.checkpoint.small_models import Net, net, same, train, values
from torch import nn
from torch import optim as O
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel3d.checkpoint import load, save
from parallel3d.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = net(1, dtype)
    optimizer = O.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    other = net(2, dtype)
    another = O.AdamW(other.parameters(), lr=0.2)
    load(tmp_path, other, another)
    same(values(other, another), values(model, optimizer))
    with pytest.raises(CheckpointError, match=r"is \w+ of shape .* but here float32"):
        load(tmp_path, net(2))


def test_frozen_parameters(tmp_path: Path) -> None:
    model, other = net(1), net(2)
    model.a.requires_grad_(False)
    optimizer = O.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    another = O.AdamW(other.parameters(), lr=0.1)  # nothing is frozen here
    load(tmp_path, other, another)
    same(values(other, another), values(model, optimizer))
    assert other.a.weight.requires_grad and not model.a.weight.requires_grad
    model.requires_grad_(False)
    load(tmp_path, model, optimizer)
    assert not model.b.weight.requires_grad


def test_compiled_and_checkpointed(tmp_path: Path) -> None:
    """Names are the plain model's, whatever is wrapped around."""
    plain = net(1)
    optimizer = O.AdamW(plain.parameters(), lr=0.1)
    train(plain, optimizer)
    wrapped = net(2)
    wrapped.a = checkpoint_wrapper(wrapped.a)
    compiled = torch.compile(net(3), backend="eager")
    save(tmp_path / "plain", plain, optimizer, step=1)
    for number, other in enumerate((wrapped, compiled, torch.compile(wrapped, backend="eager"))):
        another = O.AdamW(other.parameters(), lr=0.2)
        load(tmp_path / "plain", other, another)
        path = tmp_path / str(number)
        save(path, other, another, step=1)
        back = net(9)
        its = O.AdamW(back.parameters(), lr=0.3)
        load(path, back, its)
        same(values(back, its), values(plain, optimizer))


def test_inference_mode(tmp_path: Path) -> None:
    """Saved and loaded within it, and a model that was made within it."""
    model = net(1)
    save(tmp_path, model, step=1)
    with torch.inference_mode():
        within = net(2)
        within.a.weight = nn.Parameter(torch.empty(4, 6).T, requires_grad=False)
        load(tmp_path, within)
        save(tmp_path / "within", within, step=1)
    same(values(within), values(model))
    other = net(3)
    with torch.inference_mode():
        load(tmp_path, other)
    same(values(other), values(model))
    train(other, O.SGD(other.parameters(), lr=0.1))
    made_within = within
    save(tmp_path / "again", model, step=2)
    load(tmp_path / "again", made_within)
    same(values(made_within), values(model))


def test_tied_here_not_there(tmp_path: Path) -> None:
    def made(seed: int, tied: bool) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    tied = made(1, True)
    save(tmp_path / "tied", tied, step=1)
    untied = made(2, False)
    load(tmp_path / "tied", untied)
    same(values(untied), values(tied))
    assert untied["a"].weight is not untied["b"].weight
    save(tmp_path / "alike", untied, step=1)
    again = made(3, True)
    load(tmp_path / "alike", again)
    same(values(again), values(tied))
    save(tmp_path / "different", made(4, False), step=1)
    before = values(again)
    with pytest.raises(CheckpointError, match=r"b.weight and a.weight are one parameter"):
        load(tmp_path / "different", again)
    same(values(again), before)


def test_a_module_twice(tmp_path: Path) -> None:
    """All that is in it is tied, buffers too."""

    def made(seed: int, shared: bool) -> nn.Module:
        norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)]
        model = nn.ModuleDict({"a": norms[0], "b": norms[0 if shared else 1]})
        for buffer in (norms[0].running_mean, norms[1].running_mean):
            buffer.fill_(seed)
        return model

    save(tmp_path, made(1, True), step=1)
    for shared in (True, False):
        other = made(2, shared)
        load(tmp_path, other)
        same(values(other), values(made(1, True)))


def test_no_elements_and_no_dims(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(value))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("number", torch.tensor(int(value)))
            self.register_buffer("none", torch.zeros(2, 0))

    model = Small(2.5)
    optimizer = O.AdamW(model.parameters(), lr=0.1)
    (model.scale * 2 + model.nothing.sum()).backward()
    optimizer.step()
    save(tmp_path, model, optimizer, step=1)
    other = Small(0.5)
    another = O.AdamW(other.parameters(), lr=0.2)
    load(tmp_path, other, another)
    same(values(other, another), values(model, optimizer))


def test_eight_bits(tmp_path: Path) -> None:
    class Eight(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            for name, dtype in (("a", torch.float8_e4m3fn), ("b", torch.float8_e5m2)):
                self.register_buffer(name, torch.randn(3, 5).to(dtype))
            self.register_buffer("c", torch.randint(0, 99, (4,), dtype=torch.int8))
            self.register_buffer("d", torch.randint(0, 2, (4,)).bool())

    save(tmp_path, Eight(1), step=1)
    other = Eight(2)
    load(tmp_path, other)
    for name, value in Eight(1).state_dict().items():
        assert torch.equal(other.state_dict()[name].view(torch.uint8), value.view(torch.uint8))


def test_meta_models(tmp_path: Path) -> None:
    save(tmp_path, net(1), step=1)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(CheckpointError, match=r"a.weight is on the meta device.*materialize"):
        load(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"a.weight is on the meta device.*materialize"):
        save(tmp_path, model, step=2)


def test_other_models(tmp_path: Path) -> None:
    save(tmp_path, net(1), step=1)
    wide = net(2)
    wide.b = nn.Linear(6, 5)
    with pytest.raises(
        CheckpointError, match=r"b.weight is float32 of shape \(4, 6\) in .* \(5, 6\)"
    ):
        load(tmp_path, wide)
    more = net(2)
    more.c = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"doesn't have 'c.bias' .*, 'c.weight'"):
        load(tmp_path, more)
    less = net(2)
    del less.norm
    with pytest.raises(
        CheckpointError, match=r"the model doesn't have its 'norm.bias' .* and 1 more"
    ):
        load(tmp_path, less)


def test_twice(tmp_path: Path) -> None:
    model = net(1)
    optimizer = O.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    want = values(model, optimizer)
    for _ in range(2):
        train(model, optimizer)
        load(tmp_path, model, optimizer)
        same(values(model, optimizer), want)
    kept = optimizer.state[model.a.weight]["exp_avg"]
    load(tmp_path, model, optimizer)
    assert optimizer.state[model.a.weight]["exp_avg"] is kept  # read in place


def test_autograd_notices(tmp_path: Path) -> None:
    """A backward over values that load has replaced is an error, as after any write."""
    model = net(1)
    save(tmp_path, model, step=1)
    loss = model(torch.ones(5, 4)).sum()
    load(tmp_path, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
