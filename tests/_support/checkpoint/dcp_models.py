"""Models on both sides of a DCP folder: torch's own FSDP2 + TP, and ours."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from _support import models
from _support.models import LM_PLAN, TORCHS_PLAN
from parallel3d import CheckpointError, MeshLayout, build_mesh, parallelize
from parallel3d._torch.dtensor import get_local_tensor

DIM = 6
VOCAB = 20


class Block(models.Block):
    """With a buffer."""

    def __init__(self, hidden: int) -> None:
        super().__init__(DIM, hidden)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Lm(models.Lm):
    def __init__(self, *hidden: int, vocab: int = VOCAB) -> None:
        super().__init__(DIM, layers=0, vocab=vocab)
        self.layers.extend(Block(size) for size in hidden)


def plain(seed: int = 1, *hidden: int, vocab: int = VOCAB) -> Lm:
    """With values from a seed: ones and zeros would hide mistakes."""
    model = Lm(*(hidden or (12, 10)), vocab=vocab)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def ours(layout: MeshLayout, seed: int = 2, *hidden: int, vocab: int = VOCAB) -> Lm:
    mesh = build_mesh(layout, device_type="cpu")
    return parallelize(plain(seed, *hidden, vocab=vocab), mesh, tp_plan=LM_PLAN)


def theirs(seed: int = 2, tp: int = 2) -> Lm:
    """torch's own on 4 ranks."""
    model = plain(seed)
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], TORCHS_PLAN)
    for layer in model.layers:
        torch_fully_shard(layer, mesh=mesh["dp"])
    return torch_fully_shard(model, mesh=mesh["dp"])


def adamw(model: nn.Module, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, **options)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    vocab = model.embed.num_embeddings
    tokens = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def as_they_lie(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The very tensors of a model and of its optimizer, these by the parameters' names."""
    names = {id(param): name for name, param in model.named_parameters()}
    return dict(model.state_dict()) | {
        f"{key} of {names[id(param)]}": value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def scramble(tensors: Iterable[torch.Tensor]) -> None:
    """What a load misses stays nan."""
    with torch.no_grad():
        for tensor in tensors:
            (get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).fill_(torch.nan)


def everything(model: nn.Module, *optimizers: Any) -> dict[str, Any]:
    """Whole tensors of the model, the optimizers' by name, and their options. Collective."""
    found: dict[str, Any] = {name: whole(value) for name, value in model.state_dict().items()}
    names = {id(param): name for name, param in model.named_parameters()}
    number = 0
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                at = f"optimizer: {names[id(param)]} {key}"
                found[at] = whole(value) if isinstance(value, torch.Tensor) else value
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    found[f"optimizer: group {number} {key}"] = copy.deepcopy(value)
            number += 1
    return found


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        got = found[name]
        if isinstance(want, torch.Tensor):
            assert got.dtype == want.dtype and torch.equal(got, want), name
        else:
            assert got == want and type(got) is type(want), name


def refused_on_ranks(load: Callable[[nn.Module, Any], None]) -> str:
    """The error of ``load(model, optimizer)``, which changes nothing: training goes on."""
    model = ours(MeshLayout(shard=2))
    optimizer = adamw(model)
    step(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        load(model, optimizer)
    check_equal(everything(model, optimizer), before)
    step(model, optimizer)
    return f"{type(caught.value).__name__}: {caught.value}"
