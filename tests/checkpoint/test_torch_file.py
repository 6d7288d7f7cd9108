"""Files of torch.save: plain state dicts in, each rank its slices; whole ones out."""

import pickle
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint import bounded
from _support.checkpoint.dcp_models import (
    adamw,
    check_equal,
    everything,
    ours,
    plain,
    refused_on_ranks,
    step,
)
from _support.checkpoint.handmade_dcp import Calls, small
from _support.checkpoint.hostile_dcp_cases import touch
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout
from parallel3d.checkpoint import load_torch, save_torch
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.optim import local


def trained(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw(model, betas=(0.8, 0.97))
    for seed in (1, 2):
        step(model, optimizer, seed)
    return model, optimizer


def by_name(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Keyed by name, as FSDP's are."""
    names = [name for name, _ in model.named_parameters()]
    raw = optimizer.state_dict()
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in raw["param_groups"]]
    return {"state": {names[i]: s for i, s in raw["state"].items()}, "param_groups": groups}


FORMS = {
    "both": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict(), "epoch": 3},
    "by name": lambda m, o: {"state_dict": m.state_dict(), "optim": by_name(m, o)},
    "deep": lambda m, o: {"a": {"b": m.state_dict()}, "opts": {"first": o.state_dict()}},
}


def load_on_ranks(path: str, make: Any, layouts: list[MeshLayout]) -> None:
    expected = torch.load(f"{path}.expected")
    for layout in layouts:
        model = ours(layout)
        optimizer = make(model)
        load_torch(path, model, optimizer)
        check_equal(everything(model, optimizer), expected)
        step(model, optimizer)


def adamw_of(model: Any) -> torch.optim.Optimizer:
    return adamw(model, lr=1.0)


def local_of(model: Any) -> torch.optim.Optimizer:
    return local(torch.optim.AdamW, model, lr=1.0, fused=True)


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[pytest.mark.full] * (f == "both")) for f in FORMS]
)
def test_a_plain_file_loads_on_a_mesh(gloo_pool, tmp_path: Path, form: str) -> None:
    model, optimizer = trained(plain(1))
    path = str(tmp_path / "it.pt")
    torch.save(FORMS[form](model, optimizer), path)
    torch.save(everything(model, optimizer), f"{path}.expected")
    make = local_of if form == "by name" else adamw_of
    layouts = [MeshLayout(shard=2, tp=2), MeshLayout(replicate=2, shard=2)]
    if form != "both":  # the form doesn't matter to the mesh
        layouts = layouts[form == "deep" :][:1]
    gloo_pool.run(load_on_ranks, path, make, layouts, world_size=4)


def save_on_ranks(path: str, layout: MeshLayout) -> None:
    model, optimizer = trained(ours(layout, 1))
    save_torch(path, model, optimizer)
    save_torch(f"{path}.alone", model)
    expected = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{path}.expected")


@pytest.mark.parametrize("layout", [MeshLayout(shard=2, tp=2), MeshLayout(shard=3)], ids=str)
def test_a_file_of_ours_loads_into_plain_torch(gloo_pool, tmp_path: Path, layout) -> None:
    path = tmp_path / "it.pt"
    gloo_pool.run(save_on_ranks, str(path), layout, world_size=layout.world_size)
    expected = torch.load(f"{path}.expected")
    found = torch.load(path, weights_only=True)
    model = plain(5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    check_equal(everything(model, optimizer), expected)
    alone = torch.load(f"{path}.alone", weights_only=True)
    check_equal(dict(alone), {k: expected[k] for k in model.state_dict()})
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "it.pt",
        "it.pt.alone",
        "it.pt.expected",
    ]


def test_what_one_rank_finds_raises_on_all(gloo_pool, tmp_path: Path) -> None:
    """Checksums are verified by one rank of a host each."""
    model, optimizer = trained(plain(1))
    path = tmp_path / "it.pt"
    torch.save(FORMS["both"](model, optimizer), path)
    for key in ("3", "4"):
        with zipfile.ZipFile(path) as file:
            (info,) = (i for i in file.infolist() if i.filename.endswith(f"/data/{key}"))
        content = bytearray(path.read_bytes())
        lengths = content[info.header_offset + 26 :][:4]
        content[info.header_offset + 30 + sum(lengths[::2]) + 256 * sum(lengths[1::2])] ^= 1
        broken = tmp_path / f"broken{key}.pt"
        broken.write_bytes(content)
        found = gloo_pool.run(refused_on_ranks, partial(load_torch, broken), world_size=2)
        assert len(set(found)) == 1 and "checksum" in found[0], found


# -- alone ---------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, strided, of many dtypes; a buffer of no elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lin = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.lin.weight
        self.flipped = nn.Parameter(torch.randn(5, 3).t())
        self.short = nn.Parameter(torch.randn(3).bfloat16())
        for name, value in (
            ("numbers", torch.randint(100, (3, 2))),
            ("flags", torch.rand(7) > 0.5),
            ("waves", torch.randn(2, 2, dtype=torch.complex64)),
            ("small", torch.randn(6).to(torch.float8_e4m3fn)),
            ("large", torch.randint(60_000, (3,)).to(torch.uint16)),
            ("none", torch.empty(0, 3)),
            ("scalar", torch.tensor(float(seed))),
        ):
            self.register_buffer(name, value)


def bytes_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: (
            value.dtype,
            value.shape,
            value.detach().contiguous().view(-1).view(torch.uint8).tolist(),
        )
        if value.ndim
        else value.item()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("own", [False, True], ids=["torch's", "ours"])
def test_odd_tensors(tmp_path: Path, own: bool) -> None:
    model = Odd(1)
    if own:
        save_torch(tmp_path / "it.pt", model)
    else:
        torch.save(model.state_dict(), tmp_path / "it.pt")
    other = Odd(2)
    load_torch(tmp_path / "it.pt", other)
    assert bytes_of(other) == bytes_of(model)
    assert other.tied.weight is other.lin.weight
    plainly = Odd(3)
    plainly.load_state_dict(torch.load(tmp_path / "it.pt", weights_only=True))
    assert bytes_of(plainly) == bytes_of(model)


def test_parameters_and_slices_of_larger_ones(tmp_path: Path) -> None:
    """A state dict of Parameters; and of parts of a large tensor."""
    model = nn.Linear(3, 2)
    large = torch.randn(10, 10)
    state = {"weight": nn.Parameter(large[4:6, 2:5]), "bias": large.t()[3, 2:4]}
    torch.save(state, tmp_path / "it.pt")
    load_torch(tmp_path / "it.pt", model)
    assert torch.equal(model.weight, large[4:6, 2:5]) and torch.equal(model.bias, large.t()[3, 2:4])


def test_a_file_that_is_there_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "it.pt"
    path.write_text("before")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        save_torch(path, nn.Linear(2, 2))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_other_dtypes(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save({k: v.double() for k, v in model.state_dict().items()}, tmp_path / "it.pt")
    other = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"torch.float64 .* cast=True"):
        load_torch(tmp_path / "it.pt", other)
    load_torch(tmp_path / "it.pt", other, cast=True)
    assert torch.equal(other.weight, model.weight)


def test_names_that_are_missing_or_too_many(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "it.pt")
    larger = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"has no '2.bias', '2.weight'"):
        load_torch(tmp_path / "it.pt", larger)
    kept = larger[2].weight.detach().clone()
    load_torch(tmp_path / "it.pt", larger, strict=False)
    assert torch.equal(larger[0].weight, model[0].weight) and torch.equal(larger[2].weight, kept)
    torch.save({"m": larger.state_dict()}, tmp_path / "it.pt")
    with pytest.raises(
        CheckpointError, match=r"has '2.bias', '2.weight', which the model doesn't have"
    ):
        load_torch(tmp_path / "it.pt", model)
    torch.save({"a": model.state_dict(), "b": larger.state_dict()}, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=r"model_prefix='a\.'"):
        load_torch(tmp_path / "it.pt", model)
    load_torch(tmp_path / "it.pt", model, model_prefix="b", strict=False)
    assert torch.equal(model[1].weight, larger[1].weight)


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = small(1)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "it.pt")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"amsgrad.* momentum.* of another class"):
        load_torch(tmp_path / "it.pt", model, sgd)
    few = torch.optim.AdamW([model.lin.weight])
    with pytest.raises(CheckpointError, match="2 parameters, by number, and the optimizer has 1"):
        load_torch(tmp_path / "it.pt", model, few)
    torch.save({"model": model.state_dict()}, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        load_torch(tmp_path / "it.pt", model, optimizer)


# -- broken and hostile ones ---------------------------------------------------------------------------------


def refused(path: Path, sentinel: Path, **options: Any) -> CheckpointError:
    model, optimizer = small(2)
    load = partial(load_torch, path, model, optimizer, **options)
    limits = {"bytes_": 1 << 30, "seconds": 20.0}  # a million values take some
    return bounded.refused(load, model, optimizer, sentinel=sentinel, **limits)


def a_file(path: Path, **more: Any) -> None:
    model, optimizer = small(1)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}
    torch.save(both, path)


@pytest.mark.parametrize("where", ["beside", "in the model", "in the optimizer"])
def test_a_call_is_not_made(tmp_path: Path, where: str) -> None:
    path, sentinel = tmp_path / "it.pt", tmp_path / "sentinel"
    model, optimizer = small(1)
    both: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    place = {"beside": both, "in the model": both["model"], "in the optimizer": both["optimizer"]}
    place[where]["x"] = Calls(eval, f"__import__('os').system({touch(sentinel)!r})")
    torch.save(both, path)
    found = refused(path, sentinel)
    assert "eval" in str(found) and "trusted=True" in str(found)
    load_torch(path, model, optimizer, trusted=True, strict=False)
    assert sentinel.exists()


@pytest.mark.slow
def test_other_files(tmp_path: Path) -> None:
    path, sentinel = tmp_path / "it.pt", tmp_path / "sentinel"
    assert "is not a file" in str(refused(path, sentinel))
    path.write_bytes(b"")
    assert "doesn't begin" in str(refused(path, sentinel))
    path.write_bytes(pickle.dumps(Calls(exec, f"open({str(sentinel)!r}, 'w')")))
    refused(path, sentinel)
    torch.save([1, 2], path)
    assert "must have a state dict" in str(refused(path, sentinel))
    torch.save({}, path)
    assert "none of the model's names" in str(refused(path, sentinel))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/readme", "no checkpoint")
    assert isinstance(refused(path, sentinel), CorruptCheckpointError)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\0" * 10**7)
    assert "compressed" in str(refused(path, sentinel))
    value: Any = {"x": 1}
    for _ in range(40):
        value = {"a": value, "b": value}
    a_file(path, more=value)
    assert "without end" in str(refused(path, sentinel))


def test_files_from_before_torch_1_6_are_for_who_trusts_them(tmp_path: Path) -> None:
    path = tmp_path / "it.pt"
    model, optimizer = small(1)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, path, _use_new_zipfile_serialization=False)
    assert "trusted=True" in str(refused(path, tmp_path / "sentinel"))
    other, its = small(2)
    load_torch(path, other, its, trusted=True)
    assert torch.equal(other.lin.weight, model.lin.weight)
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_files_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "it.pt"
    torch.serialization.set_crc32_options(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a_file(path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "checksums=False" in str(refused(path, tmp_path / "sentinel"))
    model, optimizer = small(2)
    load_torch(path, model, optimizer, checksums=False)
    assert torch.equal(model.lin.weight, small(1)[0].lin.weight)


@pytest.mark.parametrize("share", [0.01, 0.6, 0.999])
def test_cut_files(tmp_path: Path, share: float) -> None:
    path = tmp_path / "it.pt"
    a_file(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert isinstance(refused(path, tmp_path / "sentinel"), CorruptCheckpointError)


@pytest.mark.parametrize("seed", range(10))
def test_flipped_bits(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "it.pt"
    a_file(path)
    content = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    places = [at for at, byte in enumerate(content) if byte not in b"\0ZFB"]
    at = places[int(torch.randint(len(places), (), generator=generator))]
    content[at] ^= 1 << int(torch.randint(8, (), generator=generator))
    path.write_bytes(content)
    model, optimizer = small(2)
    seed = 1
    try:
        load_torch(path, model, optimizer)
    except CheckpointError:
        seed = 2
    assert bounded.everything(model, optimizer)[:2] == bounded.everything(*small(seed))[:2]
