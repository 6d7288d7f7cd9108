"""What users do with a sharded model: the numbers stay the plain model's."""

import functools

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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d.testing import fake_world, record_collectives


def wrap_layers(engine, **options):
    return lambda model: shard_layers(engine, model, device_mesh(), **options)


class Stack(nn.Module):
    """Blocks and nothing else."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoHeads(Stack):
    """Two outputs from two heads, each a unit."""

    def __init__(self) -> None:
        super().__init__(2)
        self.a, self.b = nn.Linear(12, 3), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = super().forward(x)
        return self.a(h), self.b(h)


def several_forwards(engine) -> None:
    def three(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return lm_loss(model, ids) + 2 * lm_loss(model, ids.flip(0)) + lm_loss(model, ids.flip(1))

    def two_backwards(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        first, second = lm_loss(model, ids), lm_loss(model, ids.flip(0))
        ranks = 1 if isinstance(model, engine.FSDPModule) else dist.get_world_size()
        (first / ranks).backward()
        return second

    for reshard in (None, True, False):
        train(Lm(), wrap_layers(engine, reshard_after_forward=reshard), three)
        train(Lm(), wrap_layers(engine, reshard_after_forward=reshard), two_backwards)


@pytest.mark.parity("behaviour: several forwards before a backward")
def test_several_forwards_before_a_backward(on_ranks) -> None:
    on_ranks(several_forwards)


def layer_called_twice(engine) -> None:
    class Twice(Lm):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for i in (0, 1, 0, 1):
                x = self.layers[i](x)
            return self.head(self.norm(x))

    train(Twice(), wrap_layers(engine))


@pytest.mark.parity("behaviour: several forwards before a backward")
def test_unit_called_twice_in_a_forward(on_ranks) -> None:
    on_ranks(layer_called_twice)


def one_output(engine) -> None:
    def wrap(model: nn.Module) -> None:
        engine.fully_shard(model.a, mesh=device_mesh())
        engine.fully_shard(model.b, mesh=device_mesh())
        shard_layers(engine, model, device_mesh())

    twins = Twins(TwoHeads(), wrap, lambda m, x: m(x)[1].square().mean(), floats)
    twins.train()
    # Now the other; and then both, one after the other.
    twins.loss = lambda m, x: m(x)[0].square().mean()
    twins.train()

    def both(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        a, b = model(x)
        ranks = 1 if isinstance(model, engine.FSDPModule) else dist.get_world_size()
        (a.square().mean() / ranks).backward(retain_graph=True)
        return b.square().mean()

    twins.loss = both
    twins.train()


@pytest.mark.parity("behaviour: backward of one of two outputs")
def test_backward_of_one_of_two_outputs(on_ranks) -> None:
    on_ranks(one_output)


def freezing(engine) -> None:
    """A layer trained, frozen, trained again, frozen again; its neighbours all the while."""
    twins = Twins(Lm(layers=3), wrap_layers(engine))
    for index in range(6):
        for model in (twins.plain, twins.sharded):
            model.layers[1].requires_grad_(index % 3 != 1)
            model.embed.requires_grad_(index % 2 == 0)
        twins.backward(index)
        twins.check_grads()
        twins.step()
    twins.check_weights()


def frozen_at_first(engine) -> None:
    def build() -> nn.Module:
        model = Lm()
        model.layers[0].requires_grad_(False)
        return model

    twins = Twins(build(), wrap_layers(engine))
    for index in range(4):
        if index == 2:
            for model in (twins.plain, twins.sharded):
                model.requires_grad_(True)
        twins.backward(index)
        twins.check_grads()
        twins.step()


@pytest.mark.parity("behaviour: frozen, unfrozen, refrozen parameters")
@pytest.mark.parametrize("body", [freezing, frozen_at_first])
def test_frozen_and_unfrozen(on_ranks, body) -> None:
    on_ranks(body)


class Lora(nn.Module):
    """A frozen linear and a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.down = nn.Linear(12, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x)) + self.up(self.down(x))


class LoraStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parity("behaviour: frozen buckets hold no gradient or reduce buffers (LoRA)")
def test_lora(on_ranks, engine) -> None:
    """Only the trained parameters' bytes are reduced."""
    on_ranks(lora)
    with fake_world(0, 2):
        mesh = device_mesh()
        model = engine.fully_shard(Lora(), mesh=mesh)
        with record_collectives(mesh) as recorder:
            model(floats(0).float()).sum().backward()
        (scatter,) = recorder.select("reduce_scatter")
        assert scatter.bytes == 4 * 2 * 12 * 2
        assert model.base.weight.grad is None


def lora(engine) -> None:
    train(LoraStack(), wrap_layers(engine), mean_square, floats)


def shared(engine) -> None:
    """One weight in two places of a unit; a module in two places; the same in a list unit."""
    train(Lm(tied=True), lambda m: engine.fully_shard(m, mesh=device_mesh()))

    def wrap(model: nn.Module) -> None:
        engine.fully_shard([model.embed, model.norm, model.head], mesh=device_mesh())
        shard_layers(engine, model, device_mesh())
        assert model.head.weight is model.embed.weight

    train(Lm(tied=True), wrap)

    class SharedLayer(Stack):
        def __init__(self) -> None:
            super().__init__(2)
            self.layers.append(self.layers[0])

    train(
        SharedLayer(),
        lambda m: engine.fully_shard(m, mesh=device_mesh()),
        mean_square,
        floats,
    )


@pytest.mark.parity("behaviour: shared parameters")
def test_shared_parameters(on_ranks) -> None:
    on_ranks(shared)


CODES = {
    torch.uint8: lambda: torch.arange(12 * 12, dtype=torch.uint8).view(12, 12),
    torch.int64: lambda: torch.arange(12 * 12).view(12, 12) - 9,
    torch.bool: lambda: torch.arange(12 * 12).view(12, 12) % 3 == 0,
}


class Quantized(nn.Module):
    """A frozen table of codes beside a trained linear."""

    def __init__(self, codes: torch.Tensor) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ (self.codes.to(x.dtype) / 255 - 0.3))


def non_float(engine) -> None:
    """Also where a policy casts what is floating."""
    codes = CODES[torch.uint8]
    train(
        Quantized(codes()), lambda m: engine.fully_shard(m, mesh=device_mesh()), mean_square, floats
    )
    policy = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for dtype, codes in CODES.items():
        model = engine.fully_shard(Quantized(codes()), mesh=device_mesh(), mp_policy=policy)
        for _ in range(2):
            mean_square(model, floats(0)).backward()
        assert model.codes.grad is None and model.codes.dtype == dtype
        assert torch.equal(full(model.codes), codes())


@pytest.mark.smoke
@pytest.mark.parity("behaviour: non-float parameters")
def test_non_float_parameters(on_ranks) -> None:
    on_ranks(non_float)


class Narrow(nn.Module):
    """Parameters with fewer rows than ranks; maybe one of none at all."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.one, self.three = nn.Linear(12, 1), nn.Linear(1, 3)
        self.few = nn.Parameter(torch.randn(rows, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.one(x)) + self.few.sum()


def uneven(engine) -> None:
    """Three and five rows and more over four ranks; ranks that hold nothing."""
    train(Narrow(), lambda m: engine.fully_shard(m, mesh=device_mesh()), mean_square, floats)
    train(
        Lm(dim=11, hidden=9, vocab=17),
        wrap_layers(engine),
        batch=functools.partial(tokens, vocab=17),
    )
    mesh = device_mesh(1, 4)
    twins = train(Narrow(), lambda m: engine.fully_shard(m, mesh=mesh), mean_square, floats)
    twins.backward()
    norm = engine.clip_grad_norm_(twins.sharded, 0.01)
    want = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
    same(full(norm), want, "norm", 1e-6)
    twins.check_weights()


@pytest.mark.smoke
@pytest.mark.parity("behaviour: uneven sharding", "behaviour: empty shards")
def test_uneven_sharding_and_empty_shards(on_ranks) -> None:
    on_ranks(uneven, size=4)


def no_rows(engine) -> None:
    train(Narrow(0), lambda m: engine.fully_shard(m, mesh=device_mesh()), mean_square, floats)


@pytest.mark.parity("behaviour: empty shards")
@pytest.mark.torch_fails("found: no elements", match="_chunk_cat expects non-empty tensor")
def test_parameter_without_elements(on_ranks) -> None:
    on_ranks(no_rows)


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedAround(Stack):
    """One checkpoint around several units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointing(engine) -> None:
    def inputs(index: int) -> torch.Tensor:
        return floats(index).requires_grad_()  # which reentrant checkpoints need

    for reshard in (None, False):
        wrap = wrap_layers(engine, reshard_after_forward=reshard)
        for reentrant in (False, True):
            model = Checkpointed()
            model.reentrant = reentrant
            train(model, wrap, mean_square, inputs)
        train(CheckpointedAround(), wrap, mean_square, inputs)

    def wrap_inside(model: nn.Module) -> None:
        """The checkpoint wrapper is the unit's child, and the unit's own class stays."""
        mesh = device_mesh()
        for i, layer in enumerate(model.layers):
            model.layers[i] = engine.fully_shard(checkpoint_wrapper(layer), mesh=mesh)
        engine.fully_shard(model, mesh=mesh)

    twins = Twins(Stack(), wrap_inside, mean_square, inputs)
    for index in range(2):
        twins.backward(index)
        twins.check_grads()
        twins.step()


@pytest.mark.parity("behaviour: activation checkpointing")
def test_activation_checkpointing(on_ranks) -> None:
    """Reentrant and not, around one unit, around several, inside one."""
    on_ranks(checkpointing)


def arrangements(engine) -> None:
    """Units in units, only some children units, only the root."""

    def nested(model: nn.Module) -> None:
        mesh = device_mesh()
        for layer in model.layers:
            engine.fully_shard(layer.up, mesh=mesh)
        shard_layers(engine, model, mesh)

    def siblings(model: nn.Module) -> None:
        for layer in (model.layers[0], model.layers[1], model.head):
            engine.fully_shard(layer, mesh=device_mesh())
        engine.fully_shard(model, mesh=device_mesh())

    def root(model: nn.Module) -> None:
        engine.fully_shard(model, mesh=device_mesh())

    def root_without_parameters(model: nn.Module) -> None:
        for child in (model.embed, *model.layers, model.norm, model.head):
            engine.fully_shard(child, mesh=device_mesh())
        engine.fully_shard(model, mesh=device_mesh())

    for wrap in (nested, siblings, root, root_without_parameters):
        train(Lm(), wrap)


@pytest.mark.parity(
    "behaviour: nested units", "behaviour: sibling units", "behaviour: root-only unit"
)
def test_arrangements_of_units(on_ranks) -> None:
    on_ranks(arrangements)


def no_root(engine) -> None:
    """Units in a plain module, which itself is none: its own parameters are left alone."""

    def wrap(model: nn.Module) -> None:
        for layer in model.layers:
            engine.fully_shard(layer, mesh=device_mesh())

    twins = Twins(Lm(), wrap)
    for index in range(2):
        twins.zero_grad()
        twins.backward(index)
        for p in twins.sharded.parameters():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        twins.check_grads()


@pytest.mark.parity("behaviour: sibling units")
def test_siblings_without_a_root(on_ranks) -> None:
    on_ranks(no_root)


class Methods(Stack):
    """A model that is also used by a method of its own."""

    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return super().forward(x) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0].half_way(x) + self.layers[1](x)


class Halves(Block):
    def half_way(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class HalvesStack(Methods):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers.extend(Halves() for _ in range(2))


def forward_methods(engine) -> None:
    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())
        engine.register_fsdp_forward_method(model, "encode")
        engine.register_fsdp_forward_method(model.layers[0], "half_way")
        with pytest.raises(ValueError, match="nothing_like_it"):
            engine.register_fsdp_forward_method(model, "nothing_like_it")

    train(HalvesStack(), wrap, mean_square, floats)
    train(HalvesStack(), wrap, lambda m, x: m.encode(x, scale=0.5).square().mean(), floats)
    plain = HalvesStack()
    engine.register_fsdp_forward_method(plain, "encode")  # not sharded: nothing happens
    assert type(plain) is HalvesStack and "encode" not in vars(plain)


@pytest.mark.parity("function: register_fsdp_forward_method")
def test_register_forward_method(on_ranks) -> None:
    on_ranks(forward_methods)


def shared_context(engine) -> None:
    """Two roots, as the chunks of a pipeline are, one after the other."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Stack(2), Stack(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    def wrap(model: nn.Module) -> None:
        mesh = device_mesh()
        roots = [shard_layers(engine, each, mesh) for each in (model.first, model.second)]
        engine.share_comm_ctx(roots)
        engine.share_comm_ctx([])
        with pytest.raises(ValueError, match="Linear"):
            engine.share_comm_ctx([roots[0], nn.Linear(2, 2)])

    train(Pair(), wrap, mean_square, floats)


@pytest.mark.parity("function: share_comm_ctx")
def test_share_comm_ctx(on_ranks) -> None:
    on_ranks(shared_context)


def structures(engine) -> None:
    """Inputs and outputs in dicts, tuples and keywords; an input that is returned as it is."""

    class Odd(Block):
        def forward(self, x, *, extra):
            y = super().forward(x + extra["shift"][0])
            return {"y": y, "pair": (y * 2, [extra["shift"][1]])}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Odd() for _ in range(2))

        def forward(self, x):
            first = self.layers[0](x, extra={"shift": (x, x * 2)})
            second = self.layers[1](first["y"], extra={"shift": (first["pair"][0], first["y"])})
            return second["pair"][0] + second["pair"][1][0]

    train(Model(), wrap_layers(engine), mean_square, floats)


@pytest.mark.parity("behaviour: structures of inputs and outputs")
def test_structures_of_inputs_and_outputs(on_ranks) -> None:
    on_ranks(structures)


@pytest.mark.parity("behaviour: stable parameter identity")
@pytest.mark.parametrize(
    "reshard",
    [
        pytest.param(None, marks=pytest.mark.torch_fails("#144289", match="assert")),
        pytest.param(False, marks=pytest.mark.torch_fails("#144289", match="assert")),
        True,
    ],
)
def test_parameters_are_the_same_objects_at_rest(engine, reshard) -> None:
    """Also between forward and backward, and where the root is not resharded."""
    with fake_world(0, 2):
        model = shard_layers(engine, Lm(), device_mesh(), reshard_after_forward=reshard)
        objects = [id(p) for p in model.parameters()]
        loss = lm_loss(model, tokens(0))
        assert [id(p) for p in model.parameters()] == objects
        loss.backward()
        assert [id(p) for p in model.parameters()] == objects
