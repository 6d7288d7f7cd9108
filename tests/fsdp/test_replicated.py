"""Units that are not sharded: their root registers the parameters, and few all-reduces carry gradients."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from parallel3d import MeshLayout, build_mesh
from parallel3d.errors import StateError
from parallel3d.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from parallel3d.fsdp import layout as layouts
from parallel3d.fsdp.inspect import get_unit
from parallel3d.optim import clip_grad_norm_
from parallel3d.testing import GlooPool, fake_world, local_world, record_collectives, shards_of

WIDTH = 6


class Block(nn.Module):
    """Notes its output; ``recomputes``: a submodule, which is no unit, in backward; ``first`` is called
    before all else."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes
        self.first = lambda: None
        self.seen = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first()
        y = self.norm(x)
        up = checkpoint(self.up, y, use_reentrant=False) if self.recomputes else self.up(y)
        self.seen = x + torch.tanh(up)
        return self.seen


class Model(nn.Module):
    """``skip``: leaves the second block out; ``twice``: runs the first one again."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, skip: bool = False, twice: bool = False) -> torch.Tensor:
        for block in (self.blocks[0], *self.blocks[1 + skip :]):
            x = block(x)
        return self.head(self.blocks[0](x) if twice else x)


def plain(recomputes: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(recomputes).double()


def wrapped(ranks: int, model: Model | None = None) -> Model:
    mesh = build_mesh(MeshLayout(replicate=ranks, shard=1), device_type="cpu")
    model = plain() if model is None else model
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(rank: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def check(model: nn.Module, expected: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            for _, _, local in shards_of(param.grad):
                torch.testing.assert_close(local, other.grad, rtol=0, atol=1e-12, msg=name)


Program = Callable[[Model], object]
Pair = tuple[nn.Module, nn.Module]


def pair(recomputes: bool = False) -> Pair:
    return plain(recomputes), wrapped(1, plain(recomputes))


def step(model: nn.Module, index: int = 0) -> None:
    model(batch(index)).sum().backward()


def compare(program: Program, make: Callable[[], Pair] = pair, ranks: int = 1) -> nn.Module:
    """Runs ``program`` on both, on one of ``ranks``; returns that of units, whose parameters are at rest."""
    with fake_world(0, ranks):
        expected, model = make()
        for each in (expected, model):
            program(each)
        check(model, expected)
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
        return model


# -- what is run -----------------------------------------------------------------------------------------

USES: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "all": lambda model, x: model(x).sum(),
    "a block left out": lambda model, x: model(x, skip=True).sum(),
    "a block twice": lambda model, x: model(x, twice=True).sum(),
    "noted only": lambda model, x: (model(x), model.blocks[1].seen.sum())[1],
    "a block alone": lambda model, x: model.blocks[1](x).sum(),
    "two forwards": lambda model, x: model(x).sum() + model(2 * x).sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("cleared", [False, True])
def test_uses(use: str, recomputes: bool, cleared: bool) -> None:
    def program(model: Model) -> None:
        for index in range(3):
            if cleared:
                model.zero_grad()
            USES[use](model, batch(index)).backward()

    compare(program, partial(pair, recomputes))


@pytest.mark.parametrize("use", ["all", "a block left out", "a block twice"])
def test_average_over_ranks(use: str) -> None:
    with local_world(4) as world:
        with world.paused():
            expected = plain()
            for rank in range(4):
                (USES[use](expected, batch(rank)) / 4).backward()
            batches = [batch(rank) for rank in range(4)]
        model = wrapped(4)
        for _ in range(2):
            model.zero_grad()
            USES[use](model, world.map(lambda r: batches[r])).backward()
        check(model, expected)


def _train(model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """A step for each list, the mean over its batches; the second step leaves a block out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, each in enumerate(batches):
        for x in each:
            (model(x, skip=index == 1).square().mean() / len(each)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _on_gloo(steps: int) -> list[torch.Tensor]:
    rank = torch.distributed.get_rank()
    model = wrapped(torch.distributed.get_world_size())
    _train(model, [[batch(10 * index + rank)] for index in range(steps)])
    return [param.to_local().detach().clone() for param in model.parameters()]


def test_processes_beside_the_plain_model(gloo_pool: GlooPool) -> None:
    by_rank = gloo_pool.run(_on_gloo, 3)
    expected, ranks = plain(), range(len(by_rank))
    _train(expected, [[batch(10 * index + rank) for rank in ranks] for index in range(3)])
    for params in by_rank:
        for param, other in zip(params, expected.parameters(), strict=True):
            torch.testing.assert_close(param, other.detach(), rtol=0, atol=1e-12)


# -- what changes between steps, or within one -----------------------------------------------------------


def _replace(model: Model, gradient: float | None = None) -> None:
    new = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5, dtype=torch.float64))
    new.grad = None if gradient is None else torch.full_like(new, gradient)
    model.blocks[1].up.weight = new


def _load(model: Model) -> None:
    state = model.state_dict()
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


def _divide(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].set_gradient_divide_factor(0.5)
    else:
        for param in model.blocks[1].parameters():
            param.register_hook(lambda grad: 2 * grad)


def _hook(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].set_all_reduce_hook(lambda _: None)


def _unshard_and_reshard(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[2].unshard()
        assert model.blocks[2].up(torch.ones(1, WIDTH, dtype=torch.float64)).requires_grad
        model.blocks[2].reshard()


def _reshard(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].reshard()


def _put_off(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].set_requires_gradient_sync(False, recurse=False)


CHANGES: dict[str, Program] = {
    "a parameter frozen": lambda model: model.blocks[1].up.bias.requires_grad_(False),
    "a unit frozen": lambda model: model.blocks[1].requires_grad_(False),
    "a unit with a hook": _hook,
    "another divisor": _divide,
    "no sync": _put_off,
    "gathered and resharded": _unshard_and_reshard,
    "resharded": _reshard,
    "converted to what it is": lambda model: model.blocks[2].to("cpu"),
    "thawed": lambda model: model.blocks[2].requires_grad_(True),
    "recomputed from now on": lambda model: setattr(model.blocks[1], "recomputes", True),
}
BETWEEN_STEPS: dict[str, Program] = CHANGES | {
    "replaced": _replace,
    "replaced, with a gradient": partial(_replace, gradient=2.0),
    "loaded by assignment": _load,
    "converted and back": lambda model: model.float().double(),
    "evaluated": lambda model: model.eval() and model(batch()),
    "compiled": lambda model: model.blocks[1].norm.compile(backend="eager"),
    "a unit by itself": lambda model: step(model.blocks[1], 1),
    "a unit removed": lambda model: model.blocks.__delitem__(1),
}


@pytest.mark.parametrize("change", BETWEEN_STEPS)
@pytest.mark.parametrize("cleared", [False, True])
def test_between_steps(change: str, cleared: bool) -> None:
    def program(model: Model) -> None:
        step(model)
        if cleared:
            model.zero_grad()
        BETWEEN_STEPS[change](model)
        step(model, 1)
        step(model, 2)

    compare(program)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        *itertools.product(CHANGES, ("after the forward", "older graph", "both graphs")),
        *((change, "in it") for change in CHANGES if "frozen" not in change),
    ],
)
def test_within_a_step(change: str, where: str) -> None:
    """In a forward it happens to a unit that runs later; an older graph is one from before the change."""

    def program(model: Model) -> None:
        step(model)
        model.zero_grad()
        if where == "in it":
            model.blocks[0].first = lambda: CHANGES[change](model)
            step(model, 1)
            model.blocks[0].first = lambda: None
        else:
            loss = model(batch(1)).sum()
            CHANGES[change](model)
            if "graph" in where:
                newer = model(batch(2)).sum()
                loss = loss + newer if where == "both graphs" else loss
            loss.backward()
        step(model, 3)

    compare(program)


def test_accumulation() -> None:
    """Sums that wait, whose switch is set between forward and backward too."""

    def program(model: Model) -> None:
        step(model)
        if not isinstance(model, FSDPModule):
            return [step(model, index) for index in (1, 2, 3)]
        with model.no_sync():
            step(model, 1)
        loss = model(batch(2)).sum()
        with model.no_sync():
            loss.backward()
        return step(model, 3)

    compare(program)


def test_gathered_by_the_user() -> None:
    with fake_world(0, 1):
        expected, model = pair()
        step(model)
        model.zero_grad()
        model.blocks[1].unshard()
        for each in (expected, model):
            step(each, 1)
        model.blocks[1].reshard()
        check(model, expected)


# -- exceptions ------------------------------------------------------------------------------------------


def fail(*_: object) -> None:
    raise ZeroDivisionError


def break_backward(model: Model) -> None:
    loss = model(batch()).sum()
    handle = model.blocks[1].seen.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()


def break_forward(model: Model, kind: type[BaseException] = ZeroDivisionError) -> None:
    def explode() -> None:
        raise kind

    model.blocks[1].first = explode
    with pytest.raises(kind):
        model(batch(1))
    model.blocks[1].first = lambda: None


def break_backward_in_forward(model: Model) -> None:
    """The forward goes on, and its backward brings all gradients."""
    params = list(model.parameters())

    def swallow() -> None:
        x = batch().requires_grad_() * 1
        x.register_hook(fail)  # after the parameters' gradients
        with pytest.raises(ZeroDivisionError):
            model.blocks[0].up(x).sum().backward()
        for param in params:  # which have come in the plain model only
            param.grad = None

    model.blocks[1].first = swallow
    loss = model(batch(1)).sum()
    model.blocks[1].first = lambda: None
    loss.backward()


BREAKS: dict[str, Program] = {
    "forward": break_forward,
    "forward, KeyboardInterrupt": partial(break_forward, kind=KeyboardInterrupt),
    "backward": break_backward,
}


@pytest.mark.parametrize("alone", [False, True], ids=["all", "a unit alone"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("broken", BREAKS)
def test_the_step_after_an_exception(broken: str, recomputes: bool, alone: bool) -> None:
    """Without ``reset_iter_state``."""

    def program(model: Model) -> None:
        for index in range(2):
            BREAKS[broken](model)
            model.zero_grad()
            step(model.blocks[2] if alone else model, index)

    model = compare(program, partial(pair, recomputes))
    assert not get_unit(model).group.is_registered


def test_a_forward_goes_on_after_a_backward_in_it_that_fails() -> None:
    def program(model: Model) -> None:
        step(model)
        model.zero_grad()
        break_backward_in_forward(model)
        step(model, 2)

    compare(program)


def test_a_gradient_with_a_graph_is_an_error() -> None:
    with fake_world(0, 1):
        model = wrapped(1)
        with pytest.raises(StateError, match="create_graph"):
            model(batch()).square().sum().backward(create_graph=True)


# -- hooks: nobody's are taken off -----------------------------------------------------------------------


def hooks_within(model: Model) -> list[int]:
    """How many forward hooks of either kind the second block has while the model runs."""
    block, counts = model.blocks[1], []
    block.first = lambda: counts.append(len(block._forward_hooks) + len(block._forward_pre_hooks))
    step(model)
    block.first = lambda: None
    model.zero_grad()
    return counts


def test_hooks_of_others_stay() -> None:
    with fake_world(0, 1):
        _, model = pair()
        step(model)
        seen = []
        handle = model.blocks[1].register_forward_hook(lambda *_: seen.append("before"))
        assert hooks_within(model) == [3] and seen == ["before"]
        handle.remove()
        assert hooks_within(model) == [2] and seen == ["before"]
        break_forward(model)
        assert hooks_within(model) == [2]


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_comes_within_the_forward(before: bool) -> None:
    with fake_world(0, 1):
        _, model = pair()
        step(model)
        seen, handles, target = [], [], model.blocks[2]
        register = target.register_forward_pre_hook if before else target.register_forward_hook
        model.blocks[0].first = lambda: handles.append(register(lambda *_: seen.append(1)))
        step(model, 1)
        model.blocks[0].first = lambda: None
        hooks = target._forward_pre_hooks if before else target._forward_hooks
        ours, _ = get_unit(target).members.hook_ids(target)[:2]
        assert seen == [1] and len(hooks) == 2
        assert not before or next(iter(hooks)) == ours
        step(target, 2)
        assert seen == [1, 1]
        handles[0].remove()
        step(model, 3)
        assert len(hooks) == 1 and seen == [1, 1]


# -- other models ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def tied() -> Pair:
    torch.manual_seed(0)
    expected = Tied().double()
    model = copy.deepcopy(expected)
    mesh = cpu_mesh(1, 1)
    fully_shard([model.first, model.last], mesh=mesh)
    return expected, fully_shard(model, mesh=mesh)


class Again(nn.Linear):
    def again(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Named(nn.Module):
    """Runs its blocks by a method of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Again(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.again(block(x))
        return x


def named() -> Pair:
    torch.manual_seed(0)
    expected = Named().double()
    model = wrapped(1, copy.deepcopy(expected))
    for block in model.blocks:
        register_fsdp_forward_method(block, "again")
    return expected, model


@pytest.mark.parametrize("make", [tied, named])
def test_other_models(make: Callable[[], Pair]) -> None:
    compare(lambda model: [step(model, index) for index in range(2)], make)


class Root(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def two_roots(ranks: int) -> Pair:
    """A unit inside two roots. Gradients are summed, and no other rank has any."""
    torch.manual_seed(0)
    shared = Block(False)
    expected = nn.ModuleList([Root(Block(False), shared), Root(shared, Block(False))]).double()
    model = copy.deepcopy(expected)
    mesh = cpu_mesh(ranks, 1)
    for module in dict.fromkeys([*model[0].blocks, *model[1].blocks, *model]):
        fully_shard(module, mesh=mesh).set_gradient_divide_factor(1.0)
    return expected, model


OF_TWO_ROOTS: dict[str, Callable[[nn.ModuleList, torch.Tensor], list[torch.Tensor]]] = {
    "both, then their backwards": lambda roots, x: [root(x).sum() for root in roots],
    "in the other order": lambda roots, x: [root(x).sum() for root in roots][::-1],
    "one after the other": lambda roots, x: [roots[1](roots[0](x)).sum()],
    "one backward": lambda roots, x: [roots[0](x).sum() + roots[1](x).sum()],
}


@pytest.mark.parametrize("use", OF_TWO_ROOTS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_roots(ranks: int, use: str, before: bool) -> None:
    """``before``: the first root has trained before the second one."""

    def program(roots: nn.ModuleList) -> None:
        if before:
            step(roots[0])
        for index in range(3):
            for loss in OF_TWO_ROOTS[use](roots, batch(index)):
                loss.backward()

    compare(program, partial(two_roots, ranks), ranks)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_graph_from_before_an_outer_root(recomputes: bool) -> None:
    with fake_world(0, 1):
        torch.manual_seed(0)
        expected = Root(Block(recomputes), Block(recomputes)).double()
        model = wrapped(1, copy.deepcopy(expected))
        for root in (expected, model):
            loss = root.blocks[0](batch()).sum()
            if root is model:
                model.reshard()  # the outer one is the root from now on
            loss.backward()
        check(model, expected)
        for root in (expected, model):
            (root.blocks[0](batch()).sum() + root(batch(1)).sum()).backward()
        check(model, expected)


# -- what is held, copied and freed ----------------------------------------------------------------------


def test_copies_and_held_gradients() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        step(model)
        kept = [param.grad for param in model.parameters()]
        values = [grad.to_local().clone() for grad in kept]
        model.zero_grad()
        for block in model.blocks:
            block.seen = None
        twin = copy.deepcopy(model)
        for each in (expected, model, twin):
            step(each, 1)
        check(model, expected)
        check(twin, expected)
        for grad, value in zip(kept, values, strict=True):
            assert torch.equal(grad.to_local(), value)  # a step later it is what it was


def test_copies_of_a_module_within_a_forward() -> None:
    """As a teacher that is made in the first forward; it has plain Parameters of its own."""
    with fake_world(0, 1):
        outputs, x = [], batch(3)
        for each in pair():
            made: list[torch.nn.Module] = []
            up = each.blocks[1].up
            each.blocks[1].first = lambda up=up, made=made: made.append(copy.deepcopy(up))
            step(each)
            (twin,) = made
            assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.is_leaf
            torch.nn.init.zeros_(twin.bias)
            outputs.append(twin(x))
        torch.testing.assert_close(outputs[0], outputs[1])


def test_clip_grad_norm_and_grad_scaler() -> None:
    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            step(each)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        other = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        torch.testing.assert_close(norm.to(other.dtype), other)
        check(model, expected)
        expected, model = plain(False).float(), wrapped(1, plain(False).float())
        for each in (expected, model):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = each(batch(1).float()).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            for _, _, local in shards_of(param):
                torch.testing.assert_close(local, other, rtol=0, atol=2e-3)


def test_freed_at_once() -> None:
    with fake_world(0, 1), collector_off():
        model = wrapped(1)
        for index in range(2):
            step(model, index)
        for block in model.blocks:
            block.seen = None
        unit = weakref.ref(get_unit(model.blocks[1]))
        bucket = weakref.ref(unit().group.buckets[0])
        del model, block
        assert unit() is None and bucket() is None


def test_a_model_that_is_gone() -> None:
    """Its Parameters get their gradients, as long as a graph is there."""
    with fake_world(0, 1), collector_off():
        expected, model = pair()
        params, losses = [], []
        for each in (expected, model):
            step(each)
            each.zero_grad()
            params.append(list(each.parameters()))
            losses.append(each(batch(1)).square().sum())
        del expected, model, each
        gc.collect()
        for loss in losses:
            loss.backward()
        for other, param in zip(*params, strict=True):
            torch.testing.assert_close(param.grad.to_local(), other.grad)


def test_one_all_reduce_for_small_units() -> None:
    with fake_world(0, 4):
        model = wrapped(4)
        for _ in range(2):
            with record_collectives() as record:
                step(model)
            assert record.count() == record.count("all_reduce") == 1


# -- what is reduced together --------------------------------------------------------------------------


Change = Callable[[Model], object]


def sizes(model: Model, change: Change | None = None, after: Change | None = None) -> list[int]:
    """Elements of each all-reduce in a step."""
    with record_collectives() as record:
        if change is not None:
            change(model)
        loss = model(batch().to(model.head.weight.dtype)).sum()
        if after is not None:
            after(model)
        loss.backward()
    assert record.count() == record.count("all_reduce")
    return [call.bytes // model.head.weight.to_local().itemsize for call in record.calls]


def numels(model: Model) -> list[int]:
    """Elements of the units, in the order of their backwards."""
    heads = sum(p.numel() for p in model.head.parameters())
    return [*(sum(p.numel() for p in b.parameters()) for b in reversed(model.blocks)), heads]


def test_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 4):
        model = wrapped(4)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model) == [3 * block + head]
        monkeypatch.setattr(layouts, "FIRST_BYTES", 8 * block)
        monkeypatch.setattr(layouts, "MOST_BYTES", 8 * (2 * block + head))
        assert sizes(wrapped(4)) == [block, 2 * block + head]


DIFFERENT: dict[str, tuple[Change, list[list[int]]]] = {
    "another divisor": (
        lambda model: model.blocks[1].set_gradient_divide_factor(3.0),
        [[2], [1], [0, 3]],
    ),
    "a hook": (lambda model: model.blocks[2].set_all_reduce_hook(lambda _: None), [[2], [1, 0, 3]]),
    "without a gradient": (lambda model: model.blocks[2].requires_grad_(False), [[1, 0, 3]]),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_is_not_like_its_neighbours(change: str) -> None:
    act, groups = DIFFERENT[change]
    with fake_world(0, 4):
        model = wrapped(4)
        by_block = numels(model)
        units = {2: by_block[0], 1: by_block[1], 0: by_block[2], 3: by_block[3]}
        sizes(model)  # planned before
        assert sizes(model, act) == [sum(units[i] for i in group) for group in groups]


def test_what_does_not_come_is_not_waited_for() -> None:
    """A block that the loss does not reach: the others are reduced one by one, and to the same values."""
    with local_world(2) as world:
        with world.paused():
            expected = plain()
            for rank in range(2):
                (expected(batch(rank), skip=True).sum() / 2).backward()
            batches = [batch(rank) for rank in range(2)]
        model = wrapped(2)
        for _ in range(2):
            model.zero_grad()
            with record_collectives() as record:
                model(world.map(lambda r: batches[r]), skip=True).sum().backward()
            assert record.count("all_reduce") == 3
        check(model, expected)


def test_settings_changed_within_a_step() -> None:
    def put_off(model: Model) -> None:
        model.blocks[0].set_requires_all_reduce(False)

    def within_the_backward(model: Model) -> None:
        model.blocks[0].seen.register_hook(lambda _: put_off(model))

    with fake_world(0, 4):
        model = wrapped(4)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model, after=put_off) == [2 * block + head]
        model.blocks[0].set_requires_all_reduce(True)
        assert sizes(model) == [block, 2 * block + head]  # what was put off comes by itself
        assert sizes(model) == [3 * block + head]
        assert sizes(model, after=within_the_backward) == [block, block, head]


def test_in_mixed_precision() -> None:
    with fake_world(0, 4):
        mesh = cpu_mesh(4, 1)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = plain().float()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model) == [3 * block + head]
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
