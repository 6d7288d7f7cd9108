"""step_in_backward: the plain weights, few gradients at a time, or an error before anything is updated."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.side_by_side import Sides, side_by_side
from _support.stepped import build, local, refused
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from parallel3d import (
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, units_of
from parallel3d.optim.local import LocalState
from parallel3d.testing import fake_world, record_collectives


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_world(0, 2):
        yield


def groups(model: nn.Module) -> list[dict]:
    """Biases don't decay; the head is in both, by its two parameters."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def check_training(
    sizes: tuple[int, int, int],
    build: Callable[[], nn.Module] = Lm,
    optimizer_class: Callable = torch.optim.AdamW,
    apply: Callable | None = None,
    **options,
) -> None:
    """Groups, a schedule, and after each step no gradient left."""
    with side_by_side(sizes, build, apply) as sides:
        plain = adamw(groups(sides.plain))
        ours = optim.step_in_backward(
            sides.model, optimizer_class, params=groups(sides.model), lr=1e-2, **options
        )
        schedules = [halving(plain), halving(ours)]
        for step in range(3):
            sides.step_plain(plain, step)
            sides.loss(step).backward()
            assert all(p.grad is None for p in sides.model.parameters())
            for schedule in schedules:
                schedule.step()
            sides.check()
        assert ours.param_groups[0]["lr"] == 1e-2 / 8
        assert [len(g["params"]) for g in ours.param_groups] == [
            len(g["params"]) for g in plain.param_groups
        ]


TIED = functools.partial(Lm, layers=1, tied=True)


def kept(model: nn.Module, mesh, reshard: bool = False) -> nn.Module:
    """Blocks and root as units, whose weights stay gathered unless ``reshard``."""
    for each in (*model.layers, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    model.set_reshard_after_backward(reshard)
    return model


def train_apart(sides: Sides) -> None:
    """All of the plain steps first: any optimizer's step lets gathered weights be gathered anew."""
    plain = adamw(sides.plain.parameters())
    optim.step_in_backward(sides.model, torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        sides.step_plain(plain, step)
    for step in range(3):
        sides.loss(step).backward()
    sides.check()


class TestWeights:
    @pytest.mark.parametrize(
        "sizes", [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=str
    )
    def test_as_of_the_plain_optimizer(self, sizes) -> None:
        check_training(sizes)

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)], ids=str)
    def test_of_an_optimizer_on_local_tensors(self, sizes, monkeypatch) -> None:
        """And shards over replicate too. What it steps on is put together once for each bucket."""
        made, buckets = [], []
        init = LocalState.__init__
        monkeypatch.setattr(LocalState, "__init__", lambda *a: made.append(init(*a)))

        def apply(model, mesh):
            plan = LM_PLAN if sizes[2] > 1 else None
            parallelize(model, mesh, plan, shard_optimizer_over_replicate=True)
            buckets.extend(b for unit in units_of(model, True) for b in unit.group.buckets)
            return model

        local_adamw = functools.partial(optim.local, torch.optim.AdamW)
        check_training(sizes, functools.partial(Lm, layers=1), local_adamw, apply)
        assert len(made) == len(buckets)

    def test_what_is_counted_in_groups(self) -> None:
        """Once a backward, not once a bucket."""

        class Slower(torch.optim.Optimizer):
            def __init__(self, params, lr: float) -> None:
                super().__init__(params, {"lr": lr, "steps": 0})

            def step(self, closure=None) -> None:
                for group in self.param_groups:
                    group["steps"] += 1
                    for p in group["params"]:
                        if p.grad is not None:
                            p.data.sub_(p.grad, alpha=group["lr"] / group["steps"])

        with side_by_side((1, 2, 1), Lm) as sides:
            plain = Slower(groups(sides.plain), lr=0.1)
            ours = optim.step_in_backward(sides.model, Slower, params=groups(sides.model), lr=0.1)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
            sides.check()
            assert [g["steps"] for g in ours.param_groups] == [2, 2]

    def test_on_processes(self, gloo_pool) -> None:
        """Tied, and a fused optimizer."""
        fused = functools.partial(check_training, fused=True)
        gloo_pool.run(fused, (2, 2, 1), TIED, world_size=4)

    @pytest.mark.parametrize("reshard", [True, False], ids=["", "kept gathered"])
    def test_shared_and_checkpointed_units(self, reshard) -> None:
        """A block that runs twice, recomputed; gathered weights are not taken for the new ones."""

        class Twice(Lm):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = self.embed(ids)
                for layer in [*self.layers, self.layers[0]]:
                    x = checkpoint(layer, x, use_reentrant=False)
                return self.head(self.norm(x))

        with side_by_side((1, 2, 1), Twice, functools.partial(kept, reshard=reshard)) as sides:
            train_apart(sides)

    @pytest.mark.slow
    def test_units_that_are_left_at_the_end_of_the_backward(self) -> None:
        """A parameter that gets no gradient; what stays gathered are the weights from before."""

        def build() -> Lm:
            model = Lm()
            for layer in model.layers:
                layer.unused = nn.Parameter(torch.ones(3))
            return model

        with side_by_side((1, 2, 1), build, kept) as sides:
            train_apart(sides)

    def test_without_a_shard_axis(self) -> None:
        """Where forward computes with the shards themselves."""

        with side_by_side((2, 1, 1), functools.partial(Lm, layers=1), parallelize) as sides:
            plain = torch.optim.SGD(sides.plain.parameters(), lr=0.1, momentum=0.9)
            optim.step_in_backward(sides.model, torch.optim.SGD, lr=0.1, momentum=0.9)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
            sides.check()

    def test_some_parameters_only(self) -> None:
        """The others keep their gradients; a frozen one, and one that gets none, stay."""
        with side_by_side((1, 2, 1), functools.partial(Lm, layers=1)) as sides:
            for model in (sides.plain, sides.model):
                model.norm.weight.requires_grad_(False)
            chosen = [p for n, p in sides.model.named_parameters() if "up" in n or "norm" in n]
            optim.step_in_backward(sides.model, torch.optim.SGD, params=chosen, lr=0.1)
            with sides.outside():
                sides.plain_loss(0).backward()
                stepped = [p for n, p in sides.plain.named_parameters() if "up" in n or "norm" in n]
                torch.optim.SGD(stepped, lr=0.1).step()
                for p in stepped:
                    p.grad = None
            sides.loss(0).backward()
            sides.check()
            ids = {id(p) for p in chosen}
            for name, p in sides.model.named_parameters():
                assert (p.grad is None) == (id(p) in ids), name


class Peak(TorchDispatchMode):
    """Most bytes of storages made in its body: by how much each is larger than at ``reset``."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.before: dict[int, int] = {}
        self.most = 0

    def sizes(self) -> dict[int, int]:
        self.alive = {key: ref for key, ref in self.alive.items() if not ref.expired()}
        self.before = {key: size for key, size in self.before.items() if key in self.alive}
        return {key: size_of(ref) for key, ref in self.alive.items()}

    def reset(self) -> None:
        self.most, self.before = 0, self.sizes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        given = {ref.cdata for ref in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = {ref.cdata: ref for ref in storages(result)}
        self.alive |= {
            key: made[key] for key in made.keys() - given | made.keys() & self.alive.keys()
        }
        sizes = self.sizes().items()
        more = (size - self.before.get(key, 0) for key, size in sizes)
        self.most = max(self.most, sum(each for each in more if each > 0))
        return result


def storages(value) -> list[StorageWeakRef]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [StorageWeakRef(t.untyped_storage()) for t in leaves if isinstance(t, torch.Tensor)]


def size_of(ref: StorageWeakRef) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()


class TestMemory:
    def peak(self, layers: int, in_backward: bool) -> int:
        """Bytes that a backward makes at its worst moment; the second, when states are there."""
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
            model = parallelize(Lm(dim=64, hidden=96, layers=layers), mesh)
            if in_backward:
                optim.step_in_backward(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            with Peak() as peak:
                lm_loss(model, tokens(0)).backward()
                model.zero_grad()
                loss = lm_loss(model, tokens(0))
                peak.reset()
                loss.backward()
            return peak.most

    @pytest.mark.slow
    def test_it_does_not_grow_with_the_model(self) -> None:
        """Eight blocks more need no byte more; without it they need their gradients."""
        shard = sum(p.numel() for p in Lm(dim=64, hidden=96, layers=1).layers.parameters()) * 4 // 2
        in_backward, usual = self.peak(12, True), self.peak(4, False)
        assert in_backward == self.peak(4, True)
        assert self.peak(12, False) - usual == 8 * shard
        # Less than with four blocks' reduced gradients: one is used, and two are reduced.
        assert in_backward < usual

    def test_gradients_alive_at_each_update(self) -> None:
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
            model = parallelize(Lm(layers=6), mesh)
            optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            alive: list[int] = []

            def count(*_) -> None:
                alive.append(sum(p.grad is not None for p in model.parameters()))

            optimizer.register_step_post_hook(count)
            lm_loss(model, tokens(0)).backward()
            assert len(alive) == 8  # embedding, blocks, norm and head
            assert max(alive) == len(list(model.layers[0].parameters()))

    @pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
    def test_the_order_of_collectives_stays(self, sizes) -> None:
        calls = []
        for in_backward in (False, True):
            with fake_world(0, 4):
                mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
                model = parallelize(Lm(layers=3), mesh, LM_PLAN if sizes[2] > 1 else None)
                if in_backward:
                    optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
                with record_collectives(mesh) as recorder:
                    lm_loss(model, tokens(0)).backward()
                calls.append(recorder.calls)
        assert calls[0] == calls[1]

    def test_deleted_it_is_gone_at_once(self) -> None:
        """No cycle through the model, its units and the optimizer."""
        with fake_world(0, 4):
            mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
            model = parallelize(Lm(layers=1), mesh)
            optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
            lm_loss(model, tokens(0)).backward()
            gone = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(optimizer.optimizer)]
            gc.disable()
            try:
                del model, optimizer
                assert [ref() is None for ref in gone] == [True] * len(gone)
            finally:
                gc.enable()


class TestHooks:
    def test_on_parameters(self) -> None:
        """They see the reduced gradient, before the update."""
        with fake_world(0, 2):
            model, _ = build()
            weight = model.layers[0].up.weight
            before, seen = local(weight).clone(), []

            def look(param: torch.Tensor) -> None:
                assert torch.equal(local(param), before)
                seen.append(local(param.grad).clone())

            weight.register_post_accumulate_grad_hook(look)
            lm_loss(model, tokens(0)).backward()
            torch.testing.assert_close(local(weight).detach(), before - 0.1 * seen[0])

    @pytest.mark.slow
    def test_second_derivatives(self) -> None:
        """A penalty on the gradient of an input: the graph is used twice, by one backward of parameters."""

        class Smooth(Lm):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = self.embed(ids)
                y = self.layers[0](x)
                (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                return self.head(self.norm(self.layers[1](y + slope)))

        with side_by_side((1, 2, 1), Smooth, functools.partial(kept, reshard=True)) as sides:
            plain = adamw(sides.plain.parameters())
            optim.step_in_backward(sides.model, torch.optim.AdamW, lr=1e-2)
            for step in range(2):
                sides.step_plain(plain, step)
                sides.loss(step).backward()
                sides.check()


@pytest.mark.usefixtures("two_ranks")
class TestState:
    def test_saved_and_loaded(self) -> None:
        """Into a fresh optimizer, as torch's own and by torch's checkpoint functions."""
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = parallelize(Lm(layers=1), mesh)
        saving = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
        lm_loss(model, tokens(0)).backward()
        saved, by_name = saving.state_dict(), get_optimizer_state_dict(model, saving)
        averages = saved["state"][0]["exp_avg"]
        assert averages.placements == next(iter(model.parameters())).placements
        saving.remove()
        fresh = optim.step_in_backward(model, torch.optim.AdamW, lr=0.3)
        fresh.load_state_dict(saved)
        assert fresh.param_groups[0]["lr"] == 0.1
        assert torch.equal(local(fresh.state_dict()["state"][0]["exp_avg"]), local(averages))
        fresh.remove()
        fresh = optim.step_in_backward(model, torch.optim.AdamW, lr=0.3)
        before = [local(p).clone() for p in model.parameters()]
        set_optimizer_state_dict(model, fresh, by_name)
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(p), old) and p.grad is None
        again = get_optimizer_state_dict(model, fresh)
        assert again["param_groups"] == by_name["param_groups"]
        for name, state in by_name["state"].items():
            for key, value in state.items():
                assert torch.equal(local(again["state"][name][key]), local(value)), (name, key)
        lm_loss(model, tokens(1)).backward()
        assert fresh.state_dict()["state"][0]["step"] == 2

    def test_a_copy_is_not_updated(self) -> None:
        """copy.deepcopy of the model, as a frozen teacher."""
        model, _ = build()
        twin = copy.deepcopy(model)
        lm_loss(twin, tokens(0)).backward()
        assert all(p.grad is not None for p in twin.parameters())

    def test_loaded_by_the_optimizer_that_updates(self) -> None:
        model, optimizer = build(momentum=0.9)
        lm_loss(model, tokens(0)).backward()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.optimizer.load_state_dict(copy.deepcopy(saved))
        lm_loss(model, tokens(1)).backward()
        assert optimizer.state is optimizer.optimizer.state
        assert optimizer.param_groups is optimizer.optimizer.param_groups
        for index, entry in optimizer.state_dict()["state"].items():
            was, now = (local(each["momentum_buffer"]) for each in (saved["state"][index], entry))
            assert not torch.equal(was, now)

    def test_mixed_precision(self) -> None:
        """Reduced in bfloat16, updated in float32."""
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = parallelize(Lm(layers=1), mesh, mp_policy=policy)
        optimizer = optim.step_in_backward(model, torch.optim.AdamW, lr=0.1)
        lm_loss(model, tokens(0)).backward()
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32


class Region(Lm):
    """``run`` calls the blocks, in some kind of checkpoint."""

    def __init__(self, run: Callable) -> None:
        super().__init__()
        self.run = run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run(self, self.embed(ids))))


def reentrant(model: Lm, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def reentrant_inside(model: Lm, x: torch.Tensor) -> torch.Tensor:
    """Within the root's forward, the norm's parameters."""
    for layer in model.layers:
        x = checkpoint(model.norm, layer(x), use_reentrant=True)
    return x


def values_only(model: Lm, x: torch.Tensor) -> torch.Tensor:
    """Recomputed when the block has long been updated."""

    def region(x: torch.Tensor) -> torch.Tensor:
        return x * model.layers[0](x).detach()

    return model.layers[0](model.layers[1](checkpoint(region, x, use_reentrant=False)))


class TestUsesAfterTheUpdate:
    """What can't be done right is refused, and nothing of the unit is updated before."""

    def sharded(self, model: nn.Module) -> nn.Module:
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
        return model

    @pytest.mark.parametrize("run", [reentrant, reentrant_inside])
    def test_reentrant_checkpoint(self, run) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(run))
            with refused("use_reentrant=False", model):
                lm_loss(model, tokens(0)).backward()

    def test_the_whole_model_in_reentrant_checkpoint(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(lambda m, x: m.layers[1](m.layers[0](x))))
            model.embed.register_forward_hook(lambda m, a, out: out)
            x = torch.zeros(1, requires_grad=True)
            with refused("use_reentrant=False", model):
                loss = checkpoint(
                    lambda x: lm_loss(model, tokens(0)) + 0 * x.sum(), x, use_reentrant=True
                )
                loss.backward()

    def test_recomputed_for_its_values_alone(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Region(values_only))
            with refused("recomputes"):
                lm_loss(model, tokens(0)).backward()

    def test_a_loss_with_the_sharded_parameter(self) -> None:
        with fake_world(0, 2):
            model = self.sharded(Lm())
            penalty = model.layers[1].up.weight.to_local().square().sum()
            with refused("outside the unit's forward"):
                (lm_loss(model, tokens(0)) + penalty).backward()

    @pytest.mark.parametrize("retain", [True, False], ids=["one graph", "two graphs"])
    def test_a_second_backward_of_old_weights(self, retain) -> None:
        with fake_world(0, 2):
            model = self.sharded(Lm())
            first = lm_loss(model, tokens(0))
            second = first if retain else lm_loss(model, tokens(0))
            first.backward(retain_graph=retain)
            with refused("updated since this forward", model):
                second.backward()
            model.zero_grad()
            lm_loss(model, tokens(0)).backward()  # it still works

    def test_losses_that_are_summed(self) -> None:
        """Two forwards, one backward: as the plain model's."""
        with side_by_side((1, 2, 1)) as sides:
            plain = torch.optim.SGD(sides.plain.parameters(), lr=0.1)
            optim.step_in_backward(sides.model, torch.optim.SGD, lr=0.1)
            with sides.outside():
                (sides.plain_loss(0) + sides.plain_loss(1)).backward()
                plain.step()
            (sides.loss(0) + sides.loss(1)).backward()
            sides.check()

    def test_a_backward_inside_a_forward(self) -> None:
        with fake_world(0, 2):

            def run(m: Lm, x: torch.Tensor) -> torch.Tensor:
                m.layers[0](x.detach().requires_grad_()).sum().backward()
                return m.layers[1](x)

            model = self.sharded(Region(run))
            with refused("inside a forward", model):
                lm_loss(model, tokens(0))


@pytest.mark.usefixtures("two_ranks")
class TestNotTogetherWith:
    def test_accumulation(self) -> None:
        model, _ = build()
        with refused("set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
        with refused("set_requires_all_reduce"):
            model.set_requires_all_reduce(False)
        with refused("updated in backward"):
            next(optim.accumulate(model, [tokens(0), tokens(1)]))
        for ids in optim.accumulate(model, [tokens(0)]):  # one is no accumulation
            lm_loss(model, ids).backward()

    def test_switches_that_were_set_behind_its_back(self) -> None:
        model, _ = build()
        get_unit(model.layers[0]).sync = False
        with refused("accumulates"):
            lm_loss(model, tokens(0)).backward()

    def test_clipping(self) -> None:
        model, optimizer = build()
        with refused("clip_grad_norm_"):
            optim.clip_grad_norm_(model, 1.0)
        optimizer.remove()
        lm_loss(model, tokens(0)).backward()
        optim.clip_grad_norm_(model, 1.0)
        assert all(p.grad is not None for p in model.parameters())

    def test_removed_twice(self) -> None:
        """It does not remove what has come after it."""
        model, first = build()
        first.remove()
        optimizer = optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
        first.remove()
        lm_loss(model, tokens(0)).backward()
        assert all(p.grad is None for p in model.parameters())
        with refused("updated in backward", model):
            optim.clip_grad_norm_(model, 1.0)
        assert "SGD" in repr(optimizer)

    def test_our_scaler(self) -> None:
        """Before anything is updated."""
        model, optimizer = build()
        scaler = optim.GradScaler("cpu")
        loss = scaler.scale(lm_loss(model, tokens(0)))
        with refused("GradScaler", model):
            loss.backward()
        with refused("GradScaler"):
            scaler.step(optimizer)
        model.zero_grad()
        disabled = optim.GradScaler("cpu", enabled=False)
        disabled.scale(lm_loss(model, tokens(0))).backward()

    def test_torchs_scaler(self) -> None:
        model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(lm_loss(model, tokens(0))).backward()
        with refused("GradScaler"):
            scaler.step(optimizer)

    def test_its_own_step(self) -> None:
        _, optimizer = build()
        with refused("leave the call of step\\(\\) out"):
            optimizer.step()


def test_copies() -> None:
    with fake_world(0, 2):
        model, optimizer = build()
        for copied in (copy.deepcopy, pickle.dumps):
            with refused("can't be copied"):
                copied(optimizer)
        lm_loss(model, tokens(0)).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("two_ranks")
class TestRefusedArguments:
    def test_what_is_refused(self) -> None:
        with pytest.raises(Parallel3dError, match="not parallel"):
            optim.step_in_backward(Lm(), torch.optim.SGD, lr=0.1)
        with pytest.raises(Parallel3dError, match="needs a module"):
            optim.step_in_backward(torch.optim.SGD, Lm(), lr=0.1)
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        plain = Lm(layers=1)
        model = fully_shard(plain, mesh=mesh, ignored_params={plain.norm.weight})
        with pytest.raises(Parallel3dError, match="belongs to no unit"):
            optim.step_in_backward(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(Parallel3dError, match="LBFGS"):
            optim.step_in_backward(model, torch.optim.LBFGS)
        with pytest.raises(Parallel3dError, match="class of optimizers"):
            optim.step_in_backward(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(Parallel3dError, match="made a list"):
            optim.step_in_backward(model, list)
        params = [p for p in model.parameters() if p is not model.norm.weight]
        lm_loss(model, tokens(0)).backward()
        with refused("has a gradient"):
            optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
        assert model.head.weight.grad is not None  # nothing was half-applied
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        with refused("defers its reductions"):
            optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
        model.set_requires_gradient_sync(True)
        optimizer = optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
        with refused("already"):
            optim.step_in_backward(model, torch.optim.SGD, params=params, lr=0.1)
        with pytest.raises(Parallel3dError, match="at the beginning"):
            optimizer.add_param_group({"params": [model.norm.weight]})
        assert "SGD" in repr(optimizer)

    def test_ties_to_a_unit_that_is_updated(self) -> None:
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = Lm(layers=1, tied=True)
        fully_shard(model.embed, mesh=mesh)
        optim.step_in_backward(model.embed, torch.optim.SGD, lr=0.1)
        with refused("updated in backward already"):
            fully_shard(model.head, mesh=mesh)
