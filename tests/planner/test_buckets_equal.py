"""The planner's buckets are the engine's: both run the arithmetic of ``fsdp/layout.py``."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from _support.planner.specs import tp_plan
from llama import Llama, LlamaConfig
from torch import Tensor, nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.fsdp import param
from parallel3d.fsdp.inspect import units_of
from parallel3d.planner import engine, spec_from_module
from parallel3d.testing import fake_world

LARGE = 2**12
LAYOUTS = [MeshLayout(1, 4, 1), MeshLayout(2, 4, 1), MeshLayout(1, 2, 2), MeshLayout(4, 1, 1)]


class Block(nn.Module):
    """Sizes that 4 and 2 don't divide, a scalar, frozen parameters, and a dtype of its own.

    Attributes:
        wide: more than ``LARGE`` bytes, also in bf16.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 33)
        self.down = nn.Linear(33, features, bias=False)
        self.wide = nn.Linear(features, 512)
        self.back = nn.Linear(512, features)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.scale * self.down(self.up(y).relu()) + self.back(self.wide(y).relu())


class Blocks(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, features)
        self.layers = nn.ModuleList(Block(features) for _ in range(3))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, 17, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain() -> nn.Module:
    return Blocks(9)


def even() -> nn.Module:
    return Blocks(16)


def frozen() -> nn.Module:
    model = Blocks(16)
    for layer in model.layers:
        layer.wide.requires_grad_(False)
        layer.up.bias.requires_grad_(False)
    return model


def mixed() -> nn.Module:
    model = frozen()
    for layer in model.layers:
        layer.back.to(torch.bfloat16)
        layer.norm.to(torch.bfloat16)
    return model


PLAN = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.wide": "colwise",
    "layers.*.back": "rowwise",
}


def descriptions(layouts: list[engine.UnitLayout]) -> list[tuple]:
    return sorted(
        (
            *(each.num_shards, each.numel, each.packed, each.trainable),
            *(each.has_large, each.packs_as_chunks),
            sorted((grad.numel, grad.zero_copy, grad.waits) for grad in each.grads),
        )
        for unit in layouts
        for _ in range(unit.count)
        for each in unit.buckets
    )


def engines(model: nn.Module) -> list[tuple]:
    return sorted(
        (
            *(each.num_shards, each.layout.numel, each.layout.packed, bool(each.count_trainable())),
            each.layout.zero_copy > 0 and not each.layout.small_grads[0],
            each.layout.packs_as_chunks,
            sorted(
                (
                    view.numel(),
                    index < each.layout.zero_copy,
                    index < each.layout.zero_copy or small,
                )
                for index, (view, small) in enumerate(
                    zip(each.precision.compute_params, each.layout.small_grads, strict=True)
                )
            ),
        )
        for unit in units_of(model, recurse=True)
        for each in unit.group.buckets
    )


def compare(model: nn.Module, plan: object, layout: MeshLayout, itemsize: int) -> list[tuple]:
    spec = spec_from_module(model, tp_plan=plan, seq_len=8)
    planned = [
        engine.unit_layout(unit, layout.shard, layout.tp, itemsize, False, LARGE)
        for unit in spec.units
    ]
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, plan if layout.tp > 1 else None)
        found = engines(model)
    assert descriptions(planned) == found
    return found


def llama(heads: int, kv_heads: int) -> nn.Module:
    """Heads that the layouts don't divide."""
    return Llama(LlamaConfig(64 if heads == 8 else 48, 4, heads, kv_heads, 67, 9, 16))


MODELS = {
    **{make.__name__: (make, PLAN, 4) for make in (plain, even, frozen, mixed)},
    "bfloat16": (lambda: frozen().bfloat16(), PLAN, 2),
    "float64": (lambda: frozen().double(), PLAN, 8),
    **{
        f"llama {heads}": (partial(llama, *heads), tp_plan(False), 4)
        for heads in ((8, 2), (6, 3), (6, 1))
    },
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_buckets_equal_the_engines(name, layout, monkeypatch):
    monkeypatch.setattr(param, "CPU_BYTES", LARGE)
    make, plan, itemsize = MODELS[name]
    found = compare(make(), plan, layout, itemsize)
    if name in ("even", "frozen", "mixed") and layout.shard > 1:
        assert any(any(zero_copy for _, zero_copy, _ in each[-1]) for each in found)


def test_the_shared_files_import_no_torch():
    """Of ``fsdp`` the planner may import these and ``fsdp.inspect``; ``tests/house.py`` sees to it."""
    folder = Path(param.__file__).parent
    for name in ("layout", "schedule"):
        nodes = [*ast.walk(ast.parse((folder / f"{name}.py").read_text()))]
        imports = [each.name for n in nodes if isinstance(n, ast.Import) for each in n.names]
        imports += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not [i for i in imports if i.split(".")[0] in ("torch", "parallel3d")], name
