"""Which stream random numbers come from, on simulated ranks and on one rank of a fake world."""

import copy
import inspect
import itertools

import pytest
import torch
from _support.tp.tp_dropping import SEQUENCE, TENSOR, Dropping, Note
from _support.tp.tp_world import on_rank, on_ranks, tp_mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d.errors import StateError
from parallel3d.testing import fake_world, local_world
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, resolve_plan
from parallel3d.tp.random import _FIELD, _MARK, _STEP, can_drop

IDS = torch.arange(2 * 8).view(2, 8) % 20


def marked() -> bool:
    return torch.default_generator.initial_seed() & ~_FIELD == _MARK


class Sees(nn.Module):
    """Notes the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.seeds: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(marked())
        self.seeds.append(torch.default_generator.initial_seed())
        return x


class Mlp(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.before, self.inside, self.after = Sees(), Sees(), Sees()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.inside(self.drop(self.up(self.before(x))))))


PLAN = {"up": Colwise(), "down": Rowwise()}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def test_streams_of_a_forward() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(), PLAN)
        model(torch.randn(2, 8))
        assert (model.before.seen, model.inside.seen, model.after.seen) == (
            [False],
            [True],
            [False],
        )
        assert not marked()
        model.eval()
        before = torch.get_rng_state()
        model(torch.randn(2, 8, generator=torch.Generator()))
        assert model.inside.seen[-1] is False
        assert torch.equal(before, torch.get_rng_state())


def test_without_dropout_nothing_is_installed() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(p=0.0), PLAN)
        assert "_parallel3d_random" not in vars(model.up)
        assert type(model) is Mlp


def test_dropout_set_later_is_refused() -> None:
    """Ranks would drop the same elements of their parts, or, seeded apart, others of whole tensors."""
    with fake_world(0, 2):
        model = on_rank(Mlp(p=0.0), PLAN)
        model(torch.randn(2, 8))
        model.drop.p = 0.1
        model.eval()(torch.randn(2, 8))
        with pytest.raises(StateError, match=r"p is 0\.1, but nothing in the model"):
            model.train()(torch.randn(2, 8))


def test_dropout_that_starts_later() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(p=0.1), PLAN)
        for p in (0.0, 0.2):
            model.drop.p = p
            model(torch.randn(2, 8))
        assert model.inside.seen == [True, True]


@pytest.mark.parametrize(
    ("name", "value", "drops"),
    [
        ("attention_dropout", 0.1, True),
        ("resid_pdrop", 0.1, True),
        ("dropout", 0.0, False),
        ("dropout", None, False),
        ("summary_first_dropout", 0.1, False),
        ("hidden", 3, False),
    ],
)
def test_what_can_drop(name: str, value: object, drops: bool) -> None:
    for holder in ("module", "config"):
        model = nn.Sequential(nn.Linear(2, 2))
        if holder == "config":
            model[0].config = type("Config", (), {})()
        setattr(model[0] if holder == "module" else model[0].config, name, value)
        assert can_drop(model) is drops


def test_names_and_copies() -> None:
    plain = Mlp()
    keys = list(plain.state_dict())
    with fake_world(0, 2):
        model = on_rank(plain, PLAN)
        assert list(model.state_dict()) == keys
        twin = copy.deepcopy(model)
        twin(torch.randn(2, 8))
        assert twin.inside.seen == [True]
        assert model.inside.seen == []


def test_ranks_differ_and_agree_again() -> None:
    inside, after = [], []
    for rank in range(4):
        torch.manual_seed(5)
        with fake_world(rank, 4):
            model = on_rank(Mlp(), PLAN, 4)
            model(torch.ones(2, 8))
            inside += model.inside.seeds
        after.append(torch.rand(2).tolist())
    assert len(set(inside)) == 4
    assert {(s - r * _STEP) & _FIELD for r, s in enumerate(inside)} == {inside[0] & _FIELD}
    assert after == after[:1] * 4


def test_seeds_of_many_regions_differ() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(), PLAN)
        x = torch.ones(1, 8)
        with torch.no_grad():
            for _ in range(300):
                model(x)
    seeds = [seed & _FIELD for seed in model.inside.seeds]
    both = [(s + r * _STEP) & _FIELD for s, r in itertools.product(seeds, range(8))]
    assert len(set(both)) == 300 * 8


class Lora(nn.Module):
    """A LoRA layer: dropout of the whole input, after the base layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.out_features = base.out_features
        self.base_layer = base
        self.sees = Sees()
        self.lora = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(self.sees(x))


def test_a_lora_layers_dropout_is_of_a_whole_tensor() -> None:
    model = Mlp()
    model.up = Lora(model.up)
    with fake_world(0, 2):
        plan = {"up.base_layer": Colwise(), "up.lora": Colwise(), "down": Rowwise()}
        model = on_rank(model, plan)
        model(torch.randn(2, 8))
        assert (model.up.sees.seen, model.inside.seen) == ([False], [True])


@pytest.mark.parametrize("preserve", [True, False])
def test_after_a_recomputation_the_stream_is_the_common_one(preserve: bool) -> None:
    plan = {f"1.{name}": style for name, style in PLAN.items()}
    plan["1.down"] = Rowwise(output="sequence")
    plan["1.up"] = Colwise(input="sequence")
    plan["0"] = SequenceParallel(input="replicate")

    class Two(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=False, preserve_rng_state=preserve)

    with fake_world(0, 2):
        model = on_rank(Two(nn.Dropout(0.1), Mlp()), plan)
        y = model(torch.randn(2, 4, 8, requires_grad=True))
        assert not marked()
        y.sum().backward()
        assert model[1].inside.seen == [True, True]
        assert not marked()


def test_a_module_called_by_itself_stays_on_the_common_stream() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(), PLAN)
        model.up(torch.randn(2, 8))
        assert not marked()


def test_sequence_dropout_of_a_whole_input() -> None:
    torch.manual_seed(2)
    with local_world(2) as world:
        model = nn.Sequential(Note(), nn.Linear(8, 8))
        plan = {"0": SequenceParallel(input="replicate", output="replicate")}
        resolve_plan(model, plan, 2).apply(model, tp_mesh(2))
        x = world.map(lambda r: torch.ones(1, 64, 8))
        y = model[0](x)  # by itself: alike
        model(x)
        alike, different = (world.per_rank(m) for m in model[0].masks)
        assert torch.equal(*alike)
        assert not torch.equal(*different)
        del y
        assert torch.equal(*world.per_rank(torch.rand_like(x)))


@pytest.mark.parametrize("sequence", [False, True])
def test_simulated_ranks(sequence: bool) -> None:
    model = Dropping(layers=1)
    with local_world(2) as world:
        on_ranks(model, SEQUENCE if sequence else TENSOR, world)
        ids = world.map(lambda r: IDS)
        model(ids).sum().backward()
        for name, masks in model.noted().items():
            whole = not sequence and ("residual" in name or name in ("embedded", "last"))
            for mask in masks:
                assert torch.equal(*world.per_rank(mask)) is whole, name


def test_compiled() -> None:
    """What is compiled isn't switched."""
    with fake_world(0, 2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
        on_rank(model, {"0": Colwise(), "2": Rowwise()})
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        before = torch.get_rng_state()
        compiled(torch.ones(2, 8))
        assert not marked()
        assert not torch.equal(before, torch.get_rng_state())


def test_signatures_stay() -> None:
    with fake_world(0, 2):
        model = on_rank(Mlp(), PLAN)
    assert str(inspect.signature(model.forward)) == str(inspect.signature(Mlp().forward))
