"""memory="static": the same bits in buffers that stay where they are, and nothing of the user's in them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from _support import host_table
from _support.ep.models import Mixture, batch
from _support.extended import Bf16, extend, mlp
from _support.fsdp.beside_plain import Layer, Trial, features
from _support.fsdp.random_trainings import Training, found_by, random_training
from _support.fsdp.wrapped import at_rest, buckets, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from llama import SIZES, Llama, RotaryEmbedding
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d import MeshLayout, MixedPrecisionPolicy, parallelize
from parallel3d._torch.simulated import inner_tensors
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import CommHookState, full_params, fully_shard, reduce_scatter_hook
from parallel3d.fsdp.layout import BufferPool, in_ring
from parallel3d.fsdp.options import memory
from parallel3d.testing import GlooPool, fake_world, local_world
from parallel3d.tools.dryrun import record

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def storages(tensors: Any) -> set[int]:
    """Of all ranks."""
    return {each.untyped_storage()._cdata for t in tensors for each in inner_tensors(t)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def kept(model: nn.Module) -> list[torch.Tensor]:
    """The fixed buffers."""
    places = [bucket.settings.memory.place for bucket in buckets(model)]
    slots = [slot for place in places for slot in (place.slot, place.scratch)]
    found = [tensor for slot in slots for tensor in slot.buffers.values()]
    return found + [tensor for place in places for tensor in place.lent.tensors]


def fixed(model: nn.Module) -> set[int]:
    """Their storages."""
    return storages(kept(model))


def unsharded(model: nn.Module) -> list[int]:
    """For each bucket, which one's memory it has: the first with the same."""
    where = [
        next(iter(inner_tensors(bucket.precision.unsharded))).data_ptr()
        for bucket in buckets(model)
        if bucket.precision.has_own_unsharded
    ]
    return [where.index(address) for address in where]


# ---- arithmetic ----


def test_which_units_share_is_the_least_memory() -> None:
    """Of all ways to put the largest units apart."""
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice([1, 2, 3, 5, 8, 20, 21]) for _ in range(draw.randrange(9))]
        slots = draw.choice([1, 2, 3])
        shared = [size for size, shares in zip(sizes, in_ring(sizes, slots), strict=True) if shares]

        def cost(shared: list[int], sizes: list[int] = sizes, slots: int = slots) -> int:
            return sum(sizes) - sum(shared) + slots * max(shared, default=0)

        ways = (sorted(sizes)[:few] for few in range(len(sizes) + 1))
        assert cost(shared) == min(map(cost, ways))
        assert not shared or len(shared) > slots
    assert in_ring([4, 4, 4, 4], 2) == [True] * 4
    assert in_ring([9, 4, 4, 4], 2) == [False, True, True, True]


def test_a_pool_lends_the_smallest_that_fits() -> None:
    pool = BufferPool()
    assert [pool.lend("a", size) for size in (8, 4, 4)] == [0, 1, 2]
    pool.give_back([0, 2])
    assert pool.lend("b", 4) == 3  # another kind
    assert pool.lend("a", 3) == 2
    assert pool.lend("a", 3) == 4  # twice as large at most
    assert pool.lend("a", 5) == 0
    assert pool.buffers == [("a", 8), ("a", 4), ("a", 4), ("b", 4), ("a", 3)]
    assert [pool.lend("c", size, largest=9) for size in (2, 9)] == [5, 6]
    pool.give_back([5])
    assert pool.lend("c", 1, largest=9) == 5
    assert pool.buffers[5:] == [("c", 9), ("c", 9)]


# ---- the same bits ----

MESHES = {
    "fsdp": (1, 3, 1),
    "hsdp": (2, 2, 1),
    "replicate": (2, 1, 1),
    "tp": (1, 2, 2),
    "hsdp, tp": (2, 2, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mp_policy": BF16},
    "bf16 sums": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "narrow sums": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)},
    "eval": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True)},
    "recomputed": {"activation_checkpointing": True},
    "kept": {"fsdp": p3d.Sharding(reshard_after_forward=False)},
    "hfsdp": {"fsdp": p3d.Sharding(shard_optimizer_over_replicate=True), "mp_policy": BF16},
}


def trained(layout: MeshLayout, options: dict[str, Any], memory: str) -> list[torch.Tensor]:
    """Gradients, evaluations and weights of three steps of two micro-batches."""
    found: list[torch.Tensor] = []
    with local_world(layout.world_size) as world:

        def read(sample: int) -> torch.Tensor:
            with world.paused():
                samples = [tokens(sample + 100 * rank) for rank in range(layout.data_size)]
            return world.map(lambda rank: samples[layout.data_rank(rank)])

        with world.paused():
            torch.manual_seed(0)
            model: Any = Lm(layers=5)
        mesh = p3d.build_mesh(layout, device_type="cpu")
        plan = LM_PLAN if layout.tp > 1 else None
        parallelize(model, mesh, plan, memory=memory, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model.eval()
            with torch.no_grad():
                found += inner_tensors(model(read(step)).clone())
            model.train()
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                lm_loss(model, read(2 * step + micro)).backward()
            for param in model.parameters():
                found += [each.clone() for each in inner_tensors(local(param.grad))]
            if memory == "static":
                grads = storages(local(param.grad) for param in model.parameters())
                assert not grads & fixed(model)
            optimizer.step()
            optimizer.zero_grad()
        for param in model.parameters():
            found += [each.clone() for each in inner_tensors(local(param))]
        assert at_rest(model)
    return found


CASES = [(mesh, option) for mesh in MESHES for option in OPTIONS]
QUICK = [("hsdp", "bf16"), ("fsdp", "recomputed"), ("hsdp, tp", "plain")]


@pytest.mark.parametrize(
    ("mesh", "option"),
    [pytest.param(*c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in CASES],
)
def test_bits_are_those_without(mesh: str, option: str) -> None:
    layout, options = MeshLayout(*MESHES[mesh]), OPTIONS[option]
    found, wanted = (trained(layout, options, memory) for memory in ("static", "on demand"))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


def experts(layout: MeshLayout, memory: str) -> list[torch.Tensor]:
    with local_world(layout.world_size) as world:
        with world.paused():
            torch.manual_seed(0)
            model: Any = Mixture(experts=8)
        mesh = p3d.build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, memory=memory, checks=p3d.Checks(audit=False))
        found = []
        for step in range(2):
            model(batch(step)).square().mean().backward()
            for param in model.parameters():
                found += [each.clone() for each in inner_tensors(local(param.grad))]
                param.grad = None
    return found


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1)], ids=["fsdp", "hsdp"])
def test_bits_of_experts(sizes: tuple[int, int, int]) -> None:
    """Whose units are inside the blocks', and sharded over other ranks."""
    layout = MeshLayout(*sizes, ep=2)
    found, wanted = experts(layout, "static"), experts(layout, "on demand")
    assert found and all(map(torch.equal, found, wanted))


# ---- where buffers lie ----


@pytest.mark.parametrize(("named", "slots"), [(0, 2), (2, 3)])
def test_blocks_take_turns(named: int, slots: int) -> None:
    """As many as the schedule has in flight; the embedding, the head and the root are apart."""
    layout = MeshLayout(1, 2, 1)
    with local_world(2):
        torch.manual_seed(0)
        model: Any = Lm(layers=7, vocab=997)  # whose embedding is larger than two blocks
        parallelize(model, p3d.build_mesh(layout, device_type="cpu"), memory="static")
        for at, layer in enumerate(model.layers):
            if named:
                layer.set_modules_to_forward_prefetch(model.layers[at + 1 : at + 1 + named])
        seen = []
        for step in range(3):
            lm_loss(model, tokens(step)).backward()
            seen.append(unsharded(model))
        assert seen[0] == [0, *(1 + at % slots for at in range(7)), 8]
        assert seen[1:] == seen[:1] * 2
        before = fixed(model)
        with torch.no_grad():
            model(tokens(0))
        assert fixed(model) == before


def test_after_a_conversion_there_are_others() -> None:
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks))
        for convert in (nn.Module.double, nn.Module.float):
            for model in (trial.plain, trial.model):
                convert(model).zero_grad()
            dtype = next(trial.plain.parameters()).dtype
            trial.sample = lambda sample, dtype=dtype: features(sample).to(dtype)
            for step in range(2):
                trial.backward(step)
            trial.check([0, 1], tolerance=1e-12 if dtype is torch.float64 else 1e-6)
            assert {tensor.dtype for tensor in kept(trial.model)} == {dtype}


def static(wrap: Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """``wrap``, and static memory."""

    def wrapped(model: nn.Module, mesh: Any) -> nn.Module:
        made: Any = wrap(model, mesh, **options)
        made.set_static_memory(True)
        return made

    return wrapped


def test_the_first_forward_may_be_in_a_transform() -> None:
    """Of torch.func, which has no part in the buffers that are made then."""
    found = []
    with local_world(2) as world:
        for wrap in (static(shard_blocks), shard_blocks):
            trial = Trial(world, MeshLayout(1, 2, 1), wrap, build=Deep)
            x = features(0)
            out, vjp = torch.func.vjp(trial.model, x)
            found.append([*inner_tensors(out), *inner_tensors(vjp(torch.ones_like(out))[0])])
            trial.backward(1)
            trial.check([1])
    assert all(map(torch.equal, *found))


def test_it_is_set_after_the_model_is_made() -> None:
    """By ``to_empty``, ``reshard()`` and ``unshard()``: no forward has run."""
    with local_world(2) as world:

        def wrap(model: nn.Module, mesh: Any) -> nn.Module:
            made: Any = shard_blocks(model, mesh)
            made.reshard()
            made.layers[0].unshard()
            made.set_static_memory(True)
            return made

        trial = Trial(world, MeshLayout(1, 2, 1), wrap, build=Deep)
        for step in range(3):
            trial.backward(step)
            trial.check([step])
            trial.step()
            others = {b.unit for b in buckets(trial.model) if not b.settings.memory.is_fixed}
            assert others == ({"layers.0"} if step == 0 else set())  # which the user has unsharded
            trial.model.layers[0].reshard()


# ---- what a user may hold ----


def test_nothing_of_the_users_lies_there() -> None:
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks), build=Deep)
        model = trial.model
        trial.backward(0)
        shared = fixed(model)
        with full_params(model):
            assert not storages(p.detach() for p in model.parameters()) & shared
        model.layers[1].unshard()
        held = model.layers[1].linear.weight
        others = [b for b in buckets(model) if b.unit != "layers.1"]
        assert not storages([held]) & storages(b.precision.unsharded for b in others)
        values = [each.clone() for each in inner_tensors(held.detach())]
        model.layers[1].reshard()
        model.zero_grad()
        trial.backward(1)
        trial.check([1])
        assert all(map(torch.equal, inner_tensors(held.detach()), values))


@pytest.mark.parametrize("kind", ["comm", "all_reduce"])
def test_what_hooks_are_given_lies_apart(kind: str) -> None:
    """Those of communication, of gradients, and of modules: what they keep is never written again."""
    held: list[torch.Tensor] = []
    with local_world(4) as world:
        trial = Trial(world, MeshLayout(2, 2, 1), static(shard_blocks, mp_policy=BF16), build=Deep)
        model: Any = trial.model

        def comm(state: CommHookState, grad: torch.Tensor, output: Any = None) -> Any:
            held.append(grad)
            return reduce_scatter_hook(state, grad, output)

        if kind == "comm":
            model.register_comm_hook(CommHookState(), comm)
        for layer in model.layers:
            if kind == "all_reduce":
                layer.set_all_reduce_hook(held.append)
            layer.register_forward_hook(lambda m, args, out: held.extend([m.linear.weight, out]))
            layer.register_full_backward_hook(lambda m, given, got: held.extend([*given, *got]))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
        for step in range(2):
            trial.backward(step)
        found = [local(t).detach() for t in held if t is not None]
        assert len(found) > 60
        assert not storages(found) & fixed(model)


class Deep(nn.Module):
    """Six blocks and a head."""

    def __init__(self, block: type = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(rows=9) for _ in range(6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Idle(Layer):
    """One parameter is not used."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.idle = nn.Parameter(torch.ones(6))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the units that were freed for another one."""
    found: list[str] = []
    inner = memory._free

    def noting(unit: Any, *rest: Any) -> None:
        found.append(unit.label)
        inner(unit, *rest)

    monkeypatch.setattr(memory, "_free", noting)
    return found


def test_a_block_that_waits_for_a_gradient_gives_way(freed: list[str]) -> None:
    """The backward of a block with a parameter that is not used ends with the whole one."""
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks), build=lambda: Deep(Idle))
        for step in range(3):
            trial.backward(step)
            trial.check([step])
            trial.step()
    assert len(freed) == 3 * 4


class Around(Deep):
    """Three blocks at a time are recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for first in range(0, len(self.layers), 3):
            some = self.layers[first : first + 3]
            x = checkpoint(lambda y, some=some: nn.Sequential(*some)(y), x, use_reentrant=False)
        return self.head(x)


class Shared(Deep):
    """The first block runs again at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("build", [Around, Shared])
def test_more_blocks_than_buffers_are_needed_at_once(build: type, freed: list[str]) -> None:
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks), build=build)
        for step in range(2):
            trial.backward(step)
            trial.check([step])
            trial.step()
    assert freed


class Hoarder(nn.Module):
    """Leaves what it has computed where the engine does not look."""

    hoard: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Hoarder.hoard.append(self.linear(x).tanh() @ self.linear.weight)
        return self.linear(x)


def test_a_backward_that_nobody_told_of_is_an_error() -> None:
    """Its slot holds the values of another unit."""
    Hoarder.hoard.clear()
    with local_world(2) as world:

        def wrap(model: Any, mesh: Any) -> nn.Module:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        def build() -> nn.Module:
            return nn.Sequential(*(Hoarder() for _ in range(4)))

        trial = Trial(world, MeshLayout(1, 2, 1), static(wrap), build=build)
        trial.forward(0)
        with pytest.raises(StateError, match="reads parameters of the unit while they are freed"):
            Hoarder.hoard[0].square().mean().backward()
    Hoarder.hoard.clear()


def test_a_broken_backward_gives_its_memory_back() -> None:
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks), build=Deep)

        def fail(_: torch.Tensor) -> None:
            raise KeyError("a test's")

        trial.backward(0)
        handle = trial.model.layers[2].register_forward_hook(
            lambda m, args, out: out.register_hook(fail) and None
        )
        sizes = []
        for step in range(3):
            with pytest.raises(KeyError):
                trial.backward(step)
            trial.model.zero_grad()
            place = buckets(trial.model)[0].settings.memory.place
            assert not place.lent.out
            sizes.append(len(place.lent.tensors))
        assert sizes == sizes[:1] * 3
        handle.remove()
        trial.backward(5)
        trial.check([5])


def test_a_copy_has_memory_of_its_own() -> None:
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), static(shard_blocks))
        trial.backward(0)
        trial.model, shared = copy.deepcopy(trial.model), fixed(trial.model)
        trial.model.zero_grad()
        trial.backward(1)
        trial.check([1])
        assert not any(bucket.settings.memory.is_fixed for bucket in buckets(trial.model))
        assert not storages(b.precision.unsharded for b in buckets(trial.model)) & shared


# ---- what is refused ----


def wrapped(**options: Any) -> Any:
    mesh = p3d.build_mesh(MeshLayout(shard=2), device_type="cpu")
    return shard_blocks(Deep(), mesh, **options)


def test_refused() -> None:
    with fake_world(0, 2):
        mesh = p3d.build_mesh(MeshLayout(shard=2), device_type="cpu")
        with pytest.raises(
            ValueError, match="memory is 'ring'; it must be 'on demand' or 'static'"
        ):
            parallelize(Lm(), mesh, memory="ring")
        with pytest.raises(ValueError, match="memory='static' is not possible with engine"):
            parallelize(Lm(), mesh, memory="static", engine="torch")
        extended = fully_shard(extend(mlp(24), Bf16), mesh=mesh)
        with pytest.raises(ValueError, match=r"all-gather extension .* leave memory= out"):
            extended.set_static_memory(True)
        with pytest.raises(ValueError, match="static"):
            extended.set_static_memory("yes")
        model = wrapped()
        model.set_static_memory(True)
        model.layers[0].set_custom_all_gather(Rows())
        with pytest.raises(Parallel3dError, match=r"layers.0 has a collective .* set_custom"):
            model(torch.ones(1, 6))
        model = wrapped()
        model(torch.ones(1, 6))
        with pytest.raises(StateError, match="before the first forward"):
            model.set_static_memory(True)


class Rows:
    """A custom all-gather."""

    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(size, **options)

    def __call__(self, **tensors: Any) -> None:
        raise AssertionError("not called")


def test_unshard_between_forward_and_backward_is_refused() -> None:
    with fake_world(0, 2):
        model = wrapped()
        model.set_static_memory(True)
        model(torch.ones(1, 6)).sum().backward()
        loss = model(torch.ones(1, 6)).sum()
        with pytest.raises(StateError, match="before the forward, name units to gather ahead"):
            model.layers[2].unshard()
        loss.backward()
        model.layers[2].unshard()  # its graph is still there, but its backward is over
        assert model.layers[2].linear.weight.shape == (9, 6)


class Nested(Layer):
    """Runs another unit, which is not inside it."""

    other: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.other is None else self.other[0](x))


def test_a_unit_within_another_that_has_its_memory() -> None:
    with fake_world(0, 2):
        model: Any = Deep()
        model.layers = nn.ModuleList(Nested(9) for _ in range(6))
        mesh = p3d.build_mesh(MeshLayout(shard=2), device_type="cpu")
        model = shard_blocks(model, mesh)
        model.layers[4].other = [model.layers[2]]
        model.set_static_memory(True)
        with pytest.raises(
            StateError,
            match=r"layers.2 runs within the forward of unit layers.4, .* give it reshard",
        ):
            model(torch.ones(1, 6))


# ---- allocations ----


@pytest.mark.parametrize("case", host_table.CASES, ids=str)
def test_allocations_are_the_plain_models(case: host_table.Case) -> None:
    """But for one of each unit, on an accelerator: its sharded gradients. Nothing else is more."""
    found, before = (host_table.of_unit(case, engine) for engine in ("static", "ours"))
    alone = host_table.Case("TP alone", (1, 1, 2))  # whose units' gradients are allocated together
    layers = host_table.of_unit(alone, "ours")["allocations"] if case.mesh[2] > 1 else 0
    assert found["allocations"] == 1 + layers < before["allocations"]
    assert all(found[what] <= before[what] for what in found if what != "Python calls")


SMALL = replace(SIZES["nano"], n_layers=4, dim=64, hidden_dim=96, vocab_size=128)


def steps_of(layout: MeshLayout | None, memory: str, policy: MixedPrecisionPolicy | None) -> None:
    """Four; ``layout`` None: of the plain model."""
    mesh = p3d.build_mesh(layout) if layout else None
    with torch.device("meta"):
        model = Llama(SMALL)
    if mesh is not None:
        parallelize(model, mesh, mp_policy=policy, memory=memory)
        p3d.materialize(model, device="cpu")
    else:
        model.to(policy.param_dtype if policy else None)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.float()  # its tables, which mixed precision leaves as they are
        model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    ids = torch.arange(48).view(2, 24)
    for _ in range(4):
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "sizes", [(1, 4), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["fsdp", "hsdp"]
)
def test_a_step_allocates_as_the_plain_model_does(sizes: tuple[int, int], policy: Any) -> None:
    """In a dry run: but for the sharded gradients of the embedding, each block, and the head."""

    def counts(layout: MeshLayout | None, memory: str = "on demand") -> list[int]:
        run = record(lambda: steps_of(layout, memory, policy), layout.world_size if layout else 1)
        return [each.allocations for each in run.step_counts[1:4]]

    layout = MeshLayout(*sizes)
    plain, static, usual = counts(None), counts(layout, "static"), counts(layout)
    assert static == [count + SMALL.n_layers + 2 for count in plain]
    assert min(usual) > max(static)


# -- with every axis and option: random trainings ------------------------------------------------------


FAILED = "failed as it should"


def compare(training: Training) -> int:
    """Returns how many tensors were compared."""
    found, wanted = (found_by(training, memory=memory) for memory in ("static", "on demand"))
    assert [what for what, _ in found] == [what for what, _ in wanted], training
    for (what, got), (_, want) in zip(found, wanted, strict=True):
        # fp16 without a scaler may overflow: on both sides.
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), f"{what}\n{training}"
    assert (FAILED in dict(found)) == bool(training.fails), training
    return len(found)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_few_trainings(seed: int) -> None:
    assert compare(random_training(seed)) > 100


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)], ids=str)
def test_unsharded_after_an_evaluation_in_full_precision(layout: MeshLayout) -> None:
    """The memory of both dtypes is given up: in that of the one not in use others gather."""
    policy = replace(BF16, full_precision_in_eval=True)
    acts = ((), ("evaluation", "unshard"), ())
    compare(Training(layout, "five blocks", {"mp_policy": policy}, acts=acts, seed=1))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_trainings(first: int) -> None:
    """200 on simulated ranks: tp, cp, ep, HSDP, HFSDP; recomputation, dtypes, accumulation, exceptions."""
    for seed in range(first, first + 10):
        assert compare(random_training(seed)) > 100


def check_on_processes(seeds: list[int]) -> None:
    for seed in seeds:
        assert compare(random_training(seed, simulated=False)) > 100


@pytest.mark.slow
def test_a_few_on_processes(gloo_pool: GlooPool) -> None:
    gloo_pool.run(check_on_processes, [0, 1, 2], world_size=4)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_on_processes(gloo_pool: GlooPool, first: int) -> None:
    """60 on four processes: compiled blocks and offloaded activations too."""
    gloo_pool.run(check_on_processes, list(range(first, first + 10)), world_size=4, timeout=500.0)
