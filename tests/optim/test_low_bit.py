"""optim.local of torchao's optimizers: quantized in the plain model's blocks, to the bit, on every mesh."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchao")

import torch
from _support.models import Lm, lm_loss, tokens
from _support.optim.low_bit import (
    CLASSES,
    MESHES,
    STEPS,
    build,
    eager,
    gradients,
    plain,
    sharded,
    step_on,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torchao.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8

from parallel3d import (
    MeshLayout,
    Parallel3dError,
    Sharding,
    build_mesh,
    checkpoint,
    materialize,
    parallelize,
)
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.dryrun import record
from parallel3d.fsdp import fully_shard, load_optim_state_dict, optim_state_dict
from parallel3d.optim import local, step_in_backward
from parallel3d.optim.blocks import block_layout
from parallel3d.optim.pieces import local_of
from parallel3d.testing import (
    GlooPool,
    LocalWorld,
    fake_world,
    local_world,
    record_collectives,
    shards_of,
)

pytestmark = pytest.mark.ci

FULL = StateDictType.FULL_STATE_DICT
BLOCKS = {AdamW4bit: 128}


def check(world: LocalWorld, model: nn.Module, whole: nn.Module) -> None:
    """Each shard is the plain model's, to the bit."""
    with world.paused():
        for (name, want), param in zip(whole.named_parameters(), model.parameters(), strict=True):
            for rank, box, shard in shards_of(param.detach()):
                assert torch.equal(want.detach()[box], shard), (name, rank)


def compare(
    cls: type, sizes: dict[str, int], block: int | None, of_class: dict[str, Any], **ours: Any
) -> None:
    """Steps of one process beside those on a mesh; ``ours``: options of the latter alone."""
    whole, _ = plain(cls, **of_class)
    with local_world(MeshLayout(**sizes).world_size) as world:
        with world.paused():
            model = build()
        model, optimizer = sharded(cls, sizes, block, model, **of_class, **ours)
        for step in range(STEPS):
            with world.paused():
                grads = gradients(whole, step)
            step_on(model, optimizer, grads)
        check(world, model, whole)


@pytest.mark.parametrize("block", ["its own", None])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_as_one_process(sizes, cls, block) -> None:
    """With shards of whole blocks, and with blocks that are divided."""
    compare(cls, sizes, BLOCKS.get(cls, 256) if block else None, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 2, "tp": 2}], ids=str
)
def test_hfsdp(sizes) -> None:
    compare(AdamW8bit, sizes, 256, {}, hfsdp=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES[5:], ids=str)
def test_adafactor_of_transformers(sizes) -> None:
    """Its own rate, and root mean squares of parameters, are those of whole ones."""
    cls = pytest.importorskip("transformers").Adafactor
    options = {"lr": None, "scale_parameter": True, "relative_step": True, "warmup_init": True}
    compare(cls, sizes, 256, options, matrix=True)


def stored(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, torch.Tensor]:
    """A parameter's state as bytes and scales, whole."""
    found = {}
    for key, value in optimizer.state[param].items():
        if isinstance(value, DTensor):
            found[key] = value.full_tensor()
        elif hasattr(value, "codes"):
            found[key + ".codes"] = value.codes.view(torch.uint8)
            found[key + ".scale"] = value.scale
        else:
            found[key] = value
    return {key: value.flatten() for key, value in found.items()}


def resumed(path: str, cls: type, meshes: list[dict[str, int]], first: int) -> None:
    """One step on each mesh, which loads what the one before has saved."""
    for step, sizes in enumerate(meshes, first):
        block = BLOCKS.get(cls, 256) if step % 3 else None
        model, optimizer = sharded(cls, sizes, block)
        if step:
            checkpoint.load(f"{path}/{step - 1}", model, optimizer)
        step_on(model, optimizer, gradients(build(), step))
        checkpoint.save(f"{path}/{step}", model, optimizer, step=step)
    whole, expected = plain(cls, first + len(meshes))
    for (name, want), param in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(want, param.full_tensor()), name
        states = stored(expected, want), stored(optimizer, param)
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_resumed_on_another_mesh(gloo_pool: GlooPool, tmp_path: Path, cls) -> None:
    """Twelve meshes, of two, four and six processes, one after the other."""
    first = 0
    for ranks in (2, 4, 6):
        meshes = [sizes for sizes in MESHES if MeshLayout(**sizes).world_size == ranks]
        gloo_pool.run(resumed, str(tmp_path), cls, meshes, first, world_size=ranks)
        first += len(meshes)
    assert first == len(MESHES) == 12
    model = build()  # which isn't parallel
    optimizer = local(cls, model, lr=0.01)
    with fake_world(0, 1):
        checkpoint.load(tmp_path / str(first - 1), model, optimizer)
    for name, grad in gradients(model, first).items():
        model.get_parameter(name).grad = grad
    with eager():
        optimizer.step()
    whole, _ = plain(cls, first + 1)
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def divided(model: nn.Module, block: int = 256) -> set[str]:
    """The names of parameters that have blocks of which ranks have parts."""
    found = set()
    for name, param in model.named_parameters():
        mesh = tuple(param.device_mesh.shape)
        layout = block_layout(tuple(param.shape), mesh, param.placements, block)
        if layout is not None and layout.divided:
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("sizes", "block", "names"),
    [
        ({"shard": 4}, 256, []),
        ({"shard": 4}, None, ["lm.head.bias"]),
        ({"shard": 2, "tp": 2}, 256, ["lm.head.bias", "lm.layers.0.down.weight"]),
    ],
    ids=str,
)
def test_what_is_gathered(sizes, block, names) -> None:
    """Nothing where shards are whole blocks; of a parameter with divided ones itself, twice, and its
    gradient, over the axes that shard it."""
    with fake_world(0, MeshLayout(**sizes).world_size):
        model, optimizer = sharded(AdamW8bit, sizes, block)
        assert divided(model) == set(names)
        whole = gradients(model, 0)
        with record_collectives(model.odd.weight.device_mesh) as recorder:
            step_on(model, optimizer, whole)
        axes = sum(
            not placement.is_replicate() and size > 1
            for name in names
            for param in [model.get_parameter(name)]
            for size, placement in zip(param.device_mesh.shape, param.placements, strict=True)
        )
        assert len(recorder.calls) == 3 * axes


def test_bytes_of_state() -> None:
    """2.03 bytes a parameter in all, of 8-bit states on any number of ranks; 4-bit ones have 1.06."""
    for cls, expected in ((AdamW8bit, 2 + 2 / 64), (AdamW4bit, 1 + 2 / 32), (AdamWFp8, 2 + 2 / 64)):
        for ranks in (1, 4):
            total = 0
            for rank in range(ranks):
                with fake_world(rank, ranks):
                    mesh = build_mesh(MeshLayout(shard=ranks), device_type="cpu")
                    model = nn.Linear(512, 512, bias=False)
                    fully_shard(model, mesh=mesh, block=BLOCKS.get(cls, 256))
                    optimizer = local(cls, model)
                    total += sum(
                        get_local_tensor(value).nbytes
                        for value in optimizer.state[model.weight].values()
                        if isinstance(value, DTensor)
                    )
            assert total / 512**2 == expected


def test_a_dry_run_shows_it() -> None:
    """Of a rank of 64, with norms and biases, whose states are ordinary ones."""

    def train() -> None:
        mesh = build_mesh(MeshLayout(replicate=2, shard=8, tp=4))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        plan = {"0": "colwise", "2": "rowwise"}
        model = parallelize(model, mesh, plan, fsdp=Sharding(block=256))
        materialize(model)
        optimizer = local(AdamW8bit, model, lr=0.01)
        for _ in range(3):
            model(torch.randn(4, 2048)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run = record(train, world_size=64, rank=5, steps=2)
    held = run.memory[-1].by_kind
    number = held["parameters"] / 4
    assert 2.03 * number < held["optimizer state"] < 2.1 * number


def test_state_dicts_and_copies() -> None:
    """torch casts loaded state to the parameters' dtype, here bf16: not codes and scales."""
    with fake_world(0, 1):
        mesh = build_mesh(MeshLayout(shard=1), device_type="cpu")
        models = [fully_shard(nn.Linear(128, 64).bfloat16(), mesh=mesh) for _ in range(2)]
        first, second = (local(AdamW8bit, model, lr=0.1) for model in models)
        step_on(models[0], first, gradients(models[0], 0))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for param, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            ours, theirs = first.state[param], second.state[other]
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert value.dtype == theirs[key].dtype and value is not theirs[key], key
                assert torch.equal(local_of(value), local_of(theirs[key])), key
            with torch.no_grad():
                other.copy_(param)
        assert first.state[models[0].weight].keys() == {
            "step",
            *(f"exp_avg{of}.{part}" for of in ("", "_sq") for part in ("codes", "scale")),
        }
        for model, optimizer in zip(models, (first, second), strict=True):
            step_on(model, optimizer, gradients(model, 1))
        assert torch.equal(models[0].weight.to_local(), models[1].weight.to_local())
        assert isinstance(pickle.loads(pickle.dumps(first)), AdamW8bit)


def test_groups_options_and_added_parameters() -> None:
    """Options by group, what is added later, and what has no gradient; amsgrad's third state of a small one,
    as torchao's step can't read a quantized one."""
    plain = [nn.Parameter(torch.randn(64, size)) for size in (128, 128, 2)]
    ours = [nn.Parameter(param.detach().clone()) for param in plain]
    made = []
    for cls, params in ((Adam8bit, plain), (lambda *a, **k: local(Adam8bit, *a, **k), ours)):
        groups = [{"params": [params[0]], "weight_decay": 0.1}, {"params": [params[1]], "lr": 0.5}]
        optimizer = cls(groups)
        optimizer.add_param_group({"params": [params[2]], "amsgrad": True})
        made.append(optimizer)
    for step in range(3):
        for index, (param, other) in enumerate(zip(plain, ours, strict=True)):
            grad = torch.randn_like(param)
            for each in (param, other):
                each.grad = grad if index or step else None
        for optimizer in made:
            optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))
            with eager():
                optimizer.step()
    assert all(map(torch.equal, plain, ours))
    assert [int(made[1].state[param]["step"]) for param in ours] == [2, 3, 3]
    assert "exp_avg_sq.codes" in made[1].state[ours[0]]
    assert "max_exp_avg_sq" in made[1].state[ours[2]]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"shard": 3, "tp": 2}, {"shard": 4, "ep": 2}], ids=str)
def test_full_state_dicts(sizes) -> None:
    """Of the plain model's codes and scales; they load where blocks are divided."""
    whole, expected = plain(AdamW8bit, 1)
    with local_world(MeshLayout(**sizes).world_size) as world:
        found = []
        for block in (256, None):
            with world.paused():
                model, grads = build(), gradients(whole, 0)
            model, optimizer = sharded(AdamW8bit, sizes, block, model)
            if found:
                load_optim_state_dict(model, optimizer, found[0], type=FULL)
            else:
                step_on(model, optimizer, grads)
            found.append(optim_state_dict(model, optimizer, type=FULL))
        with world.paused():
            for name, param in whole.named_parameters():
                for key, value in stored(expected, param).items():
                    for full in (each["state"][name][key] for each in found):
                        for of_rank in world.per_rank(full):
                            assert of_rank.dtype == value.dtype, (name, key)
                            assert torch.equal(of_rank.flatten(), value), (name, key)


def test_step_in_backward() -> None:
    """The step of one bucket at a time."""
    with fake_world(0, 1):
        weights = []
        for at_once in (True, False):
            torch.manual_seed(0)
            mesh = build_mesh(MeshLayout(shard=1), device_type="cpu")
            model = parallelize(Lm(dim=48, hidden=192), mesh)
            if at_once:
                step_in_backward(model, partial(local, AdamW8bit), lr=0.1)
            else:
                optimizer = local(AdamW8bit, model, lr=0.1)
            for step in range(2):
                with eager():
                    lm_loss(model, tokens(step)).backward()
                    if not at_once:
                        optimizer.step()
                        optimizer.zero_grad()
            weights.append([param.to_local() for param in model.parameters()])
        assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("said", [{"elementwise": True}, {"matrix": True}])
def test_what_it_knows_is_not_to_be_said(said) -> None:
    with pytest.raises(Parallel3dError, match=r"AdamW8bit is quantized in blocks.*leave it out"):
        local(AdamW8bit, nn.Linear(2, 2), **said)


@pytest.mark.parametrize("size", [0, -256, 2.5])
def test_a_block_has_elements(size) -> None:
    """torchao divides by it."""
    with pytest.raises(Parallel3dError, match=f"block_size is {size}; it must be an integer, 1"):
        local(AdamW8bit, nn.Linear(64, 64), block_size=size)


def test_subclasses_are_not_known() -> None:
    with pytest.raises(Parallel3dError, match=r"Derived is not known .*AdamW8bit.* of torchao"):
        local(type("Derived", (AdamW8bit,), {}), nn.Linear(2, 2))


def by_torch(path: str) -> None:
    """torch's own functions, and ours for its folders, save and load it on another mesh."""
    model, optimizer = sharded(AdamW8bit, {"shard": 4}, 256)
    step_on(model, optimizer, gradients(model, 0))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/torch")
    checkpoint.save_dcp(f"{path}/ours", model, optimizer)
    whole, _ = plain(AdamW8bit, 2)
    for of in ("torch", "ours"):
        for by in ("torch", "ours"):
            other, fresh = sharded(AdamW8bit, {"shard": 2, "tp": 2}, 256)
            if by == "ours":
                checkpoint.load_dcp(f"{path}/{of}", other, fresh)
            else:
                weights, state = get_state_dict(other, fresh)
                dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/{of}")
                set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
            step_on(other, fresh, gradients(other, 1))
            for want, param in zip(whole.parameters(), other.parameters(), strict=True):
                assert torch.equal(want, param.full_tensor()), (of, by)


@pytest.mark.slow
def test_by_torchs_state_dicts(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(by_torch, str(tmp_path), world_size=4)
