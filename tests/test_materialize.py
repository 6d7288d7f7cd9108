"""materialize: the same weights on every mesh, one module at a time."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from llama import Llama, LlamaConfig
from torch import nn

from parallel3d import MeshLayout, Parallel3dError, build_mesh, materialize, parallelize
from parallel3d.testing import fake_world, local_world, shards_of


def meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


def plain_weights(build, seed: int = 3) -> dict[str, torch.Tensor]:
    return dict(materialize(meta(build), device="cpu", seed=seed).state_dict())


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_same_weights_on_every_mesh(mesh_shape, tied) -> None:
    def build():
        return Lm(layers=2, hidden=17, tied=tied)

    want = plain_weights(build)
    layout = MeshLayout(*mesh_shape)
    with local_world(layout.world_size) as world:
        mesh = build_mesh(layout, device_type="cpu")
        model = parallelize(meta(build), mesh, LM_PLAN)
        objects = [id(p) for p in model.parameters()]
        assert materialize(model, device="cpu", seed=3) is model
        assert [id(p) for p in model.parameters()] == objects
        for name, p in model.named_parameters():
            for rank, box, local in shards_of(p):
                assert torch.equal(local, want[name][box]), (name, rank)
        lm_loss(model, world.map(lambda r: tokens(r // layout.tp))).backward()
        assert all(p.grad is not None for p in model.parameters())


def test_init_weights_and_buffers() -> None:
    """A model with Hugging Face's ``_init_weights``, and buffers to fill."""
    config = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2)
    torch.manual_seed(0)
    buffers = dict(Llama(config).named_buffers())
    want = plain_weights(lambda: Llama(config))
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = parallelize(meta(lambda: Llama(config)), mesh)
        materialize(model, device="cpu", seed=3)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        for name, p in model.named_parameters():
            for _, box, local in shards_of(p):
                assert torch.equal(local, want[name][box]), name


def test_seed_and_name_decide() -> None:
    one, two = plain_weights(Lm, seed=1), plain_weights(Lm, seed=2)
    assert not torch.equal(one["embed.weight"], two["embed.weight"])
    assert not torch.equal(one["layers.0.up.weight"], one["layers.1.up.weight"])
    assert torch.equal(one["embed.weight"], plain_weights(Lm, seed=1)["embed.weight"])


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    plain_weights(Lm)
    assert torch.equal(torch.rand(3), want)


def test_weights_that_are_real_already_stay() -> None:
    model = meta(Lm)
    model.head = nn.Linear(12, 19)
    before = model.head.weight.clone()
    materialize(model, device="cpu")
    assert torch.equal(model.head.weight, before)
    assert not model.embed.weight.is_meta


def test_nothing_on_meta() -> None:
    with pytest.raises(Parallel3dError, match="meta device"):
        materialize(Lm())


def test_no_way_to_initialise() -> None:
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    model = meta(lambda: nn.Sequential(nn.Linear(3, 3), *(Bare() for _ in range(9))))
    named = r"initialises 1\.scale, 2\.scale, \.\.\. \(Bare\)\. Give Bare a .* torch.manual_seed\(seed\)"
    with pytest.raises(Parallel3dError, match=named):
        materialize(model, device="cpu")
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.slow
def test_no_way_to_initialise_is_said_once(tmp_path: Path) -> None:
    """By the first of eight ranks, or eight long lines hide the one that helps."""
    program = tmp_path / "program.py"
    program.write_text(BARE)
    command = [sys.executable, "-m", "parallel3d", "run", "--nproc-per-node", "2", str(program)]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("Give Bare a method reset_parameters()") == 1, done.stderr


BARE = """
import torch
import parallel3d as p3d

class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

mesh = p3d.build_mesh(p3d.MeshLayout(1, 2, 1), device_type="cpu")
with torch.device("meta"):
    model = Bare()
p3d.parallelize(model, mesh)
p3d.materialize(model, seed=0)
"""


def test_an_initialiser_that_fails() -> None:
    """The module's own Parameters are back in their places."""

    class Fails(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise RuntimeError("no")

    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = parallelize(meta(lambda: nn.Sequential(nn.Linear(3, 3), Fails(3, 3))), mesh)
        before = list(model.parameters())
        with pytest.raises(RuntimeError, match="no"):
            materialize(model, device="cpu")
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


class Partly(nn.Module):
    """nanoGPT's habit: its method knows linear layers, and those of torch set their own values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)  # and no bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


class Scaled(Partly):
    """With a parameter that its ``__init__`` alone sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ModuleList([Scale(), Scale()])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("mesh_size", [0, 2])
def test_what_init_weights_leaves_out_is_set_by_reset_parameters(mesh_size: int) -> None:
    model = meta(Partly)
    with fake_world(0, mesh_size) if mesh_size else nullcontext():
        if mesh_size:
            parallelize(model, build_mesh(MeshLayout(1, mesh_size, 1), device_type="cpu"))
        materialize(model, device="cpu", seed=3)
        for name, param in model.named_parameters():
            for local in [param] if not mesh_size else [local for *_, local in shards_of(param)]:
                assert torch.isfinite(local).all(), name
                if name.startswith("norm"):
                    assert torch.equal(local, torch.full_like(local, float(name == "norm.weight")))


def test_what_nobody_sets_is_an_error_before_anything_is_done() -> None:
    """Else it would be whatever the memory held."""
    model = meta(Scaled)
    with pytest.raises(
        Parallel3dError,
        match=r"calls Scaled\._init_weights, which leaves out scale\.0\.weight, scale\.1\.weight \(Scale\)\. "
        r"Give Scale a method reset_parameters\(\)",
    ):
        materialize(model, device="cpu")
    assert all(param.is_meta for param in model.parameters())


class Sometimes(nn.Module):
    """A scale that the model's method sets in the first module only."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Scale(), Scale()])
        self.first = self.parts[0]

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.first:
            nn.init.ones_(module.weight)


def test_a_module_that_is_left_out_later_is_an_error_too() -> None:
    with pytest.raises(Parallel3dError, match=r"leaves out values of 'parts\.1' \(Scale\)"):
        materialize(meta(Sometimes), device="cpu")


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "add_bias_kv": True}], ids=["packed", "apart"])
def test_attention_of_torch_is_initialized_as_torch_does(options) -> None:
    """It has no ``reset_parameters``, and sets the bias of its output layer."""

    def build() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(64, 2, **options), nn.Linear(64, 64))

    weights = plain_weights(build)
    torch.manual_seed(0)
    for name, want in build().state_dict().items():
        got = weights[name]
        assert got.std().item() == pytest.approx(want.std().item(), rel=0.3), name
        assert got.abs().max().item() == pytest.approx(want.abs().max().item(), rel=0.5), name
    assert not weights["0.out_proj.bias"].any() and weights["1.bias"].all()
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = materialize(parallelize(meta(build), mesh), device="cpu", seed=3)
        for name, p in model.named_parameters():
            for _, box, local in shards_of(p):
                assert torch.equal(local, weights[name][box]), name


def test_attention_with_more_parameters_is_not_taken_for_torchs() -> None:
    class Scaled(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(8, 2)
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(Parallel3dError, match=r"in_proj_weight.* \(Scaled\)"):
        materialize(meta(Scaled), device="cpu")
