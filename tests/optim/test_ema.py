"""EMA: the plain model's average on shards; in and out without a trace."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.side_by_side import side_by_side
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import (
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    StateError,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world, local_world, record_collectives

TINY = functools.partial(Lm, layers=1)


def warm(n: int) -> float:
    return min(0.9, (1 + n) / (4 + n))


def check(sizes: tuple[int, int, int], tied: bool = False) -> None:
    """Average after three steps, the loss with it swapped in, the weights after that."""
    with side_by_side(sizes, functools.partial(TINY, tied=tied)) as sides:
        plain = torch.optim.AdamW(sides.plain.parameters(), lr=1e-2)
        ours = torch.optim.AdamW(sides.model.parameters(), lr=1e-2)
        ema = optim.EMA(sides.model, warm)
        average = {n: p.detach().clone() for n, p in sides.plain.named_parameters()}
        for step in range(3):
            sides.step_plain(plain, step)
            sides.loss(step).backward()
            ours.step()
            ours.zero_grad()
            with record_collectives(sides.mesh) as recorder:
                ema.update()
            assert not recorder.calls
            with sides.outside():
                for name, p in sides.plain.named_parameters():
                    d = warm(step)
                    average[name] = d * average[name] + (1 - d) * p.detach()
        kept = ema.state_dict()["average"]
        assert kept.keys() == sides.model.state_dict().keys()
        sides.check(ours={n: kept[n] for n in average}, plain=average)

        objects = [id(p) for p in sides.model.parameters()]
        with pytest.raises(KeyError), record_collectives(sides.mesh) as recorder, ema.swapped():
            assert not recorder.calls
            sides.check(plain=average)
            with torch.no_grad():
                swapped_loss = sides.loss(7)
            raise KeyError
        sides.check()
        assert objects == [id(p) for p in sides.model.parameters()]
        with sides.outside(), torch.no_grad():
            for name, p in sides.plain.named_parameters():
                p.copy_(average[name])
            ids = [tokens(70 + rank) for rank in range(sides.layout.data_size)]
            losses = [lm_loss(sides.plain, each) for each in ids]
        difference = (swapped_loss - sides.mine(losses.__getitem__)).abs()
        assert all(float(d) < 1e-12 for d in inner_tensors(difference))


@pytest.mark.parametrize(
    ("sizes", "tied"), [((2, 2, 1), True), ((1, 2, 2), False)], ids=["tied", "tp"]
)
def test_as_of_the_plain_model(sizes, tied) -> None:
    check(sizes, tied)


@pytest.mark.slow  # the same on simulated ranks is above
def test_on_processes(gloo_pool) -> None:
    gloo_pool.run(check, (2, 1, 2), world_size=4)


class TestGatheredUnits:
    """No weights from before are computed with, on either way."""

    @pytest.mark.parametrize("kept", [False, True], ids=["", "unshard"])
    @pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1)], ids=["shard", "replicate"])
    def test_are_gathered_anew(self, sizes, kept) -> None:
        def apply(model, mesh):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
            return fully_shard(model, mesh=mesh, reshard_after_forward=False)

        with side_by_side(sizes, TINY, apply) as sides:

            def loss() -> list[float]:
                with torch.no_grad():
                    return [float(t) for t in sides.world.per_rank(sides.loss(0))]

            before = loss()
            ema = optim.EMA(sides.model, 0.0)
            with torch.no_grad():
                for p in sides.model.parameters():
                    get_local_tensor(p).mul_(1.5)
            if kept:
                sides.model.layers[0].unshard()
            own = loss()
            with ema.swapped():
                assert loss() == before
            assert loss() == own != before

    def test_in_inference_mode(self) -> None:
        """Whose own writes no version counts. The gathered weights are a copy, in bfloat16."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        with fake_world(0, 1):
            mesh = build_mesh(MeshLayout(1, 1, 1), device_type="cpu")
            model = fully_shard(TINY(), mesh=mesh, reshard_after_forward=False, mp_policy=policy)
            ema = optim.EMA(model, 0.0)
            with torch.inference_mode():
                before = float(lm_loss(model, tokens(0)))
            with torch.no_grad():
                get_local_tensor(model.head.bias)[0].add_(30)  # seen in bfloat16
            with torch.inference_mode():
                own = float(lm_loss(model, tokens(0)))
                with ema.swapped():
                    assert float(lm_loss(model, tokens(0))) == before
                assert float(lm_loss(model, tokens(0))) == own != before

    def test_one_that_unshard_shows(self) -> None:
        """Averages are of the shards, whatever the modules show."""
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = fully_shard(nn.Linear(3, 4), mesh=mesh)
            model.unshard()
            ema = optim.EMA(model)
            assert get_local_tensor(ema.state_dict()["average"]["weight"]).shape == (2, 3)


class Counting(nn.Module):
    """A parameter, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)


class TestBuffersAndDtypes:
    @pytest.mark.parametrize("average", [False, True])
    def test_buffers(self, average) -> None:
        model = Counting()
        ema = optim.EMA(model, 0.75, average_buffers=average)
        model.mean = model.mean + 4.0  # another tensor
        model.count += 2
        model.cache += 1
        model.codes += 3
        ema.update()
        kept = ema.state_dict()["average"]
        assert kept.keys() == model.state_dict().keys()
        assert kept["mean"].tolist() == ([1.0] * 2 if average else [4.0] * 2)
        assert kept["count"] == 2 and kept["codes"].tolist() == [3, 3]
        with ema.swapped():
            assert model.mean.tolist() == kept["mean"].tolist()
            model.mean += 9
        assert model.mean.tolist() == [4.0] * 2
        assert model.cache.tolist() == [1.0] * 2

    def test_float32_averages_of_bfloat16(self) -> None:
        """Steps that bfloat16 would round away."""
        model = nn.Linear(3, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        ema = optim.EMA(model, 0.999, dtype=torch.float32)
        with torch.no_grad():
            model.weight.mul_(2)
        for _ in range(3):
            ema.update()
        kept = ema.state_dict()["average"]["weight"]
        assert kept.dtype == torch.float32
        torch.testing.assert_close(kept, torch.full((1, 3), 2 - 0.999**3))
        with ema.swapped():
            assert model.weight.dtype == torch.bfloat16 and model.weight.tolist() == [[1.0] * 3]
        assert model.weight.tolist() == [[2.0] * 3]


class TestMemory:
    def test_one_set_of_shards(self) -> None:
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
            model = parallelize(Lm(), mesh)
            ema = optim.EMA(model)
            for p, kept in zip(
                model.parameters(), ema.state_dict()["average"].values(), strict=True
            ):
                local = get_local_tensor(kept)
                assert kept.placements == p.placements and kept.shape == p.shape
                assert local.untyped_storage().nbytes() == get_local_tensor(p).numel() * 4


class TestState:
    def test_saved_and_loaded(self) -> None:
        """DTensors, whole tensors; into the model too."""
        with local_world(4) as world:
            mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
            with world.paused():
                models = [TINY(), TINY()]
                whole = {n: p.detach() + 1 for n, p in models[0].named_parameters()}
            first, second = (parallelize(model, mesh, LM_PLAN) for model in models)
            ema, other = optim.EMA(first, 0.5), optim.EMA(second, 0.5)
            ema.load_state_dict({"average": whole, "updates": 7})
            other.load_state_dict(ema.state_dict())
            assert other.updates == 7
            second.load_state_dict(other.state_dict()["average"])
            for name, p in second.named_parameters():
                for kept in (p, ema.state_dict()["average"][name]):
                    full = kept.detach().full_tensor()
                    for each in world.per_rank(full):
                        torch.testing.assert_close(each, whole[name])

    def test_a_wrong_one_changes_nothing(self) -> None:
        model = nn.Linear(3, 2)
        ema = optim.EMA(model)
        good = {n: torch.zeros_like(t) for n, t in model.state_dict().items()}
        for state, match in (
            (model.state_dict(), "must be"),
            ({"average": {"weight": good["weight"]}, "updates": 1}, "bias is missing"),
            ({"average": {**good, "x": good["bias"]}, "updates": 1}, "x is not in the model"),
            ({"average": {**good, "bias": torch.zeros(3)}, "updates": 1}, r"shape \(3,\)"),
            ({"average": {**good, "bias": 3}, "updates": 1}, "not a tensor"),
            ({"average": good, "updates": "one"}, "updates is 'one'"),
        ):
            with pytest.raises(Parallel3dError, match=match):
                ema.load_state_dict(state)
        assert torch.equal(ema.state_dict()["average"]["weight"], model.weight)
        assert ema.updates == 0


class TestModels:
    @pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_a_copy_is_of_the_copied_model(self, again) -> None:
        model = nn.Linear(3, 2)
        twin, ema = again((model, optim.EMA(model, 0.5)))
        check_follows(ema, twin)
        assert not torch.equal(twin.weight, model.weight)

    def test_a_sharded_copy(self) -> None:
        with fake_world(0, 2):
            model = parallelize(TINY(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            twin, ema = copy.deepcopy((model, optim.EMA(model, 0.5)))
            check_follows(ema, twin)

    def test_parameters_that_no_unit_has_may_be_replaced(self) -> None:
        model = nn.Linear(3, 2)
        ema = optim.EMA(model, 0.5)
        start = model.state_dict()
        model.load_state_dict({name: t.clone() for name, t in start.items()}, assign=True)
        check_follows(ema, model)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_converted_while_swapped(self, sharded) -> None:
        with fake_world(0, 2):
            model = TINY()
            if sharded:
                parallelize(model, build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            ema = optim.EMA(model)
            start = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            with ema.swapped():
                model.double()
            for p, before in zip(model.parameters(), start, strict=True):
                mine, before = (t.to_local() if sharded else t for t in (p.detach(), before))
                torch.testing.assert_close(mine, (before + 1).double(), rtol=0, atol=0)
            with pytest.raises(StateError, match="convert the model first"):
                ema.update()


def check_follows(ema: optim.EMA, model: nn.Module) -> None:
    """Whether it averages the weights of ``model``, halfway."""
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    ema.update()
    for before, kept in zip(start, ema.state_dict()["average"].values(), strict=True):
        torch.testing.assert_close(
            *(get_local_tensor(t) if isinstance(t, DTensor) else t for t in (kept, before + 0.5))
        )


class TestRefused:
    def test_arguments(self) -> None:
        model = nn.Linear(2, 2)
        for arguments, match in (
            ((model.parameters(),), "needs a module"),
            ((model, 1.5), "decay is 1.5"),
            ((model, "0.9"), "decay is '0.9'"),
            ((model, True), "decay is True"),
            ((nn.Linear(2, 2, device="meta"),), "on meta"),
        ):
            with pytest.raises(Parallel3dError, match=match):
                optim.EMA(*arguments)
        with pytest.raises(Parallel3dError, match="dtype is"):
            optim.EMA(model, dtype=torch.int32)
        with optim.EMA(nn.Identity()).swapped():
            pass  # nothing to average
        ema = optim.EMA(model, lambda n: n + 0.5)
        ema.update()
        with pytest.raises(Parallel3dError, match="returns one"):
            ema.update()
        assert ema.updates == 1

    def test_moments(self) -> None:
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = parallelize(TINY(), mesh)
            ema = optim.EMA(model)
            with ema.swapped():
                for call in (ema.update, ema.swapped().__enter__, lambda: ema.load_state_dict({})):
                    with pytest.raises(StateError, match="within swapped"):
                        call()
            seen = []

            def within(*_) -> None:
                with pytest.raises(StateError, match="between steps"):
                    ema.swapped().__enter__()
                seen.append(1)

            model.norm.register_forward_hook(within)
            lm_loss(model, tokens(0))
            assert seen
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = fully_shard(TINY(), mesh=mesh)
            ema = optim.EMA(model)
            model.double()
            with pytest.raises(StateError, match="convert the model first"):
                ema.update()
            assert ema.updates == 0


def test_made_before_the_model_was_sharded() -> None:
    with fake_world(0, 4):
        model = Lm(layers=1)
        ema = optim.EMA(model)
        parallelize(model, build_mesh(MeshLayout(1, 4, 1), device_type="cpu"))
        with pytest.raises(StateError, match=r"is a DTensor of .* and then make the EMA"):
            ema.update()


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"shard_optimizer_over_replicate": True}], ids=str
)
def test_kept_weights_follow_a_swap(options) -> None:
    """What the engine keeps between forwards is never the average's, nor the model's within ``swapped``."""
    with local_world(4) as world:
        torch.manual_seed(0)
        with world.paused():
            plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
            model = copy.deepcopy(plain)
            averaged = copy.deepcopy(plain)
            x = torch.randn(3, 8).double()
        parallelize(
            model, build_mesh(MeshLayout(2, 2, 1), device_type="cpu"), units=["0", "2"], **options
        )
        ema = optim.EMA(model, 0.5)
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, plain)]
        for _ in range(2):
            model(world.map(lambda r: x)).square().sum().backward()
            with world.paused():
                plain(x).square().sum().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            ema.update()
            with world.paused(), torch.no_grad():
                optimizers[1].step()
                optimizers[1].zero_grad()
                for average, p in zip(averaged.parameters(), plain.parameters(), strict=True):
                    average.lerp_(p, 0.5)
            for swapped in (False, True, False):
                with torch.no_grad(), ema.swapped() if swapped else contextlib.nullcontext():
                    found = world.per_rank(model(world.map(lambda r: x)))
                with world.paused(), torch.no_grad():
                    want = (averaged if swapped else plain)(x)
                    for each in found:
                        torch.testing.assert_close(each, want, rtol=0, atol=1e-12)
