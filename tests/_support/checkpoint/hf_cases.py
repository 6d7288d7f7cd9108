"""Tiny Hugging Face models for tests of load_hf and save_hf, and what their ranks do."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d import CheckpointError, MeshLayout, build_mesh, parallelize
from parallel3d._layout.packed import PackedDTensor
from parallel3d.checkpoint import hf_shards, hf_tensors, load_hf, save_hf
from parallel3d.checkpoint.hf import load
from parallel3d.checkpoint.pieces import pieces_of, slices_of

Sizes = tuple[int, int, int]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", SMALL),
    "uneven": ("LlamaConfig", SMALL | {"intermediate_size": 17, "vocab_size": 9}),
    "tied": ("Qwen2Config", SMALL | {"tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", SMALL | {"num_local_experts": 4}),
    "phi3": ("Phi3Config", SMALL),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
}


def plain(kind: str, seed: int = 0) -> transformers.PreTrainedModel:
    """The plain model, float32, the same for the same seed; every weight is random."""
    name, sizes = CONFIGS[kind]
    config = getattr(transformers, name)(**sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def on_meta(kind: str) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        name, sizes = CONFIGS[kind]
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, name)(**sizes)
        ).eval()


def distribute(model: nn.Module, sizes: Sizes) -> nn.Module:
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    return parallelize(model, mesh, tp_plan="auto" if sizes[2] > 1 else None)


def check_equal(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    """What this rank holds is what the plain model has there, bit for bit."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in want.items():
        for piece in pieces_of(found[name]):
            assert torch.equal(piece.local, value[slices_of(*piece.box)]), name


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those in no state dict too."""
    return {
        name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


class CountingReader(load.TensorReader):
    """Notes how many bytes it has read in all."""

    total = 0

    def __exit__(self, *problem: object) -> None:
        CountingReader.total += self.bytes_read
        super().__exit__(*problem)


def load_counted(folder: str | Path, model: nn.Module, **options) -> int:
    """Loads, and returns how many bytes this rank has read of the tensors."""
    before, load.TensorReader = load.TensorReader, CountingReader
    CountingReader.total = 0
    try:
        assert load_hf(folder, model, **options) == ([], [])
    finally:
        load.TensorReader = before
    return CountingReader.total


def there_and_back(kind: str, sizes: Sizes, folder: str, out: str, meta: bool) -> None:
    """Loads a model that has other values, or none; compares; exports in several files."""
    model = distribute(on_meta(kind) if meta else plain(kind, seed=1), sizes)
    if kind == "mixtral" and sizes[2] > 1:
        assert any(isinstance(p, PackedDTensor) for p in model.parameters())
    objects = [id(p) for p in model.parameters()]
    read = load_counted(folder, model)
    if sizes != (1, 1, 1):
        assert [id(p) for p in model.parameters()] == objects
    check_equal(model, contents(plain(kind)))
    shard = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    if sizes[2] == 1:  # rows: with tensor parallelism parts of short rows are read along
        assert read <= shard + 4096, (read, shard)
    save_hf(out, model, max_shard_size="20KB")
    model(torch.zeros(1, 4, dtype=torch.long))


def cases_there_and_back(cases: list[tuple[str, bool]], sizes: Sizes, root: str) -> None:
    for kind, meta in cases:
        tag = f"{kind}-{'x'.join(map(str, sizes))}"
        there_and_back(kind, sizes, f"{root}/{kind}", f"{root}/{tag}", meta)


def same_error_everywhere(match: str, call: Callable[[], object]) -> None:
    """Each rank raises a CheckpointError that matches, with the same text."""
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts


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
