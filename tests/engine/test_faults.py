"""The faults of torch 2.13's fully_shard that the notes list: what torch fails here, and how."""

import copy

import pytest
import torch
from _support.engine.twins import (
    Twins,
    device_mesh,
    floats,
    full,
    mean_square,
    same,
    shard_layers,
    train,
)
from _support.models import Block, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parallel3d.testing import fake_world

BF16, FP32 = torch.bfloat16, torch.float32


def weights_along_1(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 else None


def reshard_to_two_along_dim_1(engine) -> None:
    options = {"reshard_after_forward": 2, "shard_placement_fn": weights_along_1}
    train(Lm(), lambda m: shard_layers(engine, m, device_mesh(), **options))


@pytest.mark.parity("fault a: reshard to a smaller world with Shard(1)")
@pytest.mark.torch_fails("fault a", match="list index out of range|out of bounds for storage")
def test_reshard_to_a_smaller_world_with_shard_1(on_ranks) -> None:
    on_ranks(reshard_to_two_along_dim_1, size=4)


def partial_sum_dropped(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh(2, 2)))
    twins.sharded.set_requires_all_reduce(False)
    twins.backward_sharded(0)
    twins.sharded.zero_grad()  # what waited for its all-reduce goes too
    twins.sharded.set_requires_all_reduce(True)
    twins.backward(1)
    twins.check_grads()


@pytest.mark.parity("fault b: stale partial sum", "method: set_requires_all_reduce")
@pytest.mark.torch_fails("fault b", match="grad: differs")
def test_zero_grad_drops_a_partial_sum(on_ranks) -> None:
    on_ranks(partial_sum_dropped, size=4)


def clip(engine, wrap, twins_grads=None) -> None:
    """The norm before clipping and the gradients after it are the plain model's."""
    twins = Twins(Lm(), wrap)
    twins.backward_plain()
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = getattr(twins.sharded, "data_ranks", world)
    twins.plain.zero_grad()
    for r in range(ranks):
        (lm_loss(twins.plain, tokens(r)) / ranks).backward()
    lm_loss(twins.sharded, tokens(rank * ranks // world)).backward()
    for p in twins.sharded.parameters():
        if not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
            p.grad /= world
    got = engine.clip_grad_norm_(twins.sharded, 0.1)
    want = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
    same(full(got), want, "norm", 1e-9)
    twins.check_grads()


def clip_mixed_meshes(engine) -> None:
    """Blocks are tensor-parallel, the rest isn't."""
    mesh = device_mesh(2, 2, names=("dp", "tp"))

    def wrap(model: nn.Module) -> None:
        for layer in model.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        shard_layers(engine, model, mesh["dp"])
        model.data_ranks = 2

    clip(engine, wrap)


@pytest.mark.parity("fault c: clipping over mixed meshes")
@pytest.mark.torch_fails("fault c", match="must have the same mesh")
def test_clipping_over_mixed_meshes(on_ranks) -> None:
    on_ranks(clip_mixed_meshes, size=4)


def clip_ignored(engine) -> None:
    def wrap(model: nn.Module) -> None:
        ignored = {model.norm.weight, model.head.bias}
        shard_layers(engine, model, device_mesh(), ignored_params=ignored)

    clip(engine, wrap)


@pytest.mark.parity("fault d: clipping with ignored parameters")
@pytest.mark.torch_fails("fault d", match=r"mixed torch\.Tensor and DTensor")
def test_clipping_with_ignored_parameters(on_ranks) -> None:
    on_ranks(clip_ignored)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def tp_reduces_in_float32(engine) -> float:
    """The two parts of the sequence add 1 and 1/512 to the gradient, whose sum is 1 in bfloat16."""
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    model = nn.Sequential(Scale())
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    policy = engine.MixedPrecisionPolicy(BF16, FP32)
    engine.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    part = torch.full((1, 1, 2), 1.0 if mesh["tp"].get_local_rank() == 0 else 1 / 512)
    model(part).sum().backward()
    return full(model[0].weight.grad).tolist()


@pytest.mark.parity("fault e: TP reductions in the reduce dtype")
@pytest.mark.torch_fails("fault e", match=r"\[1\.0, 1\.0\] != \[1\.00195")
def test_tp_reduces_in_the_reduce_dtype(on_ranks) -> None:
    assert on_ranks(tp_reduces_in_float32, size=4) == [[1 + 1 / 512] * 2] * 4


class Growing(nn.Module):
    """Uses its second linear on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.grown = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.grown else self.first(x)


def hand_cast(plain: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of a bfloat16 copy, one by one added up in float32; None where there is none."""
    totals: list[torch.Tensor | None] = [None for _ in plain.parameters()]
    for x in batches:
        half = copy.deepcopy(plain).to(BF16)
        half(x.to(BF16)).float().square().mean().backward()
        for i, p in enumerate(half.parameters()):
            if p.grad is not None:
                total = totals[i]
                totals[i] = p.grad.float() if total is None else total + p.grad.float()
    return totals


def fresh_parameter(engine, unused: bool) -> None:
    plain = Growing()
    model = copy.deepcopy(plain)
    policy = engine.MixedPrecisionPolicy(BF16, FP32)
    engine.fully_shard(model, mesh=device_mesh(), mp_policy=policy)
    if unused:  # parameters that a rank doesn't use are reduced as zeros
        model.set_reduce_scatter_unused_params(True)
    wants = []
    for grown in (False, True):
        plain.grown = model.grown = grown
        model.set_requires_gradient_sync(grown)
        x = floats(0).float()  # the same on both ranks
        model(x).float().square().mean().backward()
        wants.append(hand_cast(plain, [x]))
    for got, first, second in zip(model.parameters(), *wants, strict=True):
        want = second if first is None else first + second
        same(full(got.grad), want, "grad", 1e-6)


@pytest.mark.parity("fault f: fresh parameters in accumulation", "behaviour: gradient accumulation")
@pytest.mark.torch_fails("fault f", match="uniform gradient dtype")
@pytest.mark.parametrize("unused", [False, True])
def test_parameter_first_used_in_the_last_micro_batch(on_ranks, unused) -> None:
    on_ranks(fresh_parameter, unused)


def unfrozen(engine, frozen: list[int]) -> None:
    plain = nn.Sequential(Block(), nn.Linear(12, 12))
    model = copy.deepcopy(plain)
    for each in (plain, model):
        for i in frozen:
            list(each.parameters())[i].requires_grad_(False)
    mesh, policy = device_mesh(), engine.MixedPrecisionPolicy(BF16, FP32)
    engine.fully_shard(model[0], mesh=mesh, mp_policy=policy)
    engine.fully_shard(model, mesh=mesh, mp_policy=policy)
    x = floats(0).float()
    for _ in range(2):
        model.zero_grad()
        model(x).float().square().mean().backward()
        for got, want in zip(model.parameters(), hand_cast(plain, [x]), strict=True):
            assert (got.grad is None) == (want is None)
            if want is not None:
                assert got.grad.dtype == FP32
                same(full(got.grad), want, "grad", 1e-6)
        for each in (plain, model):
            each.requires_grad_(True)


@pytest.mark.parity(
    "fault g: unfreezing with mixed precision",
    "behaviour: frozen, unfrozen, refrozen parameters",
)
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param([2, 3], id="some of a unit"),
        pytest.param(
            [0, 1, 2, 3, 4, 5],
            id="all of a unit",
            marks=pytest.mark.torch_fails(
                "fault g", match="assign a gradient|attempting to assign"
            ),
        ),
    ],
)
def test_unfreezing_with_mixed_precision(on_ranks, frozen) -> None:
    on_ranks(unfrozen, frozen)


class TwoDtypes(nn.Module):
    """A norm in float32 in a model of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(12, 8).double(), nn.LayerNorm(8)
        self.down = nn.Linear(8, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x).float()).double())


def two_dtypes(engine) -> None:
    plain = TwoDtypes()
    model = copy.deepcopy(plain)
    engine.fully_shard(model, mesh=device_mesh())
    for _ in range(2):
        model(floats(dist.get_rank())).square().mean().backward()
        for rank in range(2):
            (plain(floats(rank)).square().mean() / 2).backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert got.dtype == got.grad.dtype == want.dtype
        same(full(got.grad), want.grad, name, 1e-6)


@pytest.mark.parity("fault h: mixed dtypes in one unit")
@pytest.mark.torch_fails("fault h", match="uniform original parameter dtype")
def test_mixed_dtypes_in_one_unit(on_ranks) -> None:
    on_ranks(two_dtypes)


@pytest.mark.parity("fault i: mesh order by name")
@pytest.mark.torch_fails("fault i", match="DID NOT RAISE")
@pytest.mark.parametrize("names", [("shard", "replicate"), ("dp_shard", "dp_replicate")])
def test_shard_before_replicate_is_refused(engine, names) -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match="shard comes before replicate"):
            engine.fully_shard(nn.Linear(4, 4), mesh=mesh)


class Scaled(nn.Module):
    """With a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.scale


def scalar(engine) -> None:
    twins = train(
        Scaled(), lambda m: engine.fully_shard(m, mesh=device_mesh()), mean_square, floats
    )
    assert twins.sharded.scale.shape == ()
    mesh = device_mesh(1, 2)
    train(Scaled(), lambda m: engine.fully_shard(m, mesh=mesh), mean_square, floats)


@pytest.mark.parity("fault n: scalar parameters")
@pytest.mark.torch_fails("fault n", match="doesn't support scalar parameters")
def test_scalar_parameter(on_ranks) -> None:
    on_ranks(scalar)


def non_contiguous(engine) -> None:
    def transposed() -> nn.Module:
        block = Block()
        block.up.weight = nn.Parameter(torch.randn(12, 20).t())
        return block

    train(transposed(), lambda m: engine.fully_shard(m, mesh=device_mesh()), mean_square, floats)


@pytest.mark.parity("fault n: non-contiguous parameters")
@pytest.mark.torch_fails("fault n", match="does not support non-contiguous parameters")
def test_non_contiguous_parameter(on_ranks) -> None:
    on_ranks(non_contiguous)


def uneven_along_1(engine) -> None:
    """9, 11 and 17 columns over four ranks; and fewer columns than ranks."""
    options = {"shard_placement_fn": weights_along_1}
    narrow = Lm(dim=11, hidden=9, vocab=19)
    train(narrow, lambda m: shard_layers(engine, m, device_mesh(), **options))
    thin = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 7))
    train(
        thin,
        lambda m: engine.fully_shard(m, mesh=device_mesh(), **options),
        mean_square,
        floats,
    )
    hsdp = device_mesh(1, 4)
    train(Lm(dim=11, hidden=9), lambda m: shard_layers(engine, m, hsdp, **options))


@pytest.mark.parity("fault n: uneven Shard(1)", "behaviour: uneven Shard(1)")
@pytest.mark.torch_fails("fault n", match="does not support uneven sharding on dim 1")
def test_uneven_shard_1(on_ranks) -> None:
    on_ranks(uneven_along_1, size=4)


def tied_across_units(engine) -> None:
    """The head's weight is the embedding's; each is a unit, and there is one parameter."""

    def wrap(model: nn.Module) -> None:
        engine.fully_shard(model.embed, mesh=device_mesh())
        engine.fully_shard([model.norm, model.head], mesh=device_mesh())
        shard_layers(engine, model, device_mesh())

    twins = train(Lm(tied=True), wrap)
    assert twins.sharded.head.weight is twins.sharded.embed.weight


@pytest.mark.parity("fault n: tied parameters across units", "behaviour: shared parameters")
@pytest.mark.torch_fails("fault n", match="is shared with a parameter already managed")
def test_tied_parameters_across_units(on_ranks) -> None:
    on_ranks(tied_across_units)


def deepcopied(engine) -> None:
    """A copy trains on its own; the original is as before."""
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    twins.train(range(2))
    copied = copy.deepcopy(twins.sharded)
    assert type(copied) is type(twins.sharded)
    assert all(isinstance(p, DTensor) for p in copied.parameters())
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in twins.sharded.parameters()}
    other = Twins(copy.deepcopy(twins.plain), lambda m: None)
    other.sharded = copied
    other.optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (other.plain, other.sharded)
    ]
    other.train(range(5, 7))
    twins.check_weights()
    twins.train(range(2, 4))


def averaged(engine) -> None:
    """An exponential moving average, as torch.optim.swa_utils keeps it; and its evaluation."""
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    twins.train(range(1))
    average = get_ema_multi_avg_fn(0.9)
    pairs = [AveragedModel(m, multi_avg_fn=average) for m in (twins.sharded, twins.plain)]
    for index in range(1, 4):
        twins.train([index])
        for ema, model in zip(pairs, (twins.sharded, twins.plain), strict=True):
            ema.update_parameters(model)
    ours, plain = pairs
    for (name, want), got in zip(plain.named_parameters(), ours.parameters(), strict=True):
        same(full(got), want, name, 1e-9)
    with torch.no_grad():
        same(ours(tokens(9)), plain(tokens(9)), "evaluation", 1e-9)
    twins.train([5])


@pytest.mark.parity("fault n: copy.deepcopy")
@pytest.mark.torch_fails("fault n", match="does not support deepcopy")
@pytest.mark.parametrize("body", [deepcopied, averaged])
def test_deepcopy(on_ranks, body) -> None:
    on_ranks(body)


def submodule_first(engine) -> None:
    """A block alone, in evaluation and in training, then the whole."""

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())

    twins = Twins(Lm(), wrap)
    x = floats(0)
    with torch.no_grad():
        same(twins.sharded.layers[0](x), twins.plain.layers[0](x), "block")
    for model in (twins.plain, twins.sharded):
        mean_square(model.layers[1], x).backward()
    twins.check_grads()
    twins.zero_grad()
    twins.train()


@pytest.mark.parity("fault o: submodule first")
@pytest.mark.torch_fails("fault o", match="already been lazily initialized")
def test_submodule_first(on_ranks) -> None:
    on_ranks(submodule_first)
