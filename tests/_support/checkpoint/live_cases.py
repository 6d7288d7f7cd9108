"""What ranks do in the tests of hf_tensors and hf_shards."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist

from _support.checkpoint.hf_cases import Sizes, distribute, plain
from parallel3d.checkpoint import hf_shards, hf_tensors, save_hf
from parallel3d.checkpoint.pieces import pieces_of


def stored(folder: str | Path) -> dict[str, Tensor]:
    """What the safetensors files of a folder hold."""
    found: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            assert not found.keys() & set(opened.keys())
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


def assembled(model: nn.Module, want: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """The whole tensors of all ranks' shards. Those of two ranks are the same, or have nothing in common, and
    those of one rank have nothing in common: each element of ``want`` is there once."""
    own = list(hf_shards(model, **options))
    for name, box, values in own:
        assert tuple(values.shape) == box.sizes, name
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(name, box, values.clone()) for name, box, values in own])
    found = {name: torch.empty_like(value) for name, value in want.items()}
    once = {name: torch.zeros(value.shape, dtype=torch.int) for name, value in want.items()}
    seen = set()
    for of_rank in everyone:
        assert len({(name, box) for name, box, _ in of_rank}) == len(of_rank)
        for name, box, values in of_rank:
            assert values.dtype == want[name].dtype, name
            found[name][box.slices] = values
            if (name, box) not in seen:
                once[name][box.slices] += 1
                seen.add((name, box))
    assert all(bool((count == 1).all()) for count in once.values())
    return found


def compared(model: nn.Module, folder: str, dtype: torch.dtype | None = None, **options) -> None:
    """hf_tensors and hf_shards of ``model`` against the files of save_hf; small and large buffers."""
    save_hf(folder, model, dtype=dtype, **options)
    want, rank = stored(folder), dist.get_rank()
    for to, buffer_mib in (
        ("all", 256),
        ("all", 0.02),
        (0, 0.05),
        (dist.get_world_size() - 1, 256),
    ):
        source = hf_tensors(model, dtype=dtype, to=to, buffer_mib=buffer_mib, **options)
        told = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        found = list(source)
        if to in ("all", rank):
            assert told == [(name, t.dtype, tuple(t.shape)) for name, t in found]
            same(dict(found), want)
            assert all(t.untyped_storage().nbytes() == t.nbytes for _, t in found)
        else:
            assert found == [] and len(told) == len(want)
    same(assembled(model, want, dtype=dtype, **options), want)


def check_live(cases: list[tuple[str, torch.dtype | None]], sizes: Sizes, root: str) -> None:
    for kind, dtype in cases:
        model = distribute(plain(kind), sizes)
        compared(model, f"{root}/{kind}-{dtype}", dtype)
        held = sum(p.local.numel() for t in model.parameters() for p in pieces_of(t))
        assert dist.get_world_size() == sizes[0] or held < sum(
            p.numel() for p in model.parameters()
        )
