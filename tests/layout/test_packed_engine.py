"""Packed parameters through the engine and the optimizers, on simulated ranks beside the plain model."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from _support.packed_models import PackedLm, even_lm, packed_plan, packed_tokens, uneven_lm
from torch import nn, optim
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, Replicate

from parallel3d import MeshLayout, build_mesh, materialize, parallelize
from parallel3d._layout.packed import PackedDTensor, PackedShard
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import (
    chunk,
    full_params,
    gather,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from parallel3d.optim import EMA, accumulate, clip_grad_norm_, local
from parallel3d.testing import assert_parity, fake_world, shards_of
from parallel3d.testing.worlds import LocalWorld, local_world

# Drawn here: simulated ranks would each draw others.
TOKENS = [packed_tokens(sample) for sample in range(2)]
FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
CASES = [(even_lm, (1, 2, 2)), (uneven_lm, (1, 2, 4))]
cases = pytest.mark.parametrize(("build", "sizes"), CASES, ids=["even", "uneven"])


def shown(value: object) -> str:
    return getattr(value, "__name__", str(value))


one_case = pytest.mark.parametrize(
    ("build", "sizes"),
    [pytest.param(*CASES[0], marks=pytest.mark.full), CASES[1]],
    ids=["even", "uneven"],
)

Build = Callable[[], PackedLm]
Sizes = tuple[int, int, int]


class Twins:
    """A plain model, and the parallel one on simulated ranks, which all read the same."""

    def __init__(self, world: LocalWorld, build: Build, sizes: Sizes, **options) -> None:
        self.world = world
        with world.paused():
            torch.manual_seed(3)
            self.plain = build().double()
            self.parallel = copy.deepcopy(self.plain)
        mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
        parallelize(self.parallel, mesh, tp_plan=packed_plan(self.plain), **options)

    def backward(self, sample: int = 0) -> None:
        with self.world.paused():
            loss_of(self.plain, sample).backward()
        loss_of(self.parallel, sample).backward()

    def step(self, plain: optim.Optimizer, parallel: optim.Optimizer, steps: int = 2) -> None:
        for sample in range(steps):
            self.backward(sample)
            with self.world.paused():
                plain.step()
                plain.zero_grad()
            parallel.step()
            parallel.zero_grad()

    def same(self, atol: float = 1e-11) -> None:
        plain = dict(self.plain.named_parameters())
        for name, param in self.parallel.named_parameters():
            lies_as(name, param.detach(), plain[name].detach(), atol)


def loss_of(model: nn.Module, sample: int) -> torch.Tensor:
    return model(TOKENS[sample]).square().mean()


def lies_as(name: str, found: torch.Tensor, whole: torch.Tensor, atol: float = 1e-11) -> None:
    """Every rank's rows of ``found`` are those of ``whole``."""
    seen = 0
    for rank, box, part in shards_of(found):
        torch.testing.assert_close(
            part, whole[box], rtol=0, atol=atol, msg=lambda m, r=rank: f"{name} on rank {r}: {m}"
        )
        seen += part.numel()
    assert seen >= whole.numel(), name


@pytest.fixture
def make() -> Iterator[Callable[..., Twins]]:
    worlds = []

    def made(build: Build, sizes: Sizes, **options) -> Twins:
        manager = local_world(sizes[0] * sizes[1] * sizes[2])
        worlds.append(manager)
        return Twins(manager.__enter__(), build, sizes, **options)

    yield made
    for manager in worlds:
        manager.__exit__(None, None, None)


def packed_of(model: nn.Module) -> dict[str, PackedDTensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, PackedDTensor)}


# -- what lies where -------------------------------------------------------------------------------------


@cases
def test_parameters_and_gradients_are_packed(make, build, sizes) -> None:
    twins = make(build, sizes)
    twins.backward()
    packed = packed_of(twins.parallel)
    assert len(packed) == 6
    for param in packed.values():
        grad = param.grad
        assert isinstance(param, nn.Parameter) and isinstance(grad, PackedDTensor)
        assert grad.placements == param.placements
        assert sum(isinstance(p, PackedShard) for p in param.placements) == 1
    twins.same(0.0)
    plain = dict(twins.plain.named_parameters())
    for name, param in twins.parallel.named_parameters():
        lies_as(name, param.grad, plain[name].grad)


def test_the_engine_shards_a_packed_dim_only_if_it_is_even() -> None:
    with fake_world(0, 8):
        for build, sharded in ((even_lm, {0}), (uneven_lm, {1, None})):
            model = build()
            plan = packed_plan(model)
            parallelize(model, build_mesh(MeshLayout(1, 2, 4), device_type="cpu"), tp_plan=plan)
            found = set()
            for name, param in packed_of(model).items():
                placement = param.placements[1]
                if not name.endswith(("out.weight", "down.weight")):
                    found.add(None if isinstance(placement, Replicate) else placement.dim)
            assert found == sharded


# -- training --------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "adamw foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw loop": lambda p: optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "momentum loop": lambda p: optim.SGD(p, lr=1e-1, momentum=0.9, foreach=False),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-2, centered=True),
}


ORDINARY = {"adamw fused": even_lm, "adamw foreach": uneven_lm, "momentum loop": uneven_lm}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "build", "sizes"),
    [
        pytest.param(n, b, s, marks=() if ORDINARY.get(n) is b else pytest.mark.full)
        for n in OPTIMIZERS
        for b, s in CASES
    ],
    ids=shown,
)
def test_torchs_optimizers(make, build, sizes, name) -> None:
    twins = make(build, sizes)
    with twins.world.paused():
        plain = OPTIMIZERS[name](twins.plain.parameters())
    parallel = OPTIMIZERS[name](twins.parallel.parameters())
    twins.step(plain, parallel)
    twins.same(1e-9)
    for param in packed_of(twins.parallel).values():
        for key, value in parallel.state[param].items():
            if key != "step":
                assert isinstance(value, PackedDTensor), key
                assert value.placements == param.placements


@pytest.mark.parametrize(
    ("kind", "build", "sizes"),
    [
        (optim.AdamW, *CASES[0]),
        (optim.AdamW, *CASES[1]),
        (optim.Adafactor, *CASES[1]),
        pytest.param(optim.Adafactor, *CASES[0], marks=pytest.mark.full),
        (optim.Muon, *CASES[0]),
        pytest.param(optim.Muon, *CASES[1], marks=pytest.mark.full),
    ],
    ids=shown,
)
def test_local_optimizers(make, build, sizes, kind) -> None:
    twins = make(build, sizes)

    def params(model: nn.Module) -> list[nn.Parameter]:
        # Adafactor divides what is noise in a key bias's gradient, which is zero, by itself.
        return [p for p in model.parameters() if p.ndim == 2 or kind is optim.AdamW]

    with twins.world.paused():
        plain = kind(params(twins.plain), lr=1e-2)
    parallel = local(kind, params(twins.parallel), lr=1e-2)
    twins.step(plain, parallel)
    twins.same(1e-2 if kind is optim.Muon else 1e-8)  # Muon computes in bfloat16
    by_plain = dict(zip(params(twins.parallel), params(twins.plain), strict=True))
    for param in packed_of(twins.parallel).values():
        for key, value in parallel.state.get(param, {}).items():
            want = plain.state[by_plain[param]][key]
            if isinstance(value, DTensor) and value.shape == param.shape:
                assert isinstance(value, PackedDTensor), key
                lies_as(key, value, want, 1e-9)


@pytest.mark.slow
@one_case
def test_clip_and_ema(make, build, sizes) -> None:
    twins = make(build, sizes)
    ema = EMA(twins.parallel, 0.9)
    twins.backward()
    with twins.world.paused():
        want = nn.utils.clip_grad_norm_(twins.plain.parameters(), 1e-2)
    for got in twins.world.per_rank(clip_grad_norm_(twins.parallel, 1e-2)):
        torch.testing.assert_close(got, want)
    plain, before = dict(twins.plain.named_parameters()), {}
    for name, param in twins.parallel.named_parameters():
        lies_as(name, param.grad, plain[name].grad)
        before[name] = plain[name].detach().clone()
    with torch.no_grad():
        for model in (twins.parallel, twins.plain):
            for param in model.parameters():
                param.add_(param.grad)
    ema.update()
    for name, value in ema.state_dict()["average"].items():
        assert type(value) is type(dict(twins.parallel.named_parameters())[name].data)
        lies_as(name, value, before[name].lerp(plain[name].detach(), 0.1))
    kept = {name: value.detach().clone() for name, value in ema.state_dict()["average"].items()}
    ema.update()
    ema.load_state_dict({"average": kept, "updates": 1})
    for name, value in ema.state_dict()["average"].items():
        lies_as(name, value, before[name].lerp(plain[name].detach(), 0.1))


def test_torchs_clip(make) -> None:
    twins = make(uneven_lm, (1, 2, 4))
    twins.backward()
    with twins.world.paused():
        want = nn.utils.clip_grad_norm_(twins.plain.parameters(), 1e-2)
    got = nn.utils.clip_grad_norm_(twins.parallel.parameters(), 1e-2)
    torch.testing.assert_close(twins.world.per_rank(got.full_tensor())[0], want)
    plain = dict(twins.plain.named_parameters())
    for name, param in twins.parallel.named_parameters():
        lies_as(name, param.grad, plain[name].grad)


PLAIN = [
    *((even_lm, sizes) for sizes in ((1, 1, 2), (2, 1, 2), (1, 4, 2))),
    *((uneven_lm, sizes) for sizes in ((1, 2, 2), (1, 1, 4), (1, 2, 4))),
]
MORE_PLAIN = [
    *((even_lm, sizes) for sizes in ((1, 2, 4), (2, 2, 2), (1, 3, 2))),
    *((uneven_lm, s) for s in ((1, 2, 3), (2, 1, 4), (2, 2, 2), (1, 4, 4), (1, 3, 4))),
]
WITH_OPTIONS = [
    (even_lm, (2, 2, 2), {"micro_batches": 2}),
    (uneven_lm, (2, 1, 4), {"micro_batches": 2, "defer": "sync"}),
    (even_lm, (2, 2, 2), {"shard_optimizer_over_replicate": True}),
]
MORE_WITH_OPTIONS = [
    (even_lm, (1, 2, 2), {"micro_batches": 2, "defer": "sync"}),
    (uneven_lm, (2, 1, 4), {"shard_optimizer_over_replicate": True}),
    (uneven_lm, (1, 2, 2), {"reshard_after_forward": False}),
]


@pytest.mark.parametrize(
    ("build", "sizes", "options"),
    [
        *((*case, {}) for case in PLAIN),
        *WITH_OPTIONS,
        *(pytest.param(*case, {}, marks=pytest.mark.full) for case in MORE_PLAIN),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_WITH_OPTIONS),
    ],
    ids=shown,
)
def test_parity(build, sizes, options) -> None:
    layout = MeshLayout(*sizes).resolve(sizes[0] * sizes[1] * sizes[2])
    plan = packed_plan(build())
    assert_parity(build, packed_tokens, layout, tp_plan=plan, steps=2, fp32=False, **options)


# -- whole tensors ---------------------------------------------------------------------------------------


@cases
def test_full_tensor_and_full_params(make, build, sizes) -> None:
    twins = make(build, sizes)
    plain = dict(twins.plain.named_parameters())
    for name, param in packed_of(twins.parallel).items():
        for got in twins.world.per_rank(param.full_tensor().detach()):
            assert torch.equal(got, plain[name])
    with full_params(twins.parallel):
        for name, param in twins.parallel.named_parameters():
            for got in twins.world.per_rank(param):
                assert torch.equal(got, plain[name])
            with torch.no_grad():
                param.mul_(3)
    with torch.no_grad():
        for param in plain.values():
            param.mul_(3)
    twins.same(0.0)


@pytest.mark.slow
@one_case
def test_state_dicts_of_all_types(make, build, sizes) -> None:
    twins = make(build, sizes)
    with twins.world.paused():
        plain = optim.AdamW(twins.plain.parameters(), lr=1e-2, fused=True)
    parallel = optim.AdamW(twins.parallel.parameters(), lr=1e-2, fused=True)
    twins.step(plain, parallel, 1)
    want = {name: value.detach() for name, value in twins.plain.state_dict().items()}
    whole = model_state_dict(twins.parallel, type=FULL)
    for name, value in whole.items():
        for got in twins.world.per_rank(value):
            torch.testing.assert_close(got, want[name], rtol=0, atol=1e-11)
    moments = optim_state_dict(twins.parallel, parallel, type=FULL)
    names = {p: n for n, p in twins.plain.named_parameters()}
    for param, state in plain.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            for got in twins.world.per_rank(moments["state"][names[param]][key]):
                torch.testing.assert_close(got, state[key], rtol=0, atol=1e-11)
    parts = model_state_dict(twins.parallel, type=LOCAL)
    parts = {name: value.clone() for name, value in parts.items()}
    sharded = {n: v.detach().clone() for n, v in twins.parallel.state_dict().items()}

    def reload(load: Callable[[], object]) -> None:
        with torch.no_grad():
            for param in twins.parallel.parameters():
                get_local_tensor(param).fill_(9.0)
        load()
        for name, param in twins.parallel.named_parameters():
            lies_as(name, param.detach(), want[name])

    reload(lambda: load_model_state_dict(twins.parallel, want, type=FULL))
    reload(lambda: load_model_state_dict(twins.parallel, parts, type=LOCAL))
    reload(lambda: twins.parallel.load_state_dict(sharded))
    reload(lambda: load_model_state_dict(twins.parallel, sharded))
    again = optim.AdamW(twins.parallel.parameters(), lr=1e-2, fused=True)
    load_optim_state_dict(twins.parallel, again, moments, type=FULL)
    for param in packed_of(twins.parallel).values():
        for key in ("exp_avg", "exp_avg_sq"):
            value = again.state[param][key]
            assert isinstance(value, PackedDTensor) and value.placements == param.placements
            lies_as(key, value, twins.world.per_rank(parallel.state[param][key].full_tensor())[0])
    loss_of(twins.parallel, 0).backward()
    again.step()


@cases
def test_chunk_and_gather(make, build, sizes) -> None:
    twins = make(build, sizes)
    plain = dict(twins.plain.named_parameters())
    for name, param in packed_of(twins.parallel).items():
        mesh, whole = param.device_mesh, plain[name].detach()
        for source in (whole, param.detach()):
            made = chunk(source, mesh, param.placements)
            assert isinstance(made, PackedDTensor)
            lies_as(name, made, whole, 0.0)
            lies_as(name, chunk(source, mesh, [Replicate()] * 3), whole, 0.0)
        for over in ("shard", "tp"):
            gathered = gather(param.detach(), over)
            assert isinstance(gathered, PackedDTensor) == (over == "shard")
            lies_as(name, gathered, whole, 0.0)


@one_case
def test_materialize(make, build, sizes) -> None:
    with torch.device("meta"):
        plain, parallel = build(), build()
    twins = make(build, sizes)
    with twins.world.paused():
        materialize(plain, device="cpu", seed=5)
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    parallelize(parallel, mesh, tp_plan=packed_plan(parallel))
    assert len(packed_of(parallel)) == 6
    materialize(parallel, seed=5)
    want = dict(plain.named_parameters())
    for name, param in parallel.named_parameters():
        lies_as(name, param.detach(), want[name].detach(), 0.0)


@one_case
def test_deepcopy(make, build, sizes) -> None:
    twins = make(build, sizes)
    twin = copy.deepcopy(twins.parallel)
    assert packed_of(twin).keys() == packed_of(twins.parallel).keys()
    loss_of(twin, 0).backward()
    optim.AdamW(twin.parameters(), lr=1e-2, fused=True).step()
    twins.same(0.0)


def test_accumulate(make) -> None:
    twins = make(even_lm, (2, 1, 2))
    for sample in accumulate(twins.parallel, [0, 1]):
        loss_of(twins.parallel, sample).backward()
    with twins.world.paused():
        for sample in (0, 1):
            loss_of(twins.plain, sample).backward()
    plain = dict(twins.plain.named_parameters())
    for name, param in twins.parallel.named_parameters():
        lies_as(name, param.grad, plain[name].grad)
