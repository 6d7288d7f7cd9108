"""Packed, tied, frozen and uneven parameters: saved on one mesh, loaded on others and into plain models."""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import adamw, check_equal, everything
from _support.checkpoint.handmade_dcp import flat, make, small
from _support.checkpoint.kinds import MODELS, advance, on_mesh
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from parallel3d import MeshLayout
from parallel3d.checkpoint import load_dcp, load_torch, save_dcp, save_torch
from parallel3d.errors import CheckpointError


def save(path: str, kind: str, layout: str) -> None:
    model = on_mesh(kind, layout)
    optimizer = adamw(model)
    advance(kind, model, optimizer)
    save_dcp(f"{path}/dcp", model, optimizer)
    save_torch(f"{path}/it.pt", model, optimizer)
    expected = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{path}/expected")


def load(path: str, kind: str, layout: MeshLayout) -> None:
    expected = torch.load(f"{path}/expected")
    for read, where, stepped in ((load_dcp, "dcp", False), (load_torch, "it.pt", True)):
        model = on_mesh(kind, layout)
        optimizer = adamw(model, lr=1.0)
        if stepped:
            advance(kind, model, optimizer, 5)
        read(f"{path}/{where}", model, optimizer)
        check_equal(everything(model, optimizer), expected)
        advance(kind, model, optimizer, 6)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("packed", marks=pytest.mark.slow),
        *(pytest.param(k, marks=pytest.mark.full) for k in ("tied", "frozen")),
    ],
)
def test_kinds(gloo_pool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path)
    gloo_pool.run(save, path, kind, "fsdp + tp", world_size=4)
    gloo_pool.run(load, path, kind, MeshLayout(tp=3), world_size=3)
    expected = torch.load(f"{path}/expected")
    for read, where in ((load_dcp, "dcp"), (load_torch, "it.pt")):
        model = MODELS[kind]()
        optimizer = adamw(model, lr=1.0)
        read(tmp_path / where, model, optimizer)
        check_equal(everything(model, optimizer), expected)


# -- options, alone --------------------------------------------------------------------------------


def test_cast_and_strict(tmp_path: Path) -> None:
    saved, its = small(1)
    make(flat(saved, its)).write(tmp_path / "it")
    model, optimizer = small(2)
    model.lin.to(torch.bfloat16)
    with pytest.raises(CheckpointError, match="cast=True"):
        load_dcp(tmp_path / "it", model, optimizer)
    load_dcp(tmp_path / "it", model, optimizer, cast=True)
    assert torch.equal(model.lin.weight, saved.lin.weight.bfloat16())
    moment = optimizer.state[model.lin.weight]["exp_avg"]
    assert torch.equal(moment, its.state[saved.lin.weight]["exp_avg"].bfloat16())
    assert optimizer.state[model.lin.weight]["step"].dtype == torch.float32

    model, _ = small(2)
    model.more = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"has no 'more.bias', 'more.weight'"):
        load_dcp(tmp_path / "it", model)
    load_dcp(tmp_path / "it", model, strict=False)
    assert torch.equal(model.lin.weight, saved.lin.weight)


def test_state_of_another_dtype_than_its_parameter_stays_so(tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` alone would round it."""
    saved, its = small(1)
    saved.lin.to(torch.bfloat16)
    make(flat(saved, its)).write(tmp_path / "it")
    for stepped in (False, True):
        model, _ = small(2)
        model.lin.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        if stepped:
            model.lin(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        load_dcp(tmp_path / "it", model, optimizer)
        for param, of in ((model.lin.weight, saved.lin.weight), (model.lin.bias, saved.lin.bias)):
            for key, value in its.state[of].items():
                found = optimizer.state[param][key]
                assert found.dtype == torch.float32 and torch.equal(found, value)


def test_names_of_two_models_and_optimizers(tmp_path: Path) -> None:
    first, its = small(1)
    second, others = small(3)
    values: dict[Any, Any] = {}
    for head, model, optimizer in (("a", first, its), ("b", second, others)):
        for path, value in flat(model, optimizer).items():
            values[head, *path] = value
    make(values).write(tmp_path / "it")
    model, optimizer = small(2)
    with pytest.raises(CheckpointError, match=r"model_prefix='a\.model\.'"):
        load_dcp(tmp_path / "it", model, optimizer)
    # Its neighbour is preferred.
    load_dcp(tmp_path / "it", model, optimizer, model_prefix="b.model")
    assert torch.equal(model.lin.weight, second.lin.weight)
    assert optimizer.param_groups[0]["lr"] == others.param_groups[0]["lr"]
    load_dcp(
        tmp_path / "it", model, optimizer, model_prefix="a.model", optimizer_prefix="b.optimizer"
    )
    assert torch.equal(model.lin.weight, first.lin.weight)
    assert optimizer.param_groups[0]["lr"] == others.param_groups[0]["lr"]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = small(1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", fail)
        with pytest.raises(CheckpointError, match="no space left"):
            save_dcp(tmp_path / "it", model, optimizer)
    assert not list(tmp_path.iterdir())
    save_dcp(tmp_path / "it", model, optimizer)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["it"]
    with pytest.raises(CheckpointError, match="exists already"):
        save_dcp(tmp_path / "it", model, optimizer)
    state = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "it", no_dist=True)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state["model"].items())


def test_loading_takes_no_step_and_no_random_numbers(tmp_path: Path) -> None:
    saved, its = small(1)
    make(flat(saved, its)).write(tmp_path / "it")
    model, _ = small(2)

    class Counting(torch.optim.AdamW):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Counting.steps += 1
            return super().step(closure)

    optimizer = Counting(model.parameters())
    model.lin(torch.ones(1, 3)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = torch.get_rng_state()
    load_dcp(tmp_path / "it", model, optimizer)
    assert Counting.steps == 0 and torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())


class Older(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (_MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_members_by_getattr(tmp_path: Path) -> None:
    folder, table = make(flat(*small(1))), io.BytesIO()
    Older(table).dump(folder.metadata)
    assert b"getattr" in table.getvalue()
    folder.write(tmp_path / "it")
    (tmp_path / "it" / ".metadata").write_bytes(table.getvalue())
    model, optimizer = small(2)
    load_dcp(tmp_path / "it", model, optimizer)
    assert torch.equal(model.lin.weight, small(1)[0].lin.weight)
